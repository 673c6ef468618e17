"""Draw the results: a column for each attention backend, a row for each question.

    pip install '.[benchmark]'
    python benchmark/plot.py dist/*.json --out dist/benchmark.svg

Any subset of the files will do; what was not measured is left out.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from results import cases_of, load, sides_of, tokens
from sides import PATCHED, PEER, RELEASE
from table import environment_lines

COLORS = {RELEASE: "#8a8a8a", PATCHED: "#1f6fb4", PEER: "#d98a1f"}
SPARE_COLORS = ("#5a9e4b", "#a05195", "#b0413e")
GROUP_WIDTH = 0.8  # of the distance between two cases


class Bars:
    """Bars of one panel: cases along the x axis, sides next to each other."""

    def __init__(self, axes, rows, color_of):
        self.axes, self.rows, self.color_of = axes, rows, color_of
        self.cases, self.sides = cases_of(rows), sides_of(rows)
        self.width = GROUP_WIDTH / len(self.sides)

    def __iter__(self):
        """(x, row, color) of every bar that was measured."""
        for i, case in enumerate(self.cases):
            for j, side in enumerate(self.sides):
                if (case, side) in self.rows:
                    x = i + (j - (len(self.sides) - 1) / 2) * self.width
                    yield x, self.rows[case, side], self.color_of[side]

    def bar(self, x, height, color, bottom=0.0, error=None, **style):
        self.axes.bar(
            *(x, height, 0.92 * self.width),
            bottom=bottom,
            color=color,
            yerr=error,
            error_kw={"elinewidth": 1.2, "capsize": 2.5},
            **style,
        )

    def label(self, x, y, text):
        self.axes.annotate(
            *(text, (x, y)),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=6.5,
        )

    def finish(self, ylabel, labels, xlabel):
        self.axes.set_ylabel(ylabel)
        self.axes.set_xlabel(xlabel)
        self.axes.set_xticks(range(len(self.cases)), labels)
        self.axes.margins(y=0.25)  # room for labels and a legend
        self.axes.spines[["top", "right"]].set_visible(False)


def steady(axes, rows, color_of):
    # The release against itself is the line at zero.
    others = {key: row for key, row in rows.items() if key[1] != RELEASE}
    bars = Bars(axes, others or rows, color_of)
    for x, row, color in bars:
        gain = 100 * (row["speed_vs_release"] - 1)
        error = 100 * row["standard_error"]
        bars.bar(x, gain, color, error=error)
        bars.label(x, max(gain + error, 0), f"{gain:+.1f} ± {error:.1f}")
    axes.axhline(0, color=COLORS[RELEASE], linewidth=1.5)
    labels = [
        f"{batch}\n{model.layers} layers\nhidden {model.hidden}"
        for model, batch in bars.cases
    ]
    bars.finish("speed against the release, %", labels, "batch, model")


def cost_labels(bars):
    lengths = {seq_len for seq_len, _ in bars.cases}
    if len(lengths) == 1:
        return [batch for _, batch in bars.cases], f"batch ({lengths.pop()} tokens)"
    labels = [f"{batch}\n{tokens(seq_len)}" for seq_len, batch in bars.cases]
    return labels, "batch, and tokens of a request"


def release_time(axes, rows, color_of):
    bars = Bars(axes, rows, color_of)
    for x, row, color in bars:
        fence = row["fence"]
        percent = 100 / fence["step_ms"]
        verify_start = fence["released_ms"] - fence["released_in_verify_ms"]
        bars.bar(x, 100, color, alpha=0.3)
        bars.bar(
            *(x, percent * fence["verify_ms"], color),
            bottom=percent * verify_start,
            alpha=0.75,
        )
        half = bars.width / 2
        released = percent * fence["released_ms"]
        axes.plot(
            *([x - half, x + half], [released] * 2),
            color="#c0182b",
            linewidth=2.5,
            solid_capstyle="butt",
        )
        bars.label(x, max(100, released), f"{fence['step_ms']:.3g}")
    bars.finish("time in the step, %", *cost_labels(bars))


def host_cost(axes, rows, color_of):
    bars = Bars(axes, rows, color_of)
    for x, row, color in bars:
        before, verify, after = (
            row[f"{part}_host_us"]["median"] / 1000
            for part in ("before_verify", "verify", "after_verify")
        )
        low, high = (q / 1000 for q in row["step_host_us"]["quartiles"])
        total = before + verify + after
        bars.bar(x, before, color)
        bars.bar(x, verify, "white", bottom=before, edgecolor=color, hatch="///")
        error = [[max(total - low, 0)], [max(high - total, 0)]]
        bars.bar(x, after, color, bottom=before + verify, alpha=0.45, error=error)
    bars.finish("host time of a step, ms", *cost_labels(bars))


def serving(axes, rows, color_of):
    bars = Bars(axes, rows, color_of)
    for x, row, color in bars:
        middle, error = row["median_tpot_ms"], row["standard_error"]["median_tpot_ms"]
        bars.bar(x, middle, color, error=error)
        bars.label(x, middle + error, f"{middle:.2f}")
    labels = [f"{100 * case:.0f}%" for case in bars.cases]
    bars.finish("time per output token, ms", labels, "load, share of saturation")


def neutral(color="#666666", **style):
    return Patch(facecolor=color, **style)


# benchmark, what draws it, heading, what its marks mean
PANELS = (
    (
        "steady_decode",
        steady,
        "Steady decoding: speed gained over the release (bar: standard error)",
        (),
    ),
    (
        "staging_cost",
        release_time,
        "When a step releases the scheduler (figure: GPU ms of the step)",
        (
            (neutral(alpha=0.3), "step"),
            (neutral(alpha=0.75), "verify"),
            (Line2D([], [], color="#c0182b", linewidth=2.5), "scheduler released"),
        ),
    ),
    (
        "staging_cost",
        host_cost,
        "Host time of a step by part (bar: quartiles of the whole)",
        (
            (neutral(), "before verify"),
            (neutral("white", edgecolor="#666666", hatch="///"), "verify"),
            (neutral(alpha=0.45), "after verify"),
        ),
    ),
    (
        "serving",
        serving,
        "Serving under churn: median time per output token (bar: standard error)",
        (),
    ),
)


def colors(results):
    names = [
        side
        for benchmark in ("steady_decode", "staging_cost", "serving")
        for _, rows in results.tables(benchmark)
        for side in sides_of(rows)
    ]
    names = [n for n in COLORS if n in names] + sorted(set(names) - set(COLORS))
    spare = iter(SPARE_COLORS * len(names))
    return {name: COLORS.get(name) or next(spare) for name in names}


def draw(results):
    configurations = sorted(results.measured)
    panels = [p for p in PANELS if any(results.tables(p[0]))]
    color_of = colors(results)
    width, height = 6.4 * len(configurations), 3.3 * len(panels) + 0.9
    figure, grid = plt.subplots(
        *(len(panels), len(configurations)),
        figsize=(max(width, 7.5), height),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for axes_row, (benchmark, panel, heading, marks) in zip(grid, panels):
        for axes, configuration in zip(axes_row, configurations):
            rows = getattr(results.measured[configuration], benchmark)
            if not rows:
                axes.axis("off")
                axes.text(0.5, 0.5, "not measured", ha="center", color="#888888")
                continue
            panel(axes, rows, color_of)
            axes.set_title(f"{heading}\n{configuration}", fontsize=9, loc="left")
            axes.yaxis.set_tick_params(labelleft=True)
            if marks:
                handles, labels = zip(*marks)
                axes.legend(handles, labels, fontsize=7, frameon=False, ncols=3)
    figure.legend(
        [Patch(color=color) for color in color_of.values()],
        list(color_of),
        loc="outside upper center",
        ncols=len(color_of),
        frameon=False,
    )
    figure.supxlabel("\n".join(environment_lines(results)), fontsize=6.5)
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path, help=".svg or .png")
    args = parser.parse_args()
    # Text stays text and ids do not change, so that figures can be compared.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "benchmark"})
    metadata = {"Date": None} if args.out.suffix == ".svg" else None
    draw(load(args.files)).savefig(args.out, dpi=130, metadata=metadata)


if __name__ == "__main__":
    main()
