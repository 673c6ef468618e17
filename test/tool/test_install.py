"""apply, revert and status on a copied package."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from inkling_mtp_staging.bases import EAGLE_WORKER, EDITED_PATHS, FLASHATTENTION_BACKEND
from inkling_mtp_staging.cli import main
from inkling_mtp_staging.state import STATE_NAME


def states(status_output: str) -> dict[str, str]:
    lines = [line.split(": ") for line in status_output.splitlines()[1:]]
    return {path: state for state, path in lines}


def test_apply_writes_the_composed_files_and_tells_where(tree, tool, composed):
    done = tool("apply")
    assert (done.status, done.err) == (0, "")
    assert done.out == f"{tree.package}: applied to sglang 0.5.19\n"
    assert tree.sources() == composed


def test_second_apply_is_a_no_op_that_says_so(tree, tool):
    tool("apply")
    before = tree.contents()
    done = tool("apply")
    assert done.status == 0
    assert "already applied to sglang 0.5.19" in done.out
    assert tree.contents() == before


def test_revert_restores_every_byte(tree, tool):
    before = tree.contents()
    tool("apply")
    done = tool("revert")
    assert (done.status, done.err) == (0, "")
    assert "reverted to sglang 0.5.19" in done.out
    assert tree.contents() == before


def test_revert_of_a_pristine_package_is_a_no_op_that_says_so(tree, tool):
    before = tree.contents()
    done = tool("revert")
    assert done.status == 0
    assert "nothing to revert" in done.out
    assert tree.contents() == before


def test_status_tells_each_file_and_exits_by_it(tree, tool):
    done = tool("status")
    assert done.status == 1
    assert states(done.out) == dict.fromkeys(EDITED_PATHS, "pristine")
    assert str(tree.package) in done.out
    tool("apply")
    done = tool("status")
    assert done.status == 0
    assert states(done.out) == dict.fromkeys(EDITED_PATHS, "applied")


def test_status_as_json(tree, tool):
    tool("apply")
    done = tool("status", "--json")
    assert json.loads(done.out) == {
        "directory": str(tree.package),
        "base": "0.5.19",
        "applied": True,
        "files": dict.fromkeys(EDITED_PATHS, "applied"),
        "notes": [],
    }


def test_older_edits_are_told_and_brought_up_to_date(tree, tool, edits, composed):
    edits.suffix = "# older\n"
    tool("apply")
    edits.suffix = ""
    done = tool("status")
    assert done.status == 1
    assert states(done.out) == dict.fromkeys(EDITED_PATHS, "applied (older edits)")
    assert "updated the edits" in tool("apply").out
    assert tree.sources() == composed
    assert tool("revert").status == 0
    assert tool("status").out.count("pristine") == len(EDITED_PATHS)


@pytest.mark.parametrize("is_applied", [False, True])
@pytest.mark.parametrize("command", ["apply", "revert", "diff"])
def test_somebody_elses_change_is_refused_untouched(tree, tool, command, is_applied):
    if is_applied:
        tool("apply")
    for path in (EAGLE_WORKER, FLASHATTENTION_BACKEND):
        with (tree.package / path).open("a") as file:
            file.write("# local\n")
    before = tree.contents()
    done = tool(command)
    assert done.status == 2
    assert done.out == ""
    errors = done.err.splitlines()
    assert len(errors) == 2
    assert str(tree.package / FLASHATTENTION_BACKEND) in errors[0]
    assert str(tree.package / EAGLE_WORKER) in errors[1]
    assert all("reinstall sglang 0.5.19" in error for error in errors)
    assert tree.contents() == before
    shown = tool("status")
    assert shown.status == 1
    assert f"modified: {EAGLE_WORKER}" in shown.out


def test_crlf_is_named_as_the_reason(tree, tool):
    file = tree.package / EAGLE_WORKER
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    done = tool("apply")
    assert done.status == 2
    assert "line endings differ from sglang 0.5.19's (CRLF instead of LF)" in done.err


def test_an_edit_that_does_not_fit_leaves_everything(tree, tool, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("inkling_mtp_staging.compose.EDITS_DIRECTORY", tree.root)
    monkeypatch.setattr(
        "inkling_mtp_staging.compose.compose_all.__defaults__", (tree.root,)
    )
    before = tree.contents()
    status = main(["apply", "--root", str(tree.root)])
    assert status == 2
    assert tree.contents() == before


def test_hard_linked_copy_elsewhere_stays_pristine(tree, tool, pristine, tmp_path):
    linked = {path: tmp_path / f"linked{i}" for i, path in enumerate(EDITED_PATHS)}
    for path, link in linked.items():
        os.link(tree.package / path, link)
    tool("apply")
    assert {path: link.read_text() for path, link in linked.items()} == pristine


def test_mode_bits_survive(tree, tool):
    file = tree.package / EAGLE_WORKER
    file.chmod(0o640)
    for command in ("apply", "revert"):
        tool(command)
        assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_stale_bytecode_of_the_files_is_removed(tree, tool):
    cache = (tree.package / EAGLE_WORKER).parent / "__pycache__"
    cache.mkdir()
    stale = cache / f"{Path(EAGLE_WORKER).stem}.cpython-311.pyc"
    other = cache / "eagle_worker.cpython-311.pyc"
    for command in ("apply", "revert"):
        stale.touch()
        other.touch()
        tool(command)
        assert not stale.exists()
        assert other.exists()


@pytest.mark.parametrize("linked", [EAGLE_WORKER, str(Path(EAGLE_WORKER).parent)])
def test_symbolic_links_are_refused(tree, tool, tmp_path, linked):
    inside, outside = tree.package / linked, tmp_path / "outside"
    shutil.move(inside, outside)
    inside.symlink_to(outside)
    before = tree.contents()
    done = tool("apply")
    assert done.status == 2
    assert "symbolic link" in done.err and str(outside) in done.err
    assert tree.contents() == before


def test_missing_file(tree, tool):
    (tree.package / EAGLE_WORKER).unlink()
    done = tool("apply")
    assert done.status == 2
    assert f"{tree.package / EAGLE_WORKER}: missing" in done.err


def test_reinstalled_sglang_makes_the_old_state_moot(tree, tool, pristine, composed):
    tool("apply")
    for path, source in pristine.items():
        (tree.package / path).write_text(source)
    assert tool("status").out.count("pristine") == len(EDITED_PATHS)
    assert "nothing to revert" in tool("revert").out
    assert not (tree.package / STATE_NAME).exists()
    assert tool("apply").status == 0
    assert tree.sources() == composed


def test_commands_wait_for_each_other(tree, tool):
    before = tree.contents()
    lock = os.open(tree.package, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waiting = threading.Thread(target=tool, args=("apply",))
    waiting.start()
    waiting.join(timeout=0.5)
    assert waiting.is_alive()
    assert tree.contents() == before
    os.close(lock)
    waiting.join(timeout=60)
    assert tree.contents() != before


def test_read_only_package_is_refused_in_one_line(tree, edits, capsys):
    # pytest's own temporary folder is closed to other users, and root may write
    # anywhere, so root tries as nobody in a folder of its own.
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "site-packages"
        shutil.copytree(tree.root, root)
        for directory in [Path(name), root, *root.rglob("*")]:
            directory.chmod(0o555 if directory.is_dir() else 0o444)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            status = main(["apply", "--root", str(root)])
        finally:
            if is_root:
                os.seteuid(0)
        error = capsys.readouterr().err
        assert status == 2
        assert error.count("\n") == 1
        assert "Permission denied" in error and str(root) in error
        assert sorted(root.rglob("*.py")) == [
            root / "sglang" / path for path in sorted(["__init__.py", *EDITED_PATHS])
        ]
        assert not list(root.rglob(".*"))
        for directory in [Path(name), *root.rglob("*"), root]:
            directory.chmod(0o755)


def test_default_root_is_the_installed_sglang_unimported(on_path, edits, capsys):
    assert main(["apply"]) == 0
    assert f"{on_path.package}: applied" in capsys.readouterr().out


def test_no_sglang_at_all(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["status"]) == 2
    assert "sglang is not installed" in capsys.readouterr().err


def test_root_without_sglang(tmp_path, capsys):
    assert main(["status", "--root", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no sglang/srt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        (None, "", True),
        ("_version.py", "__version__ = version = '0.5.19'\n", True),
        ("_version.py", "__version__ = version = '0.5.20.dev3+gabc'\n", True),
        ("version.py", "try:\n    __version__ = '0.0.1'\nexcept E: ...\n", True),
        ("_version.py", "__version__ = version = '0.5.20'\n", False),
        ("version.py", '__version__ = "0.5.18"\n', False),
    ],
)
def test_version_of_a_package_that_is_not_installed(tree, tool, name, text, accepted):
    (tree.root / "sglang-0.5.19.dist-info").rmdir()
    if name:
        (tree.package / name).write_text(text)
    done = tool("apply")
    assert done.status == (0 if accepted else 2)
    if not accepted:
        assert "no release that this tool has edits for (known: 0.5.19)" in done.err


def test_unknown_installed_version(tree, tool):
    installed = tree.root / "sglang-0.5.19.dist-info"
    installed.rename(installed.with_name("sglang-0.5.19.post1.dist-info"))
    before = tree.contents()
    for command in ("apply", "revert", "status", "diff"):
        done = tool(command)
        assert done.status == 2
        assert "sglang 0.5.19.post1 is no release" in done.err
    assert tree.contents() == before
