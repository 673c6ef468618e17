"""Random changes to the released files, and the rules that composing must keep.

The files are cut down to what the edits name, so that thousands of cases take minutes;
every member, statement and import that an edit file refers to is there.

A case is composed correctly if the edits add and remove the lines that they do on the
unchanged file, give or take lines that the case itself changed, and if the result is
git's three-way merge wherever git can merge the two without a conflict.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import subprocess
import tempfile
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

from inkling_mtp_staging.compose import EDITS_DIRECTORY, ComposeError, compose_source

_MARKERS = ("after", "before", "replace", "append_docstring")
_JUNK = ["\0", "\f", "\\", "'", '"""', "(", ")", ":", "é", "\u2028", "\t", "0", ";"]


# Nothing here changes a tree, and most sources are looked at many times.
_tree = functools.lru_cache(maxsize=32)(ast.parse)


@dataclass(frozen=True)
class Subject:
    """One file's cut pristine source, its edit, and what they compose to."""

    path: str
    pristine: str
    edit: str
    composed: str
    new_names: frozenset[str]
    replaced_names: frozenset[str]
    edited_lines: tuple[int, ...]


def subject_of(path: str, source: str) -> Subject:
    edit = (EDITS_DIRECTORY / path).read_text(encoding="utf-8")
    pristine = _cut_to(source, _named_by(path, edit))
    composed = compose_source(pristine, edit, path=path)
    old, new = _qualified_names(pristine), _qualified_names(composed)
    kept = set(composed.splitlines())
    lines = pristine.splitlines()
    anchors = {line.strip() for line in _anchors(edit)}
    near = {
        number + step
        for number, line in enumerate(lines, start=1)
        if line not in kept or line.strip() in anchors
        for step in (-1, 0, 1)
    }
    replaced = {
        name
        for name, node in _definitions(_tree(edit))
        if name in old and isinstance(node, ast.FunctionDef) and not _is_stub(node)
    }
    return Subject(
        path=path,
        pristine=pristine,
        edit=edit,
        composed=composed,
        new_names=frozenset(new - old),
        replaced_names=frozenset(replaced),
        edited_lines=tuple(sorted(near)),
    )


def outcome(subject: Subject, changed: str) -> str:
    """Return "composed", "merged" (as git does it, too) or "refused".

    Raises AssertionError if the composition is wrong, and lets any error but
    ComposeError through.
    """
    try:
        composed = compose_source(changed, subject.edit, path=subject.path)
    except ComposeError as error:
        assert error.failures and "\n" not in str(error.failures[0])
        return "refused"
    names = [name for name, _ in _definitions(_tree(composed))]
    repeated = {name for name in subject.new_names if names.count(name) != 1}
    assert not repeated, f"not there once: {repeated}"
    _check_lines(subject, changed, composed)
    _check_docstrings(subject, changed, composed)
    _check_imports(subject, changed, composed)
    merged = _merged(changed, subject.pristine, subject.composed)
    if merged is None:
        return "composed"
    expected, found = _parts(merged), _parts(composed)
    if not subject.new_names <= _qualified_names(merged):
        return "composed"  # a class ends elsewhere now, and git goes by lines
    expected.update(
        (name, part)
        for name, part in _parts(subject.composed).items()
        if name in subject.replaced_names
    )
    off = {name for name in {*expected, *found} if expected[name] != found[name]}
    if off and all(_has_both_changes(subject, changed, found, n) for n in off):
        return "composed"  # git mistook a line for an equal one elsewhere
    assert not off, f"git merges them to something else: {off}"
    return "merged"


def changed_sources(subject: Subject, seed: int, count: int) -> Iterator[str]:
    """Yield `count` random changes of the subject's source."""
    chance = random.Random(f"{seed} {subject.path}")
    for _ in range(count):
        source = subject.pristine
        for _ in range(chance.choice((1, 1, 2, 3))):
            source = chance.choice(_CHANGES)(chance, source, subject)
        yield source


# The rules


