"""The line that SGLang logs at server start."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys

import pytest

from inkling_mtp_staging import plugin
from inkling_mtp_staging.bases import EAGLE_WORKER
from inkling_mtp_staging.tree import find_package


@pytest.fixture
def line(tree, monkeypatch, caplog):
    """Report on `tree` and return the only line that was logged."""
    monkeypatch.setattr(plugin, "find_package", lambda: find_package(tree.root))

    def reported() -> str:
        caplog.clear()
        before = tree.contents()
        plugin.report()
        assert tree.contents() == before
        (record,) = caplog.records
        assert "\n" not in record.getMessage()
        return record.getMessage()

    return reported


def test_pristine(line):
    assert line() == (
        "Inkling MTP staging edits: not applied to sglang 0.5.19; run "
        "`inkling-mtp-staging apply`"
    )


def test_applied(line, tool):
    tool("apply")
    assert line() == "Inkling MTP staging edits: applied to sglang 0.5.19"


def test_modified(line, tree, tool):
    tool("apply")
    (tree.package / EAGLE_WORKER).write_text("mine\n")
    assert "not applied, and sglang 0.5.19's files are modified" in line()


def test_unknown_release(line, tree):
    (tree.root / "sglang-0.5.19.dist-info").rename(
        tree.root / "sglang-0.5.19.post1.dist-info"
    )
    assert (
        "not applied to sglang 0.5.19.post1" in line() and "no release that" in line()
    )


def test_it_never_raises(line, monkeypatch):
    def fail():
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(plugin, "find_package", fail)
    assert "state unknown (two lines)" in line()


def test_worker_processes_are_silent(line, monkeypatch, caplog):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    plugin.report()
    assert not caplog.records


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_it_is_seen_before_and_after_logging_is_configured(line, caplog, level):
    caplog.set_level(level)
    line()
    assert caplog.records[0].levelno == level


def test_sglang_finds_it_without_importing_the_composer():
    program = (
        "import sys\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "assert 'inkling_mtp_staging.plugin' in sys.modules\n"
        "assert 'libcst' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("Inkling MTP staging edits: ") == 1
