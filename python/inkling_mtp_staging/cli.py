"""`inkling-mtp-staging`: apply, revert, print or check the edits of an SGLang install."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from inkling_mtp_staging import ToolError, __version__, completion
from inkling_mtp_staging.bases import (
    BASES,
    EDITED_PATHS,
    ONLY_UPSTREAM_FIVE,
    TRITON_BACKEND,
    UPSTREAM_FIVE,
)
from inkling_mtp_staging.tree import Package, find_package, importable_directory

_PROGRAM = "inkling-mtp-staging"
_OK, _NOT_APPLIED, _ERROR = 0, 1, 2
_RELEASES = ", ".join(base.version for base in BASES)
_ROOT = "--root"
_AFTER_OS_ERROR = (
    "mend this and run again: a command first undoes what another left half done"
)
_FIRST_QUESTIONS = f"""\
what it edits: these files of sglang {_RELEASES}, all or none of them,
{"".join(f"  sglang/{path}{chr(10)}" for path in EDITED_PATHS)}\
  (the last one not with {ONLY_UPSTREAM_FIVE}) and its own state file beside them.
  Nothing else is written, no link is followed out of the package, sglang is not
  imported, and only `status --url` uses a network.
is it reversible: yes. `revert` restores the files byte for byte, also after a crash
  or a full disk in the middle. Revert before you uninstall this package.
