"""Serving under churn, side against side, with SGLang's own bench_serving over HTTP.

Saturation is measured on the unpatched side; then every side serves at half and at
nine tenths of that request rate, the sides taking turns.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from itertools import product

import sides
from bootstrap import by_boot, median_with_error
from sides import RELEASE

START_LIMIT_S = 400
SHARES = (0.5, 0.9)  # of saturation
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


class Server:
    def __init__(self, side, boot, args):
        self.side, self.boot = side, boot
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = args.logs / f"server.{side.name}.{boot}.log".replace(" ", "_")
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--port", str(port)),
            *("--model-path", args.model, *backend_args(args.attention_backend)),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--speculative-algorithm", "EAGLE", "--enable-multi-layer-eagle"),
            *("--speculative-num-steps", str(args.steps), "--speculative-eagle-topk"),
            *("1", "--speculative-num-draft-tokens", str(args.steps + 1)),
            *("--mem-fraction-static", "0.8", "--max-total-tokens", "131072"),
            *("--context-length", "8192", "--page-size", "1", "--sleep-on-idle"),
            *("--max-running-requests", "32", "--cuda-graph-bs-decode"),
            *("1", "2", "4", "8", "16", "24", "32", "--disable-prefill-cuda-graph"),
        ]
        self._process = subprocess.Popen(
            command,
            env=side.environment(),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

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
        command = [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
            *("--base-url", self.url, "--model", args.model, "--dataset-name"),
            *("random-ids", "--random-input-len", "256", "--random-output-len", "256"),
            *("--random-range-ratio", "0.25", "--num-prompts", str(num_prompts)),
            *("--request-rate", str(rate), "--seed", str(seed), "--disable-tqdm"),
            *("--output-file", str(out)),
        ]
        # One client for all sides: the environment's own sglang.
        ended = subprocess.run(command, capture_output=True, text=True)
        if not out.exists():
            raise RuntimeError(
                f"bench_serving: {ended.stdout[-800:]} {ended.stderr[-1500:]}"
            )
        result = json.loads(out.read_text().splitlines()[-1])
        return {field: result.get(field) for field in (*FIELDS, "completed")}

    def stop(self):
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)


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
    started, lock = list(servers), contextlib.ExitStack()
    try:
        boots, failed = sides.wait_for_all(servers, Server.started)
        print(f"{len(servers)} servers up: {boots}", flush=True)
        for server in servers:
            server.bench(args, 1e9, 64, seed=1)
        lock.enter_context(sides.locked(args.lock))
        reference = next((s for s in servers if s.side.name == RELEASE), servers[0])
        saturation = reference.bench(args, 1e9, 256, seed=2)["request_throughput"]
        print(
            f"saturation {saturation:.2f} requests/s on {reference.side.name}",
            flush=True,
        )
        result = {
            "benchmark": "serving",
            "environment": sides.environment(args.boots),
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
            rate = share * saturation
            prompts = max(int(rate * args.seconds), 20)
            for server in rng.sample(servers, len(servers)):
                run = server.bench(args, rate, prompts, seed=10 + round_)
                who = {"side": server.side.name, "boot": server.boot}
                result["runs"].append({**who, "share": share, "rate": rate, **run})
            summarise(result, [s.name for s in args.side], args.out)
    finally:
        lock.close()
        for server in started:
            server.stop()
    return result


def main():
    args = parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    servers = [
        Server(side, boot, args) for boot in range(args.boots) for side in args.side
    ]
    for row in measure(servers, args)["summary"]:
        print(row)


if __name__ == "__main__":
    main()
