"""A plan of changes to the statements of a module, and its execution.

Outside the changes the source stays as it is, byte for byte.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Iterable

import libcst as cst

from inkling_mtp_staging.anchors import statements_in
from inkling_mtp_staging.imports import is_import, section_of


class Plan:
    """What to do with the statements of the module that is edited."""

    def __init__(self) -> None:
        self.before: dict[cst.CSTNode, list[cst.CSTNode]] = defaultdict(list)
        self.after: dict[cst.CSTNode, list[cst.CSTNode]] = defaultdict(list)
        self.replaced: dict[cst.CSTNode, list[cst.CSTNode]] = {}
        self.rewritten: dict[cst.CSTNode, Callable[[cst.CSTNode], cst.CSTNode]] = {}
        self._yields_its_place: set[cst.CSTNode] = set()

    def insert_in_place_of(
        self, anchor: cst.CSTNode, statements: Iterable[cst.CSTNode]
    ) -> None:
        """Insert before `anchor`; the blank lines above it go above the statements."""
        self.before[anchor] += statements
        self._yields_its_place.add(anchor)

    def changes(self, statement: cst.CSTNode) -> bool:
        """Say whether the statement itself is already replaced or rewritten."""
        return statement in self.replaced or statement in self.rewritten

    def overlapping(self) -> list[cst.CSTNode]:
        """Return the replaced statements inside which something else is changed."""
        touched = {*self.before, *self.after, *self.replaced, *self.rewritten}
        return [
            statement
            for statement in self.replaced
            if touched.intersection(
                statements_in(statement.children, into_definitions=True)
            )
        ]

    def group(self, statement: cst.CSTNode, current: cst.CSTNode) -> list[cst.CSTNode]:
        """Return what stands in the place of `statement`.

        `current` is the statement with the changes inside it carried out.
        """
        group = [current]
        if statement in self.replaced:
            group = _taking_lines_above(current, self.replaced[statement])
        before = self.before.get(statement, [])
        if statement in self._yields_its_place:
            before = [_with_blanks(before[0], _blanks(current)), *before[1:]]
            group = [_with_blanks(first, 0) for first in group[:1]] + group[1:]
        return [*before, *group, *self.after.get(statement, [])]


def execute(module: cst.Module, plan: Plan) -> str:
    """Return the source of `module` with the plan carried out."""
    return module.visit(_Executor(plan)).code


@dataclass(frozen=True)
class _Level:
    """Where a body stands, and so how ruff spaces its statements."""

    blank_lines: int
    is_module: bool = False
    is_function: bool = False

    def blanks_between(
        self, previous: cst.CSTNode | None, statement: cst.CSTNode
    ) -> int:
        if previous is None:
            return _blanks(statement) if self.is_module else 0
        if is_import(previous) and is_import(statement):
            return int(section_of(previous) != section_of(statement))
        if _is_definition(previous) or _is_definition(statement):
            least = self.blank_lines
        else:
            least = int(
                is_import(previous)
                or (not self.is_function and _is_docstring(previous))
            )
        return min(max(_blanks(statement), least), self.blank_lines)


_MODULE = _Level(blank_lines=2, is_module=True)
_CLASS = _Level(blank_lines=1)
_FUNCTION = _Level(blank_lines=1, is_function=True)


class _Executor(cst.CSTTransformer):
    def __init__(self, plan: Plan):
        super().__init__()
        self._plan = plan
        self._class_bodies: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        # No expression holds statements, and most nodes are parts of expressions.
        return not isinstance(node, cst.BaseExpression) and super().on_visit(node)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._class_bodies.add(node.body)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module):
        return self._edited(original_node, updated_node, _MODULE)

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ):
        level = _CLASS if original_node in self._class_bodies else _FUNCTION
        return self._edited(original_node, updated_node, level)

    def _edited(self, original, updated, level: _Level):
        body: list[cst.CSTNode] = []
        is_after_change = False
        for statement, current in zip(original.body, updated.body):
            current = self._plan.rewritten.get(statement, _unchanged)(current)
            group = self._plan.group(statement, current)
            for member in group:
                is_new = member is not current
                if is_new or is_after_change:
                    previous = body[-1] if body else None
                    blanks = level.blanks_between(previous, member)
                    member = _with_blanks(member, blanks)
                body.append(member)
                is_after_change = is_new
            is_after_change = is_after_change or not group
        return updated.with_changes(body=body)


def _unchanged(statement: cst.CSTNode) -> cst.CSTNode:
    return statement


def _taking_lines_above(old: cst.CSTNode, new: list[cst.CSTNode]) -> list[cst.CSTNode]:
    if not new:
        return []
    has_own_comments = any(line.comment for line in new[0].leading_lines)
    lines = new[0].leading_lines if has_own_comments else old.leading_lines
    first = new[0].with_changes(leading_lines=lines)
    return [_with_blanks(first, _blanks(old)), *new[1:]]


def _blanks(statement: cst.CSTNode) -> int:
    for count, line in enumerate(statement.leading_lines):
        if line.comment:
            return count
    return len(statement.leading_lines)


def _with_blanks(statement: cst.CSTNode, count: int) -> cst.CSTNode:
    rest = statement.leading_lines[_blanks(statement) :]
    blank = cst.EmptyLine(indent=False)
    return statement.with_changes(leading_lines=[blank] * count + list(rest))


def _is_definition(statement: cst.CSTNode) -> bool:
    return isinstance(statement, (cst.FunctionDef, cst.ClassDef))


def _is_docstring(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.SimpleString)
    )
