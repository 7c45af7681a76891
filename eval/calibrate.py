"""Calibrate a drafter's confidence on what the target accepts, and say how good it is.

Prompts are decoded with the drafter, every slot verified. The temperatures are fitted on the rounds
of one part of the requests; calibration error and rank statistic come from the other part.

Shapes: N rounds, K drafted tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.prompts import Prompt
from ..dspark.calibration import auc, check_rounds, ece, fit_sts, reliability, survival
from ..target.model import Target
from ..target.sampling import GREEDY, Sampling
from .decode import Decoded, speculate
from .drafter import Drafter
from .files import write_figure, write_json
from .plan import pruning_curve
from .report import encode_groups, progress_bar

SCHEMA = 1
SPLIT_SEED = 0
MAX_ROUNDS = 4096  # recorded rounds that calibration.json keeps
THRESHOLDS = tuple(i / 10 for i in range(10))

Ids = list[int]
Calibration = dict[str, Any]  # what calibration.json holds


@dataclass(frozen=True)
class Recorded:
    """Rounds of some requests in which it is known of every slot whether it was accepted."""

    confidence: NDArray[np.float64]  # [N, K] logits
    num_accepted: NDArray[np.int64]  # [N]
    num_requests: int
    num_left_out: int  # rounds of which it is not known

    def sizes(self) -> dict[str, int]:
        return {
            "num_requests": self.num_requests,
            "num_rounds": len(self.num_accepted),
            "num_left_out": self.num_left_out,
        }


def record_rounds(decoded: Sequence[Decoded], num_draft_tokens: int) -> Recorded:
    """The rounds of finished answers, without those that do not tell about every slot.

    A stop token inside an accepted block ends the count there, and what the target thinks of the
    slots behind it is no longer said: taken for rejections they would teach too little confidence.
    The same holds for slots that were not verified. A round that the token limit cuts is counted in
    full, so it stays.
    """
    rows: list[list[float]] = []
    kept: list[int] = []
    total = 0
    for answer in decoded:
        total += len(answer.num_accepted)
        known = [drafted == num_draft_tokens for drafted in answer.num_drafted]
        if _stopped_inside(answer):
            known[-1] = answer.num_accepted[-1] == num_draft_tokens
        for i in np.flatnonzero(known):
            rows.append(answer.confidence[i])
            kept.append(answer.num_accepted[i])
    return Recorded(
        np.asarray(rows, dtype=np.float64).reshape(-1, num_draft_tokens),
        np.asarray(kept, dtype=np.int64),
        len(decoded),
        total - len(kept),
    )


def _stopped_inside(answer: Decoded) -> bool:
    """Whether the stop token was a drafted one: then the last round brought no bonus token."""
    whole = 1 + sum(kept + 1 for kept in answer.num_accepted)  # the first token is the prompt's
    rounds = bool(answer.num_accepted)
    return rounds and answer.finish_reason == "stop" and len(answer.output_ids) == whole - 1


def split_requests(prompts: Sequence[Ids]) -> tuple[list[Ids], list[Ids]]:
    """Two halves without a common prompt, the same ones every time; repeated prompts count once.

    Raises ValueError for fewer than two prompts.
    """
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    if len(distinct) < 2:
        raise ValueError(
            f"{len(distinct)} prompt to calibrate with; expected at least two: one part is fitted, "
            "the other measured"
        )
    order = np.random.default_rng(SPLIT_SEED).permutation(len(distinct))
    half = (len(distinct) + 1) // 2
    return [distinct[i] for i in sorted(order[:half])], [distinct[i] for i in sorted(order[half:])]


def calibrate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    draft_name: str,
    draft_weights: str | None = None,
    max_new_tokens: int,
    batch_size: int,
    heldout: Sequence[Prompt] | None = None,
    sampling: Sampling = GREEDY,
    progress: bool = True,
) -> Calibration:
    """Fit temperatures and measure them; the result is what `calibration.json` holds.

    Without `heldout` the prompts are split in half by request. `draft_weights` tells these weights
    from others (`sts.weights_digest`). Progress is told on stderr.

    Raises ValueError for a drafter without a confidence head, too few prompts, or no full round.
    """
    needed = max_new_tokens + drafter.num_draft_tokens
    asked, skipped = encode_prompts(target, prompts, needed)
    if heldout is None:
        fitted, measured = split_requests(asked)
    else:
        measured, also_skipped = encode_prompts(target, heldout, needed)
        skipped += also_skipped
        taken = set(map(tuple, measured))
        fitted = [ids for ids in asked if tuple(ids) not in taken]
        if not fitted:
            raise ValueError(
                "every prompt is a held-out one too; expected others to fit the temperatures on"
            )
    require_confidence(target, drafter, min(fitted, key=len), draft_name)
    requests = len(fitted) + len(measured)
    with progress_bar("calibrate", draft_name, requests, shown=progress) as advance:
        decoded = speculate(
            target,
            drafter,
            fitted + measured,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            sampling=sampling,
            on_finished=advance,
        )
    slots = drafter.num_draft_tokens
    parts = decoded[: len(fitted)], decoded[len(fitted) :]
    return {
        "schema": SCHEMA,
        "target": target.name,
        "draft": draft_name,
        "draft_weights": draft_weights,
        "num_draft_tokens": slots,
        "temperature": float(sampling.temperature),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "num_threads": torch.get_num_threads(),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "num_skipped": dict(skipped),
        **measure_calibration(*(record_rounds(part, slots) for part in parts)),
    }


def encode_prompts(
    target: Target, prompts: Sequence[Prompt], needed: int
) -> tuple[list[Ids], Counter[str]]:
    """Ids of the prompts that leave room for `needed` more, and why others were skipped."""
    groups, skipped = encode_groups(target, prompts, needed)
    return [ids for group in groups.values() for ids in group], skipped


def require_confidence(target: Target, drafter: Drafter, ids: Ids, draft_name: str) -> None:
    """Raise ValueError unless the drafter says how confident it is."""
    # Two tokens: the prompt's own, then one round.
    options = {"max_new_tokens": 2, "batch_size": 1, "stop_token_ids": ()}
    (answer,) = speculate(target, drafter, [ids], **options)
    if not any(answer.confidence):
        raise ValueError(
            f"{draft_name} has no confidence head, so there is nothing to calibrate; expected a "
            "DSpark drafter trained with one"
        )


def measure_calibration(fitted: Recorded, measured: Recorded) -> Calibration:
    """Temperatures from `fitted`, figures by slot before and after them from `measured`."""
    for name, part in (("to fit", fitted), ("to measure", measured)):
        if not len(part.num_accepted):
            raise ValueError(
                f"no full round {name} in {part.num_requests} requests; expected longer answers or "
                "more prompts"
            )
    temperatures = fit_sts(fitted.confidence, fitted.num_accepted)
    confidence, accepted = check_rounds(measured.confidence, measured.num_accepted)
    slots = range(confidence.shape[1])
    happened = [accepted > k for k in slots]
    result: Calibration = {
        "fit": fitted.sizes(),
        "heldout": measured.sizes(),
        "temperatures": temperatures,
        "survival_at": [float(h.mean()) for h in happened],
    }
    for when, used in (("before", None), ("after", temperatures)):
        predicted = survival(confidence, used)
        result[f"predicted_survival_{when}"] = [float(predicted[:, k].mean()) for k in slots]
        result[f"ece_{when}"] = [ece(predicted[:, k], happened[k]) for k in slots]
        result[f"auc_{when}"] = [auc(predicted[:, k], happened[k]) for k in slots]
        result[f"reliability_{when}"] = [
            asdict(reliability(predicted[:, k], happened[k])) for k in slots
        ]
    result["pruning"] = pruning_curve(confidence, accepted, THRESHOLDS, temperatures)
    result["rounds"] = _sample(confidence, accepted)
    return result


def _sample(confidence: NDArray[np.float64], accepted: NDArray[np.int64]) -> dict[str, Any]:
    """Measured rounds for `spec plan verify`: as many as a plan needs, in their order."""
    picks = np.arange(len(accepted))
    if len(picks) > MAX_ROUNDS:
        picks = np.sort(np.random.default_rng(SPLIT_SEED).permutation(picks)[:MAX_ROUNDS])
    return {
        "confidence": np.round(confidence[picks], 4).tolist(),
        "num_accepted": accepted[picks].tolist(),
    }


def write_calibration(calibration: Calibration, out_dir: str | Path) -> Path:
    """Write calibration.json and its plots; returns the path of calibration.json."""
    # Late: the plot's library is slow to import.
    from .curves import plot_pruning, plot_reliability

    out = Path(out_dir)
    write_figure(out / "reliability.png", plot_reliability(calibration))
    write_figure(out / "pruning.png", plot_pruning(calibration))
    write_json(out / "calibration.json", calibration)
    return out / "calibration.json"
