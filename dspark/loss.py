"""DSpark's loss over the whole vocabulary without a [slots, vocabulary] tensor.

Slot n has draft logits `z = W h + W2 u` and a teacher, the target's logits at the position before
the slot's token. With p = softmax(z), q the teacher's distribution and s = sign(p - q):
    CE      -log p(x), or -sum q log p    d/dz = p - onehot(x), or p - q
    L1      sum |p - q| = 2 TV            d/dz = p (s - sum p s)
    Renyi   -2 log sum sqrt(p q)          d/dz = p - sqrt(p q) / sum sqrt(p q)
A chunk of slots goes over the vocabulary three times: logits and exponentials, comparison with the
teacher, gradients. Each matrix product is done once, nothing is recomputed, and the teacher's row
of a position serves all slots that need it, those of the next chunk too. A chunk holds about CHUNK
numbers whatever the vocabulary's size.

Shapes: N supervised slots in the order of their blocks, n those of a chunk, P positions with a
teacher, H hidden, r rank, V rows of the head. DSpark (2026), section on training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dflash.loss import Head
from .tiles import Tiles

CHUNK = 3 << 20  # numbers of a chunk's probabilities
MAX_ROWS = 512
TINY = 1e-30  # smallest probability whose logarithm is taken


@dataclass(frozen=True)
class Terms:
    """Weights of the loss's terms; `soft`: cross-entropy against the teacher, not the token."""

    ce: float
    l1: float
    renyi: float
    soft: bool


@dataclass(frozen=True)
class TeacherRows:
    """The target's last hidden states at P ascending positions, and the one each slot needs."""

    last: Tensor  # [P, H]
    row_of_slot: Tensor  # [N]


@dataclass(frozen=True)
class SlotTerms:
    """`loss` carries the gradient; the rest is per slot [N], without one."""

    loss: Tensor  # [] weighted sum over slots
    weights: Tensor
    label_logprob: Tensor
    hit: Tensor  # bool: the label is the argmax
    acceptance: Tensor  # 1 - TV, how likely a token drawn from p is kept; 0 without a teacher


# weigh(first block, last block (exclusive), label log-probabilities of their slots) -> weights
Weigh = Callable[[int, int, Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    """What the loss needs beside the tensors it has a gradient for."""

    head: Head
    labels: Tensor  # [N], rows of the head
    teacher: TeacherRows | None
    terms: Terms
    sizes: Sequence[int]  # slots of each block
    weigh: Weigh


def slot_terms(hidden: Tensor, latent: Tensor | None, w2: Tensor | None, plan: Plan) -> SlotTerms:
    """The weighted loss of all slots: hidden [N, H], latent [N, r] and w2 [V, r] (None: no Markov
    head).

    ValueError where a term needs the teacher and there is none.
    """
    terms = plan.terms
    if plan.teacher is None and (terms.l1 or terms.renyi or terms.soft):
        raise ValueError("L1, Renyi and soft labels need the target's last hidden states")
    return SlotTerms(*_Terms.apply(hidden, latent, w2, plan))


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, latent: Tensor | None, w2: Tensor | None, plan: Plan
    ) -> tuple[Tensor, ...]:
        sources = (hidden, latent, w2)
        grads = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in sources]
        parts = [
            _chunk(chunk, sources, grads, plan, draft, teacher)
            for chunk, draft, teacher in _walk(plan)
        ]
        if not parts:
            none = hidden.new_zeros(0, dtype=torch.float32)
            parts = [(none, none, none, none.bool(), none)]
        loss, *rest = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(
            *(
                None if g is None or x is None else g.to(x.dtype)
                for g, x in zip(grads, sources, strict=True)
            )
        )
        ctx.mark_non_differentiable(*rest)
        return loss.sum(), *rest

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        # In place: the gradient by W2 is as large as W2. A second backward is refused by autograd.
        return *(None if g is None else g.mul_(grad.to(g.dtype)) for g in ctx.saved_tensors), None


