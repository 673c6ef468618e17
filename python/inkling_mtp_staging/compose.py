"""Compose an edit file with the pristine module that it edits.

An edit file is parsed, never imported. Its top-level statements mean:

- an import: the names that upstream lacks are merged into upstream's imports; a name
  imported from the edited module itself must exist there and is dropped;
- a class that upstream has: its members are new members, replacements of upstream
  members, or, with the body `...`, upstream members named only as positions;
- a function or an assignment that upstream has: likewise;
- any other class, function or assignment: new, and lands right before the next
  upstream definition that the edit file names;
- a function decorated with a marker of `inkling_mtp_staging.edit`: a statement edit.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Mapping, Sequence

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from inkling_mtp_staging import ToolError, imports
from inkling_mtp_staging.anchors import (
    AnchorError,
    KeyedStatements,
    anchor_key,
    code_of,
    header_line,
    statements_in,
)
from inkling_mtp_staging.bases import EDITED_PATHS
from inkling_mtp_staging.rewrite import Plan, execute

EDITS_DIRECTORY = Path(__file__).parent
_MARKER_MODULE = "inkling_mtp_staging.edit"
_MARKERS = ("after", "before", "replace", "append_docstring")
_INDENT = 4


@dataclass(frozen=True)
class Failure:
    """One part of an edit that could not be placed in upstream's source."""

    path: str
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name}: {self.what}"


class ComposeError(ToolError):
    """Edits do not fit the source. `failures` has them all, one line of text each."""

    def __init__(self, failures: Sequence[Failure]):
        super().__init__("\n".join(map(str, failures)))
        self.failures = tuple(failures)


def compose_source(pristine: str, edit: str, *, path: str) -> str:
    """Return the source `pristine` with the edit file's source `edit` applied.

    `path` is the module's path below the `sglang` package. Raises ComposeError with
    every part of the edit that does not fit.
    """
    failures: list[Failure] = []
    modules = []
    for what, source in (("upstream", pristine), ("the edit", edit)):
        try:
            modules.append(_parsed(source))
        except _Unreadable as error:
            failures.append(Failure(path, "the module", f"{what} {error}"))
    if failures:
        raise ComposeError(failures)
    composed = _Composer(path, *modules).compose()
    try:
        ast.parse(composed)
    except SyntaxError as error:
        reason = f"the composed source is not valid Python at line {error.lineno}"
        raise ComposeError([Failure(path, "the module", reason)]) from error
    return composed


def compose_all(
    pristine: Mapping[str, str], edits_directory: Path = EDITS_DIRECTORY
) -> dict[str, str]:
    """Return the composed source of each pristine source, by path below `sglang`.

    Raises ComposeError with the failures of all files.
    """
    composed: dict[str, str] = {}
    failures: list[Failure] = []
    for path, source in pristine.items():
        edit_file = edits_directory / path
        if not edit_file.is_file():
            failures.append(Failure(path, "the edit", "its file is missing"))
            continue
        try:
            composed[path] = compose_source(
                source, edit_file.read_text(encoding="utf-8"), path=path
            )
        except ComposeError as error:
            failures += error.failures
    if failures:
        raise ComposeError(failures)
    return composed


def compose_tree(root: Path) -> dict[str, str]:
    """Return the composed sources of the pristine `sglang` package below `root`.

    Raises ComposeError as `compose_all`, and OSError if a file cannot be read.
    """
    return compose_all(
        {
            path: (root / "sglang" / path).read_text(encoding="utf-8")
            for path in EDITED_PATHS
        }
    )


@dataclass(frozen=True)
class _Definition:
    """An upstream definition and the body it stands in."""

    node: cst.CSTNode
    depth: int


