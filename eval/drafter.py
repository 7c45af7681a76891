"""What proposes tokens: a draft network, or nothing.

Shapes: B requests, K drafted tokens, T tokens of a call, n captured layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..dflash.draft import Choose, DFlashDraft, DraftCache, Proposal
from ..recipes.algorithms import algorithm_name
from ..target.model import Target
from .pair import check_pair

NO_TOKEN = -1  # in draft tokens: nothing proposed from here on


class Drafter(Protocol):
    """Proposes tokens after each request's anchor. Slots are numbered as the target's."""

    @property
    def algorithm(self) -> str:
        """What reports call it."""
        ...

    @property
    def num_draft_tokens(self) -> int: ...

    @property
    def target_layer_ids(self) -> tuple[int, ...] | None:
        """Layers whose features `observe` gets; None where it reads only tokens."""
        ...

    def allocate(self, num_slots: int, max_length: int) -> None:
        """Make room, before the first request, for slots of up to `max_length` tokens."""
        ...

    def begin(self, slot: int, prompt_ids: Sequence[int]) -> None:
        """A new request takes the slot; its prompt's tokens follow by `observe`."""
        ...

    def observe(
        self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
    ) -> None:
        """Row b of tokens [B, T], features [B, T, n*H] adds counts[b] final tokens to its slot."""
        ...

    def propose(self, slots: Tensor, anchors: Tensor, choose: Choose | None = None) -> Proposal:
        """Draft tokens [B, K] after anchors [B]; NO_TOKEN ends a row that has fewer.

        A drafter that samples takes its tokens from `choose`; None asks for its argmax.
        """
        ...


class NetworkDrafter:
    """A draft network reading a target's features."""

    def __init__(self, draft: DFlashDraft, target: Target) -> None:
        check_pair(draft, target)
        self.draft = draft
        self.target = target
        self.cache: DraftCache | None = None

    @property
    def algorithm(self) -> str:
        return algorithm_name(self.draft)

    @property
    def num_draft_tokens(self) -> int:
        return self.draft.config.num_draft_tokens

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return tuple(self.draft.config.target_layer_ids)

    def allocate(self, num_slots: int, max_length: int) -> None:
        self.cache = self.draft.new_cache(num_slots, max_length)

    def begin(self, slot: int, prompt_ids: Sequence[int]) -> None:
        self._cache.lengths[slot] = 0

    def observe(
        self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
    ) -> None:
        assert features is not None
        self.draft.extend(self._cache, slots, features, counts)

    def propose(self, slots: Tensor, anchors: Tensor, choose: Choose | None = None) -> Proposal:
        embedding = self.target.embedding
        return self.draft.propose(
            self._cache, slots, anchors, embedding=embedding, head=self._head, choose=choose
        )

    def _head(self, hidden: Tensor) -> Tensor:
        # As a matrix: a slice of a single block would have the whole head's weight copied. In fp32:
        # argmax in bf16 takes several times as long on a CPU.
        rows = hidden.to(self.target.dtype).reshape(-1, hidden.shape[-1])
        return self.target.logits(rows).float().unflatten(0, hidden.shape[:-1])

    @property
    def _cache(self) -> DraftCache:
        assert self.cache is not None, "allocate comes first"
        return self.cache


class NoDrafter:
    """Proposes nothing: the same loop is plain decoding, the baseline of every report."""

    algorithm = "none"
    num_draft_tokens = 0
    target_layer_ids = None

    def allocate(self, num_slots: int, max_length: int) -> None: ...

    def begin(self, slot: int, prompt_ids: Sequence[int]) -> None: ...

    def observe(
        self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
    ) -> None: ...

    def propose(self, slots: Tensor, anchors: Tensor, choose: Choose | None = None) -> Proposal:
        return Proposal(anchors.new_empty(len(anchors), 0))
