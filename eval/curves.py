"""Plots of a calibration and of a plan. Only what writes them imports the plot's library, here."""

from __future__ import annotations

import math
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MIN_COUNT = 10  # rounds a bin needs to be drawn: a share of fewer says little


def plot_reliability(calibration: dict[str, Any]) -> Figure:
    """Predicted survival against the share that survived, before and after, a line a slot."""
    figure, panels = _figure(2)
    slots = calibration["num_draft_tokens"]
    colors = colormaps["viridis"]
    for axes, when in zip(panels, ("before", "after"), strict=True):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
        for k, bins in enumerate(calibration[f"reliability_{when}"]):
            points = [
                (predicted, observed)
                for n, predicted, observed in zip(
                    bins["count"], bins["predicted"], bins["observed"], strict=True
                )
                if n >= MIN_COUNT
            ]
            label = f"{k + 1}: {calibration[f'ece_{when}'][k]:.3f}"
            color = colors(0.9 * k / max(1, slots - 1))
            xs, ys = zip(*points, strict=True) if points else ((), ())
            axes.plot(xs, ys, marker="o", markersize=3, linewidth=1.2, color=color, label=label)
        axes.set_title(f"{when} calibration", fontsize=11)
        axes.set_xlabel("predicted survival")
        axes.set_ylabel("share that survived")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.legend(title="slot: calibration error", fontsize=8, title_fontsize=8)
    heldout = calibration["heldout"]
    figure.suptitle(
        f"{calibration['draft']} on {calibration['target']}: {heldout['num_rounds']} rounds of "
        f"{heldout['num_requests']} held-out requests, bins of at least {MIN_COUNT} rounds",
        fontsize=11,
    )
    return figure


def plot_pruning(calibration: dict[str, Any]) -> Figure:
    """Acceptance rate of verified tokens against tokens a step, a point a threshold."""
    figure, (axes,) = _figure(1)
    rows = calibration["pruning"]
    lengths = [row["acceptance_length"] for row in rows]
    rates = [math.nan if row["acceptance_rate"] is None else row["acceptance_rate"] for row in rows]
    axes.plot(lengths, rates, marker="o", color="C0")
    for row, length, rate in zip(rows, lengths, rates, strict=True):
        if not math.isnan(rate):
            axes.annotate(
                f"{row['threshold']:.1f}",
                (length, rate),
                textcoords="offset points",
                xytext=(5, 4),
                fontsize=8,
            )
    axes.set_xlabel("tokens a step (bonus token included)")
    axes.set_ylabel("acceptance rate of verified tokens")
    axes.set_ylim(0, 1.06)
    axes.set_title(
        f"{calibration['draft']} on {calibration['target']}: verified while the predicted\n"
        "survival is at least the threshold beside each point",
        fontsize=10,
    )
    return figure


def plot_plan(plan: dict[str, Any]) -> Figure:
    """Throughput and verified tokens by concurrency, a line a policy."""
    figure, panels = _figure(2)
    for axes, key, title in zip(
        panels,
        ("tokens_per_second", "verified_per_step"),
        ("expected tokens/s", "drafted tokens verified a step"),
        strict=True,
    ):
        for i, (name, figures) in enumerate(plan["policies"].items()):
            label = f"length {name}" if name.isdigit() else name
            line = "-" if name == "scheduler" else "--"
            axes.plot(
                plan["concurrency"], figures[key], line, marker="o", markersize=4, label=label
            )
            axes.lines[-1].set_color(f"C{i}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(plan["concurrency"], [str(n) for n in plan["concurrency"]])
        axes.minorticks_off()
        axes.set_xlabel("concurrent requests")
        axes.set_title(title, fontsize=11)
        axes.legend(fontsize=9)
    # No verified token at all is a choice too: linear near zero, logarithmic above.
    panels[1].set_yscale("symlog", linthresh=1)
    panels[1].set_ylim(bottom=-0.1)
    figure.suptitle(
        f"{plan['draft']} on {plan['target']}; steps profiled up to "
        f"{plan['max_profiled_tokens']} tokens, longer ones extrapolated",
        fontsize=11,
    )
    return figure


def _figure(num_panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5.5 * num_panels, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(1, num_panels, i + 1) for i in range(num_panels)]
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels
