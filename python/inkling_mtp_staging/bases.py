"""Known upstream releases, each named by the sha256 of the files that are edited."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Mapping

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


def identify_base(digests: Mapping[str, str]) -> Base | None:
    """Return the base whose digests are exactly `digests`, or None."""
    return next((base for base in BASES if base.sha256 == dict(digests)), None)
