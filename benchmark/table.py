"""Print the results as markdown tables, so that no figure is copied by hand.

python benchmark/table.py dist/*.json
"""

import argparse
from pathlib import Path

from results import load, tokens

NONE = "–"


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def median(row, key, digits=0):
    return f"{row[key]['median']:.{digits}f}" if key in row else NONE


def steady(results):
    header = ["attention backend", "model", "batch", "side", "step, ms"]
    header += ["speed against the release", "same tokens"]
    rows = []
    for configuration, (model, batch), side, row in results.rows("steady_decode"):
        speed = f"{row['speed_vs_release']:.3f} ± {row['standard_error']:.3f}"
        speed = "1" if row["standard_error"] == 0 else speed
        same = "yes" if row["same_tokens"] else "no"
        step = f"{row['step_ms']:.3f}"
        rows.append([configuration, model, batch, side, step, speed, same])
    return header, rows


def traces(results):
    header = ["attention backend", "model", "batch", "side", "GPU busy, µs a step"]
    header += ["GPU idle, %", "gap between steps, µs", "host waits for the GPU, µs"]
    header += ["launches", "graph launches", "tensor operations"]
    rows = []
    for configuration, (model, batch), side, row in results.rows("step_trace"):
        launches = dict(row["launches"])
        graphs = launches.pop("GraphLaunch", 0)
        rows.append(
            [
                *(configuration, model, batch, side, f"{row['gpu_busy_us']:.0f}"),
                f"{100 * row['gpu_idle_share']:.0f}",
                f"{row['gpu_gap_us']:.0f}",
                f"{row['host_wait_us']:.0f}",
                *(f"{sum(launches.values()):.1f}", f"{graphs:.1f}"),
                f"{row['tensor_ops']:.0f}",
            ]
        )
    return header, rows


def cost(results):
    header = ["attention backend", "tokens", "batch", "side", "step on the GPU, ms"]
    header += ["released at, % of the step", "% of verify"]
    header += ["host before verify, µs", "after verify, µs"]
    header += ["staging on the host, µs", "on the GPU, µs"]
    rows = []
    for configuration, (seq_len, batch), side, row in results.rows("staging_cost"):
        fence = row["fence"]
        host_waited = " (with launch gaps)" if fence["queued_ahead"] < 1 else ""
        rows.append(
            [
                *(configuration, tokens(seq_len), batch, side),
                f"{fence['step_ms']:.3f}" + host_waited,
                f"{100 * fence['share_of_step']:.0f}",
                f"{100 * fence['share_of_verify']:.0f}",
                median(row, "before_verify_host_us"),
                median(row, "after_verify_host_us"),
                median(row, "stage_host_us"),
                median(row, "stage_gpu_us", 1),
            ]
        )
    return header, rows


def serving(results):
    columns = {
        "output_throughput": "output, tokens/s",
        "median_ttft_ms": "time to first token, ms",
        "median_tpot_ms": "time per output token, ms",
        "median_itl_ms": "inter-token latency, ms",
        "p99_itl_ms": "its p99, ms",
    }
    header = ["attention backend", "load, % of saturation", "side", *columns.values()]
    rows = []
    for configuration, share, side, row in results.rows("serving"):
        errors = row["standard_error"]
        figures = [
            f"{row[key]:.2f} ± {errors[key]:.2f}" if key in row else NONE
            for key in columns
        ]
        rows.append([configuration, f"{100 * share:.0f}", side, *figures])
    return header, rows


def environment_lines(results):
    for where, whats in sorted(results.environments.items()):
        yield f"{where}; {'; '.join(sorted(whats))}."


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    results = load(parser.parse_args().files)
    print("\n".join(environment_lines(results)))
    for table in (steady, traces, cost, serving):
        header, rows = table(results)
        if rows:
            print("\n" + markdown(header, rows))


if __name__ == "__main__":
    main()
