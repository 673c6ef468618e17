"""pip and uv replace the edited files and leave the state file behind."""

from __future__ import annotations

import json

import pytest

from inkling_mtp_staging import plugin
from inkling_mtp_staging.bases import EDITED_PATHS
from inkling_mtp_staging.state import APPLYING, STATE_NAME
from inkling_mtp_staging.tree import find_package


@pytest.fixture
def line(tree, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "find_package", lambda: find_package(tree.root))

    def reported() -> str:
        caplog.clear()
        plugin.report()
        return caplog.messages[0]

    return reported


@pytest.fixture
def same_release(tree, tool, pristine):
    tool("apply")
    for path, source in pristine.items():
        (tree.package / path).write_text(source)


@pytest.fixture
def other_release(tree, tool):
    tool("apply")
    upgrade(tree)


def upgrade(tree) -> None:
    for path in EDITED_PATHS:
        (tree.package / path).write_text("VALUE = 'of another release'\n")
    installed = tree.root / "sglang-0.5.19.dist-info"
    installed.rename(installed.with_name("sglang-0.5.19.post1.dist-info"))


def test_same_release(tree, tool, line, same_release, composed):
    done = tool("status")
    assert done.status == 1
    assert done.out.splitlines()[0].endswith(": not applied")
    assert "note: sglang was reinstalled after apply; apply again" in done.out
    assert line() == (
        "Inkling MTP staging edits: not applied to sglang 0.5.19, reinstalled after "
        "apply to 0.5.19; run `inkling-mtp-staging apply`"
    )
    assert tool("apply").status == 0
    assert tree.sources() == composed
    assert "reinstalled" not in tool("status").out
    assert line() == "Inkling MTP staging edits: applied to sglang 0.5.19"


def test_other_release(tree, tool, line, other_release):
    before = tree.contents()
    done = tool("status")
    assert done.status == 1
    assert (
        done.out.splitlines()[0]
        == f"sglang 0.5.19.post1 in {tree.package}: not applied"
    )
    assert done.out.count("not applied (unknown release): srt/") == len(EDITED_PATHS)
    assert "note: sglang was reinstalled after apply to 0.5.19: " in done.out
    assert "sglang 0.5.19.post1 is no release that this tool has edits for" in done.out
    assert json.loads(tool("status", "--json").out)["applied"] is False
    assert (
        "not applied to sglang 0.5.19.post1, reinstalled after apply to 0.5.19"
        in line()
    )
    assert tool("apply").status == 2
    assert tree.contents() == before


def test_back_to_the_known_release(tree, tool, other_release, pristine, composed):
    for path, source in pristine.items():
        (tree.package / path).write_text(source)
    installed = tree.root / "sglang-0.5.19.post1.dist-info"
    installed.rename(installed.with_name("sglang-0.5.19.dist-info"))
    assert tool("apply").status == 0
    assert tree.sources() == composed


def test_revert_drops_the_stale_state(tree, tool, other_release):
    done = tool("revert")
    assert done.status == 0
    assert "nothing to revert: sglang was reinstalled after apply" in done.out
    assert not tree.leftovers()


def test_other_release_that_still_holds_an_edit_is_refused(tree, tool, composed):
    tool("apply")
    upgrade(tree)
    path = EDITED_PATHS[0]
    (tree.package / path).write_text(composed[path])
    assert tool("status").status == 2
    assert tool("revert").status == 2


def test_reinstalled_after_an_interrupted_run(tree, tool):
    tool("apply")
    state = tree.package / STATE_NAME
    document = json.loads(state.read_text())
    state.write_text(json.dumps({**document, "phase": APPLYING}))
    upgrade(tree)
    done = tool("revert")
    assert done.status == 2 and "0.5.19.post1 is no release" in done.err
    assert not tree.leftovers()
    assert tree.sources() == dict.fromkeys(
        EDITED_PATHS, "VALUE = 'of another release'\n"
    )
