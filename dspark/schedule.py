"""How many drafted tokens of each request the target verifies.

Verifying costs time: at a high load the tokens that are likely to be rejected are better left out.
`prefix` admits drafted tokens of all requests, the most likely survivors first, as long as the
expected throughput does not fall (DSpark paper, section on the load-aware scheduler);
`static_threshold` looks at each request alone.

Both decide about a slot from what was known before its token was drawn: confidence of the slots up
to it, never of what follows. So which tokens are verified says nothing about the tokens themselves,
and the output distribution stays the target's.

Shapes: B = R requests, K drafted tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .calibration import survival

# Confidence logits [B, K] of a round's requests -> verification lengths [B], 0 to K.
Schedule = Callable[[Tensor], Tensor]
# Tokens of a step (one a request, and those drafted) [...] -> steps per second [...].
StepsPerSecond = Callable[[NDArray[np.int64]], ArrayLike]

SPS = "sps.json"  # in the drafter's directory
PROBES, RATES, LIMIT = "sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"


@dataclass(frozen=True)
class CostTable:
    """Steps per second by tokens of a step, as `sps.json` holds them."""

    batch_tokens: tuple[int, ...]  # strictly increasing
    steps_per_second: tuple[float, ...]

    def __post_init__(self) -> None:
        tokens, rates = self.batch_tokens, self.steps_per_second
        if not tokens or len(tokens) != len(rates):
            raise ValueError(
                f"a cost table of {len(tokens)} token counts and {len(rates)} rates; expected as "
                "many of both, at least one"
            )
        if tokens[0] < 1 or any(a >= b for a, b in itertools.pairwise(tokens)):
            raise ValueError(f"{PROBES} is {list(tokens)}; expected strictly increasing, from 1 on")
        if not all(np.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(f"{RATES} is {list(rates)}; expected positive numbers")

    def __call__(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Steps per second at token counts [...].

        A step's seconds run straight from one probe to the next: a table read as stairs would have
        a drop at every probe, at which the rule "stop at the first decrease" would stop. Before the
        first probe its rate holds; behind the last one the last line goes on, since further tokens
        are not free.
        """
        probes = np.asarray(self.batch_tokens, dtype=np.float64)
        seconds = 1 / np.asarray(self.steps_per_second)
        taken = np.interp(tokens, probes, seconds)
        if len(probes) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (probes[-1] - probes[-2]))
            taken = taken + slope * np.maximum(0, np.asarray(tokens) - probes[-1])
        return 1 / taken

    def to_json(self) -> dict[str, Any]:
        """What a serving engine reads."""
        return {
            PROBES: list(self.batch_tokens),
            RATES: list(self.steps_per_second),
            LIMIT: self.batch_tokens[-1],
        }

    @classmethod
    def from_json(cls, content: Any) -> CostTable:
        """The table of a parsed `sps.json`; ValueError says what is wrong with it."""
        if not isinstance(content, dict) or not {PROBES, RATES} <= content.keys():
            found = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise ValueError(
                f"no cost table: found {found}, expected an object with {PROBES} and {RATES}; "
                "write one with `spec calibrate`"
            )
        tokens, rates = content[PROBES], content[RATES]
        if not _numbers(tokens, int) or not _numbers(rates, int | float):
            raise ValueError(f"{PROBES} or {RATES} is no list of numbers; write it again")
        return cls(tuple(tokens), tuple(map(float, rates)))


def read_cost_table(path: str | Path) -> CostTable:
    """The table of an `sps.json`; ValueError says what is wrong with it."""
    try:
        return CostTable.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def prefix_schedule(
    survival_RK: NDArray[np.float64], steps_per_second: StepsPerSecond
) -> NDArray[np.int64]:
    """Verification lengths [R] from the survival [R, K] of every request's prefixes.

    All (request, slot) are ranked by survival, equal ones by slot, then by request, and admitted
    one by one; R + (sum of their survivals) tokens are expected from a step of R + (their number)
    tokens. The first one that lowers expected tokens a second ends it, whatever would come later:
    that is what keeps a token's admission independent of what follows it.
    """
    num_requests, num_slots = survival_RK.shape
    assert (survival_RK[:, 1:] <= survival_RK[:, :-1]).all(), "survival of a prefix only falls"
    # Slot-major, so that a stable sort leaves equal ones in the order of slots.
    ranked = survival_RK.T.ravel()
    order = np.argsort(-ranked, kind="stable")
    expected = num_requests + np.concatenate([[0.0], np.cumsum(ranked[order])])
    tokens = num_requests + np.arange(len(expected))
    throughput = expected * np.asarray(steps_per_second(tokens), dtype=np.float64)
    falls = np.flatnonzero(throughput[1:] < throughput[:-1])
    admitted = order[: falls[0]] if len(falls) else order
    chosen = np.zeros(num_slots * num_requests, dtype=bool)
    chosen[admitted] = True
    chosen_KR = chosen.reshape(num_slots, num_requests)
    assert (chosen_KR[1:] <= chosen_KR[:-1]).all(), "what is admitted of a request is a prefix"
    return chosen_KR.sum(axis=0)


def prefix(
    steps_per_second: StepsPerSecond, temperatures: Sequence[float] | None = None
) -> Schedule:
    """`prefix_schedule` of calibrated confidence, for decoding."""

    def schedule(confidence: Tensor) -> Tensor:
        return _lengths(
            confidence,
            lambda logits: prefix_schedule(survival(logits, temperatures), steps_per_second),
        )

    return schedule


def static_threshold(threshold: float, temperatures: Sequence[float] | None = None) -> Schedule:
    """Verify the slots whose prefix survives with at least this probability.

    Raises ValueError for a threshold outside 0 (all) to 1.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"the confidence threshold is {threshold}; expected 0 to 1")

    def schedule(confidence: Tensor) -> Tensor:
        return _lengths(
            confidence, lambda logits: (survival(logits, temperatures) >= threshold).sum(axis=-1)
        )

    return schedule


def _lengths(
    confidence: Tensor, decide: Callable[[NDArray[np.float64]], NDArray[np.int64]]
) -> Tensor:
    logits = confidence.detach().double().cpu().numpy()
    # A drafter that gives no number gives no reason to verify.
    logits = np.where(np.isnan(logits), -np.inf, logits)
    return torch.from_numpy(decide(logits)).to(confidence.device)


def _numbers(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )
