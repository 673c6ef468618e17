"""Full disks, read-only packages, links and runs at once: all old or all new."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

import faults
import pytest

from inkling_mtp_staging.bases import EAGLE_WORKER, EDITED_PATHS
from inkling_mtp_staging.cli import main
from inkling_mtp_staging.state import STATE_NAME


@pytest.fixture
def mounted(tree, tmp_path, monkeypatch):
    """Mount a small file system, put the tree there, and return it and its options."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("this user may not mount")

    yield folder, mount
    subprocess.run(["umount", str(folder)], capture_output=True)


def test_really_full_disk(tree, mounted, edits, capsys, composed):
    folder, mount = mounted
    mount("size=2m")
    root = folder / "site-packages"
    shutil.copytree(tree.root, root)
    ballast = folder / "ballast"
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"\0" * 4096)
    before = {path: (root / "sglang" / path).read_bytes() for path in EDITED_PATHS}
    for room in range(0, 200_000, 40_000):
        os.truncate(ballast, ballast.stat().st_size - min(room, 40_000))
        assert main(["apply", "--root", str(root)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "No space left on device" in error
        assert str(root) in error and "None" not in error
        assert not list(root.rglob(".*"))
        for path, content in before.items():
            assert (root / "sglang" / path).read_bytes() == content
    ballast.unlink()
    assert main(["apply", "--root", str(root)]) == 0


def test_really_read_only_file_system(tree, mounted, edits, capsys):
    folder, mount = mounted
    mount("size=8m")
    root = folder / "site-packages"
    shutil.copytree(tree.root, root)
    mount_options = ["mount", "-o", "remount,ro", str(folder)]
    subprocess.run(mount_options, check=True)
    assert main(["apply", "--root", str(root)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Read-only file system" in error
    # What only reads, works.
    assert main(["status", "--root", str(root)]) == 1
    assert main(["diff", "--root", str(root)]) == 0
    assert main(["revert", "--root", str(root)]) == 0
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_disk_full_at_each_write_and_from_then_on(
    tree, tool, pristine, composed, command
):
    if command == "revert":
        tool("apply")
    before = tree.contents()
    for first in itertools.count():

        def fault(number, call, half):
            if number >= first and call in ("open", "write"):
                if call == "write":
                    half()
                raise OSError(errno.ENOSPC, "No space left on device")

        disk = faults.Disk(fault)
        with disk.patched():
            done = tool(command)
        if done.status == 0:
            break
        assert done.status == 2
        assert done.err.count("\n") == 1
        assert str(tree.package) in done.err and "No space left" in done.err
        assert tree.contents() == before
    assert first >= 20
    assert tree.sources() == (composed if command == "apply" else pristine)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_one_failure_at_each_point(tree, tool, pristine, composed, command, code):
    """The run itself, or else the next command, makes the tree whole."""
    if command == "revert":
        tool("apply")
    before = tree.contents()
    for failing in itertools.count():
        for name, content in before.items():
            (tree.root / name).write_bytes(content)
        if command == "apply":
            (tree.package / STATE_NAME).unlink(missing_ok=True)

        def fault(number, call, half):
            if number == failing:
                raise OSError(code, os.strerror(code))

        disk = faults.Disk(fault)
        with disk.patched():
            done = tool(command)
        if len(disk.calls) <= failing:
            break
        if done.status == 0:  # nobody but root may give a file away, say
            continue
        assert done.err.count("\n") == 1 and os.strerror(code) in done.err
        applied = tool("status").status == 0
        assert tree.sources() == (composed if applied else pristine)
        assert tree.leftovers() == ([f"sglang/{STATE_NAME}"] if applied else [])
    assert failing >= 35


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_survives_an_apply_by_root(tree, tool):
    file = tree.package / EAGLE_WORKER
    os.chown(file, 1234, 4321)
    for command in ("apply", "revert"):
        tool(command)
        assert (file.stat().st_uid, file.stat().st_gid) == (1234, 4321)


def start(tree, composed_file, command: str) -> subprocess.Popen:
    program = [sys.executable, faults.__file__, "-1", str(composed_file), command]
    return subprocess.Popen(
        [*program, "--root", str(tree.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def composed_file(composed, tmp_path):
    file = tmp_path / "composed.json"
    file.write_text(json.dumps(composed))
    return file


def test_of_runs_at_once_one_edits(tree, composed, composed_file):
    lock = os.open(tree.package, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    runs = [start(tree, composed_file, "apply") for _ in range(4)]
    time.sleep(1.5)
    assert all(run.poll() is None for run in runs)
    os.close(lock)
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    said = sorted(
        line.removeprefix(f"{tree.package}: ")
        for out, _ in outputs
        for line in out.splitlines()
        if not line.startswith("note: ")
    )
    assert said == ["already applied to sglang 0.5.19"] * 3 + [
        "applied to sglang 0.5.19"
    ]
    assert tree.sources() == composed
    assert tree.leftovers() == [f"sglang/{STATE_NAME}"]


def test_applies_and_reverts_at_once_never_mix(tree, composed_file, pristine, composed):
    for _ in range(3):
        commands = ("apply", "revert", "apply", "revert")
        runs = [start(tree, composed_file, command) for command in commands]
        for run in runs:
            _, error = run.communicate(timeout=60)
            assert (run.returncode, error) == (0, "")
        is_applied = bool(tree.leftovers())
        assert tree.sources() == (composed if is_applied else pristine)


def test_file_system_without_locks_is_refused(tree, tool, monkeypatch):
    def flock(*arguments):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    before = tree.contents()
    done = tool("apply")
    assert done.status == 2
    assert f"{tree.package}: cannot be locked (Bad file descriptor)" in done.err
    assert tree.contents() == before


def test_hard_links_elsewhere_keep_their_content(tree, tool, composed, tmp_path):
    """Through apply, revert, and the recovery of either."""
    links = {}

    def link_all(name: str) -> None:
        for number, path in enumerate(EDITED_PATHS):
            link = tmp_path / f"{name}{number}"
            os.link(tree.package / path, link)
            links[link] = link.read_bytes()

    def interrupted(command: str) -> None:
        renames = []

        def fault(number, call, half):
            if call == "replace":
                renames.append(number)
                if len(renames) == 4:
                    raise KeyboardInterrupt

        with faults.Disk(fault).patched():
            assert tool(command).status == 2

    link_all("pristine")
    tool("apply")
    link_all("applied")
    os.link(tree.package / STATE_NAME, tmp_path / "state")
    links[tmp_path / "state"] = (tmp_path / "state").read_bytes()
    interrupted("revert")
    link_all("half_reverted")
    tool("status")
    link_all("recovered")
    interrupted("apply")
    link_all("half_applied")
    tool("status")
    assert {link: link.read_bytes() for link in links} == links
    assert len({content for content in links.values()}) > 10


def test_interrupt_is_one_line(tree, tool, monkeypatch, pristine):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    done = tool("apply")
    assert done.status == 2
    assert done.err.count("\n") == 1 and "interrupted" in done.err
    monkeypatch.undo()
    assert tree.sources() == pristine


@pytest.mark.parametrize("link", ["package", "cache", "state"])
def test_links_out_of_the_package_are_refused(tree, tool, tmp_path, link):
    outside = tmp_path / "outside"
    if link == "package":
        shutil.move(tree.package, outside)
        tree.package.symlink_to(outside)
        named = tree.package
    elif link == "cache":
        outside.mkdir()
        named = (tree.package / EAGLE_WORKER).parent / "__pycache__"
        named.symlink_to(outside)
        (outside / "multi_layer_eagle_worker_v2.cpython-311.pyc").touch()
    else:
        tool("apply")
        named = tree.package / STATE_NAME
        shutil.move(named, outside)
        named.symlink_to(outside)
    before = tree.contents()
    for command in ("apply", "revert", "status", "diff"):
        done = tool(command)
        assert done.status == 2
        assert done.err.count("\n") == 1
        assert str(named) in done.err
    assert tree.contents() == before
    if link == "cache":
        assert len(list(outside.iterdir())) == 1


def test_a_linked_root_is_resolved_and_told(tree, tool, edits, tmp_path, capsys):
    root = tmp_path / "lib64"
    root.symlink_to(tree.root)
    assert main(["apply", "--root", str(root)]) == 0
    assert f"{tree.package}: applied" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_every_write_is_durable_before_it_counts(tree, tool, command):
    """A power cut must not find a rename on the disk without what was renamed."""
    if command == "revert":
        tool("apply")
    with faults.Disk(lambda *arguments: None).patched() as disk:
        assert tool(command).status == 0
    calls = [call for call in disk.calls if call != "unlink" or command == "revert"]
    for number, call in enumerate(calls):
        if call == "write":
            assert calls[number + 1] == "fsync"
    first = calls.index("replace")
    assert calls[first + 1] == "fsync"  # the state, before any of the files
    end = first + 2 + len(EDITED_PATHS)
    assert calls[first + 2 : end] == ["replace"] * len(EDITED_PATHS)
    assert calls[end:] == ["fsync"] * 3 + (
        ["replace", "fsync"] if command == "apply" else ["unlink", "fsync"]
    )
