"""Prompt lookup: draft what followed the same few tokens before; it needs no training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dflash.draft import Choose, Proposal
from .drafter import NO_TOKEN


class NgramDrafter:
    """Drafts what followed the latest occurrence of the longest suffix, `max_n` tokens at most.

    Where not even the last token occurred before, or the text ends, it drafts fewer tokens or none.
    """

    algorithm = "ngram"
    target_layer_ids = None

    def __init__(self, num_draft_tokens: int, *, max_n: int = 3) -> None:
        if num_draft_tokens < 1 or max_n < 1:
            raise ValueError(
                f"num_draft_tokens {num_draft_tokens}, max_n {max_n}; expected at least 1 of both"
            )
        self.num_draft_tokens = num_draft_tokens
        self.max_n = max_n
        self._history: dict[int, list[int]] = {}
        # n-gram -> where its latest occurrence is followed; the history's own end is not in it.
        self._next: dict[int, dict[tuple[int, ...], int]] = {}

    def allocate(self, num_slots: int, max_length: int) -> None:
        self._history.clear()
        self._next.clear()

    def begin(self, slot: int, prompt_ids: Sequence[int]) -> None:
        self._history[slot] = []
        self._next[slot] = {}

    def observe(
        self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
    ) -> None:
        for slot, row, count in zip(slots.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            for token in row[:count]:
                self._follow(slot)
                self._history[slot].append(token)

    def propose(self, slots: Tensor, anchors: Tensor, choose: Choose | None = None) -> Proposal:
        rows = [
            self._continuation(slot, anchor)
            for slot, anchor in zip(slots.tolist(), anchors.tolist(), strict=True)
        ]
        return Proposal(torch.tensor(rows, device=anchors.device))

    def _follow(self, slot: int) -> None:
        """A token follows the history: note where, for each n-gram that ends it."""
        history = self._history[slot]
        for n in range(1, min(self.max_n, len(history)) + 1):
            self._next[slot][tuple(history[-n:])] = len(history)

    def _continuation(self, slot: int, anchor: int) -> list[int]:
        history, following = self._history[slot], self._next[slot]
        self._follow(slot)
        suffix = [*history[-self.max_n :], anchor][-self.max_n :]
        found: list[int] = []
        for start in range(len(suffix)):
            at = following.get(tuple(suffix[start:]))
            if at is not None:
                found = [*history, anchor][at : at + self.num_draft_tokens]
                break
        return found + [NO_TOKEN] * (self.num_draft_tokens - len(found))
