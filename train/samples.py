"""From a packed list of rows to tensors a drafter trains on.

Sample i of a run is a function of (seed, i) alone: epoch and place give the packed sequence, and
its anchors are drawn with a generator seeded by both. So a resumed run, or one with another number
of processes, sees exactly the samples of the undisturbed one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.cache import CacheReader, RowFeatures
from ..data.loader import collate, order, pack, sample_anchors, seeded
from ..data.rows import Row
from ..dflash.loss import Head, expected_row
from ..dflash.objective import PackedSequence
from ..target.capture import capture
from ..target.model import Target


@dataclass(frozen=True)
class Sample:
    sequence: PackedSequence
    anchors: Tensor  # [A] ascending


class Samples:
    """The run's samples by number."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        target: Target,
        cache: CacheReader,
        layer_ids: tuple[int, ...],
        seq_length: int,
        num_anchors: int,
        seed: int,
    ) -> None:
        self._rows = rows
        self._target, self._cache, self._layer_ids = target, cache, layer_ids
        self._num_anchors, self._seed = num_anchors, seed
        # Rows without a label would only take room.
        useful = [i for i, row in enumerate(rows) if row.num_supervised > 1]
        shuffled = [useful[i] for i in order(len(useful), seed, epoch=-1)]
        self.packs = pack(rows, seq_length, row_order=shuffled)
        self.num_cut = sum(
            document.num_cut > 0 for packed in self.packs for document in packed.documents
        )
        self._head = target_head(target)
        self._epoch, self._order = -1, list[int]()

    @property
    def num_broken(self) -> int:
        """Cached rows that were not finite and had to be recomputed, in this process."""
        return self._cache.num_broken

    def __getitem__(self, number: int) -> Sample:
        epoch, place = divmod(number, len(self.packs))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, order(len(self.packs), self._seed, epoch)
        index = self._order[place]
        packed = self.packs[index]
        batch = collate(packed, self._rows)
        features = [
            self._features(self._rows[document.row], document.length)
            for document in packed.documents
        ]
        device = self._target.device
        anchors = sample_anchors(
            batch.loss_mask,
            batch.document_starts,
            num_anchors=self._num_anchors,
            generator=seeded("anchors", self._seed, epoch, index),
        )
        teacher = [f.teacher.to(device) for f in features if f.teacher is not None]
        sequence = PackedSequence(
            input_ids=batch.input_ids.to(device),
            loss_mask=batch.loss_mask.to(device),
            starts=batch.document_starts.to(device),
            ends=batch.document_ends.to(device),
            features=torch.cat([f.context.to(device) for f in features]),
            teacher=torch.cat(teacher) if self._cache.teacher else None,
        )
        return Sample(sequence, anchors.to(device))

    def _features(self, row: Row, length: int) -> RowFeatures:
        kind = self._cache.teacher
        if row.id in self._cache:
            found = self._cache.read(row.id, length)
            if found is not None and (found.teacher is not None or kind is None):
                return found
        ids = row.input_ids[:length]
        features = capture(self._target, [ids], self._layer_ids)[0]
        teacher = None
        if kind is not None:
            # Only positions before a generated token teach; the head is the expensive part.
            teaches = torch.tensor([*row.loss_mask[1:length], 0], dtype=torch.bool)
            teacher = torch.zeros_like(features.last)
            last = features.last[teaches]
            rows = last if kind == "last" else expected_row(last, self._head)
            teacher[teaches] = rows.to(teacher.dtype)
        return RowFeatures(features.context, teacher)


def target_head(target: Target, dtype: torch.dtype | None = None) -> Head:
    """The target's output head in the drafter's compute dtype.

    Shared, not copied, where it is the target's own.
    """
    bias = target.head_bias
    return Head(
        target.head.to(dtype or target.dtype),
        None if bias is None else bias.to(dtype or target.dtype),
        target.logit_scale,
        target.logit_softcap,
    )
