"""Find statements of a module by their source, whatever its formatting."""

from __future__ import annotations

import ast
import difflib
import textwrap
from typing import Iterable

import libcst as cst

_HEADER_TAILS = ("", " ...", "\n ...\nfinally:\n ...", "\n case _: ...")
_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases", "decorator_list")


class AnchorError(Exception):
    """An anchor that isn't the source of one statement."""


def anchor_key(anchor: str) -> str:
    """Return what statements with this anchor's source have in common.

    Raises AnchorError if `anchor` isn't one statement or one compound header.
    """
    source = textwrap.dedent(anchor).strip()
    tails = _HEADER_TAILS[1:] if source.endswith(":") else _HEADER_TAILS[:1]
    for tail in tails:
        try:
            parsed = ast.parse(source + tail).body
        except SyntaxError:
            continue
        if len(parsed) != 1:
            raise AnchorError("the anchor is not exactly one statement")
        if _is_compound(parsed[0]) and not tail:
            raise AnchorError("a compound anchor is its header only, up to the colon")
        return _key(parsed[0])
    raise AnchorError("the anchor is not valid Python")


def code_of(node: cst.CSTNode) -> str:
    """Return the node's source without comments above it, dedented."""
    if hasattr(node, "leading_lines"):
        node = node.with_changes(leading_lines=())
    return cst.Module([]).code_for_node(node)


def statements_in(
    roots: Iterable[cst.CSTNode], *, into_definitions: bool
) -> list[cst.CSTNode]:
    """Return all statements below `roots`, in source order.

    `into_definitions` says whether to look inside functions and classes below them.
    An `elif` is a part of its `if` and no statement of its own.
    """
    collector = _Collector(into_definitions)
    for root in roots:
        root.visit(collector)
    return collector.found


class KeyedStatements:
    """The statements of one target, each with the key that anchors compare to."""

    def __init__(self, statements: Iterable[cst.CSTNode]):
        self._keyed = [(statement, _key_of(statement)) for statement in statements]

    def matching(self, key: str) -> list[cst.CSTNode]:
        """Return the statements whose key is `key`."""
        return [statement for statement, own in self._keyed if own == key]

    def nearest(self, anchor: str) -> cst.CSTNode | None:
        """Return the statement whose source resembles `anchor` most."""
        wanted = " ".join(anchor.split())
        return max(
            (statement for statement, _ in self._keyed),
            key=lambda statement: difflib.SequenceMatcher(
                None, wanted, header_line(statement)
            ).ratio(),
            default=None,
        )


def header_line(statement: cst.CSTNode) -> str:
    """Return the source of a simple statement, or of a compound's header, in one line."""
    parsed = ast.parse(code_of(statement)).body[0]
    if _is_compound(parsed):
        return ast.unparse(_without_blocks(parsed)).splitlines()[0]
    return ast.unparse(parsed)


class _Collector(cst.CSTVisitor):
    def __init__(self, into_definitions: bool):
        super().__init__()
        self.found: list[cst.CSTNode] = []
        self._into_definitions = into_definitions
        self._elifs: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.If) and isinstance(node.orelse, cst.If):
            self._elifs.add(node.orelse)
        if isinstance(node, cst.SimpleStatementLine):
            self.found.append(node)
            return False
        if isinstance(node, cst.BaseCompoundStatement):
            if node not in self._elifs:
                self.found.append(node)
            return self._into_definitions or not isinstance(
                node, (cst.FunctionDef, cst.ClassDef)
            )
        return not isinstance(node, cst.BaseExpression)


def _key_of(statement: cst.CSTNode) -> str:
    parsed = ast.parse(code_of(statement)).body
    return _key(parsed[0]) if len(parsed) == 1 else ""


def _key(parsed: ast.stmt) -> str:
    return ast.dump(_without_blocks(parsed) if _is_compound(parsed) else parsed)


def _is_compound(parsed: ast.stmt) -> bool:
    return hasattr(parsed, "body") or hasattr(parsed, "cases")


def _without_blocks(compound: ast.stmt) -> ast.stmt:
    for block in _BLOCKS:
        if hasattr(compound, block):
            setattr(compound, block, [])
    return compound
