"""Acceptance length against CPU-seconds: where better data, signal and speed show.

    python benchmarks/budget.py runs/quickstart runs/hour --json budget.json --png budget.png

Reads the held-out measurements that runs of `spec train` left in `metrics.jsonl`. CPU-seconds are
those of all processes of a run, the generation of its data included. A run measures along its way
when `train.eval_every` says so; points before its end are taken at a learning rate that has not
come down yet, so a short run ends above the same moment of a long one.
"""

import argparse
import json
from pathlib import Path
from typing import Any


def read_points(run: Path) -> list[dict[str, Any]]:
    """The held-out measurements of a run, in order; ValueError where there is none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run}: no metrics.jsonl; expected the `out` directory of a run")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    points = [
        {
            "cpu_seconds": line["cpu_seconds"],
            "step": line["step"],
            "acceptance_length": line["acceptance_length"],
            "ci95": line["acceptance_length_ci95"],
        }
        for line in lines
        if "acceptance_length" in line
    ]
    if not points:
        raise ValueError(f"{run}: no held-out measurement yet; see train.eval_every")
    return points


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One line a run, intervals as whiskers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in runs.items():
        x = [point["cpu_seconds"] for point in points]
        y = [point["acceptance_length"] for point in points]
        low = [max(0.0, v - point["ci95"][0]) for v, point in zip(y, points, strict=True)]
        high = [max(0.0, point["ci95"][1] - v) for v, point in zip(y, points, strict=True)]
        axes.errorbar(x, y, yerr=[low, high], marker="o", capsize=3, label=name)
    axes.set_xlabel("CPU-seconds (data generation and training, all processes)")
    axes.set_ylabel("held-out acceptance length (tokens a round)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=144)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="`out` directories of finished runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    runs = {run.name: read_points(run) for run in args.runs}
    print("| run | CPU-seconds | acceptance length | 95 % interval |\n| --- | ---: | ---: | --- |")
    for name, points in runs.items():
        for p in points:
            low, high = p["ci95"]
            length = p["acceptance_length"]
            print(f"| {name} | {p['cpu_seconds']:.0f} | {length:.2f} | [{low:.2f}, {high:.2f}] |")
    if args.json:
        args.json.write_text(json.dumps(runs, indent=2) + "\n")
    if args.png:
        plot(runs, args.png)


if __name__ == "__main__":
    main()
