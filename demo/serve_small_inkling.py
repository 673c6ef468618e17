"""Make a small Inkling, serve it with the patch, and ask it for text over HTTP."""

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

START_LIMIT_S = 600


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(url: str, body: dict) -> dict:
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
            waited = time.monotonic() - start
            print(f"  compiling and capturing, {waited:.0f} s", flush=True)
            time.sleep(10)
    sys.exit(f"demo: no answer within {START_LIMIT_S} s; see {log}")


def stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def accept_length(url: str) -> float:
    with urllib.request.urlopen(url + "/server_info", timeout=30) as response:
        return json.load(response)["internal_states"][0]["avg_spec_accept_length"]


def main():
    from inkling_mtp_staging.cli import main as inkling_mtp_staging
    from inkling_mtp_staging.tiny_inkling import Recipe, Shape
    from inkling_mtp_staging.tiny_inkling.checkpoint import write_checkpoint

    work = Path(tempfile.mkdtemp(prefix="inkling-demo-"))
    model, log, port = work / "model", work / "server.log", free_port()
    recipe = Recipe(Shape())
    print(f"Making a small Inkling in {model}", flush=True)
    write_checkpoint(model, recipe)
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--attention-backend", "fa4"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        *("--enable-multi-layer-eagle", "--mem-fraction-static", "0.3"),
        *("--context-length", "8192", "--page-size", "1"),
        *("--max-total-tokens", "65536", "--max-running-requests", "16"),
        *("--cuda-graph-bs-decode", "1", "2", "4", "--enable-metrics"),
        *("--disable-prefill-cuda-graph", "--port", str(port)),
    ]
    print(f"Starting the patched server on port {port} (log: {log})", flush=True)
    with log.open("w") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server, log)
        for line in log.read_text().splitlines():
            if "staging edits" in line or "metadata is staged" in line:
                print(f"  server: {line}")
        for prompt in ("Once upon a time", " kala beka. What next?"):
            answer = post(
                url + "/v1/completions",
                {
                    "model": str(model),
                    "prompt": prompt,
                    "temperature": 0,
                    "max_tokens": 256,
                },
            )
            text = answer["choices"][0]["text"]
            print(f"  {prompt!r} ->{text[:72]} ...")
        print(
            f"  accept length {accept_length(url):.2f} tokens a step, "
            f"{recipe.expected_accept_length():.2f} expected"
        )
        staged = inkling_mtp_staging(["status", "--url", url]) == 0
    finally:
        stop(server)
    if not staged:
        sys.exit("demo: no step was staged; see the server's log")
    print("OK")


if __name__ == "__main__":
    main()
