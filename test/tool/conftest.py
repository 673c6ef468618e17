from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Callable

import pytest

from inkling_mtp_staging.bases import EDITED_PATHS
from inkling_mtp_staging.cli import main
from inkling_mtp_staging.compose import compose_all, compose_source
from inkling_mtp_staging.install import pristine_sources

PATH = "srt/some/module.py"


@pytest.fixture(scope="session")
def pristine() -> dict[str, str]:
    """The released sources, whether or not the edits are applied here."""
    return pristine_sources()


@pytest.fixture(scope="session")
def composed(pristine) -> dict[str, str]:
    return compose_all(pristine)


@pytest.fixture
def compose() -> Callable[[str, str], str]:
    """Compose two indented snippets; every edit may use every marker."""
    markers = (
        "from inkling_mtp_staging.edit import after, append_docstring, before, replace"
    )

    def composed_snippet(upstream: str, edit: str) -> str:
        edit_file = f"{markers}\n{dedent(edit)}"
        return compose_source(dedent(upstream), edit_file, path=PATH)

    return composed_snippet


@dataclass(frozen=True)
class Tree:
    """A site-packages folder that holds the edited files and little else."""

    root: Path

    @property
    def package(self) -> Path:
        return self.root / "sglang"

    def contents(self) -> dict[str, bytes]:
        """Return every file of the tree, the tool's own ones included."""
        return {
            str(file.relative_to(self.root)): file.read_bytes()
            for file in self.root.rglob("*")
            if file.is_file()
        }

    def sources(self) -> dict[str, str]:
        """Return the edited files by their path in the package."""
        return {
            path: (self.package / path).read_text(encoding="utf-8")
            for path in EDITED_PATHS
        }

    def leftovers(self) -> list[str]:
        """Return the tool's own files."""
        return [name for name in self.contents() if "inkling_mtp_staging" in name]


@pytest.fixture
def tree(tmp_path, pristine) -> Tree:
    root = tmp_path / "site-packages"
    for path, source in pristine.items():
        file = root / "sglang" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    (root / "sglang" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (root / "sglang-0.5.19.dist-info").mkdir()
    return Tree(root)


@pytest.fixture
def on_path(tree, monkeypatch) -> Tree:
    """Make this interpreter one that would import the tree's sglang."""
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.syspath_prepend(str(tree.root))
    return tree


@dataclass
class Edits:
    """The edit set that the tool composes, composed once for the whole session.

    `suffix` makes it another edit set: one that ends each file in another comment.
    """

    composed: dict[str, str]
    suffix: str = ""

    def compose_all(self, pristine: dict[str, str]) -> dict[str, str]:
        return {path: self.composed[path] + self.suffix for path in pristine}


@pytest.fixture
def edits(composed, monkeypatch) -> Edits:
    edits = Edits(composed)
    monkeypatch.setattr("inkling_mtp_staging.compose.compose_all", edits.compose_all)
    return edits


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def tool(on_path, edits, capsys) -> Callable[..., Outcome]:
    """Run a command of the tool on `tree`."""

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        status = main([*arguments, "--root", str(on_path.root)])
        return Outcome(status, *capsys.readouterr())

    return run