which sglang: the one that this Python would import, or the one in {_ROOT} DIR (a
  site-packages folder or a checkout's python folder). Every command names it.
is it safe to repeat: yes. Two runs at once wait for each other.
exit status: 0 done, or applied, or steps are staged; 1 `status`: not so; 2 an error,
  a line each, and nothing written.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 (`status`: not applied), 2.

    Raises SystemExit, with the status 0 or 2, after --help, --version and arguments
    that it does not know.
    """
    options = _parser().parse_args(arguments)
    # A folder's name may be no text that the terminal's encoding has.
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return options.command(options)
    except ToolError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of the output left; keep the interpreter's exit flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ERROR
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}; {_AFTER_OS_ERROR}")
    except KeyboardInterrupt:
        return _fail(f"interrupted; {_AFTER_OS_ERROR}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        line = " ".join(message.split())
        self.exit(_ERROR, f"{_PROGRAM}: error: {line}; see `{self.prog} --help`\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description=__doc__,
        epilog=_FIRST_QUESTIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=__version__, help="print the version"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="COMMAND")
    for name, command, description in (
        ("apply", _apply, "put the edited files in place; safe to repeat"),
        ("revert", _revert, "restore the released files, byte for byte"),
        ("diff", _diff, "print the edits as a patch for an upstream checkout"),
        ("status", _status, "tell the state of each file; exit 0 if all are applied"),
    ):
        subparser = commands.add_parser(
            name, help=description, description=description, epilog=_EPILOGS[command]
        )
        subparser.set_defaults(command=command)
        subparser.add_argument(
            _ROOT,
            type=Path,
            metavar="DIR",
            help="a site-packages folder or a checkout's python folder "
            "(default: where the sglang is that this Python would import)",
        )
        if command is not _revert:
            subparser.add_argument(
                ONLY_UPSTREAM_FIVE,
                action="store_const",
                const=UPSTREAM_FIVE,
                dest="paths",
                help="leave out what upstream's own change does not edit, "
                f"{TRITON_BACKEND}",
            )
        subparser.add_argument("--json", action="store_true", help="print JSON")
        if command is _status:
            subparser.add_argument(
                "--url",
                metavar="http://HOST:PORT",
                help="ask a running server instead: steps staged, by fence, by reason",
            )
    description = "print a script that completes this command's arguments in a shell"
    subparser = commands.add_parser(
        "completion",
        help=description,
        description=description,
        epilog=_EPILOGS[_completion],
    )
    subparser.set_defaults(command=_completion)
    subparser.add_argument("shell", choices=tuple(completion.SHELLS))
    return parser


def _apply(options: argparse.Namespace) -> int:
    from inkling_mtp_staging.install import apply

    package = find_package(options.root)
    done = apply(package, options.paths or EDITED_PATHS)
    return _tell(package, done, options, is_applied=True)


def _revert(options: argparse.Namespace) -> int:
    from inkling_mtp_staging.install import revert

    package = find_package(options.root)
    return _tell(package, revert(package), options, is_applied=False)


def _diff(options: argparse.Namespace) -> int:
    from inkling_mtp_staging.compose import compose_all
    from inkling_mtp_staging.diff import unified_diff
    from inkling_mtp_staging.install import pristine_sources

    package = find_package(options.root)
    pristine = pristine_sources(package.directory.parent, options.paths or EDITED_PATHS)
    patch = unified_diff(pristine, compose_all(pristine))
    if options.json:
        _print_json({"directory": str(package.directory), "patch": patch})
        return _OK
    print(f"{_PROGRAM}: patch for {package.directory}", file=sys.stderr)
    # As bytes: the sources are UTF-8, whatever the terminal is.
    sys.stdout.buffer.write(patch.encode("utf-8"))
    sys.stdout.buffer.flush()
    return _OK


def _status(options: argparse.Namespace) -> int:
    if options.url is not None:
        return _server_status(options)
    from inkling_mtp_staging.install import status

    package = find_package(options.root)
    found = status(package, options.paths)
    notes = [*found.notes, *_other_package(package)]
    if options.json:
        _print_json(
            {
                "directory": str(package.directory),
                "base": found.base,
                "applied": found.is_applied,
                "files": found.files,
                "notes": notes,
            }
        )
    else:
        summary = "applied" if found.is_applied else "not applied"
        print(f"sglang {found.base} in {package.directory}: {summary}")
        for path, state in found.files.items():
            print(f"{state}: {path}")
        for note in notes:
            print(f"note: {note}")
    return _OK if found.is_applied else _NOT_APPLIED


def _server_status(options: argparse.Namespace) -> int:
    from inkling_mtp_staging.metrics import NotCounted, read_steps

    if options.root is not None:
        raise ToolError(f"--url asks a server and {_ROOT} names a folder; give one")
    if options.paths is not None:
        raise ToolError(f"--url asks a server, which has no {ONLY_UPSTREAM_FIVE}")
    try:
        steps = read_steps(options.url)
    except NotCounted as error:
        if options.json:
            _print_json({"url": options.url, "steps": 0, "note": str(error)})
        else:
            print(error)
        return _NOT_APPLIED
    reasons = {reason: n for reason, n in steps.by_reason.items() if reason}
    if options.json:
        _print_json(
            {
                "url": options.url,
                "steps": steps.total,
                "staged": steps.staged,
                "share_staged": steps.share_staged,
                "fences": steps.by_fence,
                "reasons": reasons,
            }
        )
    else:
        print(f"draft-extend steps of {options.url}, over all ranks")
        rows = [("all", steps.total), ("staged before verify", steps.staged)]
        rows += [(f"fence {name or '(none)'}", n) for name, n in _most(steps.by_fence)]
        rows += [(f"not staged: {reason}", n) for reason, n in _most(reasons)]
        width = max(len(name) for name, _ in rows)
        for name, count in rows:
            print(f"{name:{width}}  {count:>12}  {count / steps.total:>6.1%}")
    return _OK if steps.staged else _NOT_APPLIED


def _completion(options: argparse.Namespace) -> int:
    print(completion.script(options.shell, _parser(), takes_folder=_ROOT), end="")
    return _OK


_EPILOGS = {
    _apply: "All files change or none. An unknown release, a file that someone else "
    f"edited or an edit that does not fit is refused. {ONLY_UPSTREAM_FIVE} restores "
    "the file that an earlier run without it edited.",
    _revert: "The originals come from the state file that apply left in the package.",
    _diff: "Writes nothing. In a checkout of upstream: git apply PATCH.",
    _status: f"Without {ONLY_UPSTREAM_FIVE}: the files that apply was told to edit. "
    "Exit status: 0 all applied, 1 not, 2 error; with --url 0 steps are staged, 1 none is "
    "or the server counts none, 2 no answer.",
    _completion: f'bash: eval "$({_PROGRAM} completion bash)" in ~/.bashrc; zsh: the '
    f"same with zsh, after compinit; fish: {_PROGRAM} completion fish | source",
}


def _most(counts):
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _other_package(package: Package) -> list[str]:
    """Say so if a server that this Python starts would not run `package`."""
    found = importable_directory()
    if found is None or found.resolve() == package.directory:
        return []
    return [
        f"this interpreter would import sglang from {found}, not from "
        f"{package.directory}"
    ]


def _tell(
    package: Package,
    sentences: list[str],
    options: argparse.Namespace,
    *,
    is_applied: bool,
) -> int:
    notes = _other_package(package) if is_applied else []
    if options.json:
        _print_json(
            {
                "directory": str(package.directory),
                "applied": is_applied,
                "done": sentences,
                "notes": notes,
            }
        )
    else:
        for sentence in sentences:
            print(f"{package.directory}: {sentence}")
        for note in notes:
            print(f"note: {note}")
    return _OK


def _print_json(document: dict) -> None:
    print(json.dumps(document, indent=2))


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"{_PROGRAM}: error: {line}", file=sys.stderr)
    return _ERROR


if __name__ == "__main__":
    sys.exit(main())
