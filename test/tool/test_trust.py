"""What the tool touches: the edited files, their bytecode, its state file, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inkling_mtp_staging.bases import EDITED_PATHS
from inkling_mtp_staging.state import STATE_NAME

# Python's own audit events tell what a whole run does, the real composer included.
PROGRAM = """
import json, os, sys
seen = []
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, (str, bytes)) and flags & WRITES:
            seen.append(["write", os.fsdecode(path)])
    elif event in ("os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir",
                   "os.rmdir", "os.truncate", "shutil.rmtree"):
        seen.extend(["write", os.fsdecode(path)] for path in arguments[:2]
                    if isinstance(path, (str, bytes)) or hasattr(path, "__fspath__"))
    elif event == "import":
        seen.append(["import", arguments[0]])
    elif event == "exec":
        seen.append(["exec", arguments[0].co_filename])
    elif event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.fork",
                           "os.posix_spawn", "urllib.")):
        seen.append(["forbidden", event])
from inkling_mtp_staging.cli import main
sys.addaudithook(watch)
status = main(sys.argv[1:])
print(json.dumps([status, seen]), file=sys.stderr)
"""


def watched(*arguments: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    status, seen = json.loads(done.stderr.splitlines()[-1])
    assert status in (0, 1)
    return seen


@pytest.fixture
def crowded(tree):
    """The tree with bytecode, and with neighbours that must stay as they are."""
    for path in map(Path, EDITED_PATHS):
        folder = (tree.package / path).parent
        (folder / "__pycache__").mkdir(exist_ok=True)
        for name in (path.stem, f"{path.stem}_other"):
            (folder / "__pycache__" / f"{name}.cpython-311.pyc").write_bytes(b"old")
        (folder / "neighbour.py").write_text("raise AssertionError('executed')\n")
    (tree.package / "srt" / "__init__.py").write_text("raise AssertionError('run')\n")
    (tree.root / "sglang-0.5.19.dist-info" / "RECORD").write_text("sglang\n")
    return tree


def snapshot(tree) -> dict[str, tuple[bytes, int, int]]:
    return {
        str(path.relative_to(tree.root)): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mode,
            path.stat().st_mtime_ns if path.is_file() else 0,
        )
        for path in tree.root.rglob("*")
    }


def changes(before: dict, after: dict) -> set[str]:
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


def test_only_the_edited_files_their_bytecode_and_the_state_change(crowded):
    edited = {f"sglang/{path}" for path in EDITED_PATHS}
    bytecode = {
        f"{Path(path).parent}/__pycache__/{Path(path).stem}.cpython-311.pyc"
        for path in edited
    }
    state = {f"sglang/{STATE_NAME}"}
    before = snapshot(crowded)
    for command, expected in (
        ("status", set()),
        ("diff", set()),
        ("apply", edited | bytecode | state),
        ("status", edited | bytecode | state),
        ("diff", edited | bytecode | state),
        ("revert", edited | bytecode),
    ):
        seen = watched(command, "--root", str(crowded.root))
        assert changes(before, snapshot(crowded)) == expected
        assert_harmless(seen, crowded)
    edited_now = {name: snapshot(crowded)[name][:2] for name in edited}
    assert edited_now == {name: before[name][:2] for name in edited}


def assert_harmless(seen: list[list[str]], tree) -> None:
    assert not [entry for entry in seen if entry[0] == "forbidden"]
    written = {what for kind, what in seen if kind == "write" and what != os.devnull}
    assert all(what.startswith(f"{tree.package}/") for what in written), written
    imported = {what for kind, what in seen if kind == "import"}
    assert not {name for name in imported if name.split(".")[0] == "sglang"}
    executed = {what for kind, what in seen if kind == "exec"}
    assert not {name for name in executed if name.startswith(str(tree.root))}


def test_the_watch_sees_what_it_should(crowded):
    seen = watched("apply", "--root", str(crowded.root))
    kinds = {kind for kind, _ in seen}
    assert {"write", "import", "exec"} <= kinds
    asked = subprocess.run(
        [sys.executable, "-c", PROGRAM, "status", "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
    )
    assert '["forbidden", "socket.connect"]' in asked.stderr
