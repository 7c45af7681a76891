"""From rows to sequences: packing, order, anchors.

Shapes: L positions of a packed sequence, A anchors. Everything here is a function of its
arguments and a seed: a run that resumes at (epoch, sequence) sees what the undisturbed run would
have seen.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import BoolTensor, LongTensor

from .rows import Row


@dataclass(frozen=True)
class Document:
    """Row `row` at positions [start, start + length); `num_cut` of its tokens were left off."""

    row: int
    start: int
    length: int
    num_cut: int = 0


@dataclass(frozen=True)
class Packed:
    """Documents side by side in one sequence; none sees another."""

    documents: tuple[Document, ...]

    @property
    def length(self) -> int:
        last = self.documents[-1]
        return last.start + last.length


@dataclass(frozen=True, eq=False)
class Batch:
    """One packed sequence as tensors, all [L]; nothing is padded.

    `document_starts[i]` and `document_ends[i]` bound the document of position i: [start, end).
    """

    input_ids: LongTensor
    loss_mask: BoolTensor
    document_starts: LongTensor
    document_ends: LongTensor


def pack(
    rows: Sequence[Row], seq_length: int, *, row_order: Sequence[int] | None = None
) -> list[Packed]:
    """Places every row in the fullest open sequence that still has room (best fit).

    Rows come in decreasing length, or in `row_order` (which also picks a subset). A row is never
    split; one longer than `seq_length` is cut at its end, which `Document.num_cut` counts.
    """
    if seq_length < 2:
        raise ValueError(
            f"seq_length is {seq_length}, expected at least 2: an anchor and its successor"
        )
    if row_order is None:
        row_order = sorted(range(len(rows)), key=lambda row: (-len(rows[row].input_ids), row))
    sequences: list[list[Document]] = []
    room: list[tuple[int, int]] = []  # (free positions, sequence), sorted; full ones are left out
    for row in row_order:
        whole = len(rows[row].input_ids)
        length = min(whole, seq_length)
        place = bisect_left(room, (length, -1))
        if place < len(room):
            free, index = room.pop(place)
        else:
            free, index = seq_length, len(sequences)
            sequences.append([])
        sequences[index].append(Document(row, seq_length - free, length, whole - length))
        if free > length:
            insort(room, (free - length, index))
    return [Packed(tuple(documents)) for documents in sequences]


def collate(packed: Packed, rows: Sequence[Row]) -> Batch:
    """The tensors of one packed sequence."""
    ids: list[int] = []
    mask: list[int] = []
    for document in packed.documents:
        ids += rows[document.row].input_ids[: document.length]
        mask += rows[document.row].loss_mask[: document.length]
    lengths = torch.tensor([document.length for document in packed.documents])
    starts = torch.tensor([document.start for document in packed.documents])
    return Batch(
        input_ids=LongTensor(ids),
        loss_mask=BoolTensor([value == 1 for value in mask]),
        document_starts=LongTensor(starts.repeat_interleave(lengths)),
        document_ends=LongTensor((starts + lengths).repeat_interleave(lengths)),
    )


def seeded(*parts: int | str) -> torch.Generator:
    """A CPU generator that depends on every part and on nothing else."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def order(num: int, seed: int, epoch: int) -> list[int]:
    """The permutation of `range(num)` for one epoch."""
    return torch.randperm(num, generator=seeded("order", seed, epoch)).tolist()


def valid_anchors(loss_mask: BoolTensor, document_starts: LongTensor) -> LongTensor:
    """Positions a, ascending, such that a and a + 1 are supervised and of one document.

    An anchor is a token the target produced (while decoding, the first one comes from the prefill),
    and at least the first drafted token has a label.
    """
    if len(loss_mask) < 2:
        return LongTensor([])
    same = document_starts[:-1] == document_starts[1:]
    return LongTensor((loss_mask[:-1] & loss_mask[1:] & same).nonzero().flatten())


def sample_anchors(
    loss_mask: BoolTensor,
    document_starts: LongTensor,
    *,
    num_anchors: int,
    generator: torch.Generator,
) -> LongTensor:
    """Up to `num_anchors` valid anchors of a sequence, without replacement, ascending [A].

    Each document gets its share in proportion to its valid anchors (largest remainders first, so no
    share is off by one or more), and draws its own uniformly. All are taken where fewer exist.
    """
    anchors = valid_anchors(loss_mask, document_starts)
    if len(anchors) <= num_anchors:
        return anchors
    _, document, counts = torch.unique_consecutive(
        document_starts[anchors], return_inverse=True, return_counts=True
    )
    quota, remainder = counts * num_anchors // len(anchors), counts * num_anchors % len(anchors)
    missing = num_anchors - int(quota.sum())
    quota[remainder.argsort(descending=True, stable=True)[:missing]] += 1
    # Shuffle, then group by document: a document's first `quota` entries are its sample.
    shuffled = torch.randperm(len(anchors), generator=generator)
    grouped = shuffled[document[shuffled].argsort(stable=True)]
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    rank = torch.arange(len(anchors)) - first
    chosen = grouped[rank < quota.repeat_interleave(counts)]
    return LongTensor(anchors[chosen].sort().values)
