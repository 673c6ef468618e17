"""Find an `sglang` package on disk, its version and its edited files, unimported."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Collection, Mapping

from inkling_mtp_staging import ToolError
from inkling_mtp_staging.bases import (
    BASES,
    EDITED_PATHS,
    Base,
    base_of_version,
    nearest_base,
    other_releases,
    sha256,
)


class UnknownBase(ToolError):
    """The files are not those of a release that the tool has edits for."""


class UnknownRelease(UnknownBase):
    """The package's version is not that of a release that the tool has edits for.

    `reasons` are the lines of the text below the first: what is known of the release.
    """

    def __init__(self, directory: Path, version: str):
        known = ", ".join(base.version for base in BASES)
        other = other_releases(version)
        self.version = version
        self.reasons = (*other.differences, other.advice) if other else ()
        refusal = (
            f"{directory}: sglang {version} is no release that this tool has edits for "
            f"(known: {known})"
        )
        super().__init__("\n".join((refusal, *self.reasons)))


@dataclass(frozen=True)
class Package:
    """An `sglang` package directory."""

    directory: Path

    def file(self, path: str) -> Path:
        """Return the file at `path` below the package.

        Raises ToolError if it is missing, or if it or its bytecode is reached through a
        symbolic link, behind which it could belong to another environment.
        """
        file = self.directory / path
        if file.resolve() != file:
            raise ToolError(
                f"{file}: is or lies behind a symbolic link to {file.resolve()}; "
                "use --root with the directory that really holds it"
            )
        if not file.is_file():
            raise ToolError(f"{file}: missing; this is no complete sglang package")
        cache = file.parent / "__pycache__"
        if cache.is_symlink():
            raise ToolError(
                f"{cache}: is a symbolic link to {cache.resolve()}; remove the link, "
                "and Python makes a directory of its own"
            )
        return file


def find_package(root: Path | None = None) -> Package:
    """Return the package below `root` (site-packages, or a checkout's `python`).

    Without `root`: the one that this Python would import. Raises ToolError if there is
    none. Links are followed up to the folder that holds the package, and no further.
    """
    directory = importable_directory() if root is None else root / "sglang"
    if directory is None:
        raise ToolError(
            "sglang is not installed in this Python; name a folder with --root"
        )
    directory = directory.parent.resolve() / directory.name
    if not (directory / "srt").is_dir():
        raise ToolError(_no_package(directory))
    return Package(directory)


def importable_directory() -> Path | None:
    """Return where this Python would import `sglang` from, without importing it."""
    spec = importlib.util.find_spec("sglang")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def check_release(package: Package) -> None:
    """Raise UnknownRelease if the edits are known not to be for the package's version.

    Reads no edited file: such a release need not have all of them.
    """
    version = stated_version(package)
    if version and not _is_development(version) and other_releases(version):
        raise UnknownRelease(package.directory, version)


def read_edited_files(
    package: Package, paths: Collection[str] = EDITED_PATHS
) -> dict[str, bytes]:
    """Return the files' contents, by path. Raises ToolError as `Package.file`."""
    return {path: package.file(path).read_bytes() for path in paths}


def base_of(package: Package, contents: Mapping[str, bytes]) -> Base:
    """Return the base that the package should be one of.

    That is the known release of the package's own version; a package that states none,
    or a development version, is compared with the base most like `contents`. Raises
    UnknownRelease on any other version.
    """
    version = stated_version(package)
    if version is None or _is_development(version):
        return nearest_base({path: sha256(data) for path, data in contents.items()})
    base = base_of_version(version)
    if base is None:
        raise UnknownRelease(package.directory, version)
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


def stated_version(package: Package) -> str | None:
    """Return the version that the package's metadata or else its source states."""
    installed = list(package.directory.parent.glob("sglang-*.dist-info"))
    if len(installed) == 1:
        return installed[0].name.removeprefix("sglang-").removesuffix(".dist-info")
    for name in ("version.py", "_version.py"):
        file = package.directory / name
        if file.is_file():
            found = re.search(
                r"""^__version__\b.*= *["']([^"']+)["']""",
                file.read_text(encoding="utf-8", errors="replace"),
                re.MULTILINE,
            )
            if found:
                return found[1]
    return None


def _is_development(version: str) -> bool:
    return ".dev" in version or "+" in version


def _no_package(directory: Path) -> str:
    root = directory.parent
    wanted = "--root takes a site-packages folder or a checkout's python folder"
    archive = next((path for path in (root, *root.parents) if path.is_file()), None)
    if archive is not None:
        return f"{archive}: is a file, and a zipped sglang cannot be edited; unpack it"
    if directory.is_dir():
        return (
            f"{root}: holds no sglang/srt, only what an uninstalled sglang left behind; "
            f"reinstall it; {wanted}"
        )
    if root.is_dir():
        return f"{root}: holds no sglang/srt; {wanted}"
    return f"{root}: no such folder; {wanted}"
