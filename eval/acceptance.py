"""What "acceptance" means: every definition, once.

Shapes: R requests, K num_draft_tokens.

A round drafts up to K tokens and keeps the leading ones that the target agrees with (num_accepted,
bonus excluded). Drafted is what the target verified: tokens that a schedule cut off do not count.
Means are sums over sums: over all rounds of all requests, never means of a request's means.
Intervals come from resampling requests, since the rounds of one answer resemble each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 0
Interval = tuple[float, float]


@dataclass(frozen=True)
class Rounds:
    """The rounds of one request, in order."""

    num_accepted: Sequence[int]  # draft tokens kept, per round
    num_drafted: Sequence[int]  # draft tokens verified, per round
    num_tokens: int  # output tokens


@dataclass(frozen=True)
class Acceptance:
    """A group's figures, as `report.json` holds them; None where nothing was counted.

    `survival_at[k-1]`: rounds that kept at least k tokens, over rounds that drafted k.
    `conditional_acceptance_at[k-1]`: the same over rounds that kept k - 1 and drafted k.
    """

    num_requests: int
    num_rounds: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    acceptance_length: float | None
    acceptance_length_ci95: Interval | None
    acceptance_rate: float | None
    survival_at: list[float | None]
    conditional_acceptance_at: list[float | None]
    survival_at_ci95: list[Interval | None]
    conditional_acceptance_at_ci95: list[Interval | None]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def leading_matches(matches: Iterable[bool | int]) -> int:
    """How many draft tokens a round keeps: those before the first mismatch."""
    count = 0
    for match in matches:
        if not match:
            break
        count += 1
    return count


def measure(
    requests: Sequence[Rounds],
    num_draft_tokens: int,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Acceptance:
    """The figures of a group of requests, their 95 % intervals by bootstrap over requests.

    Raises ValueError for a round that kept more than it drafted, or drafted more than
    num_draft_tokens.
    """
    counts = _Counts.of(requests, num_draft_tokens)
    total = counts.sum()
    draws = _resampled(counts, resamples, seed)
    length, survival, conditional = _figures(total)
    lengths, survivals, conditionals = _figures(draws)
    result = Acceptance(
        num_requests=len(requests),
        num_rounds=int(total.rounds),
        num_tokens=sum(r.num_tokens for r in requests),
        num_drafted=int(total.drafted.sum()),
        num_accepted=int(total.kept.sum()),
        acceptance_length=_number(length),
        acceptance_length_ci95=_interval(lengths),
        acceptance_rate=_number(_ratio(total.kept.sum(), total.drafted.sum())),
        survival_at=[_number(x) for x in survival],
        conditional_acceptance_at=[_number(x) for x in conditional],
        survival_at_ci95=[_interval(column) for column in survivals.T],
        conditional_acceptance_at_ci95=[_interval(column) for column in conditionals.T],
    )
    check_identity(result, num_draft_tokens)
    return result


def of_histogram(counts: Sequence[int]) -> tuple[float, list[float]]:
    """Acceptance length and survival_at of rounds counted by number of accepted drafts, 0, 1, ...

    Engines report their rounds so. Without a round: 1, and zeros.
    """
    rounds = sum(counts)
    if not rounds:
        return 1.0, [0.0] * (len(counts) - 1)
    survival = [sum(counts[k:]) / rounds for k in range(1, len(counts))]
    return 1 + sum(k * count for k, count in enumerate(counts)) / rounds, survival


def sum_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Rounds of several requests by number of accepted drafts; they may differ in length."""
    width = max(map(len, histograms), default=0)
    return [sum(h[k] for h in histograms if k < len(h)) for k in range(width)]


def check_identity(acceptance: Acceptance, num_draft_tokens: int) -> None:
    """When every round drafted K tokens, acceptance_length is 1 + the sum of survival_at."""
    full = acceptance.num_drafted == acceptance.num_rounds * num_draft_tokens
    if not full or acceptance.acceptance_length is None:
        return
    from_survival = 1 + sum(s or 0.0 for s in acceptance.survival_at)
    assert abs(acceptance.acceptance_length - from_survival) < 1e-9, (
        f"acceptance length {acceptance.acceptance_length} but 1 + sum of survival {from_survival}"
    )


@dataclass(frozen=True)
class _Counts:
    """Counts a request ([R] and [R, K]), or sums of them over requests (without R)."""

    rounds: NDArray[np.int64]
    drafted: NDArray[np.int64]  # rounds that drafted at least k tokens, k = 1..K
    kept: NDArray[np.int64]  # rounds that kept at least k tokens
    reached: NDArray[np.int64]  # rounds that kept at least k - 1 tokens and drafted at least k

    @classmethod
    def of(cls, requests: Sequence[Rounds], num_draft_tokens: int) -> _Counts:
        shape = (len(requests), num_draft_tokens)
        drafted, kept, reached = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        ks = np.arange(1, num_draft_tokens + 1)
        for i, request in enumerate(requests):
            a = np.asarray(request.num_accepted, dtype=np.int64)[:, None]
            d = np.asarray(request.num_drafted, dtype=np.int64)[:, None]
            if a.shape != d.shape or (a > d).any() or (a < 0).any() or (d > num_draft_tokens).any():
                raise ValueError(
                    f"request {i}: accepted {list(request.num_accepted)} of drafted "
                    f"{list(request.num_drafted)}; expected one of each a round, 0 <= accepted <= "
                    "drafted <= "
                    f"{num_draft_tokens}"
                )
            drafted[i] = (d >= ks).sum(axis=0)
            kept[i] = (a >= ks).sum(axis=0)
            reached[i] = ((a >= ks - 1) & (d >= ks)).sum(axis=0)
        rounds = np.array([len(r.num_accepted) for r in requests], dtype=np.int64)
        return cls(rounds, drafted, kept, reached)

    def sum(self) -> _Counts:
        return _Counts(
            self.rounds.sum(),
            self.drafted.sum(axis=0),
            self.kept.sum(axis=0),
            self.reached.sum(axis=0),
        )


def _resampled(counts: _Counts, resamples: int, seed: int) -> _Counts:
    """Sums over R requests drawn with replacement, `resamples` times."""
    num_requests = len(counts.rounds)
    weights = np.zeros((resamples, num_requests), dtype=np.int64)
    if num_requests:
        picks = np.random.default_rng(seed).integers(num_requests, size=(resamples, num_requests))
        np.add.at(weights, (np.arange(resamples)[:, None], picks), 1)
    return _Counts(
        weights @ counts.rounds,
        weights @ counts.drafted,
        weights @ counts.kept,
        weights @ counts.reached,
    )


def _figures(counts: _Counts) -> tuple[NDArray[np.float64], ...]:
    """Acceptance length, survival and conditional acceptance; NaN where nothing was counted."""
    length = 1 + _ratio(counts.kept.sum(axis=-1), counts.rounds)
    return length, _ratio(counts.kept, counts.drafted), _ratio(counts.kept, counts.reached)


def _ratio(part: Any, whole: Any) -> NDArray[np.float64]:
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    return np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _interval(values: NDArray[np.float64]) -> Interval | None:
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
