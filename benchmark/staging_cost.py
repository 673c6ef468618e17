"""What one decode step costs host and GPU, and when it releases the scheduler.

Runs on whichever sglang is first on PYTHONPATH, in one process, on the step lab of the
GPU tests: the real Scheduler, worker, backends and graphs on a small Inkling.

    python benchmark/staging_cost.py --steps 3 --out cost.json
    python benchmark/staging_cost.py --steps 3 --batch 8 --seq-len 1024 32768 131072 \\
        --attention-backend triton --out cost-long.json
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path

import sides

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "test" / "registered" / "spec"))
LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
STEP_DELAY_CYCLES = 40_000_000  # the whole step is queued before its first kernel
STAGE_DELAY_CYCLES = 4_000_000  # the same for staging alone
WARM_UP = 20
LENGTH_SPREAD = 64  # the rows of a batch differ in length by less than this


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--combined", type=int, choices=(0, 1), default=1)
    parser.add_argument(
        "--staging", type=int, choices=(0, 1), default=1, help="0: the patch's switch"
    )
    sides.add_attention_backend(parser)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument(
        "--seq-len",
        type=int,
        nargs="+",
        default=[300],
        help="tokens of a request; the pools hold the longest for the largest batch",
    )
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True)
    sides.add_lock(parser)
    return parser.parse_args()


def spread(times, digits=1):
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "median": round(middle, digits),
        "quartiles": [round(low, digits), round(high, digits)],
    }


def host_us(lab, call, repeats):
    """Median and quartiles of host microseconds, the GPU idle before each call."""
    import torch

    times = []
    with torch.no_grad(), torch.cuda.stream(lab.forward_stream):
        for i in range(repeats + WARM_UP):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if i >= WARM_UP:
                times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return spread(times)


@contextlib.contextmanager
def verify_marked(lab, mark):
    """Call ``mark`` as the worker enters and as it leaves the target worker, which every
    side does once a step."""
    target = lab.worker.target_worker
    original = target.forward_batch_generation

    def marked(*args, **kwargs):
        mark()
        result = original(*args, **kwargs)
        mark()
        return result

    target.forward_batch_generation = marked
    try:
        yield
    finally:
        del target.forward_batch_generation


def step_host_us(lab, step, repeats):
    """Host microseconds of a step, and of its parts around the target's verify.

    Staging counts before verify, and what it replaces after.
    """
    import torch

    marks = []
    times = {"step": [], "before_verify": [], "verify": [], "after_verify": []}
    with verify_marked(lab, lambda: marks.append(time.perf_counter())):
        for i in range(repeats + WARM_UP):
            torch.cuda.synchronize()
            marks.clear()
            start = time.perf_counter()
            step()
            end = time.perf_counter()
            verify_start, verify_end = marks
            if i >= WARM_UP:
                times["step"].append(1e6 * (end - start))
                times["before_verify"].append(1e6 * (verify_start - start))
                times["verify"].append(1e6 * (verify_end - verify_start))
                times["after_verify"].append(1e6 * (end - verify_end))
    torch.cuda.synchronize()
    return {f"{part}_host_us": spread(part_times) for part, part_times in times.items()}


def gpu_us(lab, call, repeats):
    """Median and quartiles of GPU microseconds on an otherwise idle GPU.

    A delay ahead of the call lets the host queue all of it first, so that the time is
    that of the kernels and not of their launches.
    """
    import torch

    times = []
    with torch.no_grad(), torch.cuda.stream(lab.forward_stream):
        for i in range(repeats + WARM_UP):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(STAGE_DELAY_CYCLES)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= WARM_UP:
                times.append(1e3 * start.elapsed_time(end))
    return spread(times)


def launches(lab, call):
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), torch.cuda.stream(lab.forward_stream):
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            call()
            torch.cuda.synchronize()
    counts = Counter()
    for event in trace.events():
        for kind in LAUNCHES:
            if kind in event.name and event.name.startswith("cu"):
                counts[kind] += 1
    return dict(counts)


def fence_lead(lab, batch_of, repeats=20):
    """GPU milliseconds of the step, and when in it the scheduler's wait ends."""
    import torch

    def event():
        return torch.cuda.Event(enable_timing=True)

    forward, schedule = lab.forward_stream, lab.schedule_stream
    verify = []

    def mark_verify():
        verify.append(event())
        verify[-1].record(forward)

    rows = []
    for _ in range(repeats):
        start, end, released = event(), event(), event()
        verify.clear()
        batch = batch_of()
        torch.cuda.synchronize()
        with torch.cuda.stream(forward):
            torch.cuda._sleep(STEP_DELAY_CYCLES)
            start.record(forward)
        with verify_marked(lab, mark_verify):
            step = lab.run_step(batch.lab_spec, batch=batch)
        # False: the host waited for the GPU within the step, or was too slow, and the
        # times below contain what the GPU waited for the host.
        queued_ahead = not start.query()
        end.record(forward)
        if step.event is None:
            schedule.wait_stream(forward)
        else:
            schedule.wait_event(step.event)
        released.record(schedule)
        torch.cuda.synchronize()
        verify_start, verify_end = verify
        rows.append(
            {
                "fence": step.fence,
                "queued_ahead": queued_ahead,
                "step_ms": start.elapsed_time(end),
                "verify_ms": verify_start.elapsed_time(verify_end),
                "released_ms": start.elapsed_time(released),
                "released_in_verify_ms": verify_start.elapsed_time(released),
            }
        )
    measured = {
        key: spread([r[key] for r in rows], digits=4)
        for key in rows[0]
        if key not in ("fence", "queued_ahead")
    }
    result = {"fences": dict(Counter(r["fence"] for r in rows))}
    result["queued_ahead"] = sum(r["queued_ahead"] for r in rows) / len(rows)
    for key, value in measured.items():
        result[key] = value["median"]
        result[f"{key}_quartiles"] = value["quartiles"]
    result["share_of_step"] = round(result["released_ms"] / result["step_ms"], 4)
    result["share_of_verify"] = round(
        result["released_in_verify_ms"] / result["verify_ms"], 4
    )
    return result


