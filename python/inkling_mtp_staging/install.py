"""Apply the edits to an `sglang` package on disk, revert them, and tell its status.

The five files change together or not at all: the originals go to the state file first,
then each file is replaced by rename, which leaves hard-linked copies elsewhere (a
package cache) as they are. A command that finds a state file left in the middle
restores the originals before it does anything else.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Mapping

from inkling_mtp_staging import ToolError
from inkling_mtp_staging.bases import EDITED_PATHS, Base, sha256
from inkling_mtp_staging.state import (
    APPLIED,
    APPLYING,
    REVERTING,
    STATE_NAME,
    FileRecord,
    State,
    load_state,
    remove_state,
    save_state,
    temporary_of,
    undone,
    write_temporary,
)
from inkling_mtp_staging.tree import (
    Package,
    base_of,
    find_package,
    fsync_directory,
    read_edited_files,
    reason_for_mismatch,
)

IS_PRISTINE = "pristine"
IS_APPLIED = "applied"
IS_OLDER = "applied (older edits)"
IS_MODIFIED = "modified"


@dataclass(frozen=True)
class Status:
    """The state of each of the five files, by path, and of the package they are in."""

    package: Package
    base: str
    files: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def is_applied(self) -> bool:
        return set(self.files.values()) == {IS_APPLIED}


def apply(package: Package) -> list[str]:
    """Put the composed files in place and return what happened, in sentences.

    Does nothing if they are there already; brings an older edit set up to date. Raises
    ToolError, with nothing changed, if a file is neither upstream's nor the tool's own,
    or if an edit does not fit.
    """
    with _locked(package):
        notes = _recover(package)
        tree = _read(package)
        originals = tree.originals()
        composed = _compose(originals)
        if tree.contents == composed:
            return [*notes, f"already applied to sglang {tree.base.version}"]
        state = State(
            base=tree.base.version,
            phase=APPLYING,
            files={
                path: FileRecord(
                    original=original,
                    composed_sha256=sha256(composed[path]),
                    replaced_sha256=sha256(tree.contents[path]),
                )
                for path, original in originals.items()
            },
        )
        was_applied = tree.contents != originals
        _replace_all(package, composed, during=state, after=state.in_phase(APPLIED))
        done = "updated the edits of" if was_applied else "applied to"
        return [*notes, f"{done} sglang {tree.base.version}"]


def revert(package: Package) -> list[str]:
    """Restore the originals byte for byte and return what happened, in sentences.

    Does nothing on a pristine package. Raises ToolError, with nothing changed, if a
    file is neither upstream's nor the tool's own.
    """
    with _locked(package):
        notes = _recover(package)
        tree = _read(package)
        originals = tree.originals()
        if tree.contents == originals:
            if tree.state is not None:
                remove_state(package)
            return [
                *notes,
                f"nothing to revert: sglang {tree.base.version} is pristine",
            ]
        during = tree.state.in_phase(REVERTING)
        _replace_all(package, originals, during=during, after=None)
        return [*notes, f"reverted to sglang {tree.base.version}"]


def status(package: Package) -> Status:
    """Return the package's status, after undoing an interrupted change.

    Raises ToolError if the package is of no known release.
    """
    with _locked(package):
        notes = _recover(package)
        tree = _read(package)
    known = tree.known_originals()
    composed = _compose(known)
    files = {}
    for path, content in tree.contents.items():
        if path not in known:
            files[path] = IS_MODIFIED
            reason = reason_for_mismatch(content, tree.base, path)
            notes.append(f"{path}: {reason}")
        elif content == known[path]:
            files[path] = IS_PRISTINE
        else:
            files[path] = IS_APPLIED if content == composed[path] else IS_OLDER
    return Status(package, tree.base.version, files, tuple(notes))


def originals_of(package: Package) -> dict[str, bytes]:
    """Return the five files as upstream released them, whether or not edits are applied.

    Writes nothing. Raises ToolError if a file is neither upstream's nor the tool's own.
    """
    return _read(package).originals()


def pristine_sources(root: Path | None = None) -> dict[str, str]:
    """Return `originals_of` the package below `root` (default: installed), decoded."""
    originals = originals_of(find_package(root))
    return {path: content.decode("utf-8") for path, content in originals.items()}


@dataclass(frozen=True)
class _Tree:
    package: Package
    base: Base
    contents: Mapping[str, bytes]
    state: State | None

    def known_originals(self) -> dict[str, bytes]:
        return {
            path: original
            for path, original in undone(self.state, self.contents).items()
            if sha256(original) == self.base.sha256[path]
        }

    def originals(self) -> dict[str, bytes]:
        known = self.known_originals()
        foreign = [
            f"{self.package.directory / path}: "
            f"{reason_for_mismatch(content, self.base, path)}; reinstall sglang "
            f"{self.base.version}, or undo the change to this file"
            for path, content in self.contents.items()
            if path not in known
        ]
        if foreign:
            raise ToolError("\n".join(foreign))
        return known


def _read(package: Package) -> _Tree:
    contents = read_edited_files(package)
    state = load_state(package)
    base = base_of(package, undone(state, contents))
    return _Tree(package, base, contents, state)


def _compose(originals: Mapping[str, bytes]) -> dict[str, bytes]:
    # Deferred: libcst takes a while to import, and the server-start plugin, which
    # shares the modules below this one, never composes.
    from inkling_mtp_staging.compose import compose_all

    sources = {path: content.decode("utf-8") for path, content in originals.items()}
    return {
        path: source.encode("utf-8") for path, source in compose_all(sources).items()
    }


@contextmanager
def _locked(package: Package) -> Iterator[None]:
    descriptor = os.open(package.directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _recover(package: Package) -> list[str]:
    _discard_temporaries(package)
    state = load_state(package)
    if state is None or state.phase == APPLIED:
        return []
    foreign = [
        f"{package.directory / path}: changed by someone else while an interrupted "
        f"run of this tool was unfinished; reinstall sglang {state.base}"
        for path, content in read_edited_files(package).items()
        if not state.files[path].is_own(content)
    ]
    if foreign:
        raise ToolError("\n".join(foreign))
    _restore(package, state)
    if state.phase == APPLYING:
        return ["an interrupted apply was rolled back first"]
    return ["an interrupted revert was completed first"]


def _restore(package: Package, state: State) -> None:
    originals = {path: record.original for path, record in state.files.items()}
    _rename_all(_prepare(package, originals))
    remove_state(package)
    _discard_temporaries(package)


def _replace_all(
    package: Package,
    contents: Mapping[str, bytes],
    *,
    during: State,
    after: State | None,
) -> None:
    prepared = _prepare(package, contents)
    try:
        save_state(package, during)
    except OSError:
        _discard_temporaries(package)
        raise
    try:
        _rename_all(prepared)
        if after is None:
            remove_state(package)
        else:
            save_state(package, after)
    except OSError:
        _restore(package, during)
        raise


def _prepare(package: Package, contents: Mapping[str, bytes]) -> dict[Path, Path]:
    """Write the next contents beside the files; all of them or none."""
    files = {package.file(path): content for path, content in contents.items()}
    try:
        return {
            file: write_temporary(file, content, stat.S_IMODE(file.stat().st_mode))
            for file, content in files.items()
        }
    except OSError:
        _discard_temporaries(package)
        raise


def _discard_temporaries(package: Package) -> None:
    files = [package.directory / STATE_NAME, *map(package.file, EDITED_PATHS)]
    for file in files:
        temporary_of(file).unlink(missing_ok=True)


def _rename_all(prepared: Mapping[Path, Path]) -> None:
    for file, temporary in prepared.items():
        os.replace(temporary, file)
        for cached in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            cached.unlink(missing_ok=True)
    for directory in {file.parent for file in prepared}:
        fsync_directory(directory)
