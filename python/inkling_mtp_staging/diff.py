"""The edits as one patch that `git apply` takes in an upstream checkout."""

from __future__ import annotations

import difflib
from typing import Mapping


def unified_diff(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the git-style diff from `old` to `new` (sources by path below `sglang`)."""
    return "".join(_file_diff(path, old[path], new[path]) for path in old)


def _file_diff(path: str, old: str, new: str) -> str:
    old_name = f"a/python/sglang/{path}"
    new_name = f"b/python/sglang/{path}"
    hunks = "".join(difflib.unified_diff(_lines(old), _lines(new), old_name, new_name))
    return f"diff --git {old_name} {new_name}\n{hunks}" if hunks else ""


def _lines(source: str) -> list[str]:
    return [line + "\n" for line in source.removesuffix("\n").split("\n")]