class _Composer:
    def __init__(self, path: str, upstream: cst.Module, edit_module: cst.Module):
        self._path = path
        self._own_module = "sglang." + path.removesuffix(".py").replace("/", ".")
        self._upstream = upstream
        self._edit = edit_module
        self._markers = _marker_names(edit_module)
        self._plan = Plan()
        self._failures: list[Failure] = []
        self._keyed: dict[str, KeyedStatements] = {}
        self._positions: Mapping[cst.CSTNode, object] | None = None

    def compose(self) -> str:
        self._merge_imports()
        self._edit_definitions()
        for statement in self._plan.overlapping():
            self._fail(header_line(statement), "replaced whole, and also edited inside")
        if self._failures:
            raise ComposeError(self._failures)
        return execute(self._upstream, self._plan)

    def _fail(self, name: str, what: str) -> None:
        self._failures.append(
            Failure(self._path, name.rstrip(":") or "the module", what)
        )

    def _line_of(self, statement: cst.CSTNode) -> int:
        if self._positions is None:
            wrapper = MetadataWrapper(self._upstream, unsafe_skip_copy=True)
            self._positions = wrapper.resolve(PositionProvider)
        return self._positions[statement].start.line

    # Imports

    def _merge_imports(self) -> None:
        body = self._upstream.body
        runtime = imports.all_names(body)
        self._merge(imports.all_names(self._edit.body), body, runtime, indent=0)

        block = next(filter(imports.is_type_checking_block, body), None)
        for edit_block in filter(imports.is_type_checking_block, self._edit.body):
            wanted = imports.all_names(edit_block.body.body)
            if block is None:
                self._fail("if TYPE_CHECKING:", "upstream has no such block")
                continue
            present = runtime + imports.all_names(block.body.body)
            self._merge(wanted, block.body.body, present, indent=_INDENT)

    def _merge(
        self,
        wanted: Iterable[imports.Import],
        statements: Sequence[cst.CSTNode],
        present: Sequence[imports.Import],
        indent: int,
    ) -> None:
        additions: dict[cst.CSTNode, list[imports.Import]] = {}
        homeless: list[imports.Import] = []
        for name in wanted:
            if name.module == _MARKER_MODULE or name in present:
                continue
            if name.module == self._own_module:
                self._check_upstream_has(name)
                continue
            home = imports.home_statement(statements, name)
            if home is None:
                homeless.append(name)
            else:
                additions.setdefault(home, []).append(name)
        for home, names in additions.items():
            self._extend_import(home, names, indent)
        for statement in imports.new_imports(homeless, indent):
            self._place_import(statement, statements)

    def _check_upstream_has(self, name: imports.Import) -> None:
        imported = imports.all_names(self._upstream.body)
        is_bound = name.name in {other.bound_name for other in imported}
        if not is_bound and not _named(self._upstream.body, name.name):
            self._fail(name.name, "imported from the edited module, which lacks it")

    def _extend_import(
        self, home: cst.CSTNode, names: list[imports.Import], indent: int
    ) -> None:
        if "#" in cst.Module([]).code_for_node(home.body[0]):
            self._fail(
                header_line(home), "cannot add names: comments stand between them"
            )
            return
        self._plan.rewritten[home] = lambda current: imports.extended_import(
            current, names, indent
        )

    def _place_import(
        self, statement: cst.CSTNode, statements: Sequence[cst.CSTNode]
    ) -> None:
        place = imports.place_of_import(statement, statements)
        if place is None:
            self._fail(
                header_line(statement), "upstream has no import to place it beside"
            )
            return
        side, neighbour = place
        getattr(self._plan, side)[neighbour].append(statement)

    # Definitions

    def _edit_definitions(self) -> None:
        waiting: list[cst.CSTNode] = []
        for statement in self._edit.body:
            if (
                imports.is_import(statement)
                or imports.is_type_checking_block(statement)
                or _docstring_of([statement])
            ):
                continue
            target = self._edit_one(statement)
            if target is statement:
                waiting.append(statement)
            elif target is not None:
                self._insert_above(target, waiting)
                waiting = []
        if waiting:
            self._plan.after[self._upstream.body[-1]] += waiting

    def _insert_above(self, found: cst.CSTNode, new: list[cst.CSTNode]) -> None:
        if new and isinstance(found, cst.SimpleStatementLine):
            self._plan.insert_in_place_of(found, new)
        elif new:
            self._plan.before[found] += new

    def _edit_one(self, statement: cst.CSTNode) -> cst.CSTNode | None:
        """Return the upstream definition that is named, or `statement` if it is new."""
        marker = self._marker_of(statement)
        if marker:
            return self._edit_statement(statement, *marker)
        name = _name_of(statement)
        if name is None:
            self._fail(
                header_line(statement), "no statement that an edit file may have"
            )
            return None
        found = self._only(self._upstream.body, name, name)
        if found is None:
            self._check_is_new(statement, name, self._upstream.body)
            return statement
        self._edit_member(found, statement, name, depth=0)
        return found

    def _only(
        self, body: Sequence[cst.CSTNode], name: str, qualified_name: str
    ) -> cst.CSTNode | None:
        """Return upstream's definition of `name`, or None if it has none."""
        found = _named(body, name)
        if len(found) > 1:
            lines = " and ".join(str(self._line_of(node)) for node in found)
            self._fail(qualified_name, f"upstream defines it twice, lines {lines}")
        return found[-1] if found else None

    def _check_is_new(
        self,
        statement: cst.CSTNode,
        qualified_name: str,
        body: Sequence[cst.CSTNode],
    ) -> None:
        name = _name_of(statement)
        within = statements_in(body, into_definitions=False)
        if _named(within, name):
            self._fail(
                qualified_name,
                "upstream defines it inside another statement, out of reach",
            )
        stubs = [statement]
        if isinstance(statement, cst.ClassDef):
            stubs += statement.body.body
        for member in stubs:
            if _is_stub(member):
                self._fail(
                    qualified_name,
                    "upstream has no such definition, and the body `...` says it has",
                )
                return

    def _edit_member(
        self,
        upstream: cst.CSTNode,
        edited: cst.CSTNode,
        qualified_name: str,
        depth: int,
    ) -> None:
        if _is_stub(edited):
            return
        if isinstance(upstream, cst.ClassDef) and isinstance(edited, cst.ClassDef):
            self._edit_class(upstream, edited, qualified_name, depth + 1)
        elif self._plan.changes(upstream):
            self._fail(qualified_name, "edited twice")
        else:
            self._plan.replaced[upstream] = [edited]

    def _edit_class(
        self, upstream: cst.ClassDef, edited: cst.ClassDef, name: str, depth: int
    ) -> None:
        self._check_header(upstream, edited, name)
        self._check_footer(edited.body, name)
        if not isinstance(upstream.body, cst.IndentedBlock):
            self._fail(name, "upstream's class has no block to put members in")
            return
        members = upstream.body.body
        docstring = _docstring_of(edited.body.body)
        if docstring:
            self._append_docstring(upstream.body, docstring, name, depth)
        position: cst.CSTNode | None = None
        waiting: list[cst.CSTNode] = []
        for member in edited.body.body[1 if docstring else 0 :]:
            member_name = _name_of(member)
            if member_name is None:
                self._fail(name, f"no member of a class: {header_line(member)}")
                continue
            qualified_name = f"{name}.{member_name}"
            found = self._only(members, member_name, qualified_name)
            if found is not None:
                self._edit_member(found, member, qualified_name, depth)
                self._insert_above(found, waiting)
                waiting, position = [], found
                continue
            self._check_is_new(member, qualified_name, members)
            if position is None:
                waiting.append(member)
            else:
                self._plan.after[position].append(member)
        if waiting:
            self._plan.after[members[-1]] += waiting

    def _check_header(
        self, upstream: cst.ClassDef, edited: cst.ClassDef, name: str
    ) -> None:
        for part in ("bases", "keywords", "decorators"):
            written = [_dump(node) for node in getattr(edited, part)]
            if written and written != [_dump(node) for node in getattr(upstream, part)]:
                self._fail(name, f"the class's {part} differ from upstream's")

    def _check_footer(self, block: cst.BaseSuite, name: str) -> None:
        lines = getattr(block, "footer", ())
        if any(line.comment for line in lines):
            self._fail(name, "the comment after its last statement belongs to none")

    # Statement edits

    def _marker_of(self, statement: cst.CSTNode) -> tuple[str, list[str | None]] | None:
        if not isinstance(statement, cst.FunctionDef):
            return None
        for decorator in statement.decorators:
            call = decorator.decorator
            if not isinstance(call, cst.Call):
                continue
            marker = self._markers.get(code_of(call.func))
            if marker:
                return marker, [_string(argument) for argument in call.args]
        return None

    def _edit_statement(
        self, function: cst.FunctionDef, marker: str, arguments: list[str | None]
    ) -> cst.CSTNode | None:
        own_name = function.name.value
        expected = 1 if marker == "append_docstring" else 2
        if (
            len(arguments) != expected
            or None in arguments
            or len(function.decorators) != 1
        ):
            self._fail(
                own_name, f"@{marker} takes {expected} string(s) and stands alone"
            )
            return None
        target = arguments[0]
        definition = self._resolve(target)
        if definition is None:
            return None
        self._check_footer(function.body, own_name)
        if marker == "append_docstring":
            self._append_target_docstring(function, definition, target)
        else:
            self._change_at_anchor(function, marker, definition, *arguments)
        top_level = target.split(".")[0]
        return _named(self._upstream.body, top_level)[-1] if top_level else None

    def _resolve(self, target: str) -> _Definition | None:
        found = _Definition(self._upstream, depth=0)
        seen: list[str] = []
        for name in filter(None, target.split(".")):
            body = _block_of(found.node).body
            seen.append(name)
            node = self._only(body, name, target)
            if not isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                self._fail(target, f"upstream has no definition of {'.'.join(seen)}")
                return None
            found = _Definition(node, found.depth + 1)
        return found

    def _change_at_anchor(
        self,
        function: cst.FunctionDef,
        marker: str,
        definition: _Definition,
        target: str,
        anchor: str,
    ) -> None:
        statement = self._anchored(definition.node, target, anchor)
        if statement is None:
            return
        body = list(function.body.body)
        if _docstring_of(body):
            body = body[1:]
        if len(body) == 1 and _is_pass(body[0]):
            body = []
        if marker == "replace":
            self._replace(statement, body, f"{target}: anchor {anchor!r}")
        elif not body:
            self._fail(function.name.value, "has no statement to insert")
        elif marker == "after":
            self._plan.after[statement] += body
        else:
            self._plan.insert_in_place_of(statement, body)

    def _anchored(
        self, node: cst.CSTNode, target: str, anchor: str
    ) -> cst.CSTNode | None:
        if target not in self._keyed:
            statements = statements_in(
                _block_of(node).body,
                into_definitions=isinstance(node, cst.FunctionDef),
            )
            self._keyed[target] = KeyedStatements(statements)
        keyed = self._keyed[target]
        name = f"{target or 'the module'}: anchor {anchor!r}"
        try:
            found = keyed.matching(anchor_key(anchor))
        except AnchorError as error:
            self._fail(name, str(error))
            return None
        if len(found) == 1:
            return found[0]
        if found:
            times = "twice" if len(found) == 2 else f"{len(found)} times"
            lines = " and ".join(str(self._line_of(statement)) for statement in found)
            self._fail(name, f"matches {times}, lines {lines}")
            return None
        nearest = keyed.nearest(anchor)
        hint = ""
        if nearest is not None:
            hint = (
                f"; nearest upstream line {self._line_of(nearest)}: "
                f"{header_line(nearest)}"
            )
        self._fail(name, f"matches nothing{hint}")
        return None

    def _replace(
        self, statement: cst.CSTNode, body: list[cst.CSTNode], name: str
    ) -> None:
        if self._plan.changes(statement):
            self._fail(name, "edited twice")
        elif len(body) == 1 and _is_header(body[0]):
            if type(body[0]) is not type(statement):
                self._fail(name, "its header can only become one of the same kind")
                return
            self._plan.rewritten[statement] = _with_header_of(body[0])
        else:
            self._plan.replaced[statement] = body

    # Docstrings

    def _append_target_docstring(
        self, function: cst.FunctionDef, definition: _Definition, target: str
    ) -> None:
        docstring = _docstring_of(function.body.body)
        if docstring is None or len(function.body.body) != 1:
            self._fail(function.name.value, "must be a docstring and nothing else")
            return
        block = _block_of(definition.node)
        self._append_docstring(block, docstring, target, definition.depth)

    def _append_docstring(
        self,
        block: cst.Module | cst.IndentedBlock,
        docstring: cst.SimpleString,
        name: str,
        depth: int,
    ) -> None:
        old = _docstring_of(block.body)
        statement = block.body[0]
        indent = " " * (_INDENT * depth)
        if old is None:
            self._fail(name, "upstream has no docstring to append to")
        elif self._plan.changes(statement):
            self._fail(name, "its docstring is edited twice")
        elif "\\" in docstring.raw_value and docstring.prefix != old.prefix:
            self._fail(name, "only one of the docstrings is raw; mind the backslash")
        else:
            new = _extended_docstring(old, docstring, indent)
            self._plan.rewritten[statement] = lambda current: current.deep_replace(
                current.body[0].value, new
            )


