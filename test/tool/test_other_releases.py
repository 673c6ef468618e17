"""Releases of which it is known why the edits are not for them."""

from __future__ import annotations

import json
import shutil

import pytest

from inkling_mtp_staging import plugin
from inkling_mtp_staging.bases import (
    BASES,
    EDITED_PATHS,
    OTHER_RELEASES,
    base_of_version,
    other_releases,
)
from inkling_mtp_staging.install import status
from inkling_mtp_staging.tree import find_package

OWN_STAGING = "since 0.5.20 upstream stages the same reads itself"
REASON_OF = {
    "0.5.15.post1": "no Inkling",
    "0.5.16": "no marker",
    "0.5.17": "no marker",
    "0.5.18": "kv_index_translator",
    "0.5.20": OWN_STAGING,
    "0.5.20.post1": OWN_STAGING,
    "0.5.23": OWN_STAGING,
    "0.6.0": OWN_STAGING,
}


@pytest.fixture(params=REASON_OF)
def version(request, tree) -> str:
    installed = tree.root / "sglang-0.5.19.dist-info"
    installed.rename(installed.with_name(f"sglang-{request.param}.dist-info"))
    # Such a release need not have the five files.
    (tree.package / EDITED_PATHS[2]).unlink()
    return request.param


def test_status_says_why(tree, tool, version):
    before = tree.contents()
    done = tool("status")
    first, *notes = done.out.splitlines()
    assert (done.status, done.err) == (1, "")
    assert first == f"sglang {version} in {tree.package}: not applied"
    assert REASON_OF[version] in done.out
    assert all(note.startswith("note: ") for note in notes)
    assert tree.contents() == before


def test_status_of_upstreams_own_staging_says_what_differs(tree):
    installed = tree.root / "sglang-0.5.19.dist-info"
    installed.rename(installed.with_name("sglang-0.5.20.dist-info"))
    notes = status(find_package(tree.root)).notes
    assert "ms of host time a step" in "\n".join(notes)
    assert "two launches" in "\n".join(notes)
    assert notes[-1] == "uninstall this package, or use sglang 0.5.19 with the edits"


def test_status_as_json(tree, tool, version):
    found = json.loads(tool("status", "--json").out)
    assert found["base"] == version
    assert found["applied"] is False and found["files"] == {}
    assert REASON_OF[version] in " ".join(found["notes"])


@pytest.mark.parametrize("command", ["apply", "diff"])
def test_the_others_refuse_and_say_why(tree, tool, version, command):
    before = tree.contents()
    done = tool(command)
    assert (done.status, done.out) == (2, "")
    lines = done.err.splitlines()
    assert f"sglang {version} is no release that this tool has edits for" in lines[0]
    assert all(line.startswith("inkling-mtp-staging: error: ") for line in lines)
    assert REASON_OF[version] in done.err
    assert ": anchor " not in done.err
    assert tree.contents() == before


def test_the_server_says_it_in_one_line(tree, version, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "find_package", lambda: find_package(tree.root))
    plugin.report()
    (line,) = caplog.messages
    assert line.startswith(f"Inkling MTP staging edits: not for sglang {version}: ")
    assert REASON_OF[version] in line and "\n" not in line


def test_an_upgrade_over_the_edits(tree, tool):
    tool("apply")
    for path in EDITED_PATHS:
        (tree.package / path).write_text("VALUE = 'of another release'\n")
    installed = tree.root / "sglang-0.5.19.dist-info"
    installed.rename(installed.with_name("sglang-0.5.20.dist-info"))
    done = tool("status")
    assert done.status == 1
    assert "note: sglang was reinstalled after apply to 0.5.19: " in done.out
    assert f"note: {OWN_STAGING}" in done.out
    assert tool("revert").status == 0
    assert not tree.leftovers()


@pytest.mark.parametrize(
    "version", ["0.5.19", "0.5.19.post1", "0.5.20rc1", "unknown", ""]
)
def test_nothing_is_known_of_the_rest(version):
    assert other_releases(version) is None


def test_no_base_is_another_release():
    for base in BASES:
        assert base_of_version(base.version) is base
        assert other_releases(base.version) is None


def test_a_difference_of_a_module_names_an_edited_one():
    named = {
        difference.split(":")[0]
        for other in OTHER_RELEASES
        for difference in other.differences
        if difference.startswith("srt/")
    }
    assert named and named <= set(EDITED_PATHS)


def test_a_development_version_is_judged_by_its_files(tree, tool):
    shutil.rmtree(tree.root / "sglang-0.5.19.dist-info")
    (tree.package / "_version.py").write_text("__version__ = '0.5.21.dev7+gabc'\n")
    assert tool("apply").status == 0
