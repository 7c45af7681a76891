"""Blocks drawn by hand, and what a block can and cannot see."""

import pytest
import torch
from torch import Tensor
from toy_drafter import dflash_config

from spec.dflash.attention import block_attention, group_anchors
from spec.dflash.block import make_blocks
from spec.dflash.draft import DFlashDraft

# Twelve tokens, two documents of 7 and 5. Supervised: 3-6 of the first, 9-10 of the second.
IDS = torch.arange(100, 112)
MASK = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0])
STARTS = torch.tensor([0] * 7 + [7] * 5)
ENDS = torch.tensor([7] * 7 + [12] * 5)


def test_blocks_of_twelve_tokens_by_hand() -> None:
    blocks = make_blocks(
        IDS,
        loss_mask=MASK,
        starts=STARTS,
        ends=ENDS,
        anchors=torch.tensor([3, 5, 9]),
        block_size=4,
        num_draft_tokens=3,
        mask_token_id=9,
    )
    assert blocks.inputs_AK.tolist() == [[103, 9, 9, 9], [105, 9, 9, 9], [109, 9, 9, 9]]
    assert blocks.positions_AK.tolist() == [[3, 4, 5, 6], [5, 6, 7, 8], [2, 3, 4, 5]]
    # Anchor 5: only token 6 is left in its document. Anchor 9: token 11 is not supervised.
    assert blocks.supervised_AD.tolist() == [
        [True, True, True],
        [True, False, False],
        [True, False, False],
    ]
    assert blocks.labels_AD.tolist() == [[104, 105, 106], [106, 0, 0], [110, 0, 0]]


def test_a_gap_in_the_mask_ends_the_block() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0])
    blocks = make_blocks(
        IDS,
        loss_mask=mask,
        starts=STARTS,
        ends=ENDS,
        anchors=torch.tensor([1]),
        block_size=5,
        num_draft_tokens=4,
        mask_token_id=9,
    )
    assert blocks.supervised_AD.tolist() == [[True, False, False, False]]


def test_dspark_supervises_the_anchor_slot_too() -> None:
    blocks = make_blocks(
        IDS,
        loss_mask=MASK,
        starts=STARTS,
        ends=ENDS,
        anchors=torch.tensor([3]),
        block_size=3,
        num_draft_tokens=3,
        mask_token_id=9,
    )
    assert blocks.inputs_AK.tolist() == [[103, 9, 9]]
    assert blocks.labels_AD.tolist() == [[104, 105, 106]]


def test_no_anchor_gives_no_block() -> None:
    none = torch.tensor([], dtype=torch.long)
    blocks = make_blocks(
        IDS,
        loss_mask=MASK,
        starts=STARTS,
        ends=ENDS,
        anchors=none,
        block_size=4,
        num_draft_tokens=3,
        mask_token_id=9,
    )
    assert blocks.inputs_AK.shape == (0, 4)
    assert group_anchors([], [], 4) == []


