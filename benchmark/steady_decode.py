"""Steady greedy decoding, side against side: time a step, tokens, GPU idle share.

    python -m inkling_mtp_staging.tiny_inkling MODEL --layers 16 --hidden 2048
    python benchmark/steady_decode.py --model MODEL --out steady.json --logs logs \\
        --side 0.5.19=RELEASE --side '0.5.19 patched=' --side 0.5.20=PEER
"""

import argparse
import json
import random
import statistics
import sys
from itertools import product

import sides
from sides import RELEASE, Worker


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
    parser.add_argument("--profile-batch", type=int, default=0, help="0: no profile")
    parser.add_argument("--engine-args", nargs="*", default=[], metavar="--ARG")
    return parser.parse_args()


def ratio_with_error(samples, side, reference):
    """Median step time of ``reference`` over that of ``side``, and a standard error.

    The error is that of a bootstrap over boots, then over the runs of each, because
    runs of one boot share its memory layout and are not independent.
    """
    rng = random.Random(0)

    def median(boots):
        return statistics.median(t for boot in boots for t in boot)

    def resample(boots):
        picked = rng.choices(boots, k=len(boots))
        return [rng.choices(boot, k=len(boot)) for boot in picked]

    a, b = samples[reference], samples[side]
    draws = [median(resample(a)) / median(resample(b)) for _ in range(2000)]
    return median(a) / median(b), statistics.stdev(draws)


def summarise(runs, names, batches):
    rows = []
    for batch, name in product(batches, names):
        samples = {}
        for run in runs:
            if run["batch"] == batch:
                boots = samples.setdefault(run["side"], {})
                step_ms = 1000 * run["seconds"] / run["steps"]
                boots.setdefault(run["boot"], []).append(step_ms)
        samples = {side: list(boots.values()) for side, boots in samples.items()}
        flat = sorted(t for boot in samples[name] for t in boot)
        quartiles = statistics.quantiles(flat, n=4)
        reference = RELEASE if RELEASE in samples else names[0]
        ratio, error = ratio_with_error(samples, name, reference)
        rows.append(
            {
                "batch": batch,
                "side": name,
                "step_ms": round(statistics.median(flat), 4),
                "quartiles_ms": [round(quartiles[0], 4), round(quartiles[2], 4)],
                "boot_medians_ms": [
                    round(statistics.median(boot), 4) for boot in samples[name]
                ],
                "speed_vs_release": round(ratio, 4),
                "standard_error": round(error, 4),
            }
        )
    return rows


def main():
    args = parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    engine_args = ["--model", args.model, "--steps", str(args.steps)]
    engine_args += ["--combined", str(args.combined), *args.engine_args]
    workers = [
        Worker("engine_worker.py", side, boot, engine_args, args.logs)
        for boot in range(args.boots)
        for side in args.side
    ]
    boots = [{"side": w.side.name, "boot": w.boot, **w.result()} for w in workers]
    print(f"{len(workers)} engines up: {boots}", flush=True)
    runs, rng = [], random.Random(1)
    for round_, batch in product(range(args.rounds + 1), args.batch):
        for worker in rng.sample(workers, len(workers)):
            run = worker.do(job="decode", batch=batch, tokens=args.tokens)
            if round_:  # the first round compiles and fills the prefix cache
                who = {"side": worker.side.name, "boot": worker.boot, "batch": batch}
                runs.append({**who, **run})
    profiles = []
    if args.profile_batch:
        for worker in workers:
            profile = worker.do(job="profile", batch=args.profile_batch, tokens=128)
            profiles.append({"side": worker.side.name, "boot": worker.boot, **profile})
    fences = {}
    for worker in workers:
        worker.stop()
        path = worker.log.with_suffix(".fences")
        if path.exists():
            fences[f"{worker.side.name}, boot {worker.boot}"] = json.loads(
                path.read_text()
            )
    result = {
        "command": sys.argv,
        "boots": boots,
        "summary": summarise(runs, [s.name for s in args.side], args.batch),
        "same_tokens": {
            batch: len({r["md5"] for r in runs if r["batch"] == batch}) == 1
            for batch in args.batch
        },
        "fences": fences,
        "profiles": profiles,
        "runs": runs,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["summary"]:
        print(row)
    print("same tokens:", result["same_tokens"], "fences:", fences)
    print("profiles:", [(p["side"], p["boot"], p["gpu_idle_share"]) for p in profiles])


if __name__ == "__main__":
    main()
