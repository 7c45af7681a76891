"""The training objective on one packed sequence: blocks in, a sum of weighted losses and its
denominator out.

Sums and denominators stay apart, so that a step can divide by the total over all ranks and
accumulation steps and the update does not depend on how samples were split. Nothing is logged here.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import group_anchors
from .block import Blocks, make_blocks, position_weights
from .draft import DFlashDraft
from .loss import Head, dpace_weights, slot_loss


@dataclass(frozen=True)
class PackedSequence:
    """Documents laid end to end, S tokens in all, with what the target said about them."""

    input_ids: Tensor  # [S]
    loss_mask: Tensor  # [S], 1 where the target generated the token
    starts: Tensor  # [S], first index of each token's document
    ends: Tensor  # [S], one past its last
    features: Tensor  # [S, n*H], context features
    teacher: Tensor | None = (
        None  # [S, H], of the next token, as the loss reads it: expected head row
    )


@dataclass(frozen=True)
class Weighting:
    """How slots are weighted; the recipe holds the defaults."""

    weighting: Literal["decay", "dpace"]  # exp(-(k-1)/gamma), or the drafter's own survival
    gamma: float | None  # of decay; None: all ones
    alpha: float  # of D-PACE: how far the confidence is smoothed towards 1


@dataclass(frozen=True)
class LossOptions(Weighting):
    """And what they learn from."""

    labels: Literal["hard", "soft"]  # soft: KL to the target's distribution


@dataclass(frozen=True)
class SequenceLoss:
    """Sums, to be added up before `loss / weight`; counts are of blocks with a supervised slot."""

    loss: Tensor  # [] sum over slots of weight x cross-entropy; carries the gradient
    weight: Tensor  # [] its denominator: sum of position weights; for D-PACE, number of blocks
    num_blocks: Tensor  # []
    num_accepted: Tensor  # [] drafted tokens that greedy verification against the labels would keep
    num_slots: Tensor  # [] supervised slots


def sequence_loss(
    draft: DFlashDraft,
    sequence: PackedSequence,
    *,
    anchors: Tensor,
    embedding: Tensor,
    head: Head,
    options: LossOptions,
    row_of_label: Tensor | None = None,
) -> SequenceLoss:
    """Draft a block at each of anchors [A] (ascending) and score it.

    Embedding [V, H] and head are the target's. With a sampled head (vocabulary.py), row_of_label
    [V] says which of its rows a token is.
    """
    blocks, hidden_ADH = draft_blocks(draft, sequence, anchors=anchors, embedding=embedding)
    return _score(hidden_ADH, blocks, sequence, head, options, row_of_label)


def draft_blocks(
    draft: DFlashDraft, sequence: PackedSequence, *, anchors: Tensor, embedding: Tensor
) -> tuple[Blocks, Tensor]:
    """The blocks at anchors [A] and the hidden states [A, D, H] of their drafted slots."""
    blocks = make_blocks(
        sequence.input_ids,
        loss_mask=sequence.loss_mask,
        starts=sequence.starts,
        ends=sequence.ends,
        anchors=anchors,
        block_size=draft.config.block_size,
        num_draft_tokens=draft.config.num_draft_tokens,
        mask_token_id=draft.config.mask_token_id,
    )
    positions = torch.arange(len(sequence.input_ids), device=anchors.device) - sequence.starts
    hidden_AKH = draft(
        sequence.features,
        positions=positions,
        embeds=F.embedding(blocks.inputs_AK, embedding),
        block_positions=blocks.positions_AK,
        anchors=anchors,
        groups=group_anchors(anchors.tolist(), blocks.starts_A.tolist(), _rows_per_anchor(draft)),
    )
    return blocks, hidden_AKH[:, draft.config.first_slot :]


def _score(
    hidden_ADH: Tensor,
    blocks: Blocks,
    sequence: PackedSequence,
    head: Head,
    options: LossOptions,
    row_of_label: Tensor | None,
) -> SequenceLoss:
    kept = blocks.supervised_AD
    expected = None
    if options.labels == "soft":
        assert sequence.teacher is not None, (
            "soft labels were asked for, but the sequence carries no teacher"
        )
        # The row of the position before a slot speaks about the slot's token.
        before_AD = blocks.anchors_A[:, None] + torch.arange(kept.shape[1], device=kept.device)
        expected = sequence.teacher[before_AD[kept]]
    labels = blocks.labels_AD[kept]
    slots = slot_loss(
        hidden_ADH[kept], head, labels if row_of_label is None else row_of_label[labels], expected
    )
    weights = slot_weights(options, kept, slots.label_logprob)
    return sum_blocks((slots.nll * weights).sum(), weights, slots.hit, kept, options)


def slot_weights(options: Weighting, kept_AD: Tensor, label_logprob: Tensor) -> Tensor:
    """Weights of the kept slots of some blocks, [n]; label_logprob [n]."""
    if options.weighting == "decay":
        weights_D = position_weights(kept_AD.shape[1], options.gamma, device=kept_AD.device)
        return weights_D.expand(kept_AD.shape)[kept_AD]
    probs_AD = torch.zeros_like(kept_AD, dtype=torch.float32)
    probs_AD[kept_AD] = label_logprob.exp()
    return dpace_weights(probs_AD, kept_AD, options.alpha)[kept_AD]


def sum_blocks(
    loss: Tensor, weights: Tensor, hit: Tensor, kept_AD: Tensor, options: Weighting
) -> SequenceLoss:
    """A sequence's sums from its loss and, of each kept slot [n], weight and hit."""
    num_blocks = kept_AD.any(1).sum()
    hits_AD = torch.zeros_like(kept_AD)
    hits_AD[kept_AD] = hit
    return SequenceLoss(
        loss=loss,
        weight=num_blocks.float() if options.weighting == "dpace" else weights.sum(),
        num_blocks=num_blocks,
        num_accepted=hits_AD.long().cumprod(1).sum(),
        num_slots=kept_AD.sum(),
    )


def _rows_per_anchor(draft: DFlashDraft) -> int:
    return (
        draft.config.block_size
        * draft.config.num_attention_heads
        // draft.config.num_key_value_heads
    )
