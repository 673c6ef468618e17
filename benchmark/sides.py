"""The versions of SGLang under comparison, and servers of them that stay resident.

A side is a name, a folder to put first on PYTHONPATH ("" for the environment's own
sglang) and environment variables. All boots of all sides start together; then one is
measured at a time while the others are stopped, the sides taking turns, so that drift of
the machine falls on all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

BENCHMARK = Path(__file__).parent
RELEASE, PATCHED, PEER = "0.5.19", "0.5.19 patched", "0.5.20"


@dataclass(frozen=True)
class Side:
    name: str
    path: str
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Side:
        name, separator, rest = text.partition("=")
        path, *variables = rest.split(",")
        if not separator or not all("=" in variable for variable in variables):
            raise argparse.ArgumentTypeError(
                f"{text!r}: give NAME=FOLDER,VARIABLE=VALUE"
            )
        # Absolute: the processes of a side need not share this one's folder.
        path = os.path.abspath(path) if path else ""
        return cls(name, path, dict(variable.split("=", 1) for variable in variables))

    def environment(self, **extra: str) -> dict[str, str]:
        paths = [
            self.path,
            str(BENCHMARK / "fence_probe"),
            os.environ.get("PYTHONPATH"),
        ]
        pythonpath = os.pathsep.join(filter(None, paths))
        return {**os.environ, "PYTHONPATH": pythonpath, **self.variables, **extra}


def add_attention_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention-backend",
        default="fa4",
        help="'default' passes none, so that SGLang picks: triton on Hopper",
    )


def add_lock(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lock",
        type=Path,
        help="file to lock while measuring; benchmarks that name the same one may boot "
        "at the same time, and are measured one after another",
    )


@contextlib.contextmanager
def locked(path: Path | None):
    if path is None:
        yield
        return
    print(f"ready to measure, waiting for {path}", flush=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def backend_or_none(name: str) -> str | None:
    return None if name == "default" else name


def resolved_backend(server_args) -> str | None:
    """The attention backend that SGLang runs on, whoever picked it."""
    if hasattr(server_args, "resolved_dict"):
        return server_args.resolved_dict().get("attention_backend")
    return server_args.attention_backend


def environment(boots: int) -> dict:
    """What a reader needs to judge or repeat the figures of this process.

    The version of SGLang is each side's own and stands with the side.
    """
    import torch
    import triton

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
        gpu, driver = answer.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError):
        gpu = driver = "unknown"
    return {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "boots": boots,
    }


def model_size(folder: str) -> dict:
    text = json.loads((Path(folder) / "config.json").read_text())["text_config"]
    return {"layers": text["num_hidden_layers"], "hidden": text["hidden_size"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_attention_backend(parser)
    parser.add_argument(
        "--side",
        type=Side.parse,
        action="append",
        required=True,
        metavar="NAME=FOLDER[,VARIABLE=VALUE...]",
        help=f"such as '{RELEASE}=/path/to/its/site-packages'; repeat for each side",
    )
    add_lock(parser)
    parser.add_argument("--boots", type=int, default=2, help="of each side")
    parser.add_argument("--model", required=True, help="folder of a small Inkling")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--logs", type=Path, required=True, help="folder for logs")


def wait_for_all(boots: list, started) -> tuple[list[dict], list[dict]]:
    """What each boot says of itself once it is up (``started``), and which are not up:
    those leave ``boots``."""
    up, failed = [], []
    for boot in list(boots):
        who = {"side": boot.side.name, "boot": boot.boot}
        try:
            up.append({**who, **started(boot)})
        except RuntimeError as error:
            print(f"left out: {error}", file=sys.stderr, flush=True)
            failed.append({**who, "error": str(error)[-600:]})
            boots.remove(boot)
    return up, failed


def processors_of(turn: int, count: int) -> list[int]:
    """``count`` processors, others in the next turn, for all that is measured in it.

    The processors of a shared machine differ by more than the sides do.
    """
    usable = sorted(os.sched_getaffinity(0))
    return [usable[(turn * count + i) % len(usable)] for i in range(count)]


def pin(process: psutil.Process, processors: list[int]) -> None:
    """The main thread of a scheduler to the first processor, which it has to itself,
    and all other threads of ``process`` to the rest. One that has ended is left."""
    first, *rest = processors
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, rest)
        if " ".join(process.cmdline()).startswith("sglang::scheduler"):
            os.sched_setaffinity(process.pid, [first])


class Resident:
    """Processes of one boot of a side: a group of their own, which can be stopped.

    A stopped group keeps its memory, on the GPU too, and takes no processor time from
    the one being measured.
    """

    END_LIMIT_S = 30

    def __init__(self, side: Side, boot: int, log: Path, command: list[str], **popen):
        self.side, self.boot, self.log = side, boot, log
        # An earlier run's counts are not this one's.
        self.fences.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            command,
            env=side.environment(FENCE_PROBE_OUT=str(self.fences)),
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **popen,
        )

    @property
    def fences(self) -> Path:
        return self.log.with_suffix(".fences")

    def _signal(self, number: int) -> None:
        # One that has ended is reported by whoever next waits for its answer.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def running(self, processors: list[int]):
        """Runs on ``processors``, two at least, while the block runs."""
        leader = psutil.Process(self._process.pid)
        for process in (leader, *leader.children(recursive=True)):
            pin(process, processors)
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def ask_to_end(self) -> None:
        self._process.terminate()

    def wait_for_end(self) -> None:
        try:
            self._process.wait(self.END_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)  # and what it has left behind


def end_all(residents: list[Resident]) -> None:
    for resident in residents:
        resident.resume()
        resident.ask_to_end()
    for resident in residents:
        resident.wait_for_end()


def fences(residents: list[Resident]) -> dict[str, dict]:
    """Steps by fence, as ``fence_probe`` counted them in each boot."""
    return {
        f"{resident.side.name}, boot {resident.boot}": json.loads(
            resident.fences.read_text()
        )
        for resident in residents
        if resident.fences.exists()
    }


@contextlib.contextmanager
def ended_afterwards(residents: list[Resident]):
    """Ends them however the block is left: they are in sessions of their own."""
    started = list(residents)
    try:
        yield
    finally:
        end_all(started)


class Worker(Resident):
    """One resident engine process that does one job at a time.

    Jobs and results are JSON, one a line, over stdin and a results pipe.
    """

    def __init__(self, script: str, side: Side, boot: int, args: list[str], logs: Path):
        log = f"{Path(script).stem}.{side.name}.{boot}.log".replace(" ", "_")
        read_end, write_end = os.pipe()
        path = str(BENCHMARK / script)
        super().__init__(
            *(side, boot, logs / log),
            [sys.executable, path, "--results", str(write_end), *args],
            stdin=subprocess.PIPE,
            pass_fds=(write_end,),
            text=True,
        )
        os.close(write_end)
        self._results = os.fdopen(read_end)

    def result(self) -> dict:
        line = self._results.readline()
        if not line:
            raise RuntimeError(
                f"{self.side.name}, boot {self.boot}, ended; see {self.log}: "
                f"{self.log.read_text()[-2000:]}"
            )
        return json.loads(line)

    def send(self, **job) -> None:
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def do(self, **job) -> dict:
        self.send(**job)
        return self.result()

    def ask_to_end(self) -> None:
        self._process.stdin.close()
