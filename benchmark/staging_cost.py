"""What one decode step costs the host, and when it releases the scheduler.

Runs on whichever sglang is first on PYTHONPATH, in one process, on the step lab of the
GPU tests: the real Scheduler, worker, backends and graphs on a small Inkling.

    python benchmark/staging_cost.py --steps 3 --out cost.json
"""

import argparse
import fcntl
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "test" / "registered" / "spec"))
LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
GPU_DELAY_CYCLES = 40_000_000  # the whole step is queued before its first kernel


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--combined", type=int, choices=(0, 1), default=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lock", type=Path, help="measure one process at a time")
    return parser.parse_args()


def host_us(lab, call, repeats):
    """Median and quartiles of host microseconds, the GPU idle before each call."""
    import torch

    times = []
    with torch.no_grad(), torch.cuda.stream(lab.forward_stream):
        for i in range(repeats + 20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if i >= 20:
                times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median": round(middle, 1), "quartiles": [round(low, 1), round(high, 1)]}


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
    target = lab.worker.target_worker
    original = target.forward_batch_generation
    verify = []

    def timed_verify(*args, **kwargs):
        start, end = event(), event()
        start.record(forward)
        result = original(*args, **kwargs)
        end.record(forward)
        verify[:] = [start, end]
        return result

    target.forward_batch_generation = timed_verify
    rows = []
    for _ in range(repeats):
        start, end, released = event(), event(), event()
        batch = batch_of()
        torch.cuda.synchronize()
        with torch.cuda.stream(forward):
            torch.cuda._sleep(GPU_DELAY_CYCLES)
            start.record(forward)
        step = lab.run_step(batch.lab_spec, batch=batch)
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
                "step_ms": start.elapsed_time(end),
                "verify_ms": verify_start.elapsed_time(verify_end),
                "released_ms": start.elapsed_time(released),
                "released_in_verify_ms": verify_start.elapsed_time(released),
            }
        )
    del target.forward_batch_generation
    medians = {
        key: round(statistics.median(r[key] for r in rows), 4)
        for key in rows[0]
        if key != "fence"
    }
    medians["share_of_step"] = round(medians["released_ms"] / medians["step_ms"], 4)
    medians["share_of_verify"] = round(
        medians["released_in_verify_ms"] / medians["verify_ms"], 4
    )
    return {"fences": dict(Counter(r["fence"] for r in rows)), **medians}


def spec_of(inkling_step_lab, batch_size):
    return inkling_step_lab.StepSpec(
        rows=list(range(batch_size)),
        seq_lens=[300 + i % 64 for i in range(batch_size)],
        accept_lens=[1] * batch_size,
    )


def main():
    args = parse_args()
    import inkling_step_lab
    import torch

    import sglang

    most = max(args.batch)
    lab = inkling_step_lab.boot(
        inkling_step_lab.LabConfig(
            "staging_cost",
            num_steps=args.steps,
            combined=bool(args.combined),
            capture_bs=tuple(args.batch),
            num_requests=most,
        )
    )
    for batch_size in args.batch:  # compile before the measured part
        spec = spec_of(inkling_step_lab, batch_size)
        for _ in range(3):
            lab.run_step(spec, batch=lab.batch_of(spec))
        torch.cuda.synchronize()
    if args.lock:
        lock = args.lock.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    rows = []
    for batch_size in args.batch:
        spec = spec_of(inkling_step_lab, batch_size)

        def batch_of():
            batch = lab.batch_of(spec)
            batch.lab_spec = spec
            return batch

        batches = [batch_of() for _ in range(args.repeats + 60)]
        queue = iter(batches)
        row = {
            "batch": batch_size,
            "step_host_us": host_us(
                lab,
                lambda: lab.run_step(spec, batch=next(queue)),
                args.repeats,
            ),
            "step_launches": launches(
                lab, lambda: lab.run_step(spec, batch=next(queue))
            ),
            "fence": fence_lead(lab, batch_of),
        }
        if hasattr(lab.draft, "stage_draft_extend"):
            batch = batch_of()
            stage = lambda: lab.draft.stage_draft_extend(batch)
            row["stage_host_us"] = host_us(lab, stage, args.repeats)
            row["stage_launches"] = launches(lab, stage)
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {
        "command": sys.argv,
        "sglang": f"{sglang.__version__} at {Path(sglang.__file__).parent}",
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "steps": args.steps,
        "combined": args.combined,
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
