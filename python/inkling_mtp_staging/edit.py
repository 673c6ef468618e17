"""Markers of statement edits.

An edit file is parsed and never imported, so a marker does nothing when called; it
is importable so that linters and editors resolve it. The name of the decorated
function describes the edit, its parameters are the upstream locals that the
statements use, and its own docstring is not composed. `target` is the qualified name
of an upstream function or method, or "" for the module. `anchor` is the source of one
statement of the target (of a compound statement: its header only), compared without
formatting and comments, and must match exactly once.
"""

from __future__ import annotations

from typing import Callable, TypeVar

_Function = TypeVar("_Function", bound=Callable)


def _marker(function: _Function) -> _Function:
    return function


def after(target: str, anchor: str) -> Callable[[_Function], _Function]:
    """Insert the function's statements after the anchor statement."""
    return _marker


def before(target: str, anchor: str) -> Callable[[_Function], _Function]:
    """Insert the function's statements before the anchor statement."""
    return _marker


def replace(target: str, anchor: str) -> Callable[[_Function], _Function]:
    """Put the function's statements in the place of the anchor statement.

    A body of `pass` alone deletes the anchor. One compound statement whose body is
    `...` replaces the anchor's header and keeps upstream's body.
    """
    return _marker


def append_docstring(target: str) -> Callable[[_Function], _Function]:
    """Append the function's docstring to the target's as a new paragraph."""
    return _marker
