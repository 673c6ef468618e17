"""The benchmark's standard errors, and how it stops and pins what it measures."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import sides  # noqa: E402
from bootstrap import paired_ratio_with_error  # noqa: E402

two_processors = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two processors"
)
SPIN = "import time\nwhile True: time.sleep(0.001)"


def rounds_of(speed, count=24, boots=2):
    """Sides whose times share what the machine does to a round, up to 1.6 times."""
    rng = random.Random(1)
    rounds = []
    for _ in range(count):
        machine = rng.uniform(1, 1.6)

        def times(fastness, machine=machine):
            return {
                boot: machine / fastness * rng.gauss(1, 0.01) for boot in range(boots)
            }

        rounds.append({"release": times(1.0), "patched": times(speed)})
    return rounds


@pytest.mark.parametrize("speed", [0.95, 1.0, 1.05])
def test_what_falls_on_a_whole_round_cancels(speed):
    ratio, error = paired_ratio_with_error(rounds_of(speed), "patched", "release")
    assert error < 0.006
    assert abs(ratio - speed) < 3 * error


def test_a_side_against_itself():
    assert paired_ratio_with_error(rounds_of(1.0), "release", "release") == (1.0, 0.0)


def test_turns_use_all_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9})
    assert [sides.processors_of(turn, 4) for turn in range(3)] == [
        [0, 1, 2, 3],
        [8, 9, 0, 1],
        [2, 3, 8, 9],
    ]


@pytest.fixture
def resident(tmp_path):
    resident = sides.Resident(
        sides.Side("release", ""), 0, tmp_path / "log", [sys.executable, "-c", SPIN]
    )
    with sides.ended_afterwards([resident]):
        yield resident


def state_of(resident):
    return psutil.Process(resident._process.pid).status()


def wait_for(state, resident):
    deadline = time.monotonic() + 10
    while state_of(resident) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(resident) == state


@two_processors
def test_a_paused_side_runs_only_in_its_turn_and_on_its_processors(resident):
    processors = sides.processors_of(0, 2)
    resident.pause()
    wait_for(psutil.STATUS_STOPPED, resident)
    with resident.running(processors):
        assert state_of(resident) != psutil.STATUS_STOPPED
        assert os.sched_getaffinity(resident._process.pid) == {*processors[1:]}
    wait_for(psutil.STATUS_STOPPED, resident)


@pytest.fixture
def scheduler():
    """A process of the name SGLang gives its schedulers."""
    name, program = "sglang::scheduler_TP0", "print(flush=True)\n" + SPIN
    with subprocess.Popen(
        [name, "-c", program], executable=sys.executable, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()  # the name shows only once exec has ended
        yield process
        process.kill()


@two_processors
def test_a_scheduler_has_a_processor_to_itself(scheduler):
    first, second = sides.processors_of(0, 2)
    sides.pin(psutil.Process(scheduler.pid), [first, second])
    assert os.sched_getaffinity(scheduler.pid) == {first}


@two_processors
def test_a_process_that_has_ended_is_not_pinned(scheduler):
    process = psutil.Process(scheduler.pid)
    scheduler.kill()
    os.waitid(os.P_PID, scheduler.pid, os.WEXITED | os.WNOWAIT)
    sides.pin(process, sides.processors_of(0, 2))
    scheduler.wait()
    sides.pin(process, sides.processors_of(0, 2))


def test_a_side_is_ended_however_the_block_is_left(tmp_path):
    resident = sides.Resident(
        sides.Side("release", ""), 0, tmp_path / "log", [sys.executable, "-c", SPIN]
    )
    with pytest.raises(KeyError), sides.ended_afterwards([resident]):
        resident.pause()
        raise KeyError
    assert resident._process.poll() is not None