def spec_of(inkling_step_lab, batch_size, seq_len):
    return inkling_step_lab.StepSpec(
        rows=list(range(batch_size)),
        seq_lens=[seq_len + i % LENGTH_SPREAD for i in range(batch_size)],
        accept_lens=[1] * batch_size,
    )


def row_tokens(inkling_step_lab, args):
    """Slots for the longest row and its draft, in whole pages of any page size."""
    needed = max(args.seq_len) + LENGTH_SPREAD + args.steps + 1
    unit = inkling_step_lab.ROW_TOKENS
    return -(-needed // unit) * unit


def main():
    args = parse_args()
    import inkling_step_lab
    import torch

    lab = inkling_step_lab.boot(
        inkling_step_lab.LabConfig(
            "staging_cost",
            attention_backend=sides.backend_or_none(args.attention_backend),
            page_size=args.page_size,
            num_steps=args.steps,
            combined=bool(args.combined),
            staging=bool(args.staging),
            capture_bs=tuple(args.batch),
            num_requests=max(4, *args.batch),  # the lab needs a few rows
            row_tokens=row_tokens(inkling_step_lab, args),
        )
    )
    stages = hasattr(lab.draft, "stage_draft_extend")
    cases = [
        (seq_len, batch_size, spec_of(inkling_step_lab, batch_size, seq_len))
        for seq_len, batch_size in product(args.seq_len, args.batch)
    ]
    for _, _, spec in cases:  # compile before the measured part
        for _ in range(3):
            lab.run_step(spec, batch=lab.batch_of(spec))
        torch.cuda.synchronize()
    with sides.locked(args.lock):
        # This thread launches; the processors of a shared machine differ by more than
        # the sides do.
        os.sched_setaffinity(0, sides.processors_of(0, 1))
        measure(lab, cases, stages, args)


def measure(lab, cases, stages, args):
    import sglang

    off = "" if args.staging else ", staging off"
    result = {
        "benchmark": "staging_cost",
        "environment": sides.environment(boots=1),
        "side": sglang.__version__ + (f" patched{off}" if stages else ""),
        "sglang": sglang.__version__,
        "attention_backend": args.attention_backend,
        "resolved_attention_backend": sides.resolved_backend(lab.scheduler.server_args),
        "page_size": args.page_size,
        "steps": args.steps,
        "combined": args.combined,
        "context_length": lab.config.context_length,
        "event_pair_gpu_us": gpu_us(lab, lambda: None, args.repeats),
        "rows": [],
    }
    for seq_len, batch_size, spec in cases:

        def batch_of():
            batch = lab.batch_of(spec)
            batch.lab_spec = spec
            return batch

        queue = iter([batch_of() for _ in range(args.repeats + WARM_UP + 2)])
        step = lambda: lab.run_step(spec, batch=next(queue))
        row = {
            "seq_len": seq_len,
            "batch": batch_size,
            **step_host_us(lab, step, args.repeats),
            "step_launches": launches(lab, step),
            "fence": fence_lead(lab, batch_of),
        }
        if stages and args.staging:
            batch = batch_of()
            stage = lambda: lab.draft.stage_draft_extend(batch)
            row["stage_host_us"] = host_us(lab, stage, args.repeats)
            row["stage_gpu_us"] = gpu_us(lab, stage, args.repeats)
            row["stage_launches"] = launches(lab, stage)
            row["unstaged_reason"] = lab.draft.unstaged_reason
        result["rows"].append(row)
        # What is measured so far outlives a run that is cut short.
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
