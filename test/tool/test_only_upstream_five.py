"""`--only-upstream-five`: the files that upstream's own change edits, and no other."""

from __future__ import annotations

import json
import os
import re

import pytest
from test_interruption import die_at_rename

from inkling_mtp_staging import plugin
from inkling_mtp_staging.bases import (
    EDIT_SETS,
    EDITED_PATHS,
    ONLY_UPSTREAM_FIVE,
    TRITON_BACKEND,
    UPSTREAM_FIVE,
)
from inkling_mtp_staging.state import STATE_NAME
from inkling_mtp_staging.tree import find_package

OPTIONS = {EDITED_PATHS: (), UPSTREAM_FIVE: (ONLY_UPSTREAM_FIVE,)}


@pytest.fixture
def expected(pristine, composed):
    """The sources that each set of edits leaves in the package."""
    return {
        paths: {**pristine, **{path: composed[path] for path in paths}}
        for paths in EDIT_SETS
    }


def paths_on_record(tree) -> list[str]:
    return list(json.loads((tree.package / STATE_NAME).read_text())["files"])


def modify(tree, path: str = TRITON_BACKEND) -> None:
    with (tree.package / path).open("a") as file:
        file.write("# local\n")


def test_the_sets():
    assert len(UPSTREAM_FIVE) == 5
    assert EDITED_PATHS == (*UPSTREAM_FIVE, TRITON_BACKEND)


def test_apply_leaves_the_other_file_alone(tree, tool, expected):
    before = tree.contents()
    done = tool("apply", ONLY_UPSTREAM_FIVE)
    assert (done.status, done.err) == (0, "")
    assert "applied to sglang 0.5.19, upstream's five files only" in done.out
    assert tree.sources() == expected[UPSTREAM_FIVE]
    assert paths_on_record(tree) == [*UPSTREAM_FIVE]
    again = tool("apply", ONLY_UPSTREAM_FIVE)
    assert "already applied to sglang 0.5.19, upstream's five files only" in again.out
    assert tool("revert").status == 0
    assert tree.contents() == before


@pytest.mark.parametrize("now", EDIT_SETS, ids=len)
@pytest.mark.parametrize("then", EDIT_SETS, ids=len)
def test_from_one_set_to_the_other_and_back(tree, tool, expected, now, then):
    before = tree.contents()
    for paths in (now, then, now):
        assert tool("apply", *OPTIONS[paths]).status == 0
        assert tree.sources() == expected[paths]
        assert paths_on_record(tree) == [*paths]
        assert tree.leftovers() == [f"sglang/{STATE_NAME}"]
    assert tool("revert").status == 0
    assert tree.contents() == before


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("then", EDIT_SETS, ids=len)
def test_a_change_of_sets_that_dies_is_undone(
    tree, tool, pristine, expected, then, number
):
    now = next(paths for paths in EDIT_SETS if paths != then)
    tool("apply", *OPTIONS[now])
    die_at_rename(number, tree.root, "apply", *OPTIONS[then])
    done = tool("status")
    assert ("interrupted apply was rolled back" in done.out) == (number > 0)
    # Before the state is in place nothing has begun; from then on all is undone.
    assert tree.sources() == (expected[now] if number == 0 else pristine)
    assert tool("apply", *OPTIONS[then]).status == 0
    assert tree.sources() == expected[then]
    assert tree.leftovers() == [f"sglang/{STATE_NAME}"]


def test_status_follows_what_was_applied(tree, tool):
    assert tool("status", ONLY_UPSTREAM_FIVE).status == 1

    tool("apply", ONLY_UPSTREAM_FIVE)
    for arguments in ((), (ONLY_UPSTREAM_FIVE,)):
        done = tool("status", *arguments, "--json")
        found = json.loads(done.out)
        assert done.status == 0 and found["applied"]
        assert found["files"] == dict.fromkeys(UPSTREAM_FIVE, "applied")
        assert found["notes"] == [f"{TRITON_BACKEND}: left out"]

    tool("apply")
    done = tool("status", "--json")
    assert done.status == 0
    assert json.loads(done.out)["files"] == dict.fromkeys(EDITED_PATHS, "applied")
    assert json.loads(done.out)["notes"] == []
    done = tool("status", ONLY_UPSTREAM_FIVE, "--json")
    assert done.status == 0
    assert json.loads(done.out)["files"] == dict.fromkeys(UPSTREAM_FIVE, "applied")
    assert json.loads(done.out)["notes"] == [f"{TRITON_BACKEND}: applied too"]


def test_diff_is_the_other_one_without_the_last_file(tree, tool):
    both = tool("diff").out
    only_five = tool("diff", ONLY_UPSTREAM_FIVE).out
    names = re.findall("^diff --git a/python/sglang/(.*) b/", only_five, re.MULTILINE)
    assert names == [*UPSTREAM_FIVE]
    assert both.startswith(only_five)
    last = both.removeprefix(only_five)
    assert last.count("diff --git") == 1 and TRITON_BACKEND in last
    for paths in EDIT_SETS:
        tool("apply", *OPTIONS[paths])
        assert tool("diff", ONLY_UPSTREAM_FIVE).out == only_five
        assert tool("diff").out == both


