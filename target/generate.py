"""Plain generation by the target with continuous batching, and the features it leaves on the way.

Shapes: B rows of a call, T tokens a row, P prompt, L = P + outputs - 1 (the last token is never fed
back), H hidden, n captured layers, V vocabulary.

A finished slot takes the next prompt, so the batch stays full until the prompts run out; from then
on it shrinks. Prompts run through the layers in groups of similar length, and the head only where a
token is chosen.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cache import SlotCache, forward_slots
from .capture import Capture
from .model import Target
from .sampling import Sampling, choose
from .teacher import Teacher

PREFILL_TOKENS = (
    2048  # computed tokens of one call, padding included: larger ones gain nothing on a CPU
)


@dataclass
class Generation:
    """One finished answer.

    `context` [L, n*H] holds the features of every position that was computed; the last output token
    is chosen, never fed, and has none. `teacher` [L, H] is what was asked for at the positions
    whose next token was generated (from the prompt's last on) and zero before.
    """

    index: int
    output_ids: list[int]  # a stop token included
    finish_reason: str  # "stop" | "length" | "deadline" (only with keep_unfinished)
    context: Tensor | None = None
    teacher: Tensor | None = None


@dataclass
class PrefillStep:
    """What one call of a prefill left: rows name requests by their place in the list given."""

    rows: list[int]
    counts: list[int]  # valid tokens of each row
    tokens: Tensor  # [B, T] what was read
    hidden: Tensor  # [B, T, H] final norm's output
    finished: list[bool]  # whether the row's prompt is complete


def prefill(
    target: Target,
    cache: SlotCache,
    requests: Sequence[tuple[int, Sequence[int]]],
    *,
    max_tokens: int = PREFILL_TOKENS,
) -> Iterator[PrefillStep]:
    """Append each (slot, ids) in calls of at most `max_tokens`; longer prompts take several calls.

    One PrefillStep a call: a Capture around the iteration holds that call's features.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i][1]))
    for group in _groups(order, [len(ids) for _, ids in requests], max_tokens):
        slots = torch.tensor([requests[i][0] for i in group], device=target.device)
        longest = max(len(requests[i][1]) for i in group)
        for start in range(0, longest, max_tokens):
            pieces = [list(requests[i][1][start : start + max_tokens]) for i in group]
            counts = [len(piece) for piece in pieces]
            tokens = pad(pieces, target.device)
            lengths = torch.tensor(counts, device=target.device)
            hidden = forward_slots(target, cache, slots, tokens, lengths)
            finished = [
                start + n == len(requests[i][1]) for i, n in zip(group, counts, strict=True)
            ]
            yield PrefillStep(group, counts, tokens, hidden, finished)


def _groups(order: list[int], lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Runs of the sorted requests whose padded size fits; one that never fits comes alone."""
    group: list[int] = []
    for i in order:
        # A row more than a quarter longer than the group's shortest would mostly compute padding.
        too_wide = bool(group) and lengths[i] > 1.25 * lengths[group[0]] + 16
        if group and (too_wide or (len(group) + 1) * lengths[i] > max_tokens):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def pad(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, T] with zeros after each sequence's end."""
    width = max(len(s) for s in sequences)
    return torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences], device=device)


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    names: Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    layer_ids: Sequence[int] | None = None,
    teacher: Teacher | None = None,
    deadline: float | None = None,
    keep_unfinished: bool = False,
) -> Iterator[Generation]:
    """Answer every prompt, in any order, each as soon as it is finished.

    Sampling draws from a generator seeded with (seed, the prompt's name; by default its index):
    what a prompt gets does not depend on its neighbours. `layer_ids` asks for context features,
    `teacher` for what soft labels need. After `deadline` (seconds of time.monotonic) no step
    starts; unfinished answers are dropped, or yielded as "deadline" with `keep_unfinished`.
    `stop_token_ids` defaults to the target's own; () ignores them.

    Raises ValueError for an empty prompt, one too long for the target, or an impossible sampling.
    """
    check_prompts(target, prompts, max_new_tokens)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")
    if not prompts:
        return
    names = [str(index) for index in range(len(prompts))] if names is None else names
    assert len(names) == len(prompts), "one name a prompt"
    sampling = Sampling(temperature, top_p, top_k, seed)
    stop = frozenset(target.stop_token_ids if stop_token_ids is None else stop_token_ids)
    slots = min(batch_size, len(prompts))
    cache = SlotCache(target, slots, max(map(len, prompts)) + max_new_tokens)
    capturing = Capture(target, layer_ids, last=False) if layer_ids is not None else None
    with capturing or nullcontext():
        batch = _Batch(
            target, cache, prompts, names, max_new_tokens, sampling, stop, capturing, teacher
        )
        while batch.running or batch.waiting:
            if deadline is not None and time.monotonic() >= deadline:
                break
            batch.admit()
            yield from batch.finish()
            if batch.running:
                batch.step()
                yield from batch.finish()
        if keep_unfinished:
            yield from batch.abandon()


