"""The upstream releases that the edits are for, and why they are for no other.

A release that the edits are for is named by the sha256 of the edited files. That every
anchor matches is not enough for a release to be listed: the names that the edits read
must exist there, with the same meaning.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

BASE_ATTN_BACKEND = "srt/layers/attention/base_attn_backend.py"
FLASHATTENTION_BACKEND = "srt/layers/attention/flashattention_backend.py"
INKLING_SCONV_BACKEND = "srt/layers/attention/linear/inkling_sconv_backend.py"
DRAFT_EXTEND_RUNNER = (
    "srt/speculative/multi_layer_eagle_draft_extend_cuda_graph_runner.py"
)
EAGLE_WORKER = "srt/speculative/multi_layer_eagle_worker_v2.py"
TRITON_BACKEND = "srt/layers/attention/triton_backend.py"

# What upstream's own change edits, and what is edited unless told otherwise.
UPSTREAM_FIVE = (
    BASE_ATTN_BACKEND,
    FLASHATTENTION_BACKEND,
    INKLING_SCONV_BACKEND,
    DRAFT_EXTEND_RUNNER,
    EAGLE_WORKER,
)
EDITED_PATHS = (*UPSTREAM_FIVE, TRITON_BACKEND)
EDIT_SETS = (EDITED_PATHS, UPSTREAM_FIVE)
ONLY_UPSTREAM_FIVE = "--only-upstream-five"  # the option that chooses the second


@dataclass(frozen=True)
class Base:
    """An upstream release and the sha256 of its edited files, by path below `sglang`."""

    version: str
    sha256: Mapping[str, str]


BASES = (
    Base(
        version="0.5.19",
        sha256={
            BASE_ATTN_BACKEND: (
                "ff8a2b28549212dcb357e3636a2f78293eef5a6cdd3ab229fff0513ac60a89e0"
            ),
            FLASHATTENTION_BACKEND: (
                "bd6afb54f832d056f37ff018f8140ce1f756293fd90b73e879fa686f82ea513a"
            ),
            INKLING_SCONV_BACKEND: (
                "6a6ef90cb5f5ceb6d032016ebc1e8887fc85b0f7855c5f6493ddd0aa6d7d9ab6"
            ),
            DRAFT_EXTEND_RUNNER: (
                "5a09aaf437126cdad9001aaa763d2aa240f654e95860443c083700e91dee0645"
            ),
            EAGLE_WORKER: (
                "cba2eb9875ba2430c1bbb7d095a47f9aa301d0221a046e5814386bd480b30410"
            ),
            TRITON_BACKEND: (
                "16e2572d15597175e136a04eaee7000d08da0b4fbc3380f8badb8f8250646f09"
            ),
        },
    ),
)


@dataclass(frozen=True)
class OtherReleases:
    """Upstream releases that the edits are not for: why not, and what to do instead.

    `differences` are sentences; one that concerns a single module starts with its path
    below `sglang`.
    """

    versions: SpecifierSet
    differences: tuple[str, ...]
    advice: str


_USE_A_BASE = f"use sglang {BASES[-1].version}"

OTHER_RELEASES = (
    OtherReleases(
        SpecifierSet("<0.5.16"),
        differences=("the release has no Inkling model",),
        advice=_USE_A_BASE,
    ),
    OtherReleases(
        SpecifierSet(">=0.5.16,<0.5.18"),
        differences=(
            "the target's verify graph has no marker behind its mapping reads, so the "
            "scheduler has nothing to wait for short of the whole step",
            f"{EAGLE_WORKER}: last_shared_read_runner and shared_read_done_event have "
            "other names, and no step of multi-layer EAGLE publishes an event",
            f"{INKLING_SCONV_BACKEND}: is not in 0.5.16",
        ),
        advice=_USE_A_BASE,
    ),
    OtherReleases(
        SpecifierSet(">=0.5.18,<0.5.19"),
        differences=(
            f"{BASE_ATTN_BACKEND}: only wrappers have attn_backend_list, which the "
            "edits read from every backend",
            f"{FLASHATTENTION_BACKEND}: has no kv_index_translator, which tells whether "
            "page tables are translated; _unified_dense is its nearest relative",
            f"{EAGLE_WORKER}: a batch's can_run_decode_cuda_graph is called "
            "can_run_dp_cuda_graph",
            "every anchor matches, but no test of the edits has run there",
        ),
        advice=_USE_A_BASE,
    ),
    OtherReleases(
        SpecifierSet(">=0.5.20"),
        differences=(
            "since 0.5.20 upstream stages the same reads itself, and nothing is left "
            "for these edits to do",
            "what differs: in 0.5.20 upstream's staging costs 0.2 to 0.5 ms of host "
            "time a step (one H200); these edits take two launches a step, one kernel "
            "and one graph for all draft depths",
        ),
        advice=f"uninstall this package, or {_USE_A_BASE} with the edits",
    ),
)


def other_releases(version: str) -> OtherReleases | None:
    """Return why the edits are not for that release, None if nothing is known of it."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    return next((other for other in OTHER_RELEASES if parsed in other.versions), None)


def sha256(content: bytes) -> str:
    """Return the hexadecimal sha256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def base_of_version(version: str) -> Base | None:
    """Return the known base of that release, or None."""
    return next((base for base in BASES if base.version == version), None)


def nearest_base(digests: Mapping[str, str]) -> Base:
    """Return the known base that shares most of `digests` (path -> sha256)."""
    return max(
        BASES,
        key=lambda base: sum(
            base.sha256[path] == digest for path, digest in digests.items()
        ),
    )
