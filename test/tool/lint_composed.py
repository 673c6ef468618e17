"""Check the composed files by upstream's linters: nothing that upstream lacks already.

Two pristine files do not pass `ruff format` themselves, so the formatter may ask for
the changes that it asks of the pristine files, and for no other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Mapping

from inkling_mtp_staging.compose import compose_all
from inkling_mtp_staging.diff import unified_diff
from inkling_mtp_staging.install import pristine_sources

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "pyproject.toml"


def complaints(pristine: Mapping[str, str], composed: Mapping[str, str]) -> list[str]:
    """Return what upstream's linters, git included, say against the composed files."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        old = _written(scratch / "old", pristine)
        new = _written(scratch / "new", composed)
        return [
            *_failing(new, "ruff", "check", "--no-cache", "--config", str(CONFIG)),
            *_failing(new, "isort", "--check", "--diff", "--settings", str(CONFIG)),
            *_new_format_changes(old, new),
            *_git_complaints(old, unified_diff(pristine, composed)),
        ]


def _written(directory: Path, sources: Mapping[str, str]) -> Path:
    for path, source in sources.items():
        file = directory / "python" / "sglang" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return directory


def _failing(directory: Path, tool: str, *arguments: str) -> list[str]:
    done = _run([sys.executable, "-m", tool, *arguments, "."], directory)
    return [] if done.returncode == 0 else [done.stdout + done.stderr]


def _new_format_changes(old: Path, new: Path) -> list[str]:
    extra = Counter(_format_changes(new)) - Counter(_format_changes(old))
    return [f"ruff format: {line}" for line in extra]


def _format_changes(directory: Path) -> list[str]:
    command = [sys.executable, "-m", "ruff", "format", "--no-cache", "--diff"]
    done = _run([*command, "--config", str(CONFIG), "."], directory)
    if done.returncode not in (0, 1):
        return [done.stderr]
    return [line for line in done.stdout.splitlines() if line[:1] in ("-", "+")]


def _git_complaints(old: Path, patch: str) -> list[str]:
    done = []
    for arguments in (
        ["init", "--quiet"],
        ["add", "--all"],
        ["apply", "--whitespace=error-all", "-"],
        ["diff", "--check"],
    ):
        done.append(_run(["git", *arguments], old, patch))
    return [run.stdout + run.stderr for run in done if run.returncode != 0]


def _run(
    command: list[str], directory: Path, text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=directory, input=text, capture_output=True, text=True
    )


def main() -> int:
    """Print the complaints and return 1 if there are any."""
    pristine = pristine_sources()
    found = complaints(pristine, compose_all(pristine))
    print("\n".join(found) or "the composed files are clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
