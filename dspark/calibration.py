"""Sequential temperature scaling (STS): confidence logits to survival that can be believed.

The confidence head's logit of slot k says whether it survives verification, given that the slots
before did; the survival of a prefix is the product. STS gives every slot a temperature, left to
right: the one that makes the survival of the prefix up to here agree best with what was accepted,
the earlier slots' temperatures being settled (DSpark paper, section on confidence calibration).

Shapes: N rounds, K drafted tokens, S bins, T temperatures of the grid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 15
GRID = np.logspace(-1, 1, 41)  # DESIGN section 5; its middle is exactly 1

STS = "sts.json"  # in the drafter's directory

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """What was predicted against what happened, in S equal bins of the predicted probability."""

    count: list[int]  # rounds in the bin
    predicted: list[float | None]  # their mean predicted probability; None: an empty bin
    observed: list[float | None]  # share of them that happened


def survival(logits: ArrayLike, temperatures: Sequence[float] | None = None) -> Floats:
    """Confidence logits [..., K] -> probability [..., K] that the prefix up to each slot survives.

    Non-increasing along the slots, rounding included. `temperatures` [K] default to 1; ValueError
    for another number of them.
    """
    scaled = np.asarray(logits, dtype=np.float64)
    if temperatures is not None:
        if len(temperatures) != scaled.shape[-1]:
            raise ValueError(
                f"{len(temperatures)} temperatures for {scaled.shape[-1]} slots; they belong to "
                "another drafter: run `spec calibrate`"
            )
        scaled = scaled / np.asarray(temperatures, dtype=np.float64)
    return np.cumprod(_sigmoid(scaled), axis=-1, dtype=np.float64)


def fit_sts(logits: ArrayLike, num_accepted: ArrayLike) -> list[float]:
    """Temperatures [K] from confidence logits [N, K] and tokens kept [N] of fully verified rounds.

    Of equally good temperatures the one nearest to 1 is taken, so a slot about which the rounds
    say nothing keeps its logits. Raises ValueError for no rounds, other shapes, or logits that are
    no finite numbers.
    """
    logits_NK, accepted_N = check_rounds(logits, num_accepted)
    grid = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    before = np.ones(len(accepted_N))
    temperatures: list[float] = []
    for k, logits_N in enumerate(logits_NK.T, start=1):
        candidates_TN = before * _sigmoid(logits_N / grid[:, None])
        best = int(np.argmin(np.round(_ece_rows(candidates_TN, accepted_N >= k), 12)))
        temperatures.append(float(grid[best]))
        before = candidates_TN[best]
    return temperatures


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object of a file; ValueError with the path for anything else."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: not JSON ({error}); expected one object: write it again"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: found a JSON {type(content).__name__}; expected one object: write it again"
        )
    return content


def read_sts(path: str | Path) -> list[float]:
    """The temperatures of an `sts.json`; ValueError says what is wrong with it."""
    content = read_object(path)
    try:
        return positive_numbers(content.get("temperatures"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def positive_numbers(temperatures: Any) -> list[float]:
    """Temperatures as JSON holds them; ValueError unless they are one or more positive numbers."""
    good = isinstance(temperatures, list) and all(
        isinstance(t, int | float) and not isinstance(t, bool) and 0 < t < math.inf
        for t in temperatures
    )
    if not good or not temperatures:
        raise ValueError(
            f"temperatures is {temperatures!r}; expected a list of positive numbers, one a slot: "
            "write it with `spec calibrate`"
        )
    return [float(t) for t in temperatures]


def check_rounds(logits: ArrayLike, num_accepted: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """The rounds as arrays [N, K] and [N]; ValueError where they cannot be fitted or measured."""
    logits_NK = np.asarray(logits, dtype=np.float64)
    accepted_N = np.asarray(num_accepted)
    if logits_NK.ndim != 2 or accepted_N.shape != logits_NK.shape[:1] or not logits_NK.size:
        raise ValueError(
            f"confidence logits {list(logits_NK.shape)} and accepted counts "
            f"{list(accepted_N.shape)}; expected [rounds, slots] and [rounds], at least one of each"
        )
    if not np.isfinite(logits_NK).all():
        n, k = (int(i[0]) for i in np.nonzero(~np.isfinite(logits_NK)))
        raise ValueError(
            f"the confidence logit of round {n}, slot {k + 1} is {logits_NK[n, k]}; expected "
            "finite numbers: the confidence head's weights are broken"
        )
    whole = accepted_N.astype(np.int64)
    if (whole != accepted_N).any() or (whole < 0).any() or (whole > logits_NK.shape[1]).any():
        raise ValueError(
            f"accepted counts from {accepted_N.min()} to {accepted_N.max()}; expected whole "
            f"numbers from 0 to {logits_NK.shape[1]}"
        )
    return logits_NK, whole


def ece(predicted: ArrayLike, happened: ArrayLike) -> float:
    """Expected calibration error of probabilities [N] against outcomes [N], 15 equal bins.

    The mean over rounds of |mean predicted - share that happened| of the round's bin, 0 to 1.
    """
    return float(_ece_rows(np.asarray(predicted, dtype=np.float64)[None], np.asarray(happened))[0])


def auc(scores: ArrayLike, happened: ArrayLike) -> float | None:
    """Probability that a round where it happened scores above one where it did not; ties half.

    None where all or none happened.
    """
    happened_N = np.asarray(happened, dtype=bool)
    positive = int(happened_N.sum())
    negative = len(happened_N) - positive
    if not positive or not negative:
        return None
    _, index, counts = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    # Equal scores share the mean of the ranks they span.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]
    above = float(ranks[happened_N].sum()) - positive * (positive + 1) / 2
    return above / (positive * negative)


def reliability(predicted: ArrayLike, happened: ArrayLike) -> Reliability:
    """The bins whose disagreement `ece` sums up."""
    predicted_N = np.asarray(predicted, dtype=np.float64)
    bins = _bins(predicted_N)
    count = np.bincount(bins, minlength=NUM_BINS)
    sums = [
        np.bincount(bins, weights=values, minlength=NUM_BINS)
        for values in (predicted_N, np.asarray(happened, dtype=np.float64))
    ]
    means = [
        [float(total / n) if n else None for total, n in zip(part, count, strict=True)]
        for part in sums
    ]
    return Reliability([int(n) for n in count], *means)


def _ece_rows(predicted_TN: Floats, happened_N: NDArray[np.bool_]) -> Floats:
    """The calibration error of each row [T]."""
    rows, rounds = predicted_TN.shape
    # A bin's count cancels: count * |mean predicted - mean happened| is the absolute sum of
    # differences.
    differences = predicted_TN - happened_N
    index = _bins(predicted_TN) + NUM_BINS * np.arange(rows)[:, None]
    sums = np.bincount(index.ravel(), weights=differences.ravel(), minlength=rows * NUM_BINS)
    return np.abs(sums).reshape(rows, NUM_BINS).sum(axis=1) / rounds


def _bins(predicted: Floats) -> NDArray[np.int64]:
    return np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)


def _sigmoid(x: Floats) -> Floats:
    # By tanh: exp would overflow for a logit of -800.
    return 0.5 * (1 + np.tanh(0.5 * x))