class _Unreadable(Exception):
    """Why a source cannot be composed, to follow its name in a sentence."""


def _parsed(source: str) -> cst.Module:
    if "\r" in source:
        # Composed docstrings and statements would end their lines in another way.
        raise _Unreadable("has line endings other than LF")
    try:
        # LibCST also takes some of what CPython refuses.
        is_empty = not ast.parse(source).body
        module = cst.parse_module(source)
    except (SyntaxError, cst.ParserSyntaxError) as error:
        line = getattr(error, "lineno", None) or getattr(error, "raw_line", "?")
        raise _Unreadable(f"is not valid Python at line {line}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "nested too deeply"
        raise _Unreadable(f"is not valid Python: {reason}") from error
    if is_empty:
        raise _Unreadable("has no statement")
    return module


def _marker_names(edit_module: cst.Module) -> dict[str, str]:
    return {
        name.bound_name: name.name
        for name in imports.all_names(edit_module.body)
        if name.module == _MARKER_MODULE and name.name in _MARKERS
    }


def _named(body: Sequence[cst.CSTNode], name: str) -> list[cst.CSTNode]:
    return [statement for statement in body if _name_of(statement) == name]


def _name_of(statement: cst.CSTNode) -> str | None:
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        return statement.name.value
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    assignment = statement.body[0]
    if isinstance(assignment, cst.Assign) and len(assignment.targets) == 1:
        target = assignment.targets[0].target
    elif isinstance(assignment, cst.AnnAssign):
        target = assignment.target
    else:
        return None
    return target.value if isinstance(target, cst.Name) else None


def _is_stub(definition: cst.CSTNode) -> bool:
    if isinstance(definition, (cst.FunctionDef, cst.ClassDef)):
        body = definition.body.body
        return len(body) == 1 and _is_ellipsis_statement(body[0])
    if isinstance(definition, cst.SimpleStatementLine):
        value = getattr(definition.body[0], "value", None)
        return isinstance(value, cst.Ellipsis)
    return False


def _is_ellipsis_statement(statement: cst.CSTNode) -> bool:
    if isinstance(statement, cst.SimpleStatementLine):
        statement = statement.body[0]
    return isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Ellipsis)


