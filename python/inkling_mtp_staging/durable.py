"""Writes and renames that a crash leaves old or new, never half done."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator


def temporary_of(file: Path, purpose: str = "") -> Path:
    """Return where the next content of `file` is prepared."""
    dotted = f".{purpose}" if purpose else ""
    return file.with_name(f".{file.name.lstrip('.')}{dotted}.inkling_mtp_staging.tmp")


def write_temporary(temporary: Path, content: bytes, like: Path | None = None) -> Path:
    """Write `content` durably to the file `temporary`, which must not exist, and return it.

    It gets mode and owner of the file `like`. Raises OSError, which names the file.
    """
    with naming(temporary):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "wb") as stream:
            if like is not None:
                _make_alike(descriptor, like.stat())
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
    return temporary


def fsync_directory(directory: Path) -> None:
    """Make the directory's latest renames and removals durable."""
    with naming(directory):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_if_there(file: Path) -> None:
    """Remove `file`; a read-only file system refuses even the removal of no file."""
    if os.path.lexists(file):
        os.unlink(file)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError that names no file, as a full disk's does not."""
    try:
        yield
    except OSError as error:
        where = error.filename or str(path)
        raise OSError(error.errno, error.strerror, where) from error


def _make_alike(descriptor: int, like: os.stat_result) -> None:
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
        # Only root may give a file away; any other user keeps what they write.
        with suppress(PermissionError):
            os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, like.st_mode & 0o7777)