def test_the_left_out_file_may_be_anything(tree, tool, expected):
    """Modified, a link, or missing: it is neither read nor written."""
    file = tree.package / TRITON_BACKEND
    modify(tree)
    refused = tool("apply")
    assert refused.status == 2
    assert f"{file}: its sha256" in refused.err
    assert f"or use {ONLY_UPSTREAM_FIVE}" in refused.err
    aside = file.with_name("aside.py")

    def linked():
        file.rename(aside)
        file.symlink_to(aside)

    for make in (lambda: None, linked, file.unlink):
        make()
        content = file.read_bytes() if file.exists() else None
        for command in ("diff", "apply", "status"):
            assert tool(command, ONLY_UPSTREAM_FIVE).status == 0, command
        assert tool("status").status == 0
        assert tool("revert").status == 0
        assert (file.read_bytes() if file.exists() else None) == content
    assert not tree.leftovers()


def test_a_modified_file_is_told_for_either_set(tree, tool):
    for paths in EDIT_SETS:
        tool("apply", *OPTIONS[paths])
        for path in paths:
            whole = (tree.package / path).read_bytes()
            modify(tree, path)
            shown = tool("status")
            assert shown.status == 1
            assert f"modified: {path}" in shown.out
            for command in ("revert", "apply"):
                before = tree.contents()
                done = tool(command, *(OPTIONS[paths] if command == "apply" else ()))
                assert done.status == 2
                assert str(tree.package / path) in done.err
                assert f"or use {ONLY_UPSTREAM_FIVE}" not in done.err
                assert tree.contents() == before
            (tree.package / path).write_bytes(whole)
        assert tool("revert").status == 0


def test_what_was_edited_is_not_left_out_modified(tree, tool):
    """Half of it is the tool's: it is refused, not forgotten."""
    tool("apply")
    modify(tree)
    before = tree.contents()
    done = tool("apply", ONLY_UPSTREAM_FIVE)
    assert done.status == 2
    assert str(tree.package / TRITON_BACKEND) in done.err
    assert tree.contents() == before


@pytest.mark.parametrize("then", EDIT_SETS, ids=len)
@pytest.mark.parametrize("now", EDIT_SETS, ids=len)
def test_reinstalled_in_between(tree, tool, pristine, expected, now, then):
    tool("apply", *OPTIONS[now])
    for path, source in pristine.items():
        (tree.package / path).write_text(source)
    assert "reinstalled after apply" in tool("status").out
    if then == UPSTREAM_FIVE:
        modify(tree)  # by whoever reinstalled
    assert tool("apply", *OPTIONS[then]).status == 0
    assert paths_on_record(tree) == [*then]
    for path in then:
        assert tree.sources()[path] == expected[then][path]


def test_restored_by_hand(tree, tool, pristine, expected):
    """The file is upstream's again, the state still has it: only the state changes."""
    tool("apply")
    (tree.package / TRITON_BACKEND).write_text(pristine[TRITON_BACKEND])
    assert tool("status").status == 1
    assert tool("apply", ONLY_UPSTREAM_FIVE).status == 0
    assert tree.sources() == expected[UPSTREAM_FIVE]
    assert paths_on_record(tree) == [*UPSTREAM_FIVE]


def test_older_edits_of_either_set_are_updated(tree, tool, edits, expected):
    for now in EDIT_SETS:
        for then in EDIT_SETS:
            edits.suffix = "# older\n"
            tool("apply", *OPTIONS[now])
            edits.suffix = ""
            assert tool("status").out.count("older edits") == len(now)
            assert "updated the edits" in tool("apply", *OPTIONS[then]).out
            assert tree.sources() == expected[then]
            tool("revert")


def test_no_temporary_of_the_left_out_file_stays(tree, tool):
    die_at_rename(0, tree.root, "apply")
    assert any(TRITON_BACKEND.rpartition("/")[2] in name for name in tree.leftovers())
    tool("apply", ONLY_UPSTREAM_FIVE)
    assert tree.leftovers() == [f"sglang/{STATE_NAME}"]


@pytest.mark.parametrize("missing", [0, 2])
def test_a_record_of_neither_set_is_refused(tree, tool, missing):
    tool("apply")
    file = tree.package / STATE_NAME
    document = json.loads(file.read_text())
    del document["files"][EDITED_PATHS[missing]]
    file.write_text(json.dumps(document))
    done = tool("status")
    assert done.status == 2
    assert "damaged or written by another version" in done.err


def test_the_server_s_line_tells_it(tree, tool, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "find_package", lambda: find_package(tree.root))
    lines = []
    for paths in EDIT_SETS:
        tool("apply", *OPTIONS[paths])
        caplog.clear()
        plugin.report()
        (record,) = caplog.records
        lines.append(record.getMessage().partition(": ")[2])
    assert lines == [
        "applied to sglang 0.5.19",
        f"applied to sglang 0.5.19, without {TRITON_BACKEND}",
    ]


def test_a_server_has_no_such_option(tree, capsys):
    from inkling_mtp_staging.cli import main

    assert main(["status", "--url", "http://127.0.0.1:9", ONLY_UPSTREAM_FIVE]) == 2
    error = capsys.readouterr().err
    assert ONLY_UPSTREAM_FIVE in error and error.count("\n") == 1
    assert "--url" in error and os.linesep not in error.strip()
