"""Greedy speculative decoding of many requests: propose, verify, commit.

Shapes: B requests of a round, K drafted tokens, H hidden, n captured layers, V vocabulary.

One slot a request; a finished slot takes the next prompt. Each round the drafter proposes K tokens
after every request's anchor, the target reads anchor and draft in one forward pass, and the leading
draft tokens that equal the target's own choices are kept; the target's next choice, the bonus
token, is the next anchor. Rejected tokens are forgotten by writing a shorter length. The output is
that of plain greedy decoding, token for token in fp32, whatever the drafter proposes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..dflash.draft import DFlashDraft, DraftCache
from ..target.cache import SlotCache, forward_slots
from ..target.capture import Capture
from ..target.generate import check_prompts, greedy, prefill
from ..target.model import Target

NO_TOKEN = -1  # in draft tokens: nothing proposed from here on


class Drafter(Protocol):
    """Proposes tokens after each request's anchor. Slots are numbered as the target's."""

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

    def propose(self, slots: Tensor, anchors: Tensor) -> Tensor:
        """Draft tokens [B, K] after anchors [B]; NO_TOKEN ends a row that has fewer."""
        ...


class NetworkDrafter:
    """A DFlash network reading a target's features."""

    def __init__(self, draft: DFlashDraft, target: Target) -> None:
        check_pair(draft, target)
        self.draft = draft
        self.target = target
        self.cache: DraftCache | None = None

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

    def propose(self, slots: Tensor, anchors: Tensor) -> Tensor:
        embedding = self.target.embedding
        return self.draft.propose(
            self._cache, slots, anchors, embedding=embedding, head=self._head
        ).tokens

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
    """Proposes nothing: the same loop is plain greedy decoding, the baseline of every report."""

    num_draft_tokens = 0
    target_layer_ids = None

    def allocate(self, num_slots: int, max_length: int) -> None: ...

    def begin(self, slot: int, prompt_ids: Sequence[int]) -> None: ...

    def observe(
        self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
    ) -> None: ...

    def propose(self, slots: Tensor, anchors: Tensor) -> Tensor:
        return anchors.new_empty(len(anchors), 0)


