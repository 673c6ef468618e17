"""The JSON files of the benchmarks, merged by what was measured.

Figures compare sides only within one configuration: attention backend, draft steps,
draft graphs and page size.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sides import PATCHED, PEER, RELEASE

SIDE_ORDER = (RELEASE, PATCHED, PEER)


@dataclass(frozen=True, order=True)
class Configuration:
    backend: str
    steps: int
    combined: bool
    page_size: int

    def __str__(self) -> str:
        graphs = "" if self.combined else ", a graph a depth"
        page = "" if self.page_size == 1 else f", page size {self.page_size}"
        return f"{self.backend}, {self.steps} draft steps{graphs}{page}"


class Model(NamedTuple):
    layers: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}"


@dataclass
class Measured:
    """(case, side) -> row. A case is (model, batch size) for steady decoding and its
    traces, (tokens, batch size) for the cost of a step, and a share of saturation for
    serving."""

    steady_decode: dict = field(default_factory=dict)
    step_trace: dict = field(default_factory=dict)
    staging_cost: dict = field(default_factory=dict)
    serving: dict = field(default_factory=dict)


@dataclass
class Results:
    measured: dict[Configuration, Measured] = field(default_factory=dict)
    environments: dict[str, set[str]] = field(default_factory=dict)

    def tables(self, benchmark: str):
        """(configuration, its rows) where there are any, in a fixed order."""
        for configuration in sorted(self.measured):
            rows = getattr(self.measured[configuration], benchmark)
            if rows:
                yield configuration, rows

    def rows(self, benchmark: str):
        """(configuration, case, side, row) of all that was measured, in that order."""
        for configuration, measured in self.tables(benchmark):
            for case in cases_of(measured):
                for side in sides_of(measured):
                    if (case, side) in measured:
                        yield configuration, case, side, measured[case, side]


def cases_of(rows: dict) -> list:
    return sorted({case for case, _ in rows})


def sides_of(rows: dict) -> list[str]:
    names = {side for _, side in rows}
    return [s for s in SIDE_ORDER if s in names] + sorted(names - set(SIDE_ORDER))


def load(paths: list[Path]) -> Results:
    results = Results()
    for path in paths:
        content = json.loads(path.read_text())
        if content.get("benchmark") not in vars(Measured()):
            sys.exit(f"{path}: no result of a benchmark in this folder")
        _add(results, content, path)
    return results


def _add(results: Results, content: dict, path: Path) -> None:
    configuration = Configuration(
        content["resolved_attention_backend"] or content["attention_backend"],
        content["steps"],
        bool(content.get("combined", True)),
        content.get("page_size", 1),
    )
    measured = results.measured.setdefault(configuration, Measured())
    for benchmark, case, side, row in _rows(content):
        rows = getattr(measured, benchmark)
        if (case, side) in rows:
            print(f"{path}: replaces {case} of {side}", file=sys.stderr)
        rows[case, side] = row
    keys = ("gpu", "driver", "torch", "triton")
    values = [str(content["environment"][key]) for key in keys]
    where = "{}, driver {}, torch {}, triton {}".format(*values)
    boots = content["environment"]["boots"]
    what = f"{content['benchmark']}: boots of each side {boots}"
    results.environments.setdefault(where, set()).add(what)


def _rows(content: dict):
    benchmark = content["benchmark"]
    if benchmark == "staging_cost":
        for row in content["rows"]:
            yield benchmark, (row["seq_len"], row["batch"]), content["side"], row
    elif benchmark == "steady_decode":
        model = Model(**content["model"])
        for row in content["summary"]:
            same = content["same_tokens"][str(row["batch"])]
            row = {**row, "same_tokens": same}
            yield benchmark, (model, row["batch"]), row["side"], row
        for profile in content["profiles"]:
            if "trace" in profile:
                case = (model, profile["batch"])
                yield "step_trace", case, profile["side"], profile["trace"]
    else:
        for row in content["summary"]:
            yield benchmark, row["share"], row["side"], row


def tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
