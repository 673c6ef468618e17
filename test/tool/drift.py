"""Report, in Markdown, how far an unpacked `sglang` is from the edits' base.

    python test/tool/drift.py DIR     # DIR holds the folder sglang

Nothing is written or imported there. Exit status: 0 if bases.py has the release, as a
base or with the reasons why it is none, 1 if it says nothing of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from inkling_mtp_staging.bases import (
    BASES,
    EDITED_PATHS,
    base_of_version,
    other_releases,
    sha256,
)
from inkling_mtp_staging.compose import EDITS_DIRECTORY, ComposeError, compose_source
from inkling_mtp_staging.tree import Package, find_package, stated_version


def report(package: Package) -> tuple[str, bool]:
    """Return the report and whether bases.py has the package's release."""
    version = stated_version(package) or "of unknown version"
    base = base_of_version(version)
    other = other_releases(version)
    lines = [f"# Drift of sglang {version}", ""]
    if base:
        lines.append("The edits are for this release.")
    elif other:
        lines.append("The edits are not for this release, as bases.py says:")
        lines += ["", *(f"- {text}" for text in (*other.differences, other.advice))]
    else:
        lines.append(
            "**bases.py says nothing of this release.** State there what it is."
        )
    lines += [
        "",
        f"| file | against {BASES[-1].version} | edits that miss |",
        "|-|-|-|",
    ]
    lines += [_row(package, path) for path in EDITED_PATHS]
    return "\n".join(lines), bool(base or other)


def _row(package: Package, path: str) -> str:
    file = package.directory / path
    if not file.is_file():
        return f"| {path} | absent | all |"
    content = file.read_bytes()
    is_same = sha256(content) == BASES[-1].sha256[path]
    edit = (EDITS_DIRECTORY / path).read_text(encoding="utf-8")
    misses = "none"
    try:
        compose_source(content.decode("utf-8", errors="replace"), edit, path=path)
    except ComposeError as error:
        misses = "<br>".join(f"{part.name}: {part.what}" for part in error.failures)
    return f"| {path} | {'same' if is_same else 'changed'} | {_cell(misses)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(root: str) -> int:
    text, is_known = report(find_package(Path(root)))
    print(text)
    return 0 if is_known else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
