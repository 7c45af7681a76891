"""What verifying fewer drafted tokens would bring: computed from recorded rounds, nothing is run.

Shapes: N recorded rounds, R requests of a step, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..dspark.calibration import check_rounds, positive_numbers, read_object, survival
from ..dspark.schedule import CostTable, prefix_schedule
from .files import write_figure, write_json

SCHEMA = 1
FIXED = (1, 3, 5)
SCHEDULER = "scheduler"
DRAWS = 64  # steps drawn for each concurrency
SEED = 0

Floats = NDArray[np.float64]
Plan = dict[str, Any]  # what plan.json holds


def pruning_curve(
    confidence: ArrayLike,
    num_accepted: ArrayLike,
    thresholds: Sequence[float],
    temperatures: Sequence[float] | None = None,
) -> list[dict[str, float | None]]:
    """What each survival threshold would have done to rounds [N, K] that were verified in full.

    Exact, since a shorter verification keeps the same leading tokens: min(num_accepted, length).
    A row a threshold: `acceptance_rate` of the verified tokens (None where there are none),
    `acceptance_length` (tokens a step, the bonus token included), `verified` (drafted tokens
    verified a step).
    """
    confidence_NK, accepted_N = check_rounds(confidence, num_accepted)
    survival_NK = survival(confidence_NK, temperatures)
    rows: list[dict[str, float | None]] = []
    for threshold in thresholds:
        lengths_N = (survival_NK >= threshold).sum(axis=1)
        kept, verified = int(np.minimum(accepted_N, lengths_N).sum()), int(lengths_N.sum())
        rows.append(
            {
                "threshold": threshold,
                "acceptance_rate": kept / verified if verified else None,
                "acceptance_length": 1 + kept / len(accepted_N),
                "verified": verified / len(accepted_N),
            }
        )
    return rows


@dataclass(frozen=True)
class Survivals:
    """Survival of drafted prefixes, as a plan takes it, and what came of them where that is known.

    With `num_accepted` lengths are chosen by the survivals and paid by what was accepted; without
    it by the survivals themselves, whatever they are worth.
    """

    rounds: Floats  # [N, K]; one row: an average, all requests are alike
    draft: str
    target: str
    num_accepted: NDArray[np.int64] | None = None  # [N], all slots verified

    @property
    def num_draft_tokens(self) -> int:
        return self.rounds.shape[1]


def read_survivals(path: str | Path) -> Survivals:
    """Survivals of a `calibration.json` (calibrated, a row a round) or a `report.json` (average).

    Raises ValueError, with the path, for anything else.
    """
    known = read_object(path)
    calibrated = "rounds" in known and "temperatures" in known
    if not calibrated and "groups" not in known:
        raise ValueError(
            f"{path}: neither calibration.json nor report.json; expected what `spec calibrate` or "
            "`spec eval` writes"
        )
    draft, target = str(known.get("draft", "")), str(known.get("target", ""))
    try:
        if not calibrated:
            return Survivals(_average(known), draft, target)
        temperatures = positive_numbers(known["temperatures"])
        rounds = known["rounds"]
        logits_NK, accepted_N = check_rounds(rounds["confidence"], rounds["num_accepted"])
        return Survivals(survival(logits_NK, temperatures), draft, target, accepted_N)
    except (KeyError, TypeError, OverflowError) as error:
        found = f"lacks {error}" if isinstance(error, KeyError) else f"has other types ({error})"
        raise ValueError(
            f"{path}: {found}; write it again with `spec calibrate` or `spec eval`"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _average(report: dict[str, Any]) -> Floats:
    """The survival [1, K] of a report; ValueError where it is not that of every round."""
    group, slots = report["groups"]["all"], report["num_draft_tokens"]
    curve, drafted, full = group["survival_at"], group["num_drafted"], group["num_rounds"] * slots
    if not curve or curve[0] is None:
        raise ValueError("the report counts no round; expected survival_at of some")
    if drafted < full:
        # The rounds that drafted k tokens are then promising ones: no other has their survival.
        raise ValueError(
            f"its rounds drafted {drafted} of {full} tokens, and survival_at counts only those "
            "that did; expected all of them: measure without --threshold, or give calibration.json"
        )
    values = np.asarray(curve, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all() or (np.diff(values) > 0).any():
        raise ValueError(f"survival_at is {curve}; expected shares from 0 to 1 that never rise")
    return values[None]


def plan_verification(
    survivals: Survivals, table: CostTable, concurrency: Sequence[int], *, draws: int = DRAWS
) -> Plan:
    """Expected throughput and verified tokens by concurrency, for fixed lengths and the scheduler.

    For each concurrency R the same `draws` steps of R rounds are drawn (seeded) for every policy.
    A step of R + v tokens, v of them drafted and verified, takes the table's seconds. It yields R
    tokens and, of each request, what was accepted of the verified ones: min(num_accepted, length),
    or the sum of the verified survivals where only those are known. Throughput is tokens over
    seconds of all steps.

    Raises ValueError for a concurrency below 1.
    """
    if not concurrency or min(concurrency) < 1:
        raise ValueError(f"concurrency {list(concurrency)}; expected whole numbers from 1 on")
    num_slots = survivals.num_draft_tokens
    policies: dict[str, Callable[[Floats], NDArray[np.int64]]] = {
        str(length): _fixed(length) for length in FIXED if length < num_slots
    }
    policies["all"] = _fixed(num_slots)
    policies[SCHEDULER] = lambda step_RK: prefix_schedule(step_RK, table)
    results: dict[str, dict[str, list[float]]] = {name: {} for name in policies}
    for num_requests in concurrency:
        rng = np.random.default_rng([SEED, num_requests])
        # Requests that are all alike make the same step every time.
        times = draws if len(survivals.rounds) > 1 else 1
        picks = rng.integers(len(survivals.rounds), size=(times, num_requests))
        for name, policy in policies.items():
            row = _run(survivals, picks, policy, table)
            for key, value in row.items():
                results[name].setdefault(key, []).append(value)
    return {
        "schema": SCHEMA,
        "draft": survivals.draft,
        "target": survivals.target,
        "num_draft_tokens": num_slots,
        "num_rounds": len(survivals.rounds),
        "tokens_from": "survival" if survivals.num_accepted is None else "num_accepted",
        "max_profiled_tokens": table.batch_tokens[-1],
        "concurrency": list(concurrency),
        "policies": results,
    }


def _run(
    survivals: Survivals,
    picks: NDArray[np.int64],  # [steps, R] rounds
    policy: Callable[[Floats], NDArray[np.int64]],
    table: CostTable,
) -> dict[str, float]:
    tokens = seconds = verified = 0.0
    for picks_R in picks:
        step_RK = survivals.rounds[picks_R]
        num_requests, num_slots = step_RK.shape
        lengths = policy(step_RK)
        if survivals.num_accepted is None:
            kept = step_RK[np.arange(num_slots) < lengths[:, None]]
        else:
            kept = np.minimum(survivals.num_accepted[picks_R], lengths)
        tokens += num_requests + float(kept.sum())
        seconds += 1 / float(table(np.array(num_requests + lengths.sum())))
        verified += float(lengths.sum())
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": tokens / len(picks),
        "verified_per_step": verified / len(picks),
    }


def _fixed(length: int) -> Callable[[Floats], NDArray[np.int64]]:
    return lambda step_RK: np.full(len(step_RK), length)


def write_plan(plan: Plan, out_dir: str | Path) -> Path:
    """Write plan.json and plan.png; returns the path of plan.json."""
    # Late: the plot's library is slow to import.
    from .curves import plot_plan

    out = Path(out_dir)
    write_figure(out / "plan.png", plot_plan(plan))
    write_json(out / "plan.json", plan)
    return out / "plan.json"