def _check_lines(subject: Subject, changed: str, composed: str) -> None:
    touched = _difference(changed, subject.pristine)
    expected = _difference(subject.composed, subject.pristine)
    found = _difference(composed, changed)
    off = {
        line: (found[line], expected[line])
        for line in {*found, *expected}
        if found[line] != expected[line] and not touched[line]
    }
    assert not off, f"(found, expected) lines: {off}"


def _check_docstrings(subject: Subject, changed: str, composed: str) -> None:
    """Each is kept, and ends with what the edit appends to it, if that is anything."""
    old, new = _docstrings(subject.pristine), _docstrings(subject.composed)
    ours, found = _docstrings(changed), _docstrings(composed)
    for name in subject.new_names | subject.replaced_names:
        assert found[name] == new[name], f"docstring of {name}"
    for name, text in ours.items():
        addition = new.get(name, "").removeprefix(old.get(name, ""))
        if name in found and name in old and name not in subject.replaced_names:
            assert found[name] == text + addition, f"docstring of {name or 'the file'}"


def _check_imports(subject: Subject, changed: str, composed: str) -> None:
    old, new = _imports(subject.pristine), _imports(subject.composed)
    missing = (_imports(changed) - (old - new)) | (new - old)
    missing -= _imports(composed)
    assert not missing, f"not imported: {missing}"


