"""Apply the edits to an `sglang` package on disk, revert them, and tell its status.

The edited files change together or not at all: the originals go to the state file first,
then each file is replaced by rename, which leaves hard-linked copies elsewhere (a
package cache) as they are. All that needs disk space is written before the first
rename. A command that finds a state file left in the middle restores the originals
before it does anything else.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Collection, Iterator, Mapping

from inkling_mtp_staging import ToolError
from inkling_mtp_staging.bases import (
    EDITED_PATHS,
    ONLY_UPSTREAM_FIVE,
    TRITON_BACKEND,
    Base,
    sha256,
)
from inkling_mtp_staging.durable import (
    fsync_directory,
    remove_if_there,
    temporary_of,
    write_temporary,
)
from inkling_mtp_staging.state import (
    APPLIED,
    APPLYING,
    PHASES,
    REVERTING,
    STATE_NAME,
    FileRecord,
    State,
    commit_state,
    load_state,
    prepare_state,
    remove_state,
    undone,
)
from inkling_mtp_staging.tree import (
    Package,
    UnknownBase,
    UnknownRelease,
    base_of,
    check_release,
    find_package,
    read_edited_files,
    reason_for_mismatch,
)

IS_PRISTINE = "pristine"
IS_APPLIED = "applied"
IS_OLDER = "applied (older edits)"
IS_MODIFIED = "modified"
IS_UNKNOWN = "not applied (unknown release)"


@dataclass(frozen=True)
class Status:
    """The state of each edited file, by path, and of the package they are in."""

    package: Package
    base: str
    files: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def is_applied(self) -> bool:
        return set(self.files.values()) == {IS_APPLIED}


def apply(package: Package, paths: Collection[str] = EDITED_PATHS) -> list[str]:
    """Put the composed files in place and return what happened, in sentences.

    `paths` is one of the `EDIT_SETS`; a file that an earlier run edited and that is
    none of them is restored. Does nothing if all is there already; brings older edits
    up to date. Raises ToolError, with nothing changed, if a file is neither upstream's
    nor the tool's own, or if an edit does not fit.
    """
    with _locked(package):
        check_release(package)
        notes = _recover(package)
        handled = {*paths, *_still_edited(package)}
        tree, originals = _read_originals(package, _in_order(handled))
        composed = {**originals, **_compose({path: originals[path] for path in paths})}
        base = f"sglang {tree.base.version}{_scope(paths)}"
        if tree.contents == composed and originals.keys() == set(paths):
            return [*notes, f"already applied to {base}"]
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
        left_out = originals.keys() - set(paths)
        after = state.without(left_out).in_phase(APPLIED)
        _replace_all(package, composed, during=state, after=after)
        done = "updated the edits of" if was_applied else "applied to"
        return [*notes, f"{done} {base}"]


def revert(package: Package) -> list[str]:
    """Restore the originals byte for byte and return what happened, in sentences.

    Does nothing on a package that holds no edit, be it pristine or reinstalled since.
    Raises ToolError, with nothing changed, if a file is neither upstream's nor the
    tool's own.
    """
    with _locked(package):
        notes = _recover(package)
        state = load_state(package)
        paths = _on_record(state)
        if state is not None and state.is_stale(read_edited_files(package, paths)):
            remove_state(package)
            return [*notes, "nothing to revert: sglang was reinstalled after apply"]
        tree = _read(package, paths)
        originals = tree.originals()
        if tree.contents == originals:
            return [
                *notes,
                f"nothing to revert: sglang {tree.base.version} is pristine",
            ]
        during = tree.state.in_phase(REVERTING)
        _replace_all(package, originals, during=during, after=None)
        return [*notes, f"reverted to sglang {tree.base.version}"]


def status(package: Package, paths: Collection[str] | None = None) -> Status:
    """Return the package's status, after undoing an interrupted change.

    `paths` is one of the `EDIT_SETS`, without it the one that was applied, or all. Of a
    release that the edits are known not to be for, the notes say why, and no file is
    looked at. Raises ToolError if nothing is known of the release, unless it replaced
    one that the edits were applied to.
    """
    with _locked(package):
        if not os.path.lexists(package.directory / STATE_NAME):
            try:
                check_release(package)
            except UnknownRelease as error:
                return Status(package, error.version, {}, error.reasons)
        notes = _recover(package)
        state = load_state(package)
        paths = _on_record(state) if paths is None else paths
        contents = read_edited_files(package, paths)
    is_stale = state is not None and state.is_stale(contents)
    try:
        tree = _tree(package, contents, state)
    except UnknownRelease as error:
        if not is_stale:
            raise
        reinstalled = f"sglang was reinstalled after apply to {state.base}: {error}"
        notes += reinstalled.splitlines()
        files = dict.fromkeys(paths, IS_UNKNOWN)
        return Status(package, error.version, files, tuple(notes))
    if is_stale:
        notes.append("sglang was reinstalled after apply; apply again")
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
    if state is not None and not is_stale:
        notes += [
            f"{path}: {'applied too' if path in state.files else 'left out'}"
            for path in EDITED_PATHS
            if path not in paths
        ]
    return Status(package, tree.base.version, files, tuple(notes))


def originals_of(
    package: Package, paths: Collection[str] = EDITED_PATHS
) -> dict[str, bytes]:
    """Return the files as upstream released them, whether or not edits are applied.

    Writes nothing. Raises ToolError if a file is neither upstream's nor the tool's own.
    """
    check_release(package)
    return _read_originals(package, paths)[1]


def pristine_sources(
    root: Path | None = None, paths: Collection[str] = EDITED_PATHS
) -> dict[str, str]:
    """Return `originals_of` the package below `root` (default: installed), decoded."""
    originals = originals_of(find_package(root), paths)
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

    def originals(self, may_leave_out: Collection[str] = ()) -> dict[str, bytes]:
        known = self.known_originals()
        foreign = [
            f"{self.package.directory / path}: "
            f"{reason_for_mismatch(content, self.base, path)}; reinstall sglang "
            f"{self.base.version}, or undo the change to this file"
            + (f", or use {ONLY_UPSTREAM_FIVE}" if path in may_leave_out else "")
            for path, content in self.contents.items()
            if path not in known
        ]
        if foreign:
            raise UnknownBase("\n".join(foreign))
        return known


def _on_record(state: State | None) -> Collection[str]:
    return EDITED_PATHS if state is None else tuple(state.files)


def _still_edited(package: Package) -> Collection[str]:
    """Return what an earlier run edited, unless sglang was reinstalled since."""
    state = load_state(package)
    if state is None or state.is_stale(read_edited_files(package, state.files)):
        return ()
    return state.files


def _in_order(paths: Collection[str]) -> Collection[str]:
    return tuple(path for path in EDITED_PATHS if path in paths)


def _scope(paths: Collection[str]) -> str:
    return "" if TRITON_BACKEND in paths else ", upstream's five files only"


def _read(package: Package, paths: Collection[str]) -> _Tree:
    return _tree(package, read_edited_files(package, paths), load_state(package))


def _tree(
    package: Package, contents: Mapping[str, bytes], state: State | None
) -> _Tree:
    base = base_of(package, undone(state, contents))
    return _Tree(package, base, contents, state)


def _read_originals(
    package: Package, paths: Collection[str]
) -> tuple[_Tree, dict[str, bytes]]:
    """Read what the edits are applied to; a refusal names each edit that misses there."""
    try:
        tree = _read(package, paths)
        on_record = tree.state.files if tree.state else {}
        return tree, tree.originals(may_leave_out={TRITON_BACKEND} - on_record.keys())
    except UnknownBase as error:
        contents = undone(load_state(package), read_edited_files(package, paths))
        try:
            _compose(contents)
        except ToolError as misfit:
            raise ToolError(f"{error}\n{misfit}") from misfit
        raise


def _compose(originals: Mapping[str, bytes]) -> dict[str, bytes]:
    # Deferred: libcst takes a while to import, and the server-start plugin, which
    # shares the modules below this one, never composes.
    from inkling_mtp_staging.compose import compose_all

    # A release is valid UTF-8; for anything else, composing only says what misses.
    sources = {
        path: content.decode("utf-8", errors="replace")
        for path, content in originals.items()
    }
    return {
        path: source.encode("utf-8") for path, source in compose_all(sources).items()
    }


@contextmanager
def _locked(package: Package) -> Iterator[None]:
    descriptor = os.open(package.directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise ToolError(
                f"{package.directory}: cannot be locked ({error.strerror}), so two runs "
                "could mix; use a file system that has locks"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _recover(package: Package) -> list[str]:
    _discard_temporaries(package)
    state = load_state(package)
    if state is None or state.phase == APPLIED:
        return []
    contents = read_edited_files(package, _on_record(state))
    foreign = [
        f"{package.directory / path}: changed by someone else while an interrupted "
        f"run of this tool was unfinished; reinstall sglang {state.base}"
        for path, content in contents.items()
        if not state.files[path].is_own(content)
    ]
    if foreign and state.is_stale(contents):
        remove_state(package)
        return ["sglang was reinstalled after an interrupted run of this tool"]
    if foreign:
        raise ToolError("\n".join(foreign))
    _restore(package, state)
    if state.phase == APPLYING:
        return ["an interrupted apply was rolled back first"]
    return ["an interrupted revert was completed first"]


def _restore(package: Package, state: State) -> None:
    _discard_temporaries(package)
    originals = {path: record.original for path, record in state.files.items()}
    _rename_all(_prepare(package, originals))
    remove_state(package)


def _replace_all(
    package: Package,
    contents: Mapping[str, bytes],
    *,
    during: State,
    after: State | None,
) -> None:
    try:
        prepared = _prepare(package, contents)
        begun = prepare_state(package, during)
        ended = prepare_state(package, after) if after else None
        commit_state(package, begun)
    except OSError:
        _discard_temporaries(package)
        raise
    try:
        _rename_all(prepared)
        if ended is None:
            remove_state(package)
        else:
            commit_state(package, ended)
    except OSError:
        _restore(package, during)
        raise


def _prepare(package: Package, contents: Mapping[str, bytes]) -> dict[Path, Path]:
    """Write the next contents beside the files."""
    files = {package.file(path): content for path, content in contents.items()}
    return {
        file: write_temporary(temporary_of(file), content, like=file)
        for file, content in files.items()
    }


def _discard_temporaries(package: Package) -> None:
    for path in EDITED_PATHS:
        # A file that is left out may be missing or a link.
        with suppress(ToolError):
            remove_if_there(temporary_of(package.file(path)))
    for phase in PHASES:
        remove_if_there(temporary_of(package.directory / STATE_NAME, phase))


def _rename_all(prepared: Mapping[Path, Path]) -> None:
    for file, temporary in prepared.items():
        os.replace(temporary, file)
        for cached in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            remove_if_there(cached)
    for directory in {file.parent for file in prepared}:
        fsync_directory(directory)
