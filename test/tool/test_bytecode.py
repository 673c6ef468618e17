"""Python runs the new source after apply and after revert, whatever is cached."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from inkling_mtp_staging import bases, install
from inkling_mtp_staging.bases import EAGLE_WORKER, EDITED_PATHS, Base, sha256
from inkling_mtp_staging.cli import main

OLD, NEW = b"VALUE = 'old'\n", b"VALUE = 'new'\n"


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """An sglang whose edited modules can be imported, with edits of the same size."""
    root = tmp_path / "site-packages"
    for path in EDITED_PATHS:
        file = root / "sglang" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(OLD)
    base = Base("9.9", dict.fromkeys(EDITED_PATHS, sha256(OLD)))
    monkeypatch.setattr(bases, "BASES", (base,))
    monkeypatch.setattr("inkling_mtp_staging.tree.BASES", (base,))
    monkeypatch.setattr(
        install, "_compose", lambda originals: dict.fromkeys(originals, NEW)
    )
    return root


def values(root: Path, *options: str) -> set[str]:
    modules = [path.removesuffix(".py").replace("/", ".") for path in EDITED_PATHS]
    program = "import importlib\n" + "".join(
        f"print(importlib.import_module('sglang.{module}').VALUE)\n"
        for module in modules
    )
    environment = {key: value for key, value in os.environ.items() if key != WRITES_NOT}
    done = subprocess.run(
        [sys.executable, *options, "-S", "-c", program],
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


WRITES_NOT = "PYTHONDONTWRITEBYTECODE"
MODES = [
    py_compile.PycInvalidationMode.TIMESTAMP,
    py_compile.PycInvalidationMode.UNCHECKED_HASH,
]


@pytest.mark.parametrize("mode", MODES)
def test_new_source_runs_though_old_bytecode_matches(small, mode):
    """Same size, same mtime or no check at all: only removal helps."""

    def compile_all() -> None:
        for path in EDITED_PATHS:
            file = small / "sglang" / path
            os.utime(file, (1e9, 1e9))
            for level in (0, 1):
                py_compile.compile(str(file), invalidation_mode=mode, optimize=level)

    def set_times() -> None:
        for path in EDITED_PATHS:
            os.utime(small / "sglang" / path, (1e9, 1e9))

    for command, expected in (("apply", "new"), ("revert", "old")):
        compile_all()
        assert main([command, "--root", str(small)]) == 0
        set_times()
        assert values(small) == {expected}
        assert values(small, "-O") == {expected}


def test_stale_bytecode_would_win(small):
    """The trap is real: without removal the old code runs."""
    file = small / "sglang" / EAGLE_WORKER
    py_compile.compile(str(file), invalidation_mode=MODES[1])
    file.write_bytes(NEW)
    assert "old" in values(small)


def test_bytecode_of_every_interpreter_goes_and_no_other(small):
    cache = (small / "sglang" / EAGLE_WORKER).parent / "__pycache__"
    cache.mkdir()
    stem = Path(EAGLE_WORKER).stem
    tags = ("cpython-310", "cpython-311.opt-2", "cpython-313", "pypy311")
    ours = [cache / f"{stem}.{tag}.pyc" for tag in tags]
    others = [cache / f"{stem}_other.cpython-311.pyc", cache / f"{stem}.txt"]
    for command in ("apply", "revert"):
        for file in (*ours, *others):
            file.touch()
        assert main([command, "--root", str(small)]) == 0
        assert sorted(cache.iterdir()) == sorted(others)
