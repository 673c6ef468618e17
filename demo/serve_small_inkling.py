"""Launch the patched server on a small Inkling with MTP, and ask it for tokens."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
START_LIMIT_S = 600


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(url: str, body: dict) -> list:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def wait_until_healthy(url: str, server: subprocess.Popen, log: Path) -> None:
    start = time.monotonic()
    while time.monotonic() - start < START_LIMIT_S:
        if server.poll() is not None:
            sys.exit(f"demo: the server stopped:\n{log.read_text()[-3000:]}")
        try:
            urllib.request.urlopen(url + "/health_generate", timeout=30).read()
            print(f"  ready after {time.monotonic() - start:.0f} s")
            return
        except OSError:
            print(f"  compiling and capturing, {time.monotonic() - start:.0f} s")
            time.sleep(10)
    sys.exit(f"demo: no answer within {START_LIMIT_S} s; see {log}")


def stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def main():
    from inkling_mtp_staging.tiny_inkling import write_config

    work = Path(tempfile.mkdtemp(prefix="inkling-demo-"))
    write_config(work / "model", num_layers=4, hidden_size=1024)
    fences, log, port = work / "fences.json", work / "server.log", free_port()
    env = dict(os.environ, FENCE_PROBE_OUT=str(fences))
    env["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY / "benchmark" / "fence_probe"), env.get("PYTHONPATH", "")]
    )
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(work / "model"), "--load-format", "dummy"),
        *("--skip-tokenizer-init", "--attention-backend", "fa4"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        *("--enable-multi-layer-eagle", "--mem-fraction-static", "0.6"),
        *("--context-length", "8192", "--page-size", "1"),
        *("--max-total-tokens", "65536", "--max-running-requests", "16"),
        *("--cuda-graph-bs-decode", "1", "2", "4"),
        *("--disable-prefill-cuda-graph", "--port", str(port)),
    ]
    print(f"Starting the patched server on port {port} (log: {log})")
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server, log)
        prompts = [[(7 * i + 3 * j) % 1000 + 5 for j in range(64)] for i in range(4)]
        answers = post(
            url + "/generate",
            {
                "input_ids": prompts,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": 64,
                    "ignore_eos": True,
                },
            },
        )
        for answer in answers:
            meta = answer["meta_info"]
            accept = meta["completion_tokens"] / meta["spec_verify_ct"]
            print(f"  {answer['output_ids'][:8]} ..., accept length {accept:.2f}")
        print("  (dummy weights: the tokens mean nothing)")
        counts = json.loads(fences.read_text()) if fences.exists() else {}
    finally:
        stop(server)
    staged = counts.get("decode:target", 0)
    decode = sum(n for name, n in counts.items() if name.startswith("decode"))
    print(f"  decode steps staged and fenced by the target: {staged} of {decode}")
    if not staged:
        sys.exit("demo: no step was staged; see the server's log")
    print("OK")


if __name__ == "__main__":
    main()
