"""Speculative decoding of many requests: propose, verify, commit.

Shapes: B requests of a round, K drafted tokens, H hidden, n captured layers, V vocabulary.

One slot a request; a finished slot takes the next prompt. Each round the drafter proposes K tokens
after every request's anchor, a schedule may cut each request's draft to what is worth verifying,
the target reads anchor and draft in one forward pass, and the leading draft tokens that it agrees
with are kept; the target's next choice, the bonus token, is the next anchor. Rejected tokens are
forgotten by writing a shorter length.

The output is the target's own, whatever the drafter proposes and however much of it is verified:
that of plain greedy decoding, token for token in fp32, at temperature 0; draws from the target's
distribution above (`rejection`).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dflash.draft import Choose, Proposal
from ..dspark.schedule import Schedule
from ..target.cache import SlotCache, forward_slots
from ..target.capture import Capture
from ..target.generate import check_prompts, prefill
from ..target.model import Target
from ..target.sampling import GREEDY, Sampling, choose, distribution, draw, greedy, uniforms
from .drafter import NO_TOKEN, Drafter, NoDrafter
from .rejection import keep_or_replace


@dataclass
class Decoded:
    """One finished answer and its rounds."""

    output_ids: list[int]  # a stop token included
    finish_reason: str  # "stop" | "length"
    num_accepted: list[int]  # per round, bonus excluded
    num_drafted: list[int]  # per round, what the target verified
    seconds: float  # its share of the wall time: each round's, split over the running requests
    # Per round the K logits of the drafter's confidence, verified or not; empty without a head.
    confidence: list[list[float]] = field(default_factory=list)


@dataclass
class Request:
    """One running request."""

    index: int
    random: random.Random  # judges the draft and draws the target's tokens
    # Draws the draft. Of the same stream, whether a token stays would depend on what was drafted.
    draft_random: random.Random
    seconds: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    num_drafted: list[int] = field(default_factory=list)
    confidence: list[list[float]] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the target says to a round's draft."""

    slots: Tensor  # [B]
    tokens: Tensor  # [B, K+1] anchor and draft, as read
    choices: Tensor  # [B, K+1] the target's choice after each of them, up to the bonus token
    num_accepted: Tensor  # [B] leading draft tokens that the target agrees with
    num_drafted: Tensor  # [B]
    features: Tensor | None  # [B, K+1, n*H] where the drafter reads them
    confidence: Tensor | None  # [B, num_draft_tokens] logits, from a drafter that tells


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
        sampling: Sampling = GREEDY,
        schedule: Schedule | None = None,
    ) -> None:
        # A round reads its whole block before it knows how much of it stays.
        room = max_length + drafter.num_draft_tokens
        self.target = target
        self.drafter = drafter
        self.cache = SlotCache(target, num_slots, room)
        self.max_new_tokens = max_new_tokens
        self.stop = frozenset(stop_token_ids)
        self.capture = capture
        self.sampling = sampling
        self.schedule = schedule
        self.requests: dict[int, Request] = {}
        self.free = list(range(num_slots))
        drafter.allocate(num_slots, room)

    def start(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Give each (index, ids) a free slot, read its prompt and choose its first token."""
        requests: list[tuple[int, Sequence[int]]] = []
        for index, ids in prompts:
            slot = self.free.pop(0)
            self.cache.lengths[slot] = 0
            self.requests[slot] = self.new_request(index)
            self.drafter.begin(slot, ids)
            requests.append((slot, ids))
        for call in prefill(self.target, self.cache, requests):
            slots = torch.tensor([requests[row][0] for row in call.rows], device=call.hidden.device)
            counts = torch.tensor(call.counts, device=slots.device)
            self.drafter.observe(slots, call.tokens, self.features(), counts)
            ends = [b for b, finished in enumerate(call.finished) if finished]
            if ends:
                logits = self.target.logits(call.hidden[ends, counts[ends] - 1])
                started = [self.requests[slot] for slot in slots[ends].tolist()]
                chosen = choose(logits, self.sampling, [request.random for request in started])
                for request, token in zip(started, chosen, strict=True):
                    self.accept(request, [token])

    def new_request(self, index: int) -> Request:
        """Seeded with (seed, index), as plain generation is: neighbours do not matter."""
        seed = f"{self.sampling.seed}/{index}"
        return Request(index, random.Random(seed), random.Random(f"{seed}/draft"))

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

    def chooser(self, slots: Tensor) -> Choose | None:
        """How a drafter that samples picks tokens for these slots; None: greedily."""
        if self.sampling.temperature == 0:
            return None
        randoms = [self.requests[slot].draft_random for slot in slots.tolist()]

        def choose_draft(k: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
            probs = distribution(logits, self.sampling)
            return draw(probs, uniforms(randoms, logits.device)), probs

        return choose_draft

    def uniforms(self, slots: Tensor, counts: Tensor) -> Tensor:
        """Row b holds counts[b] numbers in [0, 1) of its request's own, then zeros; float64."""
        rows: list[list[float]] = []
        width = int(counts.max())
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            own = self.requests[slot].random
            rows.append([own.random() for _ in range(count)] + [0.0] * (width - count))
        return torch.tensor(rows, dtype=torch.float64, device=slots.device)

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


def propose(batch: Batch, slots: Tensor) -> Proposal:
    """Draft tokens [B, K] after each slot's anchor, cut to what the schedule lets be verified."""
    proposal = batch.drafter.propose(slots, batch.anchors(slots), batch.chooser(slots))
    return proposal if batch.schedule is None else cut(proposal, batch.schedule)


def cut(proposal: Proposal, schedule: Schedule) -> Proposal:
    """NO_TOKEN behind each request's verification length.

    Whether slot k is verified may depend on what was known before its token was drawn: the
    confidence of slots up to k, and other requests. A schedule that looks at the token itself or
    at later ones changes what comes out. Raises ValueError where the drafter tells no confidence.
    """
    tokens = proposal.tokens
    if proposal.confidence is None:
        raise ValueError(
            "the drafter has no confidence head, which a verification schedule reads; verify all "
            "drafted tokens or take a drafter with `enable_confidence_head`"
        )
    lengths = schedule(proposal.confidence)
    assert lengths.shape == tokens.shape[:1], f"{list(lengths.shape)} for {list(tokens.shape)}"
    assert bool(((lengths >= 0) & (lengths <= tokens.shape[1])).all()), f"lengths {lengths}"
    behind = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    return replace(proposal, tokens=tokens.masked_fill(behind, NO_TOKEN))


def verify(batch: Batch, slots: Tensor, proposal: Proposal) -> Verdict:
    """Read anchor and draft in one forward pass of the target and count what it agrees with."""
    drafted = (proposal.tokens != NO_TOKEN).long().cumprod(dim=-1)
    num_drafted = drafted.sum(dim=-1)
    width = int(num_drafted.max())
    draft_tokens = proposal.tokens[:, :width]
    tokens = torch.cat([batch.anchors(slots)[:, None], draft_tokens], dim=1).clamp_min(0)
    hidden = forward_slots(batch.target, batch.cache, slots, tokens, num_drafted + 1)
    logits = batch.target.logits(hidden)
    if batch.sampling.temperature == 0:
        choices = greedy(logits)
        matches = (choices[:, :width] == draft_tokens) & drafted[:, :width].bool()
        num_accepted = matches.long().cumprod(dim=-1).sum(dim=-1)
    else:
        num_accepted, bonus = keep_or_replace(
            distribution(logits.flatten(0, 1), batch.sampling).view(logits.shape),
            tokens[:, 1:],
            num_drafted,
            batch.uniforms(slots, num_drafted + 1),
            draft_probs=None if proposal.probs is None else proposal.probs[:, :width],
        )
        choices = F.pad(tokens[:, 1:], (0, 1)).scatter(1, num_accepted[:, None], bonus[:, None])
    return Verdict(
        slots,
        tokens,
        choices,
        num_accepted,
        num_drafted,
        batch.features(),
        proposal.confidence,
    )


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
    if verdict.confidence is not None:
        for slot, logits in zip(slots.tolist(), verdict.confidence.tolist(), strict=True):
            batch.requests[slot].confidence.append(logits)


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
    sampling: Sampling = GREEDY,
    schedule: Schedule | None = None,
) -> list[Decoded]:
    """Decode every prompt with the drafter (None: plainly); results in the prompts' order.

    `stop_token_ids` defaults to all of the target's own; () ignores them. `on_finished` sees each
    answer as it ends. `sampling` seeds each request with its index, so that its answer does not
    depend on its neighbours. `schedule` says each round how many of a request's drafted tokens are
    verified, from the drafter's confidence (see `cut`); None verifies all.

    Raises ValueError for an empty prompt or one that does not fit the target's positions together
    with its answer and one block, and for a schedule with a drafter that tells no confidence.
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
        sampling=sampling,
        schedule=schedule,
    )
    waiting = deque(enumerate(prompts))
    results: dict[int, Decoded] = {}
    with capture or nullcontext():
        while waiting or batch.requests:
            began = time.perf_counter()
            batch.start([waiting.popleft() for _ in range(min(len(batch.free), len(waiting)))])
            slots = batch.slots()
            if len(slots):
                proposal = propose(batch, slots)
                verdict = verify(batch, slots, proposal)
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
        request.confidence,
    )
