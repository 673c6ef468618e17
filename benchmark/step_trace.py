"""What a profiler's trace says of steady decode steps: GPU idle, launches, host waits.

Steps are the ranges that ``fence_probe`` marks. The profiler slows the host, so times
compare sides with each other and not with runs that are not profiled; counts are exact.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

STEP = "mtp_decode_step"
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_CALLS = {"cuda_runtime", "cuda_driver"}
LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
WARM_STEPS, LAST_STEPS = 5, 2  # steps at the ends of a request batch are not steady


@dataclass(frozen=True)
class Span:
    start: float
    end: float

    @classmethod
    def of(cls, event) -> Span:
        return cls(event["ts"], event["ts"] + event["dur"])

    def holds(self, moment: float) -> bool:
        return self.start <= moment < self.end


def read(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as f:
        return [e for e in json.load(f)["traceEvents"] if "dur" in e]


def summary(events: list[dict]) -> dict:
    """Figures a step, microseconds unless named otherwise.

    ``gpu_idle_share``: of the time from the first steady step's first kernel to the
    last one's end. ``gpu_gap``: from the last kernel of a step to the first of the
    next. ``host_wait``: the scheduler's thread in CUDA's synchronising calls.
    Raises ValueError if the trace holds too few steps.
    """
    marked = sorted(
        (e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"),
        key=lambda e: e["ts"],
    )
    steady = marked[WARM_STEPS : len(marked) - LAST_STEPS]
    if len(steady) < 2:
        raise ValueError(
            f"{len(marked)} decode steps in the trace, too few to be steady"
        )
    thread = (steady[0]["pid"], steady[0]["tid"])
    starts = [e["ts"] for e in steady]
    window = Span(starts[0], starts[-1])
    steps = len(starts) - 1

    host_calls = [
        e
        for e in events
        if e.get("cat") in HOST_CALLS
        and (e["pid"], e["tid"]) == thread
        and window.holds(e["ts"])
    ]
    waits = sum(e["dur"] for e in host_calls if "Synchronize" in e["name"])
    launches = Counter(
        kind for e in host_calls for kind in LAUNCHES if kind in e["name"]
    )
    tensor_ops = sum(
        e.get("cat") == "cpu_op"
        and (e["pid"], e["tid"]) == thread
        and window.holds(e["ts"])
        for e in events
    )
    work = gpu_work_by_step(events, steady)
    first, last = work[0][0].start, max(span.end for span in work[steps])
    busy = covered([span for spans in work[: steps + 1] for span in spans])
    gaps = [
        min(span.start for span in after) - max(span.end for span in before)
        for before, after in zip(work, work[1:])
    ]
    return {
        "steps": steps,
        "gpu_idle_share": round(1 - busy / (last - first), 4),
        "gpu_busy_us": round(busy / (steps + 1), 1),
        "gpu_gap_us": round(statistics.median(gaps), 1),
        "host_step_us": round((starts[-1] - starts[0]) / steps, 1),
        "host_in_worker_us": round(statistics.median(e["dur"] for e in steady), 1),
        "host_wait_us": round(waits / steps, 1),
        "launches": {kind: round(n / steps, 2) for kind, n in launches.items()},
        "tensor_ops": round(tensor_ops / steps, 1),
    }


def gpu_work_by_step(events: list[dict], steady: list[dict]) -> list[list[Span]]:
    """Kernels and copies by the step whose worker call launched them, in GPU order."""
    step_of = {}
    spans = [Span.of(e) for e in steady]
    for event in events:
        if event.get("cat") in HOST_CALLS and "correlation" in event.get("args", {}):
            for i, span in enumerate(spans):
                if span.holds(event["ts"]):
                    step_of[event["args"]["correlation"]] = i
    work = [[] for _ in spans]
    for event in events:
        if event.get("cat") in GPU_WORK:
            i = step_of.get(event.get("args", {}).get("correlation"))
            if i is not None:
                work[i].append(Span.of(event))
    return [sorted(spans, key=lambda span: span.start) for spans in work]


def covered(spans: list[Span]) -> float:
    """Length of the union of the spans."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total
