"""Set what an engine did with a drafter beside what `spec eval`'s loop does, request by request.

Shapes: R requests, K num_draft_tokens, T tokens of a prompt, n captured layers, H hidden.

A headline acceptance length proves nothing: a drafter that reads a layer too high can look fine.
Compared are the context features of each layer, the tokens of each answer, and each request's
histogram: rounds by number of accepted drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..eval.acceptance import Rounds, measure, of_histogram, sum_histograms
from ..eval.decode import Decoded
from ..target.engine import Answer, EngineError

# Largest relative error of a layer's features at the median token, by dtype of the target. What
# bfloat16 does to SmolLM2-135M (30 layers, 368 tokens, beside the same weights in float32): at most
# 1.4e-2 at the median of a layer, 3.1e-2 at the 95th percentile, 8.3e-2 at the worst token; two
# implementations that round independently differ by 1.4 times that. Neighbouring layers: 0.22.
FEATURE_TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}
TAIL = 0.95  # of the tokens have to be within
TAIL_TOLERANCE = 3.0  # times that
SHOWN = 5  # requests that differ, listed with their histograms


@dataclass(frozen=True)
class LayerMatch:
    """One captured layer: how far the engine's is from ours, and which of ours it resembles."""

    layer_id: int
    error: float  # relative, of the median token
    error_tail: float  # of the token at the 95th percentile
    nearest_layer: int  # by `error`; -1 is the embedding
    nearest_error: float

    def to_json(self) -> dict[str, Any]:
        """What is not a number is null."""
        return {k: v if np.isfinite(v) else None for k, v in asdict(self).items()}


@dataclass(frozen=True)
class PassResult:
    """One pass over the prompts; `ours` is `spec eval`'s loop on the same ones."""

    name: str
    num_requests: int
    num_equal_text: int  # to plain decoding
    num_equal_histogram: int  # to ours
    num_our_text: int  # answers equal to ours, plain or not
    num_our_text_plain: int  # of the engine's plain answers
    num_shared_tokens: int  # of the answers, before they part from ours
    num_shared_tokens_plain: int
    cached_tokens: int
    histogram: list[int]  # rounds by number of accepted drafts, summed
    histogram_ours: list[int]
    # Means over rounds, bonus included: of all requests, and of those with our text.
    acceptance_length: float
    acceptance_length_ours: float
    acceptance_length_same_text: float | None
    acceptance_length_same_text_ours: float | None
    survival_at: list[float]
    survival_at_ours: list[float]
    different: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "different": self.different[:SHOWN]}


def compare_pass(
    name: str,
    answers: Sequence[Answer],
    plain: Sequence[Sequence[int]],
    ours: Sequence[Decoded],
    num_draft_tokens: int,
) -> PassResult:
    """Set R answers of the engine beside R plain ones of the engine and R of our own."""
    theirs = [padded(answer.histogram, num_draft_tokens) for answer in answers]
    own = [histogram(decoded, num_draft_tokens) for decoded in ours]
    texts = [list(d.output_ids) for d in ours]
    same = [a.output_ids == text for a, text in zip(answers, texts, strict=True)]
    different = [
        {"request": i, "histogram": t, "histogram_ours": o, "same_text": equal}
        for i, (t, o, equal) in enumerate(zip(theirs, own, same, strict=True))
        if t != o
    ]
    kept = [i for i, equal in enumerate(same) if equal]
    (length, survival), (length_ours, survival_ours) = (
        of_histogram(sum_histograms(histograms)) for histograms in (theirs, own)
    )
    same_text = [
        of_histogram(sum_histograms([h[i] for i in kept]))[0] for h in (theirs, own) if kept
    ]
    return PassResult(
        name=name,
        num_requests=len(answers),
        num_equal_text=sum(
            a.output_ids == list(ids) for a, ids in zip(answers, plain, strict=True)
        ),
        num_equal_histogram=len(answers) - len(different),
        num_our_text=len(kept),
        num_our_text_plain=sum(list(a) == b for a, b in zip(plain, texts, strict=True)),
        num_shared_tokens=sum(map(_shared, [a.output_ids for a in answers], texts)),
        num_shared_tokens_plain=sum(map(_shared, plain, texts)),
        cached_tokens=sum(int(a.meta.get("cached_tokens") or 0) for a in answers),
        histogram=sum_histograms(theirs),
        histogram_ours=sum_histograms(own),
        acceptance_length=length,
        acceptance_length_ours=length_ours,
        acceptance_length_same_text=same_text[0] if kept else None,
        acceptance_length_same_text_ours=same_text[1] if kept else None,
        survival_at=survival,
        survival_at_ours=survival_ours,
        different=different,
    )


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before two texts part."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def histogram(decoded: Decoded, num_draft_tokens: int) -> list[int]:
    """Rounds of a request by number of accepted drafts, 0..K."""
    counts = np.bincount(np.asarray(decoded.num_accepted, dtype=int), minlength=1)
    return padded(counts.tolist(), num_draft_tokens)


def padded(counts: Sequence[int], num_draft_tokens: int) -> list[int]:
    """K + 1 counts; an engine leaves out what stands behind its last round.

    A longer one stays as it is: that the engine drafts more is a difference to be seen.
    """
    return [*counts, *[0] * (num_draft_tokens + 1 - len(counts))]


def compare_features(
    engine: Sequence[Tensor], ours: Sequence[Tensor], layer_ids: Sequence[int]
) -> list[LayerMatch]:
    """Each layer that the engine captured, beside every layer of ours.

    `engine` has [T, n*H] a prompt, `ours` [L, T, H]: the embedding, then each layer but the last.
    Raises EngineError where the engine returned other rows than the prompt has tokens.
    """
    n = len(layer_ids)
    for theirs, own in zip(engine, ours, strict=True):
        wanted = [own.shape[1], n * own.shape[2]]
        if list(theirs.shape) != wanted:
            raise EngineError(
                f"the engine captured {list(theirs.shape)} where {wanted} was expected (tokens of "
                "the prompt, layers x hidden size); serve it with --disable-radix-cache"
            )
    slices = [rows.unflatten(-1, (n, -1)).unbind(1) for rows in engine]
    matches: list[LayerMatch] = []
    for i, layer_id in enumerate(layer_ids):
        captured = torch.cat([parts[i] for parts in slices]).float()
        errors = [
            relative_errors(captured, torch.cat([own[row] for own in ours]).float())
            for row in range(len(ours[0]))
        ]
        medians = [float(each.quantile(0.5)) for each in errors]
        tail = float(errors[layer_id + 1].quantile(TAIL))
        nearest = int(np.argmin(np.nan_to_num(medians, nan=np.inf)))
        stated = medians[layer_id + 1]
        matches.append(LayerMatch(layer_id, stated, tail, nearest - 1, medians[nearest]))
    return matches


def relative_errors(a: Tensor, b: Tensor) -> Tensor:
    """[T]: the size of each token's difference, over that of its row of `b`.

    Token by token: an attention sink is a hundred times the others and would hide them in one norm.
    """
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)


def acceptance(ours: Sequence[Decoded], num_draft_tokens: int) -> float:
    """Our acceptance length on these requests, bonus included; 1 where nothing was drafted."""
    rounds = [Rounds(d.num_accepted, d.num_drafted, len(d.output_ids)) for d in ours]
    return measure(rounds, num_draft_tokens, resamples=1).acceptance_length or 1.0
