"""Make the n-th thing that a run does to the disk go wrong.

Run as a program, it kills itself there, as SIGKILL does, with half of a write written:

    python faults.py NUMBER COMPOSED.json ARGUMENTS...

`COMPOSED.json` holds the composed sources: composing them touches no disk and takes long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

from inkling_mtp_staging import cli

_CALLS = ("open", "fchmod", "fsync", "replace", "unlink")


class Disk:
    """Counts what is done to the disk and calls `fault` instead, where it says so.

    `fault(number, call, complete)` is told the number from 0, the call's name, and how
    to carry half of it out; it returns if the call shall go on.
    """

    def __init__(self, fault: Callable[[int, str, Callable[[], None]], None]):
        self.calls: list[str] = []
        self._fault = fault

    def _meet(self, call: str, half: Callable[[], None] = lambda: None) -> None:
        self.calls.append(call)
        self._fault(len(self.calls) - 1, call, half)

    @contextmanager
    def patched(self) -> Iterator[Disk]:
        real = {name: getattr(os, name) for name in (*_CALLS, "fdopen")}

        def counted(name):
            def call(*arguments, **options):
                is_reading = name == "open" and not arguments[1] & os.O_CREAT
                if not is_reading:
                    self._meet(name)
                if name != "fsync":  # slow, and of no effect on what a test sees
                    return real[name](*arguments, **options)

            return call

        def fdopen(*arguments):
            return _Stream(real["fdopen"](*arguments), self._meet)

        for name in _CALLS:
            setattr(os, name, counted(name))
        os.fdopen = fdopen
        try:
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)


class _Stream:
    def __init__(self, stream, meet):
        self._stream = stream
        self._meet = meet

    def __enter__(self):
        self._stream.__enter__()
        return self

    def __exit__(self, *exception):
        return self._stream.__exit__(*exception)

    def flush(self):
        self._stream.flush()

    def write(self, content: bytes) -> int:
        def half() -> None:
            self._stream.write(content[: len(content) // 2])
            self._stream.flush()

        self._meet("write", half)
        return self._stream.write(content)


def main() -> int:
    number, composed, *arguments = sys.argv[1:]
    sources = json.loads(Path(composed).read_text(encoding="utf-8"))
    compose = types.ModuleType("inkling_mtp_staging.compose")
    compose.compose_all = lambda pristine: {path: sources[path] for path in pristine}
    sys.modules[compose.__name__] = compose

    def kill(at: int, call: str, half: Callable[[], None]) -> None:
        if at == int(number):
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    with Disk(kill).patched():
        return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