def check_prompts(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, extra: int = 0
) -> None:
    """Raise ValueError unless every prompt has a token and fits the target with its answer."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    limit = max_positions(target)
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty; expected at least one token id")
        if limit is not None and len(prompt) + max_new_tokens + extra > limit:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; with {max_new_tokens + extra} more it "
                "exceeds the "
                f"{limit} positions of {target.name}; shorten the prompt or lower max_new_tokens"
            )


def max_positions(target: Target) -> int | None:
    """The longest sequence the target was built for, where its config says so."""
    limit = getattr(target.config, "max_position_embeddings", None)
    return int(limit) if limit else None


@dataclass
class _Running:
    """One request in its slot."""

    index: int
    random: random.Random
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


class _Batch:
    """The running requests by slot, the waiting ones, and the buffers of what they leave."""

    def __init__(
        self,
        target: Target,
        cache: SlotCache,
        prompts: Sequence[Sequence[int]],
        names: Sequence[str],
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int],
        capture: Capture | None,
        teacher: Teacher | None,
    ) -> None:
        self.target = target
        self.cache = cache
        self.prompts = prompts
        self.names = names
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.stop = stop
        self.capture = capture
        self.waiting = deque(range(len(prompts)))
        self.free = list(range(cache.slots))
        self.running: dict[int, _Running] = {}
        self._context: Tensor | None = None  # [S, max_length, n*H], made when the width is known
        shape = (cache.slots, cache.max_length, target.hidden_size)
        self._kind = teacher
        self._teacher = torch.empty(shape, dtype=target.dtype) if teacher else None

    def admit(self) -> None:
        """Give free slots to waiting prompts; each admitted one gets its first token."""
        chosen = [(self.free.pop(0), self.waiting.popleft()) for _ in self._possible()]
        for slot, index in chosen:
            self.cache.lengths[slot] = 0
            seed = f"{self.sampling.seed}/{self.names[index]}"
            self.running[slot] = _Running(index, random.Random(seed))
        requests = [(slot, self.prompts[index]) for slot, index in chosen]
        starts = [0] * len(requests)
        for call in prefill(self.target, self.cache, requests):
            slots = [requests[row][0] for row in call.rows]
            for b, (row, count) in enumerate(zip(call.rows, call.counts, strict=True)):
                self._keep_context(slots[b], starts[row], b, count)
                starts[row] += count
            done = [b for b, finished in enumerate(call.finished) if finished]
            if done:
                ends = torch.tensor([call.counts[b] - 1 for b in done])
                self._choose([slots[b] for b in done], call.hidden[done, ends])

    def step(self) -> None:
        """One more token for every running request."""
        slots = self.cache.in_order(list(self.running))
        device = self.target.device
        tokens = torch.tensor([[self.running[s].output_ids[-1]] for s in slots], device=device)
        rows = torch.tensor(slots, device=device)
        before = self.cache.lengths[rows]
        hidden = forward_slots(self.target, self.cache, rows, tokens, torch.ones_like(rows))
        if self.capture is not None:
            context = self.capture.context
            self._context_buffer(context)[rows, before] = context[:, 0]
        self._choose(slots, hidden[:, 0])

    def finish(self) -> Iterator[Generation]:
        """Yield what is finished and free its slot; give the slot up when nothing waits for it."""
        ended = [slot for slot, request in self.running.items() if request.finish_reason]
        for slot in ended:
            yield self._generation(slot)
            del self.running[slot]
            self.free.append(slot)
            if not self.waiting:
                self.cache.release(slot)

    def abandon(self) -> Iterator[Generation]:
        for slot, request in self.running.items():
            request.finish_reason = "deadline"
            yield self._generation(slot)

    def _possible(self) -> range:
        return range(min(len(self.free), len(self.waiting)))

    def _choose(self, slots: list[int], hidden: Tensor) -> None:
        """Pick the next token of each slot from its last hidden state [B, H]."""
        logits = self.target.logits(hidden)
        requests = [self.running[slot] for slot in slots]
        if self._teacher is not None:
            rows = hidden
            if self._kind == "expected":
                probs = torch.softmax(logits.float(), dim=-1)
                rows = probs.to(self.target.dtype) @ self.target.head
            where = torch.tensor(slots)
            self._teacher[where, self.cache.lengths[where] - 1] = rows
        tokens = choose(logits, self.sampling, [request.random for request in requests])
        for request, token in zip(requests, tokens, strict=True):
            request.output_ids.append(token)
            if token in self.stop:
                request.finish_reason = "stop"
            elif len(request.output_ids) == self.max_new_tokens:
                request.finish_reason = "length"

    def _keep_context(self, slot: int, start: int, row: int, count: int) -> None:
        if self.capture is not None:
            context = self.capture.context
            self._context_buffer(context)[slot, start : start + count] = context[row, :count]

    def _context_buffer(self, like: Tensor) -> Tensor:
        if self._context is None:
            self._context = like.new_empty(self.cache.slots, self.cache.max_length, like.shape[-1])
        return self._context

    def _generation(self, slot: int) -> Generation:
        request = self.running[slot]
        prompt = len(self.prompts[request.index])
        length = prompt + len(request.output_ids) - 1
        context = teacher = None
        if self._context is not None:
            context = self._context[slot, :length].clone()
        if self._teacher is not None:
            teacher = self._teacher[slot, :length].clone()
            teacher[: prompt - 1] = 0
        return Generation(
            request.index, request.output_ids, request.finish_reason, context, teacher
        )
