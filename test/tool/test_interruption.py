"""A run that dies in the middle is undone by the next one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inkling_mtp_staging.bases import (
    EAGLE_WORKER,
    EDITED_PATHS,
    FLASHATTENTION_BACKEND,
)
from inkling_mtp_staging.cli import main
from inkling_mtp_staging.state import STATE_NAME

RENAMES_OF_REVERT = 1 + len(EDITED_PATHS)  # the state before, the files
RENAMES_OF_APPLY = RENAMES_OF_REVERT + 1  # and the state after
KILLED = 77


def die_at_rename(number: int, root: Path, *arguments: str) -> None:
    """Run a command in a child process that dies instead of its n-th rename."""
    child = os.fork()
    if child == 0:
        rename, seen = os.replace, 0

        def replace(*arguments):
            nonlocal seen
            seen += 1
            if seen > number:
                os._exit(KILLED)
            rename(*arguments)

        os.replace = replace
        main([*arguments, "--root", str(root)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


@pytest.mark.parametrize("number", range(RENAMES_OF_APPLY))
def test_interrupted_apply(tree, tool, pristine, composed, number):
    die_at_rename(number, tree.root, "apply")
    done = tool("status")
    assert done.status == 1
    assert done.out.count("pristine") == len(EDITED_PATHS)
    assert ("interrupted apply was rolled back" in done.out) == (number > 0)
    assert tree.sources() == pristine
    assert not tree.leftovers()

    die_at_rename(number, tree.root, "apply")
    assert tool("apply").status == 0
    assert tree.sources() == composed
    assert tree.leftovers() == [f"sglang/{STATE_NAME}"]


@pytest.mark.parametrize("number", range(RENAMES_OF_REVERT))
def test_interrupted_revert(tree, tool, pristine, composed, number):
    tool("apply")
    die_at_rename(number, tree.root, "revert")
    done = tool("revert")
    assert done.status == 0
    assert ("interrupted revert was completed" in done.out) == (number > 0)
    assert tree.sources() == pristine
    assert not tree.leftovers()


@pytest.mark.parametrize("number", range(RENAMES_OF_APPLY))
def test_interrupted_update(tree, tool, edits, pristine, composed, number):
    edits.suffix = "# older\n"
    tool("apply")
    edits.suffix = ""
    die_at_rename(number, tree.root, "apply")
    assert tool("apply").status == 0
    assert tree.sources() == composed
    assert tool("revert").status == 0
    assert tree.sources() == pristine
    assert not tree.leftovers()


def test_diff_of_an_interrupted_package_changes_nothing(tree, tool):
    patch = tool("diff").out
    die_at_rename(3, tree.root, "apply")
    before = tree.contents()
    done = tool("diff")
    assert (done.status, done.out) == (0, patch)
    assert tree.contents() == before


def test_change_after_an_interruption_is_refused_untouched(tree, tool):
    die_at_rename(3, tree.root, "apply")
    (tree.package / EAGLE_WORKER).write_text("mine\n")
    before = tree.contents()
    for command in ("apply", "revert", "status"):
        done = tool(command)
        assert done.status == 2
        assert str(tree.package / EAGLE_WORKER) in done.err
    after = tree.contents()
    kept = {name: before[name] for name in before if not name.endswith(".tmp")}
    assert after == kept


@pytest.mark.parametrize("number", range(RENAMES_OF_APPLY))
def test_failing_rename_is_rolled_back_at_once(
    tree, tool, pristine, monkeypatch, number
):
    rename, seen = os.replace, 0

    def replace(source, target):
        nonlocal seen
        seen += 1
        if seen == number + 1:
            raise OSError(5, "Input/output error", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    done = tool("apply")
    assert done.status == 2
    assert "Input/output error" in done.err
    assert tree.sources() == pristine
    assert not tree.leftovers()


def test_failing_write_leaves_nothing_behind(tree, tool, monkeypatch):
    before = tree.contents()
    open_file = os.open

    def refuse(path, *arguments):
        if Path(FLASHATTENTION_BACKEND).name in str(path):
            raise OSError(28, "No space left on device", str(path))
        return open_file(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    done = tool("apply")
    assert done.status == 2
    assert "No space left on device" in done.err
    assert tree.contents() == before
