"""The benchmark's reading of a profiler's trace."""

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import step_trace  # noqa: E402

SCHEDULER = {"pid": 7, "tid": 7}
STEP_US, WORKER_US = 1000, 600


def step(i):
    """A step that launches a graph of two kernels, then waits; the next follows."""
    start = STEP_US * i
    host = {**SCHEDULER, "args": {"correlation": i}}
    gpu = {"pid": 0, "tid": 7, "args": {"correlation": i}}
    return [
        {
            **SCHEDULER,
            "cat": "user_annotation",
            "name": step_trace.STEP,
            "ts": start,
            "dur": WORKER_US,
        },
        {**SCHEDULER, "cat": "cpu_op", "name": "aten::add", "ts": start + 1, "dur": 5},
        {
            **host,
            "cat": "cuda_runtime",
            "name": "cudaGraphLaunch",
            "ts": start + 10,
            "dur": 5,
        },
        {"cat": "kernel", "name": "verify", **gpu, "ts": start + 100, "dur": 300},
        {"cat": "kernel", "name": "extend", **gpu, "ts": start + 350, "dur": 150},
        # Behind the worker's call: the scheduler waits for the step's results.
        {
            **SCHEDULER,
            "cat": "cuda_runtime",
            "name": "cudaEventSynchronize",
            "ts": start + 700,
            "dur": 40,
            "args": {"correlation": 10_000 + i},
        },
        # Another thread's launches are not the scheduler's.
        {
            "pid": 7,
            "tid": 8,
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": start + 20,
            "dur": 5,
            "args": {"correlation": 20_000 + i},
        },
    ]


def trace(steps):
    return [event for i in range(steps) for event in step(i)]


def test_figures_of_steady_steps():
    figures = step_trace.summary(trace(20))
    assert figures == {
        "steps": 12,
        "gpu_idle_share": pytest.approx(1 - 13 * 400 / (12 * 1000 + 400), abs=1e-4),
        "gpu_busy_us": 400.0,
        "gpu_gap_us": 600.0,
        "host_step_us": 1000.0,
        "host_in_worker_us": 600.0,
        "host_wait_us": 40.0,
        "launches": {"GraphLaunch": 1.0},
        "tensor_ops": 1.0,
    }


def test_a_trace_without_steady_steps_is_refused():
    with pytest.raises(ValueError, match="8 decode steps in the trace"):
        step_trace.summary(trace(8))


def test_events_without_duration_are_left_out(tmp_path):
    path = tmp_path / "t.trace.json.gz"
    events = [{"name": "process_name", "ph": "M"}, *trace(1)]
    with gzip.open(path, "wt") as f:
        json.dump({"traceEvents": events}, f)
    assert step_trace.read(path) == trace(1)
