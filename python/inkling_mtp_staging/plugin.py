"""SGLang plugin: one log line at server start that tells whether the edits are applied."""

from __future__ import annotations

import logging
import multiprocessing

from inkling_mtp_staging.bases import EDITED_PATHS, TRITON_BACKEND, sha256
from inkling_mtp_staging.state import APPLIED, load_state, undone
from inkling_mtp_staging.tree import (
    UnknownRelease,
    base_of,
    check_release,
    find_package,
    read_edited_files,
)

logger = logging.getLogger(__name__)
_HOW = "run `inkling-mtp-staging apply`"


def report() -> None:
    """Log the state of the installed package. Changes nothing and never raises."""
    # SGLang loads plugins in every worker process; the launcher's line is enough.
    if multiprocessing.parent_process() is not None:
        return
    try:
        line = _describe()
    except Exception as error:
        line = f"state unknown ({error})"
    # SGLang loads plugins before it configures logging, when INFO is still dropped.
    level = logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING
    logger.log(level, "Inkling MTP staging edits: %s", " ".join(line.split()))


def _describe() -> str:
    package = find_package()
    state = load_state(package)
    if state is None:
        try:
            check_release(package)
        except UnknownRelease as error:
            return f"not for sglang {error.version}: {'; '.join(error.reasons)}"
    paths = EDITED_PATHS if state is None else tuple(state.files)
    contents = read_edited_files(package, paths)
    since = ""
    if state is not None and state.is_stale(contents):
        since = f", reinstalled after apply to {state.base}"
    try:
        base = base_of(package, undone(state, contents))
    except UnknownRelease as error:
        return f"not applied to sglang {error.version}{since} ({error})"
    digests = {path: sha256(content) for path, content in contents.items()}
    if digests == {path: base.sha256[path] for path in paths}:
        return f"not applied to sglang {base.version}{since}; {_HOW}"
    if state is not None and state.phase == APPLIED:
        composed = {path: file.composed_sha256 for path, file in state.files.items()}
        if digests == composed:
            left_out = "" if TRITON_BACKEND in paths else f", without {TRITON_BACKEND}"
            return f"applied to sglang {base.version}{left_out}"
    return f"not applied, and sglang {base.version}'s files are modified{since}; {_HOW}"
