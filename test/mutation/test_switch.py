"""Switched off, the patch launches what the release launches, and waits as long."""

from __future__ import annotations

import json

import pytest
import torch
from mutants import run_jobs, write_job

from inkling_mtp_staging.compose import compose_all
from inkling_mtp_staging.install import pristine_sources

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the tests run kernels in the interpreter"
    ),
]

SWITCH = "SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING"
TRACE = ["launch_trace.TestTrace.test_trace"]
WORKER_FOLDER = "srt/speculative"


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> dict[str, dict]:
    root = tmp_path_factory.mktemp("switch")
    pristine = pristine_sources()
    composed = compose_all(pristine)
    folders, jobs = {}, {}
    for name, sources, switch in (
        ("release", pristine, "1"),
        ("switched off", composed, "0"),
        ("switched on", composed, "1"),
    ):
        folders[name] = root / name.replace(" ", "_")
        jobs[name] = write_job(folders[name], sources, TRACE, **{SWITCH: switch})
    for outcome in run_jobs(root, jobs).values():
        assert outcome == {"import_error": None, "failed": {}}
    return {
        name: json.loads((folder / WORKER_FOLDER / "trace.json").read_text())
        for name, folder in folders.items()
    }


def test_off_is_the_release(traces):
    assert traces["switched off"] == traces["release"]


def test_on_is_not(traces):
    for key, trace in traces["switched on"].items():
        release = traces["release"][key]
        for part in ("fence", "commit", "draft graphs"):
            assert trace[part] != release[part], (key, part)