@dataclass(frozen=True)
class _Chunk:
    """Blocks [first, last) and their slots [start, stop)."""

    first: int
    last: int
    start: int
    stop: int

    @property
    def slots(self) -> slice:
        return slice(self.start, self.stop)


def _chunks(sizes: Sequence[int], rows: int) -> list[_Chunk]:
    """Whole blocks, as many as have at most `rows` slots together, one at least."""
    found: list[_Chunk] = []
    first = start = stop = 0
    for block, size in enumerate(sizes):
        if stop > start and stop + size - start > rows:
            found.append(_Chunk(first, block, start, stop))
            first, start = block, stop
        stop += size
    return [*found, _Chunk(first, len(sizes), start, stop)] if stop > start else found


@dataclass(frozen=True)
class _Teacher:
    """The teacher's probabilities of positions from `first` on, in order."""

    tiles: Tiles
    first: int

    def rows(self, index: int, wanted: Tensor) -> Tensor:
        """A tile's rows of the positions wanted [n], a copy."""
        return self.tiles.values[index, :, : self._width(index)].index_select(
            0, wanted - self.first
        )

    def _width(self, index: int) -> int:
        start, stop = self.tiles.bounds[index]
        return stop - start


def _walk(plan: Plan) -> Iterator[tuple[_Chunk, Tiles, _Teacher | None]]:
    """The chunks, each with room for its probabilities and with its positions' teacher."""
    rows = max(1, min(MAX_ROWS, CHUNK // len(plan.head.weight)))
    chunks = _chunks(plan.sizes, rows)
    draft = Tiles(plan.head, max((c.stop - c.start for c in chunks), default=0))
    if plan.teacher is None:
        for chunk in chunks:
            yield chunk, draft, None
        return
    needed = [plan.teacher.row_of_slot[c.slots] for c in chunks]
    spans = [(int(r.min()), int(r.max()) + 1) for r in needed]
    tiles = Tiles(plan.head, max((stop - start for start, stop in spans), default=0))
    begun = done = 0  # positions [begun, done) are in the tiles
    for chunk, (start, stop) in zip(chunks, spans, strict=True):
        # Later blocks never reach back before an earlier one's first position.
        tiles.keep(start - begun, max(done - begun, start - begun))
        begun, done = start, max(done, start)
        if stop > done:
            tiles.fill(done - begun, plan.teacher.last[done:stop])
            for index in range(len(tiles.bounds)):
                tiles.normalize(index, done - begun, stop - begun)
            done = stop
        yield chunk, draft, _Teacher(tiles, begun)


def _chunk(
    chunk: _Chunk,
    sources: tuple[Tensor, Tensor | None, Tensor | None],
    grads: list[Tensor | None],
    plan: Plan,
    draft: Tiles,
    teacher: _Teacher | None,
) -> tuple[Tensor, ...]:
    """Loss, weight, label log-probability, hit and acceptance of a chunk's slots; adds to grads."""
    hidden, latent, w2 = sources
    slots, terms = chunk.slots, plan.terms
    labels = plan.labels[slots]
    latent = None if latent is None else latent[slots]
    logprob, hit = draft.fill(0, hidden[slots], latent, w2, labels)
    weights = plan.weigh(chunk.first, chunk.last, logprob)
    wanted = None if plan.teacher is None else plan.teacher.row_of_slot[slots]
    seen = _compare(draft, teacher, wanted, len(labels), terms)
    loss = terms.ce * (-logprob if seen.cross_entropy is None else seen.cross_entropy)
    if terms.l1:
        loss = loss + terms.l1 * 2 * seen.tv
    if terms.renyi:
        loss = loss - terms.renyi * 2 * seen.overlap.log()
    _add_gradients(
        draft, teacher, wanted, seen, weights, terms,
        latent=latent, w2=w2, labels=labels, slots=slots, grads=grads,
    )  # fmt: skip
    acceptance = torch.zeros_like(seen.tv) if teacher is None else 1 - seen.tv
    return loss * weights, weights, logprob, hit, acceptance


@dataclass(frozen=True)
class _Seen:
    """Sums over the vocabulary, [n]; the draft's tiles are probabilities now, signed for L1."""

    tv: Tensor
    signed: Tensor  # sum p sign(p - q)
    overlap: Tensor  # sum sqrt(p q)
    cross_entropy: Tensor | None  # -sum q log p, for soft labels


def _compare(
    draft: Tiles, teacher: _Teacher | None, wanted: Tensor | None, n: int, terms: Terms
) -> _Seen:
    tv, signed, overlap, soft = draft.values.new_zeros(4, n)
    for index in range(len(draft.bounds)):
        p = draft.normalize(index, 0, n)
        if teacher is None or wanted is None:
            continue
        q = teacher.rows(index, wanted)
        if terms.renyi:
            overlap += (p * q).sqrt_().sum(1)
        if terms.soft:
            soft -= (p.clamp_min(TINY).log_() * q).sum(1)
        q.neg_().add_(p)
        tv += torch.linalg.vector_norm(q, 1, dim=1)
        if terms.l1:
            torch.copysign(p, q, out=p)
            signed += p.sum(1)
    return _Seen(tv / 2, signed, overlap.clamp_min_(TINY), soft if terms.soft else None)


def _add_gradients(
    draft: Tiles,
    teacher: _Teacher | None,
    wanted: Tensor | None,
    seen: _Seen,
    weights: Tensor,
    terms: Terms,
    *,
    latent: Tensor | None,
    w2: Tensor | None,
    labels: Tensor,
    slots: slice,
    grads: list[Tensor | None],
) -> None:
    """Weighted gradients by hidden and latent (these slots' rows) and by W2 (added)."""
    head, n = draft.head, len(labels)
    of_hidden, of_latent, of_w2 = grads
    assert of_hidden is not None
    of_p = (weights * (terms.ce + terms.renyi - terms.l1 * seen.signed))[:, None]
    of_sign = (weights * terms.l1)[:, None]
    of_root = (weights * terms.renyi / seen.overlap)[:, None]
    of_label = weights * terms.ce
    for index, (start, stop) in enumerate(draft.bounds):
        p = draft.tile(index, 0, n)
        g = p.abs().mul_(of_p)
        if terms.l1:
            g.addcmul_(p, of_sign)
        if terms.renyi or terms.soft:
            assert teacher is not None and wanted is not None
            q = teacher.rows(index, wanted)
            if terms.soft:
                g.addcmul_(q, of_label[:, None], value=-1)
            if terms.renyi:
                g.addcmul_(q.mul_(p.abs()).sqrt_(), of_root, value=-1)
        if not terms.soft:
            _subtract_labels(g, labels, of_label, start, stop)
        slope = draft.slope(index, n)
        lowered = g.to(head.weight.dtype)
        if latent is not None and w2 is not None:
            assert of_latent is not None and of_w2 is not None
            add_to(of_latent[slots], lowered, w2[start:stop])
            add_to(of_w2[start:stop], lowered.T, latent)
        if slope is not None:
            lowered = (g * slope).to(head.weight.dtype)
        add_to(of_hidden[slots], lowered, head.weight[start:stop])
    if head.scale != 1.0:
        of_hidden[slots] *= head.scale


def _subtract_labels(g: Tensor, labels: Tensor, amount: Tensor, start: int, stop: int) -> None:
    """g[i, label of i] -= amount[i] where the label lies in this tile."""
    here = (labels >= start) & (labels < stop)
    columns = (labels - start).clamp(0, stop - start - 1)[:, None]
    g.scatter_add_(1, columns, torch.where(here, -amount, 0.0)[:, None])


def add_to(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [n, m] float32 += a [n, k] b [k, m]."""
    if a.dtype == torch.float32:
        out.addmm_(a, b)
    else:
        out += a @ b
