"""What `make benchmark` runs: commands that the scripts accept, once each, and only for
results that are missing or older than an edit."""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmark"))
SRT = "python/inkling_mtp_staging/srt"


@pytest.fixture
def tree(tmp_path):
    for name in ("Makefile", "pyproject.toml", "benchmark/benchmark.mk"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / SRT, tmp_path / SRT)
    return tmp_path


def commands(tree) -> list[list[str]]:
    """The words of each line that `make benchmark` would run."""
    ran = subprocess.run(
        ["make", "-n", "benchmark", f"UV={sys.executable}"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    return [shlex.split(c) for c in ran.stdout.replace("\\\n", "").splitlines()]


def measurements(tree) -> dict[str, list[str]]:
    """Arguments of the measuring scripts by the result that they write."""
    found = {}
    for words in commands(tree):
        if "--lock" in words:
            result = words[words.index("--out") + 1].removesuffix(".part")
            script = next(i for i, w in enumerate(words) if w.startswith("benchmark/"))
            assert result not in found
            found[result] = words[script:]
    return found


def test_the_scripts_accept_what_make_gives_them(tree, monkeypatch):
    for result, (script, *arguments) in measurements(tree).items():
        module = importlib.import_module(Path(script).stem)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        args = module.parse_args()
        backend, steps = Path(result).name.split("-")[1:3]
        assert (args.attention_backend, f"s{args.steps}") == (backend, steps)
        if "-cost-" not in result:
            sides = [side.name for side in args.side]
            off = "0.5.19 patched, staging off"
            fa4 = ["0.5.19", "0.5.19 patched", "0.5.20"]
            assert sides == (fa4 if backend == "fa4" else [off, "0.5.19 patched"])


def test_every_result_is_measured_once_and_reported(tree):
    measured = set(measurements(tree))
    assert len(measured) == 17
    for words in commands(tree):
        if "benchmark/table.py" in words or "benchmark/plot.py" in words:
            assert measured == {w for w in words if w.endswith(".json")}


def test_a_result_is_kept_until_an_edit_changes(tree):
    before = set(measurements(tree))
    result = tree / "dist" / "benchmark-fa4-s3-gpu-bound.json"
    result.parent.mkdir()
    result.with_name(result.name + ".part").write_text("{}")  # cut short
    assert set(measurements(tree)) == before
    result.write_text("{}")
    assert set(measurements(tree)) == before - {str(result.relative_to(tree))}
    edit = next((tree / SRT).rglob("*.py"))
    later = result.stat().st_mtime + 10
    os.utime(edit, (later, later))
    assert set(measurements(tree)) == before


def test_models_and_releases_are_not_thrown_away(tree):
    """make removes what it made on the way, unless told otherwise."""
    removed = [words for words in commands(tree) if words[:1] == ["rm"]]
    assert removed and all(words[-1].endswith(".part") for words in removed)