def check_pair(draft: DFlashDraft, target: Target) -> None:
    """Raise ValueError unless the drafter was made for a target of this shape."""
    config = draft.config
    for what, drafter_has, target_has in (
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("hidden size", config.hidden_size, target.hidden_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    ):
        if drafter_has != target_has:
            raise ValueError(
                f"the drafter's {what} is {drafter_has}, that of {target.name} is {target_has}; "
                "evaluate it with the target it was trained for"
            )


@dataclass
class Decoded:
    """One finished answer and its rounds."""

    output_ids: list[int]  # a stop token included
    finish_reason: str  # "stop" | "length"
    num_accepted: list[int]  # per round, bonus excluded
    num_drafted: list[int]  # per round
    seconds: float  # its share of the wall time: each round's, split over the running requests


@dataclass
class Request:
    """One running request."""

    index: int
    seconds: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    num_drafted: list[int] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the target says to a round's draft."""

    slots: Tensor  # [B]
    tokens: Tensor  # [B, K+1] anchor and draft, as read
    choices: Tensor  # [B, K+1] the target's choice after each of them
    num_accepted: Tensor  # [B] leading draft tokens that equal the target's choices
    num_drafted: Tensor  # [B]
    features: Tensor | None  # [B, K+1, n*H] where the drafter reads them


class Batch:
    """The running requests by slot and what serves them."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        num_slots: int,
        max_length: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        capture: Capture | None,
    ) -> None:
        # A round reads its whole block before it knows how much of it stays.
        room = max_length + drafter.num_draft_tokens
        self.target = target
        self.drafter = drafter
        self.cache = SlotCache(target, num_slots, room)
        self.max_new_tokens = max_new_tokens
        self.stop = frozenset(stop_token_ids)
        self.capture = capture
        self.requests: dict[int, Request] = {}
        self.free = list(range(num_slots))
        drafter.allocate(num_slots, room)

    def start(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Give each (index, ids) a free slot, read its prompt and choose its first token."""
        requests: list[tuple[int, Sequence[int]]] = []
        for index, ids in prompts:
            slot = self.free.pop(0)
            self.cache.lengths[slot] = 0
            self.requests[slot] = Request(index)
            self.drafter.begin(slot, ids)
            requests.append((slot, ids))
        for call in prefill(self.target, self.cache, requests):
            slots = torch.tensor([requests[row][0] for row in call.rows], device=call.hidden.device)
            counts = torch.tensor(call.counts, device=slots.device)
            self.drafter.observe(slots, call.tokens, self.features(), counts)
            ends = [b for b, finished in enumerate(call.finished) if finished]
            if ends:
                hidden = call.hidden[ends, counts[ends] - 1]
                chosen = greedy(self.target.logits(hidden)).tolist()
                for slot, token in zip(slots[ends].tolist(), chosen, strict=True):
                    self.accept(self.requests[slot], [token])

    def share(self, seconds: float) -> None:
        """Charge a round's wall time to the requests it served, in equal parts."""
        for request in self.requests.values():
            request.seconds += seconds / len(self.requests)

    def features(self) -> Tensor | None:
        return None if self.capture is None else self.capture.context

    def accept(self, request: Request, tokens: list[int]) -> int | None:
        """Add tokens up to a stop token or the limit; the number added if a stop token ended it."""
        tokens = tokens[: self.max_new_tokens - len(request.output_ids)]
        for i, token in enumerate(tokens):
            request.output_ids.append(token)
            if token in self.stop:
                request.finish_reason = "stop"
                return i + 1
        if len(request.output_ids) == self.max_new_tokens:
            request.finish_reason = "length"
        return None

    def slots(self) -> Tensor:
        """The slots of unfinished requests, in the order that the cache reads without a copy."""
        running = [slot for slot, request in self.requests.items() if not request.finish_reason]
        return torch.tensor(self.cache.in_order(running), device=self.target.device)

    def anchors(self, slots: Tensor) -> Tensor:
        last = [self.requests[slot].output_ids[-1] for slot in slots.tolist()]
        return torch.tensor(last, device=slots.device)

    def pop_finished(self) -> list[Request]:
        """The finished requests; their slots are free again."""
        ended = [slot for slot, request in self.requests.items() if request.finish_reason]
        self.free += ended
        return [self.requests.pop(slot) for slot in ended]

    def shrink(self) -> None:
        """Nothing waits any more: give the free slots up, so that the rest stays side by side."""
        for slot in self.free:
            self.cache.release(slot)
        self.free.clear()


def propose(batch: Batch, slots: Tensor) -> Tensor:
    """Draft tokens [B, K] after each slot's anchor."""
    return batch.drafter.propose(slots, batch.anchors(slots))


def verify(batch: Batch, slots: Tensor, draft_tokens: Tensor) -> Verdict:
    """Read anchor and draft in one forward pass of the target and count the leading matches."""
    drafted = (draft_tokens != NO_TOKEN).long().cumprod(dim=-1)
    num_drafted = drafted.sum(dim=-1)
    width = int(num_drafted.max())
    draft_tokens = draft_tokens[:, :width]
    tokens = torch.cat([batch.anchors(slots)[:, None], draft_tokens], dim=1).clamp_min(0)
    hidden = forward_slots(batch.target, batch.cache, slots, tokens, num_drafted + 1)
    choices = greedy(batch.target.logits(hidden))
    matches = (choices[:, :width] == draft_tokens) & drafted[:, :width].bool()
    num_accepted = matches.long().cumprod(dim=-1).sum(dim=-1)
    return Verdict(slots, tokens, choices, num_accepted, num_drafted, batch.features())


def commit(batch: Batch, verdict: Verdict) -> None:
    """Keep each request's accepted tokens and the bonus token; forget the rest."""
    slots, kept = verdict.slots, verdict.num_accepted
    batch.cache.lengths[slots] -= verdict.num_drafted - kept
    batch.drafter.observe(slots, verdict.tokens, verdict.features, kept + 1)
    rows = zip(
        slots.tolist(),
        verdict.choices.tolist(),
        kept.tolist(),
        verdict.num_drafted.tolist(),
        strict=True,
    )
    for slot, choices, num_accepted, num_drafted in rows:
        request = batch.requests[slot]
        stopped = batch.accept(request, choices[: num_accepted + 1])
        # A round that the token limit cuts counts in full; one that meets a stop token, up to it.
        counted = num_accepted if stopped is None else min(num_accepted, stopped)
        request.num_accepted.append(counted)
        request.num_drafted.append(num_drafted)


@torch.no_grad()
def speculate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    stop_token_ids: Sequence[int] | None = None,
    on_finished: Callable[[Decoded], None] | None = None,
) -> list[Decoded]:
    """Decode every prompt greedily with the drafter (None: plainly); results in the prompts' order.

    `stop_token_ids` defaults to all of the target's own; () ignores them. `on_finished` sees each
    answer as it ends.

    Raises ValueError for an empty prompt or one that does not fit the target's positions together
    with its answer and one block.
    """
    drafter = drafter or NoDrafter()
    check_prompts(target, prompts, max_new_tokens, extra=drafter.num_draft_tokens)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")
    if not prompts:
        return []
    layer_ids = drafter.target_layer_ids
    capture = Capture(target, layer_ids, last=False) if layer_ids is not None else None
    batch = Batch(
        target,
        drafter,
        num_slots=min(batch_size, len(prompts)),
        max_length=max(map(len, prompts)) + max_new_tokens,
        max_new_tokens=max_new_tokens,
        stop_token_ids=target.stop_token_ids if stop_token_ids is None else stop_token_ids,
        capture=capture,
    )
    waiting = deque(enumerate(prompts))
    results: dict[int, Decoded] = {}
    with capture or nullcontext():
        while waiting or batch.requests:
            began = time.perf_counter()
            batch.start([waiting.popleft() for _ in range(min(len(batch.free), len(waiting)))])
            slots = batch.slots()
            if len(slots):
                draft_tokens = propose(batch, slots)
                verdict = verify(batch, slots, draft_tokens)
                commit(batch, verdict)
            batch.share(time.perf_counter() - began)
            for request in batch.pop_finished():
                results[request.index] = _decoded(request)
                if on_finished is not None:
                    on_finished(results[request.index])
            if not waiting:
                batch.shrink()
    return [results[i] for i in range(len(prompts))]


def _decoded(request: Request) -> Decoded:
    return Decoded(
        request.output_ids,
        request.finish_reason,
        request.num_accepted,
        request.num_drafted,
        request.seconds,
    )
