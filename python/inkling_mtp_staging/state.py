"""The state file inside the `sglang` package: originals, digests, and the phase.

It is written before the first of the five files changes and removed after the last one
is restored, so whatever happens in between can be undone from it.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Mapping

from inkling_mtp_staging import ToolError
from inkling_mtp_staging.bases import EDITED_PATHS, sha256
from inkling_mtp_staging.tree import Package, fsync_directory

STATE_NAME = ".inkling_mtp_staging.json"
APPLYING, APPLIED, REVERTING = "applying", "applied", "reverting"
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
        known = (sha256(self.original), self.composed_sha256, self.replaced_sha256)
        return sha256(content) in known


@dataclass(frozen=True)
class State:
    """What the tool has done, or was doing, to a package."""

    base: str
    phase: str
    files: Mapping[str, FileRecord]

    def in_phase(self, phase: str) -> State:
        """Return this state in another phase."""
        return replace(self, phase=phase)


def undone(state: State | None, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return `contents` with what the tool wrote exchanged for the originals."""
    if state is None:
        return dict(contents)
    return {
        path: state.files[path].original
        if state.files[path].is_own(content)
        else content
        for path, content in contents.items()
    }


def load_state(package: Package) -> State | None:
    """Return the package's state, None if it has none.

    Raises ToolError if the state file is damaged.
    """
    file = package.directory / STATE_NAME
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(file) from error
    try:
        if document["format"] != _FORMAT or set(document["files"]) != {*EDITED_PATHS}:
            raise _damaged(file)
        return State(
            base=document["base"],
            phase=document["phase"],
            files={
                path: _record(file, entry) for path, entry in document["files"].items()
            },
        )
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise _damaged(file) from error


def save_state(package: Package, state: State) -> None:
    """Replace the package's state file in one durable step."""
    document = {
        "format": _FORMAT,
        "base": state.base,
        "phase": state.phase,
        "files": {
            path: {
                "original": base64.b64encode(zlib.compress(record.original)).decode(),
                "original_sha256": sha256(record.original),
                "composed_sha256": record.composed_sha256,
                "replaced_sha256": record.replaced_sha256,
            }
            for path, record in state.files.items()
        },
    }
    file = package.directory / STATE_NAME
    temporary = write_temporary(file, json.dumps(document, indent=1).encode(), 0o644)
    os.replace(temporary, file)
    fsync_directory(file.parent)


def remove_state(package: Package) -> None:
    """Remove the package's state file, if there is one."""
    (package.directory / STATE_NAME).unlink(missing_ok=True)
    fsync_directory(package.directory)


def temporary_of(file: Path) -> Path:
    """Return where the next content of `file` is prepared."""
    return file.with_name(f".{file.name.lstrip('.')}.inkling_mtp_staging.tmp")


def write_temporary(file: Path, content: bytes, mode: int) -> Path:
    """Write the next content of `file` beside it, durably, and return where."""
    temporary = temporary_of(file)
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as stream:
        os.fchmod(descriptor, mode)
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)
    return temporary


def _record(file: Path, entry: Mapping[str, str]) -> FileRecord:
    original = zlib.decompress(base64.b64decode(entry["original"]))
    if sha256(original) != entry["original_sha256"]:
        raise _damaged(file)
    return FileRecord(original, entry["composed_sha256"], entry["replaced_sha256"])


def _damaged(file: Path) -> ToolError:
    return ToolError(
        f"{file}: damaged or written by another version of this tool; reinstall "
        "sglang and remove this file"
    )
