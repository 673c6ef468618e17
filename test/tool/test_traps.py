"""Known ways in which patch sets for SGLang fail their users."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import packaging
import pytest

import inkling_mtp_staging
from inkling_mtp_staging.bases import EAGLE_WORKER, EDITED_PATHS, FLASHATTENTION_BACKEND
from inkling_mtp_staging.cli import main
from inkling_mtp_staging.compose import EDITS_DIRECTORY
from inkling_mtp_staging.state import STATE_NAME


def test_git_apply_skips_site_packages_of_a_checkout_and_the_tool_does_not(
    tree, tool, tmp_path, pristine, composed
):
    """Why there is a tool: git finds no such file in its index, and says nothing."""

    def git(*arguments: str, cwd=tmp_path, text: str = "") -> None:
        command = ["git", *arguments]
        subprocess.run(command, cwd=cwd, input=text, text=True, check=True)

    git("init", "--quiet")
    (tmp_path / ".gitignore").write_text("site-packages\n")
    patch = tool("diff").out
    git("apply", "-p2", "-", cwd=tree.root, text=patch)
    assert tree.sources() == pristine
    assert tool("apply").status == 0
    assert tree.sources() == composed
    assert tool("diff").out == patch


def test_every_anchor_that_misses_in_any_file_is_named(tree, capsys):
    """On files of no known release, too, where the digest is refused first."""
    for path, old, new in (
        (EAGLE_WORKER, "class MultiLayerEagleWorkerV2", "class Renamed"),
        (FLASHATTENTION_BACKEND, "class FlashAttentionBackend(", "class Other("),
    ):
        file = tree.package / path
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    before = tree.contents()
    for command in ("apply", "diff"):
        assert main([command, "--root", str(tree.root)]) == 2
        errors = capsys.readouterr().err.splitlines()
        refusals = [line for line in errors if "its sha256" in line]
        misfits = [line for line in errors if ": error: srt/" in line]
        assert len(refusals) == 2 and len(misfits) >= 2
        assert len(errors) == len(refusals) + len(misfits)
        for path in (EAGLE_WORKER, FLASHATTENTION_BACKEND):
            assert any(path in line for line in misfits)
    assert main(["revert", "--root", str(tree.root)]) == 2
    assert ": error: srt/" not in capsys.readouterr().err
    assert tree.contents() == before


def test_a_missing_anchor_is_told_with_the_nearest_line(tree, capsys):
    installed = tree.root / "sglang-0.5.19.dist-info"
    installed.rename(installed.with_name("sglang-0.5.19.post1.dist-info"))
    edit = (EDITS_DIRECTORY / EAGLE_WORKER).read_text()
    anchor = next(
        line.strip()
        for line in (tree.package / EAGLE_WORKER).read_text().splitlines()
        if f'"{line.strip()}"' in edit and len(line.strip()) > 20
    )
    file = tree.package / EAGLE_WORKER
    file.write_text(file.read_text().replace(anchor, f"_ = {anchor}"))
    assert main(["apply", "--root", str(tree.root)]) == 2
    errors = capsys.readouterr().err
    assert "sglang 0.5.19.post1 is no release that this tool has edits for" in errors
    assert "matches nothing; nearest upstream line" in errors


def test_base_that_the_edits_fit_gets_no_extra_line(tree, tool):
    installed = tree.root / "sglang-0.5.19.dist-info"
    installed.rename(installed.with_name("sglang-0.5.19.post1.dist-info"))
    assert tool("apply").err.count("\n") == 1


@pytest.fixture
def elsewhere(tree, tmp_path, monkeypatch):
    """Another sglang, which this interpreter would import instead."""
    other = tmp_path / "elsewhere"
    shutil.copytree(tree.root, other)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.syspath_prepend(str(other))
    return other


@pytest.mark.parametrize("command", ["apply", "status"])
def test_the_sglang_that_would_be_imported_is_told(
    tree, edits, elsewhere, capsys, command
):
    main([command, "--root", str(tree.root)])
    line = (
        f"note: this interpreter would import sglang from {elsewhere / 'sglang'}, "
        f"not from {tree.package}"
    )
    assert capsys.readouterr().out.splitlines()[-1] == line
    main([command, "--root", str(elsewhere)])
    assert "would import" not in capsys.readouterr().out
    main([command, "--json", "--root", str(tree.root)])
    assert line in f"note: {json.loads(capsys.readouterr().out)['notes'][-1]}"


def test_a_pth_file_counts_as_the_interpreter_counts_it(tree, tmp_path):
    """An editable checkout comes first for a real interpreter."""
    environment = tmp_path / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    checkout = tmp_path / "checkout" / "python"
    shutil.copytree(tree.root, checkout)
    (packages / "editable.pth").write_text(f"{checkout}\n")
    shutil.copytree(Path(packaging.__file__).parent, packages / "packaging")
    tool_path = str(Path(inkling_mtp_staging.__file__).parents[1])
    done = subprocess.run(
        [environment / "bin" / "python", "-m", "inkling_mtp_staging.cli", "revert"],
        env={**os.environ, "PYTHONPATH": tool_path},
        capture_output=True,
        text=True,
    )
    assert f"{checkout / 'sglang'}: nothing to revert" in done.stdout


DAMAGES = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "wrapped": lambda text: "\n".join(
        text[at : at + 76] for at in range(0, len(text), 76)
    ),
    "binary": lambda text: "\udc80\udcff",
    "list": lambda text: "[]",
    "nested": lambda text: "[" * 100_000,
    "format": lambda text: text.replace('"format": 1', '"format": 9'),
    "phase": lambda text: text.replace('"phase": "applied"', '"phase": "gone"'),
    "base": lambda text: text.replace('"base": "0.5.19"', '"base": "0.5.20"'),
    "files": lambda text: json.dumps({**json.loads(text), "files": [*EDITED_PATHS]}),
    "fewer": lambda text: json.dumps(
        {**json.loads(text), "files": dict([*json.loads(text)["files"].items()][1:])}
    ),
    "exchanged": lambda text: json.dumps(
        {
            **json.loads(text),
            "files": dict(
                zip(EDITED_PATHS, reversed(json.loads(text)["files"].values()))
            ),
        }
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_state_file(tree, tool, damage):
    tool("apply")
    file = tree.package / STATE_NAME
    damaged = damage(file.read_text())
    assert damaged != file.read_text()
    file.write_text(damaged, errors="surrogateescape")
    before = tree.contents()
    for command in ("apply", "revert", "status", "diff"):
        done = tool(command)
        assert done.status == 2
        assert done.err.count("\n") == 1
        assert f"{STATE_NAME}: damaged" in done.err
        assert "reinstall sglang==0.5.19" in done.err and "remove this file" in done.err
    assert tree.contents() == before


def test_a_state_that_holds_something_else_is_never_written_back(tree, tool):
    """Self-consistent, but its original is not upstream's."""
    tool("apply")
    file = tree.package / STATE_NAME
    document = json.loads(file.read_text())
    evil = base64.b64encode(zlib.compress(b"import os\n")).decode()
    document["files"][EAGLE_WORKER]["original"] = evil
    document["phase"] = "applying"
    file.write_text(json.dumps(document))
    before = tree.contents()
    assert tool("status").status == 2
    assert tree.contents() == before


