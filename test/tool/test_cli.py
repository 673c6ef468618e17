"""Help, completion, JSON and argument errors."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from inkling_mtp_staging import __version__
from inkling_mtp_staging.bases import EDITED_PATHS
from inkling_mtp_staging.cli import main

PROGRAM = "inkling-mtp-staging"
COMMANDS = ("apply", "revert", "diff", "status", "completion")


def exits(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([*arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("bogus",),
        ("apply", "extra"),
        ("apply", "--bogus"),
        ("apply", "--root"),
        ("apply", "--url", "http://x"),
        ("status", "--url"),
        ("completion",),
        ("completion", "powershell"),
        ("--json", "apply"),
        ("apply", "two\nlines"),
    ],
)
def test_argument_errors_are_one_line(capsys, arguments):
    code, out, error = exits(capsys, *arguments)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"{PROGRAM}: error: ")
    assert f"see `{PROGRAM}" in error and "--help`" in error


def test_version(capsys):
    assert exits(capsys, "--version") == (0, f"{__version__}\n", "")


def test_help_answers_the_first_questions(capsys):
    code, out, _ = exits(capsys, "--help")
    assert code == 0
    for path in EDITED_PATHS:
        assert path in out
    for part in ("0.5.19", "is it reversible: yes", "which sglang", "exit status"):
        assert part in out
    for command in COMMANDS:
        assert command in out
        code, out_of_command, _ = exits(capsys, command, "--help")
        assert code == 0
        assert len(out_of_command.splitlines()) > 5


def test_json_of_apply_and_revert(tree, tool):
    for command, is_applied, words in (
        ("apply", True, "applied to sglang 0.5.19"),
        ("apply", True, "already applied to sglang 0.5.19"),
        ("revert", False, "reverted to sglang 0.5.19"),
        ("revert", False, "nothing to revert: sglang 0.5.19 is pristine"),
    ):
        done = tool(command, "--json")
        assert json.loads(done.out) == {
            "directory": str(tree.package),
            "applied": is_applied,
            "done": [words],
            "notes": [],
        }


def test_json_of_diff(tree, tool):
    found = json.loads(tool("diff", "--json").out)
    assert found == {"directory": str(tree.package), "patch": tool("diff").out}


def test_json_of_an_error_is_the_error_line(tree, tool):
    (tree.package / EDITED_PATHS[0]).unlink()
    for command in ("apply", "revert", "diff", "status"):
        done = tool(command, "--json")
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "inkling_mtp_staging.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
    )


def test_diff_is_utf8_on_any_terminal(tree, tool, edits, monkeypatch):
    edits.suffix = "# caf\u00e9\n"
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert tool("diff").status == 0
    assert written.getvalue().count("+# caf\u00e9\n".encode()) == len(EDITED_PATHS)


def test_a_folder_of_any_name_is_printed(tree, tmp_path):
    root = tmp_path / "caf\udce9"
    shutil.copytree(tree.root, root)
    done = run("status", "--root", str(root), PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert done.stderr == b""


def completed_by_bash(words: list[str], tmp_path) -> set[str]:
    script = run("completion", "bash").stdout.decode()
    quoted = " ".join(f"'{word}'" for word in [PROGRAM, *words])
    program = (
        f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words)}\n"
        f'_inkling_mtp_staging; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    return set(filter(None, done.stdout.split("\n")))


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ([""], {*COMMANDS, "--help", "--version"}),
        (["st"], {"status"}),
        (["status"], {"status"}),
        (
            ["status", "--"],
            {"--help", "--root", "--json", "--only-upstream-five", "--url"},
        ),
        (["apply", "--"], {"--help", "--root", "--json", "--only-upstream-five"}),
        (["revert", "--"], {"--help", "--root", "--json"}),
        (["completion", ""], {"bash", "zsh", "fish", "--help"}),
        (["completion", "f"], {"fish"}),
        (["apply", "--root", ""], {"a folder", "other"}),
        (["apply", "--root", "a"], {"a folder"}),
        (["bogus", ""], set()),
    ],
)
def test_bash_completion(tmp_path, words, completed):
    for name in ("a folder", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "a file").touch()
    assert completed_by_bash(words, tmp_path) == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_everything_and_is_a_script(shell, tmp_path):
    script = run("completion", shell).stdout.decode()
    for word in (
        *COMMANDS,
        "root",
        "json",
        "url",
        "only-upstream-five",
        "help",
        "version",
    ):
        assert word in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here; only the words of its script were checked")
    file = tmp_path / "script"
    file.write_text(script)
    option = "--no-execute" if shell == "fish" else "-n"
    done = subprocess.run([shell, option, str(file)], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("", {*COMMANDS}),
        ("status --", {"--help", "--root", "--json", "--only-upstream-five", "--url"}),
        ("completion ", {"bash", "zsh", "fish"}),
        ("apply --root ", {"folder/"}),
    ],
)
def test_fish_completion(tmp_path, line, completed):
    (tmp_path / "folder").mkdir()
    script = run("completion", "fish").stdout.decode()
    done = subprocess.run(
        ["fish", "-c", f"{script}\ncomplete -C '{PROGRAM} {line}'"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert {word.split("\t")[0] for word in done.stdout.splitlines()} == completed
