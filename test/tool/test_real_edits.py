"""The edit files on the released sources, through the command line."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from lint_composed import complaints

from inkling_mtp_staging.bases import BASES, EDITED_PATHS, sha256
from inkling_mtp_staging.compose import compose_all


def run(*arguments: str, text: str = "", cwd: Path | None = None):
    return subprocess.run(
        arguments, input=text, cwd=cwd, capture_output=True, text=True, check=True
    )


def tool(command: str, root: Path) -> str:
    program = [sys.executable, "-m", "inkling_mtp_staging.cli", command]
    return run(*program, "--root", str(root)).stdout


def test_pristine_sources_are_the_released_ones(pristine):
    digests = {path: sha256(source.encode()) for path, source in pristine.items()}
    assert digests == BASES[0].sha256


def test_every_file_is_edited_and_compiles(pristine, composed):
    assert tuple(composed) == EDITED_PATHS
    for path, source in composed.items():
        assert source != pristine[path]
        ast.parse(source)


def test_composition_is_deterministic(pristine, composed):
    assert compose_all(pristine) == composed


def test_edits_only_touch_what_they_name(pristine, composed):
    """Most of upstream stands, line by line."""
    for path, source in pristine.items():
        kept = set(composed[path].splitlines())
        gone = [line for line in source.splitlines() if line not in kept]
        assert len(gone) < 0.03 * len(source.splitlines())


def test_upstreams_linters_find_nothing_new(pristine, composed):
    assert complaints(pristine, composed) == []


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("import  os\n", "F401"),
        ("undefined_name\n", "F821"),
        ("import sys\nimport ast\n\nsys, ast\n", "sorted"),
        ("x  = 1\n", "ruff format: -x  = 1"),
        ("x = 1  \n", "trailing whitespace"),
        ("<<<<<<< ours\n", "conflict marker"),
    ],
)
def test_linters_would_find_it(pristine, composed, bad, complaint):
    path = EDITED_PATHS[1]
    spoiled = {**composed, path: f"{composed[path]}\n\n{bad}"}
    assert complaint in "\n".join(complaints(pristine, spoiled))


def test_diff_applies_in_a_checkout_and_equals_apply(
    tree, tmp_path, pristine, composed
):
    patch = tool("diff", tree.root)
    tool("apply", tree.root)
    assert tree.sources() == composed
    assert tool("diff", tree.root) == patch
    assert "inkling_mtp_staging" not in patch

    checkout = tmp_path / "checkout"
    for path, source in pristine.items():
        file = checkout / "python" / "sglang" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    run("git", "init", "--quiet", cwd=checkout)
    counts = run("git", "apply", "--numstat", "-", text=patch, cwd=checkout).stdout
    assert [line.split("\t")[2] for line in counts.splitlines()] == [
        f"python/sglang/{path}" for path in EDITED_PATHS
    ]
    run("git", "apply", "--check", "-", text=patch, cwd=checkout)
    run("git", "apply", "-", text=patch, cwd=checkout)
    applied = {
        path: (checkout / "python" / "sglang" / path).read_text()
        for path in EDITED_PATHS
    }
    assert applied == composed
    assert patch.count("diff --git a/python/sglang/srt/") == len(EDITED_PATHS)


def test_a_checkouts_python_folder_is_a_root(tree, composed):
    (tree.root / "sglang-0.5.19.dist-info").rmdir()
    tool("apply", tree.root)
    assert tree.sources() == composed
    tool("revert", tree.root)
