"""A run killed by SIGKILL at any write, fsync, rename or removal is made good."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import faults
import pytest

from inkling_mtp_staging.bases import BASE_ATTN_BACKEND, EAGLE_WORKER, EDITED_PATHS
from inkling_mtp_staging.durable import temporary_of
from inkling_mtp_staging.state import STATE_NAME

FEWEST_POINTS = {"apply": 43, "revert": 40}

SAID = {
    "applying": "an interrupted apply was rolled back first",
    "reverting": "an interrupted revert was completed first",
}


@pytest.fixture
def killed(tree, composed, tmp_path):
    """Run a command on `tree`; return whether it was killed at that point."""
    sources = tmp_path / "composed.json"
    sources.write_text(json.dumps(composed))

    def run(command: str, number: int) -> bool:
        program = [sys.executable, faults.__file__, str(number), str(sources)]
        done = subprocess.run(
            [*program, command, "--root", str(tree.root)], capture_output=True
        )
        assert done.returncode in (0, 1, -signal.SIGKILL), done.stderr
        return done.returncode == -signal.SIGKILL

    return run


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def restore(tree, contents: dict[str, bytes]) -> None:
    shutil.rmtree(tree.root)
    for name, content in contents.items():
        file = tree.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (tree.root / "sglang-0.5.19.dist-info").mkdir(exist_ok=True)


def with_bytecode(tree) -> None:
    for path in map(Path, EDITED_PATHS):
        cache = (tree.package / path).parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / f"{path.stem}.cpython-311.pyc").write_bytes(b"stale")


def assert_made_good(tree, tool, pristine, composed, number: int) -> None:
    """Whichever command comes next: it continues from all-old or all-new and says so."""
    left = tree.contents()
    phase = phase_of(left)
    done = tool("status")
    assert done.status in (0, 1)
    assert (SAID.get(phase, "interrupted") in done.out) == (phase in SAID)
    assert tree.sources() == (composed if done.status == 0 else pristine)
    assert set(tree.leftovers()) == ({state(tree)} if done.status == 0 else set())

    restore(tree, left)
    command, sources = (("apply", composed), ("revert", pristine))[number % 2]
    assert tool(command).status == 0
    assert tree.sources() == sources
    assert tree.leftovers() == ([state(tree)] if command == "apply" else [])
    assert not list(tree.root.rglob("*.pyc")) or sources == sources_in(left)


def phase_of(contents: dict[str, bytes]) -> str | None:
    written = contents.get(f"sglang/{STATE_NAME}")
    return json.loads(written)["phase"] if written else None


def state(tree) -> str:
    return f"sglang/{STATE_NAME}"


def sources_in(contents: dict[str, bytes]) -> dict[str, str]:
    return {path: contents[f"sglang/{path}"].decode() for path in EDITED_PATHS}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("command", ["apply", "revert", "update"])
def test_killed_anywhere(tree, tool, edits, killed, pristine, composed, command):
    if command == "update":
        edits.suffix = "# older\n"
    if command != "apply":
        tool("apply")
    edits.suffix = ""
    with_bytecode(tree)
    before = tree.contents()
    command = "revert" if command == "revert" else "apply"
    for number in itertools.count():
        restore(tree, before)
        if not killed(command, number):
            break
        if edits_are_older(tree, before):
            continue
        assert_made_good(tree, tool, pristine, composed, number)
    assert number >= FEWEST_POINTS[command]


def edits_are_older(tree, before) -> bool:
    """Say whether an update was killed before it began; then nothing is to make good."""
    content = (tree.package / EAGLE_WORKER).read_bytes()
    phase = b'"phase": "applied"' in before.get(state(tree), b"")
    return (
        phase
        and content.endswith(b"# older\n")
        and (tree.package / STATE_NAME).read_bytes() == before[state(tree)]
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_killed_again_while_it_is_made_good(
    tree, tool, killed, pristine, composed, command
):
    if command == "revert":
        tool("apply")
    with_bytecode(tree)
    rename = os.replace
    renamed = []

    def die_later(source, target):
        renamed.append(target)
        if len(renamed) > 3:
            raise KeyboardInterrupt
        rename(source, target)

    os.replace = die_later
    try:
        assert tool(command).status == 2
    finally:
        os.replace = rename
    before = tree.contents()
    for number in itertools.count():
        restore(tree, before)
        if not killed("status", number):
            break
        assert_made_good(tree, tool, pristine, composed, number)
    assert number >= 36


def test_half_a_write_is_really_left_behind(tree, killed, composed):
    """The kill points are what they claim to be."""
    temporary = temporary_of(tree.package / BASE_ATTN_BACKEND)
    sizes = set()
    for number in range(5):
        assert killed("apply", number)
        if temporary.exists():
            sizes.add(temporary.stat().st_size)
            temporary.unlink()
    whole = len(composed[BASE_ATTN_BACKEND].encode())
    assert sizes == {0, whole // 2, whole}