def _imports(source: str) -> set[tuple[str, str, str]]:
    return {
        (getattr(node, "module", ""), alias.name, alias.asname or "")
        for node in ast.walk(_tree(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def _docstrings(source: str) -> dict[str, str]:
    module = _tree(source)
    named = [("", module), *_definitions(module)]
    return {
        name: " ".join((ast.get_docstring(node) or "").split()) for name, node in named
    }


@functools.lru_cache(maxsize=32)
def _kept_lines(source: str) -> tuple[str, ...]:
    """Return the lines, but for indents, and empty for imports and docstrings.

    Imports and docstrings merge by rules of their own.
    """
    lines = [line.strip() for line in source.split("\n")]
    for node in ast.walk(_tree(source)):
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        if is_import or _is_text(node):
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
    return tuple(lines)


def _lines(source: str) -> list[str]:
    return [line for line in _kept_lines(source) if line]


def _parts(source: str) -> defaultdict[str, list[str]]:
    """Return the lines of each function, and those outside of all, sorted.

    Where a neighbour of a new member moved away, the new member may follow either.
    """
    lines = list(_kept_lines(source))
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for name, node in _definitions(_tree(source)):
        if not isinstance(node, ast.ClassDef):
            parts[name] += filter(None, lines[_span(node)])
            lines[_span(node)] = [""] * len(lines[_span(node)])
    parts[""] = sorted(filter(None, lines))
    return parts


def _has_both_changes(subject: Subject, changed: str, found, name: str) -> bool:
    """Whether a definition has upstream's lines and those of ours that upstream left,
    each in their order, and no other."""
    theirs, ours, pristine = (
        _parts(source)[name] for source in (changed, subject.composed, subject.pristine)
    )
    added = Counter(ours) - Counter(pristine)
    left = _without(ours, Counter(pristine) - Counter(theirs))
    return (
        _is_subsequence(theirs, found[name])
        and _is_subsequence(left, found[name])
        and Counter(found[name]) == Counter(theirs) + added
    )


def _without(lines: list[str], removed: Counter[str]) -> list[str]:
    left = []
    for line in lines:
        if removed[line] > 0:
            removed[line] -= 1
        else:
            left.append(line)
    return left


def _is_subsequence(part: list[str], whole: list[str]) -> bool:
    rest = iter(whole)
    return all(line in rest for line in part)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _difference(new: str, old: str) -> Counter[str]:
    difference = Counter(_lines(new))
    difference.subtract(_lines(old))
    return Counter({line: count for line, count in difference.items() if count})


def _merged(ours: str, base: str, theirs: str) -> str | None:
    """Return git's merge, None if there is a conflict or no Python comes out."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / side for side in ("ours", "base", "theirs")]
        for file, source in zip(files, (ours, base, theirs)):
            file.write_bytes(source.encode("utf-8"))
        done = subprocess.run(
            ["git", "merge-file", "-p", *map(str, files)], capture_output=True
        )
    merged = done.stdout.decode("utf-8")
    return merged if done.returncode == 0 and _is_python(merged) else None


def _is_python(source: str) -> bool:
    try:
        _tree(source)
    except (SyntaxError, ValueError):
        return False
    return True


# What the edits name


def _named_by(path: str, edit: str) -> set[str]:
    named: set[str] = set()
    own_module = "sglang." + path.removesuffix(".py").replace("/", ".")
    for statement in _tree(edit).body:
        if isinstance(statement, ast.ImportFrom) and statement.module == own_module:
            named |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.FunctionDef) and statement.decorator_list:
            call = statement.decorator_list[0]
            if isinstance(call, ast.Call) and ast.unparse(call.func) in _MARKERS:
                parts = call.args[0].value.split(".")
                named |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        else:
            named |= {name for name, _ in _definitions(ast.Module([statement], []))}
    return named | {name.split(".")[0] for name in named}


def _anchors(edit: str) -> set[str]:
    return {
        line
        for node in ast.walk(_tree(edit))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _MARKERS
        for argument in node.args[1:]
        for line in argument.value.split("\n")
    }


def _definitions(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for statement in module.body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name, statement
        if isinstance(statement, ast.ClassDef):
            for member in statement.body:
                if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{statement.name}.{member.name}", member


def _is_stub(function: ast.FunctionDef) -> bool:
    return ast.unparse(function.body[0]) == "..."


def _qualified_names(source: str) -> set[str]:
    return {name for name, _ in _definitions(_tree(source))}


def _cut_to(source: str, named: set[str]) -> str:
    """Drop the functions and classes that are not named, but for a few small ones."""
    lines = source.splitlines()
    spare = 3
    for name, node in reversed(list(_definitions(_tree(source)))):
        if name in named:
            continue
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        if spare and node.end_lineno - first < 12:
            spare -= 1
            continue
        within = [each for each in lines[first - 1 : node.end_lineno]]
        lines[first - 1 : node.end_lineno] = [None] * len(within)
    return "\n".join(line for line in lines if line is not None) + "\n"


# The changes


def _change(function: Callable) -> Callable:
    """Leave alone what an earlier change made unparsable for this one."""

    def changed(chance: random.Random, source: str, subject: Subject) -> str:
        if not _is_python(source):
            return source
        try:
            return function(chance, source, _tree(source), subject)
        except IndexError:  # an earlier change left nothing of the kind
            return source

    return changed


def _some_statement(
    chance: random.Random, module: ast.Module, subject: Subject
) -> ast.stmt:
    statements = [node for node in ast.walk(module) if isinstance(node, ast.stmt)]
    near = [node for node in statements if node.lineno in subject.edited_lines]
    return chance.choice(near if near and chance.random() < 0.6 else statements)


def _span(node: ast.stmt) -> slice:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return slice(first - 1, node.end_lineno)


def _joined(lines: list[str]) -> str:
    return "\n".join(lines)


@_change
def _rename_local(chance, source, module, subject):
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    function = chance.choice(functions)
    names = sorted({n.id for n in ast.walk(function) if isinstance(n, ast.Name)})
    if not names:
        return source
    name = chance.choice(names)
    lines = source.split("\n")
    span = _span(function)
    lines[span] = [
        re.sub(rf"\b{name}\b", f"{name}_renamed", line) for line in lines[span]
    ]
    return _joined(lines)


@_change
def _move_method(chance, source, module, subject):
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    bodies = [each.body for each in classes] + [module.body]
    body = chance.choice(bodies)
    methods = [node for node in body if isinstance(node, (ast.FunctionDef, ast.Assign))]
    if not methods:
        return source
    moved, target = chance.choice(methods), chance.choice(body)
    lines = source.split("\n")
    text = lines[_span(moved)]
    lines[_span(moved)] = [None] * len(text)
    lines.insert(target.end_lineno, _joined(text))
    return _joined([line for line in lines if line is not None])


@_change
def _reindent_block(chance, source, module, subject):
    blocks = [node for node in ast.walk(module) if isinstance(node, (ast.If, ast.For))]
    blocks += [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    block = chance.choice(blocks).body
    more = chance.choice((" ", "  ", "    ", "\t"))
    lines = source.split("\n")
    for number in range(block[0].lineno - 1, block[-1].end_lineno):
        lines[number] = more + lines[number] if lines[number].strip() else ""
    return _joined(lines)


@_change
def _comment(chance, source, module, subject):
    statement = _some_statement(chance, module, subject)
    lines = source.split("\n")
    number = chance.randrange(statement.lineno - 1, statement.end_lineno)
    if chance.random() < 0.5:
        lines[number] += "  # a remark"
    else:
        indent = " " * chance.choice((0, statement.col_offset, 7))
        lines.insert(number, f"{indent}# a remark")
    return _joined(lines)


@_change
def _delete(chance, source, module, subject):
    lines = source.split("\n")
    del lines[_span(_some_statement(chance, module, subject))]
    return _joined(lines)


@_change
def _duplicate(chance, source, module, subject):
    lines = source.split("\n")
    span = _span(_some_statement(chance, module, subject))
    lines[span.stop : span.stop] = lines[span]
    return _joined(lines)


@_change
def _swap(chance, source, module, subject):
    blocks = [
        node.body
        for node in ast.walk(module)
        if isinstance(getattr(node, "body", None), list) and len(node.body) > 1
    ]
    body = chance.choice(blocks)
    at = chance.randrange(len(body) - 1)
    first, second = _span(body[at]), _span(body[at + 1])
    lines = source.split("\n")
    between = lines[first.stop : second.start]
    lines[first.start : second.stop] = lines[second] + between + lines[first]
    return _joined(lines)


@_change
def _wrap(chance, source, module, subject):
    statement = _some_statement(chance, module, subject)
    lines = source.split("\n")
    span = _span(statement)
    indent = " " * statement.col_offset
    header = chance.choice(("if condition():", "with lock:", "for _ in range(2):"))
    inner = [f"    {line}" if line.strip() else line for line in lines[span]]
    lines[span] = [indent + header, *inner]
    return _joined(lines)


@_change
def _reformat(chance, source, module, subject):
    statement = _some_statement(chance, module, subject)
    lines = source.split("\n")
    lines[_span(statement)] = textwrap.indent(
        ast.unparse(statement), " " * statement.col_offset
    ).split("\n")
    return _joined(lines)


@_change
def _put_on_one_line(chance, source, module, subject):
    statement = _some_statement(chance, module, subject)
    lines = source.split("\n")
    lines[statement.end_lineno - 1] += chance.choice(("; pass", "; x = 1", ";"))
    return _joined(lines)


@_change
def _decorate(chance, source, module, subject):
    name, node = chance.choice(list(_definitions(module)))
    lines = source.split("\n")
    lines.insert(_span(node).start, " " * node.col_offset + "@decorated")
    return _joined(lines)


@_change
def _make_async(chance, source, module, subject):
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    lines = source.split("\n")
    number = chance.choice(functions).lineno - 1
    lines[number] = lines[number].replace("def ", "async def ", 1)
    return _joined(lines)


def _line_endings(chance, source, subject):
    if chance.random() < 0.5:
        return source.replace("\n", "\r\n")
    lines = source.split("\n")
    lines[chance.randrange(len(lines))] += "\r"
    return _joined(lines)


def _tabs(chance, source, subject):
    return re.sub(r"^( {4})+", lambda m: "\t" * (len(m[0]) // 4), source, flags=re.M)


def _file_ends(chance, source, subject):
    return chance.choice((source.rstrip("\n"), source + "\n\n", "\ufeff" + source))


def _truncate(chance, source, subject):
    return source[: chance.randrange(len(source))]


def _junk(chance, source, subject):
    at = chance.randrange(len(source))
    return source[:at] + chance.choice(_JUNK) + source[at:]


def _drop_line(chance, source, subject):
    lines = source.split("\n")
    del lines[chance.randrange(len(lines))]
    return _joined(lines)


_CHANGES = (
    *(3 * [_rename_local, _move_method, _reindent_block, _comment, _delete]),
    *(3 * [_duplicate, _swap, _wrap, _reformat, _put_on_one_line]),
    *(_decorate, _make_async, _line_endings, _tabs, _file_ends),
    *(_truncate, _junk, _drop_line),
)
