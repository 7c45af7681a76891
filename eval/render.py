"""A report as text and as a plot.

`report.json` is the record; this is what people read. Only `write_report` imports the plot's
library, through here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MAX_LINES = 8  # groups in the plot: more cannot be told apart
COLUMNS = (
    "acceptance length",
    "acceptance rate",
    "tokens/s",
    "plain tokens/s",
    "speedup",
    "equal to plain",
)

Report = dict[str, Any]


def markdown(report: Report) -> str:
    """The report as text: one row a group, one row a position, one row a compared drafter."""
    skipped = sum(report["num_skipped"].values())
    lines = [
        f"# {report['draft']} on {report['target']}",
        "",
        f"Engine {report['engine']}, algorithm {report['algorithm']}, "
        f"{report['num_draft_tokens']} draft tokens a round{_verified(report)}, "
        f"{sampling_text(report)}, {report['dtype']}, {report['device']} with "
        f"{report['num_threads']} thread(s), batch size {report['batch_size']}, at most "
        f"{report['max_new_tokens']} new tokens. Acceptance length counts the bonus token; 95 % "
        "intervals by "
        f"bootstrap over requests. Prompts skipped: {skipped}"
        + "".join(f" ({n} {reason})" for reason, n in report["num_skipped"].items())
        + ".",
        "",
        *table(
            ("group", "requests", "rounds", "tokens", *COLUMNS),
            [[name, *_row(group)] for name, group in report["groups"].items()],
        ),
    ]
    if report.get("comparisons"):
        compared = [report, *report["comparisons"]]
        lines += ["", "## Compared on the same prompts", ""]
        lines += table(
            ("drafter", "draft tokens", *COLUMNS),
            [
                [r["draft"], str(r["num_draft_tokens"]), *_row(r["groups"]["all"])[3:]]
                for r in compared
            ],
        )
    for title, key in (
        ("Survival: rounds that kept at least k tokens", "survival_at"),
        ("Conditional acceptance at k, given k - 1 kept", "conditional_acceptance_at"),
    ):
        positions = [str(k) for k in range(1, report["num_draft_tokens"] + 1)]
        rows = [[n, *map(share, group[key])] for n, group in report["groups"].items()]
        lines += ["", f"## {title}", "", *table(("group", *positions), rows)]
    return "\n".join([*lines, "", "![Acceptance by position](acceptance.png)", ""])


def _verified(report: Report) -> str:
    """Which of the draft tokens the target verified, where not all."""
    if report["schedule"] is None:
        return ""
    group = report["groups"]["all"]
    mean = group["num_drafted"] / max(1, group["num_rounds"])
    return f", of which {mean:.2f} verified ({report['schedule']})"


def sampling_text(report: Report) -> str:
    parts = [f"temperature {report['temperature']:g}"]
    if report["temperature"] > 0:
        if report["top_p"] < 1:
            parts.append(f"top-p {report['top_p']:g}")
        if report["top_k"]:
            parts.append(f"top-k {report['top_k']}")
        parts.append(f"seed {report['seed']}")
    return ", ".join(parts)


def _row(group: dict[str, Any]) -> list[str]:
    return [
        str(group["num_requests"]),
        str(group["num_rounds"]),
        str(group["num_tokens"]),
        length_text(group),
        share(group["acceptance_rate"]),
        f"{group['tokens_per_second']:.1f}",
        f"{group['baseline_tokens_per_second']:.1f}",
        f"{group['speedup']:.2f}x",
        share(group["equal_to_plain"]),
    ]


def length_text(group: dict[str, Any]) -> str:
    """`2.31 [2.10, 2.52]`."""
    if group["acceptance_length"] is None:
        return "no rounds"
    low, high = group["acceptance_length_ci95"]
    return f"{group['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, columns_of_text: int = 1
) -> list[str]:
    """A table as lines; columns after the first `columns_of_text` are numbers, to the right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    marks = ["---" if i < columns_of_text else "---:" for i in range(len(header))]
    return [f"| {' | '.join(row)} |" for row in [header, marks, *cells]]


def plot(report: Report) -> Figure:
    """Two panels over the position in the block: a line and band a group, dashed for others."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    lines = [(name, group, "-") for name, group in _plotted(report["groups"])]
    for other in report.get("comparisons", []):
        lines.append((f"{other['draft']} (all)", other["groups"]["all"], "--"))
    for axes, key, title in zip(
        panels,
        ("survival_at", "conditional_acceptance_at"),
        ("kept at least k tokens", "kept token k, given k - 1 kept"),
        strict=True,
    ):
        for i, (name, group, style) in enumerate(lines):
            values = [math.nan if v is None else v for v in group[key]]
            bands = [(math.nan, math.nan) if b is None else b for b in group[f"{key}_ci95"]]
            ks = range(1, len(values) + 1)
            label = f"{name}: {length_text(group)}" if key == "survival_at" else None
            color = f"C{i % 10}"
            axes.plot(ks, values, style, marker="o", markersize=4, color=color, label=label)
            low, high = zip(*bands, strict=True) if bands else ((), ())
            axes.fill_between(ks, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_title(f"share of rounds that {title}", fontsize=11)
        axes.set_xlabel("position k in the block")
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['draft']} on {report['target']} ({report['dtype']})", fontsize=12)
    figure.legend(
        loc="outside lower center",
        ncols=2,
        fontsize=9,
        title="acceptance length with 95 % interval",
    )
    return figure


def _plotted(groups: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """`all` and the groups with the most rounds, in the report's order."""
    tags = [name for name in groups if name != "all"]
    largest = sorted(tags, key=lambda name: -groups[name]["num_rounds"])[: MAX_LINES - 1]
    # One group is the whole: drawing it twice says nothing more.
    kept = {"all", *largest} if len(tags) > 1 else {"all"}
    return [(name, group) for name, group in groups.items() if name in kept]
