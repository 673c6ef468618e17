"""The nightly report on the newest release."""

from __future__ import annotations

import pytest
from drift import main, report

from inkling_mtp_staging.bases import EAGLE_WORKER, EDITED_PATHS, INKLING_SCONV_BACKEND
from inkling_mtp_staging.tree import find_package


def rename(tree, version: str) -> None:
    installed = tree.root / "sglang-0.5.19.dist-info"
    installed.rename(installed.with_name(f"sglang-{version}.dist-info"))


def test_the_base_has_not_drifted(tree):
    before = tree.contents()
    text, is_known = report(find_package(tree.root))
    assert is_known and "The edits are for this release." in text
    for path in EDITED_PATHS:
        assert f"| {path} | same | none |" in text
    assert tree.contents() == before


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("0.5.18", 0, "kv_index_translator"),
        ("0.5.20", 0, "upstream stages the same reads itself"),
        ("0.5.19.post1", 1, "bases.py says nothing of this release"),
    ],
)
def test_a_release_is_known_or_not(tree, capsys, version, status, said):
    rename(tree, version)
    assert main(str(tree.root)) == status
    out = capsys.readouterr().out
    assert out.startswith(f"# Drift of sglang {version}\n") and said in out


def test_what_changed_and_what_misses(tree):
    (tree.package / INKLING_SCONV_BACKEND).unlink()
    file = tree.package / EAGLE_WORKER
    file.write_text(file.read_text().replace("batch.spec_info = verify_input", "pass"))
    text, _ = report(find_package(tree.root))
    rows = [line for line in text.splitlines() if line.startswith("| srt/")]
    assert len(rows) == len(EDITED_PATHS)
    assert f"| {INKLING_SCONV_BACKEND} | absent | all |" in rows
    (row,) = (row for row in rows if EAGLE_WORKER in row)
    assert "| changed |" in row
    assert "forward_batch_generation" in row and "matches nothing" in row
