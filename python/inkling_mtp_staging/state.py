"""The state file inside the `sglang` package: originals, digests, and the phase.

It is written before the first of the edited files changes and removed after the last one
is restored, so whatever happens in between can be undone from it.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Collection, Mapping

from inkling_mtp_staging import ToolError
from inkling_mtp_staging.bases import EDIT_SETS, base_of_version, sha256
from inkling_mtp_staging.durable import (
    fsync_directory,
    remove_if_there,
    temporary_of,
    write_temporary,
)
from inkling_mtp_staging.tree import Package, stated_version

STATE_NAME = ".inkling_mtp_staging.json"
PHASES = APPLYING, APPLIED, REVERTING = "applying", "applied", "reverting"
_FORMAT = 1


@dataclass(frozen=True)
class FileRecord:
    """One file: its original, and the digests of what the tool put in its place.

    `replaced_sha256` is the digest of what stood there when the phase began: the
    original, or an older composition.
    """

    original: bytes
    composed_sha256: str
    replaced_sha256: str

    def is_own(self, content: bytes) -> bool:
        """Say whether `content` is the original or was written by the tool."""
        return content == self.original or self.is_edited(content)

    def is_edited(self, content: bytes) -> bool:
        """Say whether `content` was composed by the tool."""
        composed = (self.composed_sha256, self.replaced_sha256)
        return content != self.original and sha256(content) in composed


@dataclass(frozen=True)
class State:
    """What the tool has done, or was doing, to a package.

    `files` has one of the `EDIT_SETS`, by path.
    """

    base: str
    phase: str
    files: Mapping[str, FileRecord]

    def in_phase(self, phase: str) -> State:
        """Return this state in another phase."""
        return replace(self, phase=phase)

    def without(self, paths: Collection[str]) -> State:
        """Return this state with nothing on record about `paths`."""
        kept = {path: file for path, file in self.files.items() if path not in paths}
        return replace(self, files=kept)

    def is_stale(self, contents: Mapping[str, bytes]) -> bool:
        """Say whether none of the edited files is left, as after a reinstallation."""
        return not any(
            self.files[path].is_edited(content)
            for path, content in contents.items()
            if path in self.files
        )


def undone(state: State | None, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return `contents` with what the tool wrote exchanged for the originals."""
    if state is None:
        return dict(contents)
    return {
        path: state.files[path].original
        if path in state.files and state.files[path].is_own(content)
        else content
        for path, content in contents.items()
    }


def load_state(package: Package) -> State | None:
    """Return the package's state, None if it has none.

    Raises ToolError if the state file is damaged, a link, or holds anything but the
    files of a known release: what it holds may be written back one day.
    """
    file = package.directory / STATE_NAME
    if not os.path.lexists(file):
        return None
    try:
        if file.is_symlink():
            raise ValueError("a link could hold anybody's content")
        return _state(json.loads(file.read_text(encoding="utf-8")))
    except (
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        version = stated_version(package)
        release = f"sglang=={version}" if version else "sglang"
        raise ToolError(
            f"{file}: damaged or written by another version of this tool; reinstall "
            f"{release} (pip install --force-reinstall --no-deps) and remove this file"
        ) from error


def prepare_state(package: Package, state: State) -> Path:
    """Write `state` beside the package's state file, durably, and return where."""
    document = {
        "format": _FORMAT,
        "base": state.base,
        "phase": state.phase,
        "files": {
            path: {
                "original": base64.b64encode(zlib.compress(record.original)).decode(),
                "composed_sha256": record.composed_sha256,
                "replaced_sha256": record.replaced_sha256,
            }
            for path, record in state.files.items()
        },
    }
    temporary = temporary_of(package.directory / STATE_NAME, state.phase)
    return write_temporary(temporary, json.dumps(document, indent=1).encode())


def commit_state(package: Package, prepared: Path) -> None:
    """Make the prepared state the package's, in one durable step."""
    os.replace(prepared, package.directory / STATE_NAME)
    fsync_directory(package.directory)


def remove_state(package: Package) -> None:
    """Remove the package's state file, if there is one."""
    remove_if_there(package.directory / STATE_NAME)
    fsync_directory(package.directory)


def _state(document: dict) -> State:
    base = base_of_version(document["base"])
    files = {path: _record(entry) for path, entry in document["files"].items()}
    is_sound = (
        document["format"] == _FORMAT
        and document["phase"] in PHASES
        and base is not None
        and any(files.keys() == set(paths) for paths in EDIT_SETS)
        and all(sha256(file.original) == base.sha256[p] for p, file in files.items())
    )
    if not is_sound:
        raise ValueError("not what this version of the tool writes")
    return State(base.version, document["phase"], files)


def _record(entry: Mapping[str, str]) -> FileRecord:
    original = zlib.decompress(base64.b64decode(entry["original"]))
    return FileRecord(original, entry["composed_sha256"], entry["replaced_sha256"])
