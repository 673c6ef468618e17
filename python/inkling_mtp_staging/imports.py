"""Merge an edit file's imports into upstream's, in isort's order (profile black)."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Iterable, Sequence

import libcst as cst

LINE_LENGTH = 88
_FIRST_PARTY = "sglang"


@dataclass(frozen=True)
class Import:
    """One imported name. `module` is "" for a plain `import name`."""

    module: str
    name: str
    asname: str = ""

    @property
    def bound_name(self) -> str:
        return self.asname or self.name

    def __str__(self) -> str:
        return f"{self.name} as {self.asname}" if self.asname else self.name


def is_import(statement: cst.CSTNode) -> bool:
    """Say whether the statement is one `import` or `from ... import`."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and isinstance(statement.body[0], (cst.Import, cst.ImportFrom))
    )


def is_type_checking_block(statement: cst.CSTNode) -> bool:
    """Say whether the statement is `if TYPE_CHECKING:`."""
    return (
        isinstance(statement, cst.If)
        and isinstance(statement.test, cst.Name)
        and statement.test.value == "TYPE_CHECKING"
    )


def names_of(statement: cst.SimpleStatementLine) -> list[Import]:
    """Return what an import statement imports; a star is the name `*`."""
    imported = statement.body[0]
    module = _module_of(imported)
    if isinstance(imported.names, cst.ImportStar):
        return [Import(module, "*")]
    return [
        Import(module, alias.evaluated_name, alias.evaluated_alias or "")
        for alias in imported.names
    ]


def all_names(statements: Iterable[cst.CSTNode]) -> list[Import]:
    """Return what the import statements among `statements` import."""
    return [
        name
        for statement in statements
        if is_import(statement)
        for name in names_of(statement)
    ]


def section_of(statement: cst.SimpleStatementLine) -> int:
    """Return the rank of the statement's isort section (0 is `__future__`)."""
    return _sort_key(names_of(statement)[0])[0]


def home_statement(
    statements: Iterable[cst.CSTNode], wanted: Import
) -> cst.SimpleStatementLine | None:
    """Return the import statement that `wanted` can join, or None."""
    if not wanted.module or wanted.asname:
        return None
    return next(
        (
            statement
            for statement in statements
            if is_import(statement)
            and all(
                present.module == wanted.module
                and present.name != "*"
                and not present.asname
                for present in names_of(statement)
            )
        ),
        None,
    )


def extended_import(
    statement: cst.SimpleStatementLine, wanted: Iterable[Import], indent: int
) -> cst.SimpleStatementLine:
    """Return the `from` import `statement` with the `wanted` names added."""
    present = names_of(statement)
    stays_vertical = "\n" in cst.Module([]).code_for_node(statement.body[0])
    rendered = _render([*present, *wanted], indent, stays_vertical)
    return statement.with_changes(body=rendered.body)


def new_imports(wanted: Iterable[Import], indent: int) -> list[cst.SimpleStatementLine]:
    """Return sorted import statements for names that no statement can take in."""
    groups: dict[tuple[str, str], list[Import]] = {}
    for name in wanted:
        alone = "" if name.module and not name.asname else str(name)
        groups.setdefault((name.module, alone), []).append(name)
    ordered = sorted(groups.values(), key=lambda group: _sort_key(group[0]))
    return [_render(group, indent) for group in ordered]


def place_of_import(
    statement: cst.SimpleStatementLine, statements: Sequence[cst.CSTNode]
) -> tuple[str, cst.SimpleStatementLine] | None:
    """Say where a new import goes in the first run of imports of `statements`.

    Returns ("before" or "after", neighbour), or None if there is no import at all.
    """
    run = _first_run(statements)
    if not run:
        return None
    key = _sort_key(names_of(statement)[0])
    for neighbour in run:
        if _sort_key(names_of(neighbour)[0]) > key:
            return "before", neighbour
    return "after", run[-1]


def _first_run(statements: Sequence[cst.CSTNode]) -> list[cst.SimpleStatementLine]:
    run: list[cst.SimpleStatementLine] = []
    for statement in statements:
        if is_import(statement):
            run.append(statement)
        elif run:
            break
    return run


def _render(
    names: Iterable[Import], indent: int, vertical: bool = False
) -> cst.SimpleStatementLine:
    ordered = sorted(set(names), key=_name_key)
    module = ordered[0].module
    if not module:
        return cst.parse_statement(f"import {ordered[0]}\n")
    text = f"from {module} import {', '.join(map(str, ordered))}"
    if vertical or indent + len(text) > LINE_LENGTH:
        lines = "".join(f"    {name},\n" for name in ordered)
        text = f"from {module} import (\n{lines})"
    return cst.parse_statement(text + "\n")


def _module_of(imported: cst.Import | cst.ImportFrom) -> str:
    if isinstance(imported, cst.Import):
        return ""
    dotted = cst.Module([]).code_for_node(imported.module) if imported.module else ""
    return "." * len(imported.relative) + dotted


def _sort_key(imported: Import) -> tuple:
    module = imported.module or imported.name
    return _section(module), bool(imported.module), _natural(module)


def _section(module: str) -> int:
    package = module.split(".")[0]
    if package == "__future__":
        return 0
    if package in sys.stdlib_module_names:
        return 1
    if module.startswith("."):
        return 4
    return 3 if package == _FIRST_PARTY else 2


def _name_key(imported: Import) -> tuple:
    name = imported.name
    if name.isupper() and len(name) > 1:
        kind = 0
    else:
        kind = 1 if name[0].isupper() else 2
    return kind, _natural(name), imported.asname


def _natural(text: str) -> list:
    return [
        int(part) if part.isdigit() else part
        for part in re.split(r"(\d+)", text.lower())
    ]
