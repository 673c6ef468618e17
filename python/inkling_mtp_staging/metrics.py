"""What a running server counted: steps staged, steps not staged and why, fence chosen."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from typing import Mapping

from inkling_mtp_staging import ToolError

COUNTER = "sglang:mtp_draft_extend_steps_total"
_TIMEOUT_S = 5
_SAMPLE = re.compile(
    re.escape(COUNTER) + r"(?:\{(?P<labels>.*)\})?\s+(?P<value>\d+(\.\d*)?(e\+?\d+)?)\b"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\n": "\n", r"\"": '"', r"\\": "\\"}


class NotCounted(Exception):
    """The server answers and has no such counter; the text says what that may mean."""


@dataclass(frozen=True)
class Steps:
    """Draft-extend steps by the fence that ended them, and by why they weren't staged.

    The reason of a staged step is "".
    """

    by_fence: Mapping[str, int]
    by_reason: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_reason.values())

    @property
    def staged(self) -> int:
        return self.by_reason.get("", 0)

    @property
    def share_staged(self) -> float:
        return self.staged / self.total


def read_steps(url: str) -> Steps:
    """Return the steps that the server at `url` counted, over all its ranks.

    Raises NotCounted if it counted none, ToolError if it can't be asked.
    """
    steps = steps_in(_fetch(url))
    if not steps.total:
        raise NotCounted(
            f"{url}: no counter {COUNTER}: the server is unpatched, has run no decode "
            "step yet, or runs without --enable-metrics"
        )
    return steps


def steps_in(exposition: str) -> Steps:
    """Return the steps that a Prometheus text counts; labels of other names add up."""
    by_fence: Counter[str] = Counter()
    by_reason: Counter[str] = Counter()
    for line in exposition.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        labels = {
            name: re.sub(r'\\[n"\\]', lambda found: _ESCAPES[found[0]], value)
            for name, value in _LABEL.findall(sample["labels"] or "")
        }
        count = int(float(sample["value"]))
        by_fence[labels.get("fence", "")] += count
        by_reason[labels.get("reason", "")] += count
    return Steps(by_fence, by_reason)


def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ToolError(f"{url}: no server's address; --url takes http://host:port")
    # A server is asked directly: a proxy for the outside does not know it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/metrics", timeout=_TIMEOUT_S) as answer:
            return answer.read().decode("utf-8", errors="replace")
    except urllib.error.HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            return ""
        reason: object = f"status {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error or type(error).__name__
    line = f"{url}: no answer ({reason}); is an SGLang server listening there?"
    raise ToolError(" ".join(line.split()))