def _is_pass(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], cst.Pass
    )


def _is_header(statement: cst.CSTNode) -> bool:
    body = getattr(getattr(statement, "body", None), "body", None)
    return (
        isinstance(statement, cst.BaseCompoundStatement)
        and body is not None
        and len(body) == 1
        and _is_ellipsis_statement(body[0])
    )


def _with_header_of(header: cst.CSTNode) -> Callable[[cst.CSTNode], cst.CSTNode]:
    def rewritten(current: cst.CSTNode) -> cst.CSTNode:
        kept = ("body", "orelse", "finalbody", "leading_lines")
        return header.with_changes(
            **{name: getattr(current, name) for name in kept if hasattr(current, name)}
        )

    return rewritten


def _block_of(node: cst.CSTNode) -> cst.Module | cst.BaseSuite:
    return node if isinstance(node, cst.Module) else node.body


def _docstring_of(body: Sequence[cst.CSTNode]) -> cst.SimpleString | None:
    if not body or not isinstance(body[0], cst.SimpleStatementLine):
        return None
    value = getattr(body[0].body[0], "value", None)
    is_expression = isinstance(body[0].body[0], cst.Expr)
    return value if is_expression and isinstance(value, cst.SimpleString) else None


def _extended_docstring(
    old: cst.SimpleString, addition: cst.SimpleString, indent: str
) -> cst.SimpleString:
    text = old.raw_value
    ends_on_own_line = "\n" not in text or text.rstrip(" ").endswith("\n")
    paragraph = textwrap.indent(inspect.cleandoc(addition.raw_value), indent)
    end = f"\n{indent}" if ends_on_own_line else ""
    quote = old.quote if len(old.quote) == 3 else '"""'
    return cst.SimpleString(
        f"{old.prefix}{quote}{text.rstrip()}\n\n{paragraph}{end}{quote}"
    )


def _string(argument: cst.Arg) -> str | None:
    value = getattr(argument.value, "evaluated_value", None)
    return value if argument.keyword is None and isinstance(value, str) else None


def _dump(node: cst.CSTNode) -> str:
    return "".join(cst.Module([]).code_for_node(node).split()).rstrip(",")
