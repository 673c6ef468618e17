"""Thousands of random changes to the released files: composed right, or refused by name."""

from __future__ import annotations

import difflib
import functools
import gc
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import libcst
import pytest
from composer_fuzz import changed_sources, outcome, subject_of

from inkling_mtp_staging import compose
from inkling_mtp_staging.bases import (
    BASE_ATTN_BACKEND,
    DRAFT_EXTEND_RUNNER,
    EAGLE_WORKER,
    EDITED_PATHS,
    FLASHATTENTION_BACKEND,
    INKLING_SCONV_BACKEND,
    TRITON_BACKEND,
)

SEED = int(os.environ.get("FUZZ_SEED", "0"))
SCALE = int(os.environ.get("FUZZ_SCALE", "1"))
CASES = {
    BASE_ATTN_BACKEND: 2200,
    FLASHATTENTION_BACKEND: 1600,
    INKLING_SCONV_BACKEND: 900,
    DRAFT_EXTEND_RUNNER: 150,
    EAGLE_WORKER: 150,
    TRITON_BACKEND: 150,
}


def run(path: str, source: str, seed: int, count: int) -> tuple[Counter[str], str]:
    """Return the outcomes, and the first wrong one in words."""
    # The edit file is the same in every case.
    parse = functools.lru_cache(maxsize=8)(libcst.parse_module)
    compose.cst.parse_module = parse
    subject = subject_of(path, source)
    outcomes: Counter[str] = Counter()
    for number, changed in enumerate(changed_sources(subject, seed, count)):
        try:
            outcomes[outcome(subject, changed)] += 1
        except Exception as error:
            lines = (subject.pristine.split("\n"), changed.split("\n"))
            change = "\n".join(difflib.unified_diff(*lines, n=2, lineterm=""))
            return outcomes, (
                f"{path}, seed {seed}, case {number}: {type(error).__name__}: {error}\n"
                f"{change}"
            )
    return outcomes, ""


@pytest.mark.timeout(900)
def test_every_change_is_composed_right_or_refused_by_name(pristine):
    assert sum(CASES.values()) >= 5000
    # Frozen, what pytest has loaded is not searched for garbage over and over.
    with ProcessPoolExecutor(2, initializer=gc.freeze) as pool:
        jobs = {
            (path, part): pool.submit(
                run, path, pristine[path], SEED + part, SCALE * CASES[path] // 2
            )
            for path in reversed(EDITED_PATHS)
            for part in (0, 500_000)
        }
        results = {name: job.result() for name, job in jobs.items()}
    assert not any(wrong for _, wrong in results.values()), "\n\n".join(
        wrong for _, wrong in results.values() if wrong
    )
    for path in EDITED_PATHS:
        outcomes = results[path, 0][0] + results[path, 500_000][0]
        print(path, dict(outcomes))
        # Cases that only ever fail, or never do, would prove nothing.
        assert outcomes["refused"] > 0.05 * CASES[path]
        assert outcomes["merged"] > 0.2 * CASES[path]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text.replace("import torch", "import numpy"), "not imported"),
        (lambda text: text + "\n\ndef extra():\n    pass\n", "lines"),
        (lambda text: text.replace("    return", "    return not", 1), "lines"),
        (
            lambda text: text.replace('\n        """', '\n        """Not ', 1),
            "docstring",
        ),
        (lambda text: text + text[text.index("class ") :], "not there once"),
        (
            lambda text: text.replace("    return", "    pass\n        return", 1),
            "lines",
        ),
    ],
)
def test_a_wrong_composition_is_noticed(pristine, monkeypatch, change, complaint):
    subject = subject_of(EAGLE_WORKER, pristine[EAGLE_WORKER])
    assert outcome(subject, subject.pristine) == "merged"
    wrong = change(subject.composed)
    assert wrong != subject.composed
    monkeypatch.setattr("composer_fuzz.compose_source", lambda *_, **__: wrong)
    with pytest.raises(AssertionError, match=complaint):
        outcome(subject, subject.pristine)


def test_a_change_at_the_wrong_place_is_noticed(pristine, monkeypatch):
    """The same lines, two of them swapped: only git's merge tells."""
    subject = subject_of(EAGLE_WORKER, pristine[EAGLE_WORKER])
    lines = subject.composed.split("\n")
    at = max(number for number, line in enumerate(lines) if " = " in line)
    lines[at - 1], lines[at] = lines[at], lines[at - 1]
    monkeypatch.setattr(
        "composer_fuzz.compose_source", lambda *_, **__: "\n".join(lines)
    )
    with pytest.raises(AssertionError, match="git merges"):
        outcome(subject, subject.pristine)
