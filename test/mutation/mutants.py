"""Runs jobs of ``run_mutants.py``: tests against given sources of the edited modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Mapping, Sequence

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "registered" / "unit" / "speculative"


def write_job(
    folder: Path,
    sources: Mapping[str, str],
    tests: Sequence[str],
    **environment: str,
) -> dict:
    """Write ``sources`` (path below the package -> text) into ``folder``; returns the
    job that runs ``tests`` with them in place of the installed modules, and with
    ``environment`` added to the process's."""
    modules = {}
    for path, source in sources.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
        module = "sglang." + path.removesuffix(".py").replace("/", ".")
        modules[module] = str(file)
    return {"modules": modules, "tests": list(tests), "environment": environment}


def run_jobs(folder: Path, jobs: Mapping[str, dict]) -> dict[str, dict]:
    """Run the jobs in forks of one process; returns each job's result by name."""
    jobs_file, results_file = folder / "jobs.json", folder / "results.json"
    jobs_file.write_text(json.dumps(jobs))
    subprocess.run(
        [sys.executable, HERE / "run_mutants.py", jobs_file, results_file],
        cwd=HERE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(TESTS), *sys.path]),
            "TRITON_INTERPRET": "1",
        },
        check=True,
    )
    return json.loads(results_file.read_text())
