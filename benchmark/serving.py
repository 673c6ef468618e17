"""Serving under churn, side against side, with SGLang's own serving benchmark over HTTP.

Saturation is measured on the unpatched side; then every side serves at half and at
nine tenths of that request rate, and all requests at once, the sides taking turns.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import sys
import time
import urllib.request
from itertools import product

import sides
from bootstrap import by_boot, median_with_error
from sides import RELEASE, Resident

START_LIMIT_S = 400
PROCESSORS = 6  # of a server
SHARES = (0.5, 0.9, 1.0)  # of saturation; 1.0: all requests at once
ALL_AT_ONCE = 1e9  # requests a second
SATURATING_PROMPTS = 256
FIELDS = (
    *("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms"),
    *("median_itl_ms", "p99_itl_ms", "median_tpot_ms", "p99_tpot_ms", "accept_length"),
)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    sides.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of one run")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def backend_args(name):
    backend = sides.backend_or_none(name)
    return ("--attention-backend", backend) if backend else ()


class Server(Resident):
    def __init__(self, side, boot, args):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        log = f"server.{side.name}.{boot}.log".replace(" ", "_")
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--port", str(port)),
            *("--model-path", args.model, *backend_args(args.attention_backend)),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--speculative-algorithm", "EAGLE", "--enable-multi-layer-eagle"),
            *("--speculative-num-steps", str(args.steps), "--speculative-eagle-topk"),
            *("1", "--speculative-num-draft-tokens", str(args.steps + 1)),
            *("--mem-fraction-static", "0.8", "--max-total-tokens", "65536"),
            *("--context-length", "8192", "--page-size", "1", "--sleep-on-idle"),
            *("--max-running-requests", "32", "--max-mamba-cache-size", "256"),
            *("--cuda-graph-bs-decode", "8", "16", "32"),
            "--disable-prefill-cuda-graph",
        ]
        super().__init__(side, boot, args.logs / log, command)

    def wait(self):
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(self.url + "/health_generate", timeout=30).read()
                return
            except OSError:
                time.sleep(2)
        raise RuntimeError(f"{self.side.name}: {self.log.read_text()[-2000:]}")

    def started(self):
        self.wait()
        info = self.info()
        return {key: info.get(key) for key in ("version", "attention_backend")}

    def info(self):
        """Version and resolved arguments, as the server itself gives them."""
        url = self.url + "/server_info"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)
        except OSError:
            return {}  # on another release the route may differ: go on without

    def bench(self, args, rate, num_prompts, seed):
        out = self.log.with_suffix(".jsonl")
        out.unlink(missing_ok=True)
        flags = [
            *("--backend", "sglang", "--base-url", self.url, "--model", args.model),
            *("--dataset-name", "random-ids", "--random-input-len", "256"),
            *("--random-output-len", "256", "--random-range-ratio", "0.25"),
            *("--num-prompts", str(num_prompts), "--request-rate", str(rate)),
            *("--seed", str(seed), "--disable-tqdm", "--output-file", str(out)),
        ]
        with self.log.with_suffix(".client").open("a") as client_log:
            run_client(flags, client_log)
        result = json.loads(out.read_text().splitlines()[-1])
        return {field: result.get(field) for field in (*FIELDS, "completed")}


def run_client(flags, log):
    """SGLang's serving benchmark, in this process: its imports take longer than a run.

    One client for all sides: the environment's own sglang.
    """
    from sglang.benchmark import serving

    argv, sys.argv = sys.argv, ["sglang.benchmark.serving", *flags]
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            serving.cli_main()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"serving benchmark: {ended}, see {log.name}") from ended
    finally:
        sys.argv = argv


def summarise(result, names, out):
    """Write what is known so far, so that an interrupted benchmark is not lost."""
    result["summary"] = []
    for share, side in product(SHARES, names):
        rows = [r for r in result["runs"] if (r["side"], r["share"]) == (side, share)]
        if not rows:
            continue
        medians, errors = {}, {}
        for field in FIELDS:
            if any(row[field] is None for row in rows):
                continue
            samples = by_boot((r["side"], r["boot"], r[field]) for r in rows)
            middle, error = median_with_error(samples[side])
            medians[field], errors[field] = round(middle, 3), round(error, 3)
        who = {"share": share, "side": side, "runs": len(rows)}
        result["summary"].append({**who, **medians, "standard_error": errors})
    out.write_text(json.dumps(result, indent=1) + "\n")


def measure(servers, args):
    boots, failed = sides.wait_for_all(servers, Server.started)
    print(f"{len(servers)} servers up: {boots}", flush=True)
    for server in servers:
        server.bench(args, ALL_AT_ONCE, 64, seed=1)
    for server in servers:
        server.pause()
    with sides.locked(args.lock):
        return measure_in_turn(servers, boots, failed, args)


@contextlib.contextmanager
def of_turn(server, turn):
    """The server on the processors of this turn, the client on the others."""
    usable = os.sched_getaffinity(0)
    processors = sides.processors_of(turn, PROCESSORS)
    os.sched_setaffinity(0, usable - {*processors} or usable)
    try:
        with server.running(processors):
            yield
    finally:
        os.sched_setaffinity(0, usable)


def measure_in_turn(servers, boots, failed, args):
    reference = next((s for s in servers if s.side.name == RELEASE), servers[0])
    with of_turn(reference, 0):
        first = reference.bench(args, ALL_AT_ONCE, SATURATING_PROMPTS, seed=2)
    saturation = first["request_throughput"]
    print(
        f"saturation {saturation:.2f} requests/s on {reference.side.name}", flush=True
    )
    result = {
        "benchmark": "serving",
        "environment": sides.environment(args.boots),
        "model": sides.model_size(args.model),
        "attention_backend": args.attention_backend,
        "resolved_attention_backend": boots[0]["attention_backend"],
        "steps": args.steps,
        "sglang": {b["side"]: b["version"] for b in boots},
        "boots": boots,
        "failed_boots": failed,
        "saturation": saturation,
        "saturation_of": reference.side.name,
        "runs": [],
    }
    rng = random.Random(1)
    for round_, share in product(range(args.rounds), SHARES):
        seed = 10 + len(result["runs"])  # the same for all servers
        rate = share * saturation
        prompts = max(int(rate * args.seconds), 20)
        if share == 1.0:
            rate, prompts = ALL_AT_ONCE, SATURATING_PROMPTS
        for server in rng.sample(servers, len(servers)):
            with of_turn(server, round_):
                run = server.bench(args, rate, prompts, seed=seed)
            who = {"side": server.side.name, "boot": server.boot}
            result["runs"].append({**who, "share": share, "rate": rate, **run})
        result["fences"] = sides.fences(servers)
        summarise(result, [s.name for s in args.side], args.out)
    return result


def main():
    args = parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    servers = [
        Server(side, boot, args) for boot in range(args.boots) for side in args.side
    ]
    with sides.ended_afterwards(servers):
        result = measure(servers, args)
    for row in result["summary"]:
        print(row)


if __name__ == "__main__":
    main()
