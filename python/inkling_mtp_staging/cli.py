"""`inkling-mtp-staging`: apply, revert, print or check the edits of an SGLang install."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from inkling_mtp_staging import ToolError, __version__
from inkling_mtp_staging.tree import Package, find_package

_PROGRAM = "inkling-mtp-staging"
_OK, _NOT_APPLIED, _ERROR = 0, 1, 2
_AFTER_OS_ERROR = (
    "no file is left changed, or the next command undoes it: mend this, then run again"
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 (`status`: not applied), 2."""
    options = _parser().parse_args(arguments)
    try:
        package = find_package(options.root)
        return options.command(package, options)
    except ToolError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of the output left; keep the interpreter's exit flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ERROR
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}; {_AFTER_OS_ERROR}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="a site-packages folder or a checkout's python folder "
        "(default: where the installed sglang is)",
    )
    for name, command, description in (
        ("apply", _apply, "put the edited files in place; safe to repeat"),
        ("revert", _revert, "restore the released files, byte for byte"),
        ("diff", _diff, "print the edits as a patch for an upstream checkout"),
        ("status", _status, "tell the state of each file; exit 0 if all are applied"),
    ):
        subparser = commands.add_parser(name, parents=[common], help=description)
        subparser.set_defaults(command=command)
        if command is _status:
            subparser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _apply(package: Package, options: argparse.Namespace) -> int:
    from inkling_mtp_staging.install import apply

    return _tell(package, apply(package))


def _revert(package: Package, options: argparse.Namespace) -> int:
    from inkling_mtp_staging.install import revert

    return _tell(package, revert(package))


def _diff(package: Package, options: argparse.Namespace) -> int:
    from inkling_mtp_staging.compose import compose_all
    from inkling_mtp_staging.diff import unified_diff
    from inkling_mtp_staging.install import pristine_sources

    pristine = pristine_sources(package.directory.parent)
    patch = unified_diff(pristine, compose_all(pristine))
    print(f"{_PROGRAM}: {package.directory}", file=sys.stderr)
    sys.stdout.write(patch)
    sys.stdout.flush()
    return _OK


def _status(package: Package, options: argparse.Namespace) -> int:
    from inkling_mtp_staging.install import status

    found = status(package)
    if options.json:
        document = {
            "directory": str(package.directory),
            "base": found.base,
            "applied": found.is_applied,
            "files": found.files,
            "notes": found.notes,
        }
        print(json.dumps(document, indent=2))
    else:
        print(f"sglang {found.base} in {package.directory}")
        for path, state in found.files.items():
            print(f"{state}: {path}")
        for note in found.notes:
            print(f"note: {note}")
    return _OK if found.is_applied else _NOT_APPLIED


def _tell(package: Package, sentences: list[str]) -> int:
    for sentence in sentences:
        print(f"{package.directory}: {sentence}")
    return _OK


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"{_PROGRAM}: error: {line}", file=sys.stderr)
    return _ERROR


if __name__ == "__main__":
    sys.exit(main())
