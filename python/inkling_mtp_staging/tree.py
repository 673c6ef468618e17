"""Find an `sglang` package on disk, its version and its five edited files, unimported."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from inkling_mtp_staging import ToolError
from inkling_mtp_staging.bases import (
    BASES,
    EDITED_PATHS,
    Base,
    base_of_version,
    nearest_base,
    sha256,
)


@dataclass(frozen=True)
class Package:
    """An `sglang` package directory."""

    directory: Path

    def file(self, path: str) -> Path:
        """Return the file at `path` below the package.

        Raises ToolError if it is missing or reached through a symbolic link, behind
        which it could belong to another environment.
        """
        file = self.directory / path
        if file.resolve() != file:
            raise ToolError(
                f"{file}: is or lies behind a symbolic link to {file.resolve()}; "
                "use --root with the directory that really holds it"
            )
        if not file.is_file():
            raise ToolError(f"{file}: missing; this is no complete sglang package")
        return file


def find_package(root: Path | None = None) -> Package:
    """Return the package below `root` (site-packages, or a checkout's `python`).

    Without `root`: the one that this Python would import. Raises ToolError if there is
    none.
    """
    if root is not None:
        directory = root / "sglang"
        if not (directory / "srt").is_dir():
            raise ToolError(
                f"{root}: holds no sglang/srt; --root takes a site-packages folder or "
                "a checkout's python folder"
            )
        return Package(directory.resolve())
    spec = importlib.util.find_spec("sglang")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    for location in map(Path, locations):
        if (location / "srt").is_dir():
            return Package(location.resolve())
    raise ToolError("sglang is not installed in this Python; name a folder with --root")


def read_edited_files(package: Package) -> dict[str, bytes]:
    """Return the five files' contents, by path. Raises ToolError as `Package.file`."""
    return {path: package.file(path).read_bytes() for path in EDITED_PATHS}


def base_of(package: Package, contents: Mapping[str, bytes]) -> Base:
    """Return the base that the package should be one of.

    That is the known release of the package's own version; a package that states none,
    or a development version, is compared with the base most like `contents`. Raises
    ToolError on the version of an unknown release.
    """
    version = _stated_version(package)
    if version is None or _is_development(version):
        return nearest_base({path: sha256(data) for path, data in contents.items()})
    base = base_of_version(version)
    if base is None:
        known = ", ".join(base.version for base in BASES)
        raise ToolError(
            f"{package.directory}: sglang {version} is no release that this tool has "
            f"edits for (known: {known})"
        )
    return base


def reason_for_mismatch(content: bytes, base: Base, path: str) -> str:
    """Say why `content` is not the base's file."""
    if sha256(content.replace(b"\r\n", b"\n")) == base.sha256[path]:
        return (
            f"its line endings differ from sglang {base.version}'s (CRLF instead of LF)"
        )
    return (
        f"its sha256 {sha256(content)[:12]} is not sglang {base.version}'s "
        f"{base.sha256[path][:12]}"
    )


def _stated_version(package: Package) -> str | None:
    installed = list(package.directory.parent.glob("sglang-*.dist-info"))
    if len(installed) == 1:
        return installed[0].name.removeprefix("sglang-").removesuffix(".dist-info")
    for name in ("version.py", "_version.py"):
        file = package.directory / name
        if file.is_file():
            found = re.search(
                r"""^__version__\b.*= *["']([^"']+)["']""",
                file.read_text(encoding="utf-8"),
                re.MULTILINE,
            )
            if found:
                return found[1]
    return None


def _is_development(version: str) -> bool:
    return ".dev" in version or "+" in version


def fsync_directory(directory: Path) -> None:
    """Make the directory's latest renames durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
