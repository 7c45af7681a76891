"""Packing, order and anchors, on sequences small enough to draw."""

from collections import Counter

import pytest
import torch
from torch import BoolTensor, LongTensor

from spec.data.loader import (
    collate,
    order,
    pack,
    sample_anchors,
    seeded,
    valid_anchors,
)
from spec.data.rows import Row


def make_rows(*lengths: int) -> list[Row]:
    """Rows whose tokens name them (100 * row + position), the second half supervised."""
    return [
        Row(
            f"r{row}",
            [100 * row + place for place in range(length)],
            [int(place >= length // 2) for place in range(length)],
        )
        for row, length in enumerate(lengths)
    ]


def anchors_of(mask: list[int], starts: list[int], num_anchors: int, seed: int = 0) -> list[int]:
    return sample_anchors(
        BoolTensor([value == 1 for value in mask]),
        LongTensor(starts),
        num_anchors=num_anchors,
        generator=seeded(seed),
    ).tolist()


def test_packing_fills_sequences_and_splits_no_row() -> None:
    packed = pack(make_rows(5, 9, 3, 12, 7, 1), 16)
    placed = [[(d.row, d.start, d.length) for d in p.documents] for p in packed]
    # Decreasing: 12, 9, 7, 5, 3, 1, each into the fullest sequence that has room.
    assert placed == [[(3, 0, 12), (2, 12, 3), (5, 15, 1)], [(1, 0, 9), (4, 9, 7)], [(0, 0, 5)]]
    assert [p.length for p in packed] == [16, 16, 5]


def test_a_longer_row_is_cut_at_its_end_and_counted() -> None:
    rows = make_rows(20, 4)
    first, second = pack(rows, 16)
    assert [(d.length, d.num_cut) for d in first.documents] == [(16, 4)]
    assert collate(first, rows).input_ids.tolist() == rows[0].input_ids[:16]
    assert second.documents[0].num_cut == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_packed_once_in_any_order(seed: int) -> None:
    lengths = [1 + place * 7 % 33 for place in range(200)]
    rows = make_rows(*lengths)
    packed = pack(rows, 32, row_order=order(len(rows), seed, 0))
    documents = [document for p in packed for document in p.documents]
    assert Counter(d.row for d in documents) == Counter(range(200))
    assert all(d.length == min(lengths[d.row], 32) for d in documents)
    for p in packed:
        ends = [0, *(d.start + d.length for d in p.documents)]
        assert [d.start for d in p.documents] == ends[:-1] and p.length <= 32
    assert packed == pack(rows, 32, row_order=order(len(rows), seed, 0))
    assert len(packed) <= sum(min(n, 32) for n in lengths) / 32 * 1.1 + 1


def test_a_batch_knows_the_document_of_every_position() -> None:
    rows = make_rows(4, 3)
    batch = collate(pack(rows, 8)[0], rows)
    assert batch.input_ids.tolist() == [0, 1, 2, 3, 100, 101, 102]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert batch.document_starts.tolist() == [0, 0, 0, 0, 4, 4, 4]
    assert batch.document_ends.tolist() == [4, 4, 4, 4, 7, 7, 7]
    assert batch.input_ids.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool


def test_a_sequence_too_short_for_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="seq_length is 1"):
        pack(make_rows(3), 1)


def test_order_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    orders = [order(50, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(sorted(found) == list(range(50)) for found in orders)
    assert len({tuple(found) for found in orders}) == 9
    assert order(50, 1, 2) == order(50, 1, 2)
    assert order(0, 0, 0) == []


#        position  0  1  2  3  4  5  6  7  8  9 10 11
MASK, STARTS = [0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1], [0] * 5 + [5] * 3 + [8] * 4


def test_an_anchor_and_its_successor_are_supervised_and_of_one_document() -> None:
    # 2 is followed by a prompt token, 4 by another document, 7 by a prompt token of another one.
    found = valid_anchors(BoolTensor([m == 1 for m in MASK]), LongTensor(STARTS))
    assert found.tolist() == [1, 5, 6, 10]


@pytest.mark.parametrize(
    ("mask", "valid"),
    [
        ([], []),
        ([1], []),
        ([0, 0, 0], []),
        ([0, 0, 1], []),
        ([0, 1, 0], []),
        ([0, 1, 1], [1]),
        ([1, 1, 1], [0, 1]),
        ([1, 1], [0]),
    ],
)
def test_none_one_and_two_valid_anchors(mask: list[int], valid: list[int]) -> None:
    for num_anchors in (2, 100):
        assert anchors_of(mask, [0] * len(mask), num_anchors) == valid
    assert anchors_of(mask, [0] * len(mask), 0) == []


def test_documents_share_anchors_in_proportion() -> None:
    # 30, 20 and 10 valid anchors: one row longer each, all supervised.
    lengths = [31, 21, 11]
    starts = [sum(lengths[:n]) for n, length in enumerate(lengths) for _ in range(length)]
    for num_anchors, shares in ((12, [6, 4, 2]), (6, [3, 2, 1]), (60, [30, 20, 10])):
        for seed in range(20):
            found = anchors_of([1] * 63, starts, num_anchors, seed)
            assert found == sorted(set(found))
            assert [sum(starts[a] == start for a in found) for start in (0, 31, 52)] == shares
    # 7 of 60: shares 3.5, 2.33, 1.17.
    found = anchors_of([1] * 63, starts, 7)
    assert [sum(starts[a] == start for a in found) for start in (0, 31, 52)] == [4, 2, 1]


def test_anchors_are_uniform_and_follow_the_generator() -> None:
    counts = Counter[int]()
    for seed in range(3000):
        counts.update(anchors_of([1] * 11, [0] * 11, 3, seed))
    assert set(counts) == set(range(10))
    # 900 expected, standard deviation about 25.
    assert all(abs(count - 900) < 110 for count in counts.values())
    assert anchors_of([1] * 99, [0] * 99, 5, 7) == anchors_of([1] * 99, [0] * 99, 5, 7)