def run(
    draft: DFlashDraft, features: Tensor, embeds: Tensor, anchors: Tensor, starts: Tensor
) -> Tensor:
    anchor_starts = starts[anchors]
    positions = torch.arange(len(starts)) - starts
    return draft(
        features,
        positions=positions,
        embeds=embeds,
        block_positions=positions[anchors][:, None] + torch.arange(draft.config.block_size),
        anchors=anchors,
        groups=group_anchors(anchors.tolist(), anchor_starts.tolist(), 8),
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("anchors", [[3], [3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
def test_grouped_attention_equals_one_dense_softmax(anchors: list[int], is_causal: bool) -> None:
    g = torch.Generator().manual_seed(0)
    A, K, N, M, D, S = len(anchors), 4, 4, 2, 8, 12
    q, kb, vb = (torch.randn(A, K, h, D, generator=g, requires_grad=True) for h in (N, M, M))
    kc, vc = (torch.randn(S, M, D, generator=g, requires_grad=True) for _ in range(2))
    at = torch.tensor(anchors)
    starts = STARTS[at]
    for rows_per_anchor in (8, 100, 1000):  # many anchors a group, two, one
        out = block_attention(
            q,
            k_block=kb,
            v_block=vb,
            k_context=kc,
            v_context=vc,
            groups=group_anchors(anchors, starts.tolist(), rows_per_anchor),
            anchors=at,
            is_causal=is_causal,
        )
        columns = torch.arange(S)
        sees = (columns >= starts[:, None]) & (columns < at[:, None])
        keys = torch.cat([kc.expand(A, -1, -1, -1), kb], 1).repeat_interleave(N // M, 2)
        values = torch.cat([vc.expand(A, -1, -1, -1), vb], 1).repeat_interleave(N // M, 2)
        inside = (
            torch.ones(K, K, dtype=torch.bool).tril()
            if is_causal
            else torch.ones(K, K, dtype=torch.bool)
        )
        visible = torch.cat([sees[:, None].expand(A, K, S), inside.expand(A, K, K)], 2)
        scores = torch.einsum("aknd,asnd->anks", q, keys) * D**-0.5
        probs = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        want = torch.einsum("anks,asnd->aknd", probs, values)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
        weight = torch.randn(out.shape, generator=g)
        for got_grad, want_grad in zip(
            torch.autograd.grad((out * weight).sum(), (q, kb, vb, kc, vc), retain_graph=True),
            torch.autograd.grad((want * weight).sum(), (q, kb, vb, kc, vc), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(got_grad, want_grad, atol=1e-5, rtol=1e-4)


def test_nothing_outside_the_prefix_moves_a_block_by_one_bit() -> None:
    torch.manual_seed(0)
    draft = DFlashDraft(dflash_config())
    anchors = torch.tensor([3, 4, 5, 9])
    features, embeds = torch.randn(12, 64), torch.randn(4, 4, 32)
    before = run(draft, features, embeds, anchors, STARTS)
    for index, anchor in enumerate(anchors.tolist()):
        other = features.clone()
        other[anchor:] += 1.0  # the anchor itself and everything after it
        other[: STARTS[anchor]] -= 1.0  # the documents before
        moved = embeds.clone()
        moved[torch.arange(4) != index] *= 3.0  # the other blocks
        after = run(draft, other, moved, anchors, STARTS)
        assert torch.equal(after[index], before[index])
        seen = features.clone()
        seen[anchor - 1] += 1.0
        assert not torch.equal(run(draft, seen, embeds, anchors, STARTS)[index], before[index])


def test_a_packed_document_equals_the_document_alone() -> None:
    torch.manual_seed(0)
    draft = DFlashDraft(dflash_config())
    features, embeds = torch.randn(12, 64), torch.randn(1, 4, 32)
    packed = run(draft, features, embeds, torch.tensor([10]), STARTS)
    alone = run(draft, features[7:], embeds, torch.tensor([3]), torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=1e-5)


def test_more_anchors_than_positions_and_repeats() -> None:
    torch.manual_seed(0)
    draft = DFlashDraft(dflash_config())
    anchors = torch.arange(12).repeat_interleave(2)
    features, embeds = torch.randn(12, 64), torch.randn(12, 4, 32).repeat_interleave(2, 0)
    out = run(draft, features, embeds, anchors, STARTS)
    torch.testing.assert_close(out[::2], out[1::2])


@pytest.mark.parametrize("is_causal", [False, True])
def test_cached_decoding_equals_the_training_pass(is_causal: bool) -> None:
    """Ragged slots, features arriving in pieces, a roll-back.

    Hidden states as in one training pass.
    """
    torch.manual_seed(0)
    draft = DFlashDraft(dflash_config(is_causal=is_causal)).eval()
    features, embeds = torch.randn(2, 12, 64), torch.randn(2, 4, 32)
    cache = draft.new_cache(3, 16)
    slots = torch.tensor([2, 0])
    draft.extend(cache, slots, features[:, :4], torch.tensor([4, 2]))
    draft.extend(
        cache, slots, torch.stack([features[0, 4:8], features[1, 2:6]]), torch.tensor([3, 4])
    )
    draft.hidden(cache, slots, torch.randn(2, 4, 32))  # a block leaves nothing behind
    cache.lengths[2] = 5  # roll back two positions
    got = draft.hidden(cache, slots, embeds)
    for row, anchor in ((0, 5), (1, 6)):
        want = run(
            draft,
            features[row],
            embeds[row : row + 1],
            torch.tensor([anchor]),
            torch.zeros(12, dtype=torch.long),
        )
        torch.testing.assert_close(got[row : row + 1], want, atol=1e-5, rtol=1e-4)