def test_reformatted_but_whole_state_file_is_fine(tree, tool, pristine):
    tool("apply")
    file = tree.package / STATE_NAME
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    assert tool("revert").status == 0
    assert tree.sources() == pristine


def test_zipped_sglang(tree, tmp_path, monkeypatch, capsys):
    archive = tmp_path / "sglang.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for name, content in tree.contents().items():
            zipped.writestr(name, content)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.syspath_prepend(str(archive))
    for arguments in (["apply"], ["apply", "--root", str(archive)]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{archive}: is a file, and a zipped sglang cannot be edited" in error


def test_what_an_uninstalled_sglang_left_behind(tree, monkeypatch, capsys, tmp_path):
    """pip leaves our state file, and with it a folder that imports as a namespace."""
    root = tmp_path / "leftover"
    (root / "sglang").mkdir(parents=True)
    (root / "sglang" / STATE_NAME).write_text("{}")
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setattr(sys, "path", [str(root)])
    for arguments in (["apply"], ["status", "--root", str(root)]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{root}: holds no sglang/srt, only what an uninstalled sglang" in error


def test_no_such_root(tmp_path, capsys):
    assert main(["status", "--root", str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path / 'nowhere'}: no such folder" in capsys.readouterr().err


def test_version_file_in_another_encoding(tree, tool):
    (tree.root / "sglang-0.5.19.dist-info").rmdir()
    (tree.package / "version.py").write_bytes(b"# \xff\n__version__ = '0.5.19'\n")
    assert tool("apply").status == 0
