"""How the next token is chosen from the target's logits: the argmax, or a seeded draw.

Shapes: B rows, V vocabulary.

`distribution` says from what is drawn, `draw` draws. Plain generation and the verification of
drafted tokens use the same two, so that they cannot disagree about what the target would say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the argmax."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        usable = 0 <= self.temperature < math.inf
        if not usable or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"sampling has temperature {self.temperature}, top_p {self.top_p}, top_k "
                f"{self.top_k}; expected "
                "temperature >= 0, 0 < top_p <= 1, top_k >= 0 (0 keeps every token)"
            )


GREEDY = Sampling()


def greedy(logits: Tensor) -> Tensor:
    """Argmax over the last dimension, the first of equals."""
    return logits.max(dim=-1).indices  # argmax in bf16 takes four times as long on a CPU


def choose(logits: Tensor, sampling: Sampling, randoms: Sequence[random.Random]) -> list[int]:
    """The next token of each row of [B, V]: the argmax, or a draw with that row's own generator."""
    if sampling.temperature == 0:
        return greedy(logits).tolist()
    return draw(distribution(logits, sampling), uniforms(randoms, logits.device)).tolist()


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] in float32 of logits [B, V]: temperature, then top-k, then top-p.

    Of the k likeliest tokens, renormalized, those stay before which less than top_p of the mass
    lies. A row does not depend on the others. Temperature 0 has no distribution.
    """
    assert sampling.temperature > 0, "greedy decoding takes the argmax"
    logits = logits.float()
    # From the largest on: a tiny temperature then gives 0 and -inf, not infinities of both signs.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return torch.softmax(logits, dim=-1)
    likeliest, ids = _candidates(logits, sampling)
    # The first always stays: no mass lies before it.
    before = likeliest.cumsum(dim=-1) - likeliest
    kept = likeliest * ((before < sampling.top_p) | (before == 0))
    kept = kept / kept.sum(dim=-1, keepdim=True)
    # Added, not written: rows padded by `_candidates` name a token again with probability 0.
    return torch.zeros_like(logits).scatter_add_(-1, ids, kept)


def uniforms(randoms: Sequence[random.Random], device: torch.device) -> Tensor:
    """One number in [0, 1) of each generator, [B] in float64."""
    return torch.tensor([r.random() for r in randoms], dtype=torch.float64, device=device)


def draw(weights: Tensor, at: Tensor) -> Tensor:
    """Tokens [B] in proportion to weights [B, V]: the inverse cumulative sum at [B] in [0, 1)."""
    cumulative = weights.double().cumsum(dim=-1)
    # Scaled by the total, so that rounding cannot push a draw past the last token.
    found = torch.searchsorted(cumulative, (at * cumulative[:, -1])[:, None], right=True)
    return found[:, 0].clamp(max=weights.shape[-1] - 1)


def _candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order and their ids: the top k, or enough to hold top_p."""
    vocabulary = logits.shape[-1]
    if sampling.top_k:
        top, ids = logits.topk(min(sampling.top_k, vocabulary), dim=-1)
        return torch.softmax(top, dim=-1), ids
    probabilities = torch.softmax(logits, dim=-1)
    # Sorting the vocabulary costs more than the head; the nucleus is nearly always among the first
    # few.
    top, ids = probabilities.topk(min(256, vocabulary), dim=-1)
    wide = top.sum(dim=-1) < sampling.top_p
    if not bool(wide.any()):
        return top, ids
    # Only the rows that need it are sorted: equal probabilities may come in another order, and a
    # row must not depend on its neighbours.
    every, every_ids = torch.zeros_like(probabilities), ids.new_zeros(probabilities.shape)
    every[:, : top.shape[1]], every_ids[:, : top.shape[1]] = top, ids
    every[wide], every_ids[wide] = probabilities[wide].sort(dim=-1, descending=True)
    return every, every_ids
