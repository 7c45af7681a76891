"""Acceptance length of two drafters on the same prompts: a report, the change and its interval.

The change is relative, of the acceptance length over all rounds. Its interval draws requests, each
with its rounds under both drafters: what a request is like moves both alike, so the interval of the
change is narrower than those of the two lengths suggest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.prompts import Prompt
from ..eval.acceptance import RESAMPLES, SEED, Interval
from ..eval.decode import Decoded
from ..eval.drafter import NetworkDrafter
from ..eval.report import Baseline, Report, evaluate
from ..recipes.algorithms import load_draft
from ..target.model import Target


@dataclass(frozen=True)
class MeasureOptions:
    """How the prompts are decoded: greedily, with these limits."""

    max_new_tokens: int
    batch_size: int


def compare(
    target: Target,
    before: str | Path,
    after: str | Path,
    prompts: Sequence[Prompt],
    options: MeasureOptions,
    *,
    names: tuple[str, str],
) -> Report:
    """The acceptance report of `after`, with that of `before` in `comparisons`.

    Its `quantization` has both lengths, the relative change and its 95 % interval. Raises
    ValueError where a drafter does not fit the target, or no prompt fits.
    """
    plain: Baseline = {}
    answers: list[list[Decoded]] = []
    reports: list[Report] = []
    for directory, name in zip((before, after), names, strict=True):
        draft = load_draft(directory, dtype=target.dtype, device=target.device)
        runs: Baseline = {}
        reports.append(
            evaluate(
                target,
                NetworkDrafter(draft, target),
                prompts,
                max_new_tokens=options.max_new_tokens,
                batch_size=options.batch_size,
                draft_name=name,
                baseline=plain,
                runs=runs,
            )
        )
        answers.append([decoded for run in runs.values() for decoded in run.decoded])
    lengths = [report["groups"]["all"]["acceptance_length"] for report in reports]
    if None in lengths:
        raise ValueError(
            "no answer had a round to draft in, so there is nothing to compare: give more prompts "
            "or a greater --max-new-tokens"
        )
    change, interval = relative_change(*answers)
    return {
        **reports[1],
        "comparisons": [reports[0]],
        "quantization": {
            "acceptance_length_before": lengths[0],
            "acceptance_length_after": lengths[1],
            "relative_change": change,
            "relative_change_ci95": list(interval),
            "num_requests": len(answers[0]),
            "num_rounds_after": reports[1]["groups"]["all"]["num_rounds"],
            "target": target.name,
            "dtype": reports[1]["dtype"],
        },
    }


def relative_change(before: list[Decoded], after: list[Decoded]) -> tuple[float, Interval]:
    """after / before - 1 of the acceptance length, and its 95 % interval over requests.

    Request i is the same in both. Its rounds may be empty, not those of all requests.
    """
    counts = np.array(
        [
            [n for d in pair for n in (len(d.num_accepted), sum(d.num_accepted))]
            for pair in zip(before, after, strict=True)
        ]
    )  # [R, 4]: rounds and accepted tokens before, then after
    picks = np.random.default_rng(SEED).integers(len(counts), size=(RESAMPLES, len(counts)))
    draws = np.concatenate([counts.sum(0)[None], counts[picks].sum(1)])
    draws = draws[(draws[:, [0, 2]] > 0).all(axis=1)]
    lengths = 1 + draws[:, [1, 3]] / draws[:, [0, 2]]
    changes = lengths[:, 1] / lengths[:, 0] - 1
    low, high = np.percentile(changes[1:], [2.5, 97.5])
    return float(changes[0]), (float(low), float(high))
