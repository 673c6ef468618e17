"""Steady greedy decoding, side against side: time a step, tokens, and what a trace shows.

    python -m inkling_mtp_staging.tiny_inkling MODEL --layers 16 --hidden 2048
    python benchmark/steady_decode.py --model MODEL --out steady.json --logs logs \\
        --side 0.5.19=RELEASE --side '0.5.19 patched=' --side 0.5.20=PEER
"""

import argparse
import json
import random
import statistics
from itertools import product

import sides
from bootstrap import by_boot, paired_ratio_with_error
from sides import RELEASE, Worker

PROCESSORS = 4  # of an engine
WARM_UP_TOKENS = 32  # an engine that was stopped has cold caches
PROFILED_TOKENS = 128


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sides.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--combined", type=int, choices=(0, 1), default=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--profile-batch", type=int, nargs="*", default=[], help="batches to profile"
    )
    parser.add_argument(
        "--engine-arg", action="append", default=[], help="passed to engine_worker.py"
    )
    return parser.parse_args()


def step_ms(run):
    return 1000 * run["seconds"] / run["steps"]


def rows_of(runs, names, batches):
    rows = []
    for batch in batches:
        of_batch = [run for run in runs if run["batch"] == batch]
        samples = by_boot((r["side"], r["boot"], step_ms(r)) for r in of_batch)
        rounds = [
            {name: {} for name in samples} for _ in {r["round"] for r in of_batch}
        ]
        for run in of_batch:
            rounds[run["round"]][run["side"]][run["boot"]] = step_ms(run)
        reference = RELEASE if RELEASE in samples else names[0]
        for name in names:
            times = sorted(t for boot in samples[name] for t in boot)
            quartiles = statistics.quantiles(times, n=4)
            ratio, error = paired_ratio_with_error(rounds, name, reference)
            rows.append(
                {
                    "batch": batch,
                    "side": name,
                    "step_ms": round(statistics.median(times), 4),
                    "quartiles_ms": [round(quartiles[0], 4), round(quartiles[2], 4)],
                    "boot_medians_ms": [
                        round(statistics.median(boot), 4) for boot in samples[name]
                    ],
                    "speed_vs_release": round(ratio, 4),
                    "standard_error": round(error, 4),
                }
            )
    return rows


def summarise(result, names, args):
    """Write what is known so far, so that an interrupted benchmark is not lost."""
    result["summary"] = rows_of(result["runs"], names, args.batch)
    result["same_tokens"] = {
        batch: len({r["md5"] for r in result["runs"] if r["batch"] == batch}) == 1
        for batch in args.batch
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(workers, names, result, args):
    rng = random.Random(1)
    for round_ in range(args.rounds):
        processors = sides.processors_of(round_, PROCESSORS)
        for worker in rng.sample(workers, len(workers)):
            with worker.running(processors):
                worker.do(job="decode", batch=args.batch[0], tokens=WARM_UP_TOKENS)
                for batch in args.batch:
                    run = worker.do(job="decode", batch=batch, tokens=args.tokens)
                    who = {"side": worker.side.name, "boot": worker.boot}
                    who = {**who, "round": round_, "batch": batch}
                    result["runs"].append({**who, **run})
        if round_:
            summarise(result, names, args)
    for worker, batch in product(workers, args.profile_batch):
        if worker.boot == 0:
            with worker.running(sides.processors_of(0, PROCESSORS)):
                profile = worker.do(job="profile", batch=batch, tokens=PROFILED_TOKENS)
            result["profiles"].append({"side": worker.side.name, **profile})
            summarise(result, names, args)


def main():
    args = parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    engine_args = ["--model", args.model, "--steps", str(args.steps)]
    engine_args += ["--combined", str(args.combined)]
    engine_args += ["--batch", *map(str, args.batch)]
    engine_args += ["--attention-backend", args.attention_backend, *args.engine_arg]
    workers = [
        Worker("engine_worker.py", side, boot, engine_args, args.logs)
        for boot in range(args.boots)
        for side in args.side
    ]
    with sides.ended_afterwards(workers):
        compare(workers, args)


def compare(workers, args):
    boots, failed = sides.wait_for_all(workers, Worker.result)
    names = [s.name for s in args.side if any(b["side"] == s.name for b in boots)]
    print(f"{len(workers)} engines up: {boots}", flush=True)
    for batch in args.batch:  # compile and fill the prefix caches, all at a time
        for worker in workers:
            worker.send(job="decode", batch=batch, tokens=args.tokens)
        for worker in workers:
            worker.result()
    for worker in workers:
        worker.pause()
    result = {
        "benchmark": "steady_decode",
        "environment": sides.environment(args.boots),
        "model": sides.model_size(args.model),
        "attention_backend": args.attention_backend,
        "resolved_attention_backend": next(
            (b["attention_backend"] for b in boots), None
        ),
        "steps": args.steps,
        "combined": args.combined,
        "sglang": {b["side"]: b["sglang"] for b in boots},
        "boots": boots,
        "failed_boots": failed,
        "profiles": [],
        "runs": [],
    }
    with sides.locked(args.lock):
        measure(workers, names, result, args)
    sides.end_all(workers)
    result["fences"] = sides.fences(workers)
    summarise(result, names, args)
    for row in result["summary"]:
        print(row)
    print("same tokens:", result["same_tokens"], "fences:", result["fences"])
    for profile in result["profiles"]:
        print(profile)


if __name__ == "__main__":
    main()
