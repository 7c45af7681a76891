"""DSpark's training objective on one packed sequence; DFlash's but for the heads and the teacher.

Shapes: A anchors, D drafted slots, N supervised ones, H hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dflash.block import Blocks
from ..dflash.loss import Head
from ..dflash.objective import (
    PackedSequence,
    SequenceLoss,
    Weighting,
    draft_blocks,
    slot_weights,
    sum_blocks,
)
from .draft import DSparkDraft
from .loss import Plan, TeacherRows, Terms, slot_terms


@dataclass(frozen=True)
class DSparkLossOptions(Weighting):
    """And what they learn."""

    terms: Terms
    confidence: float  # weight of the confidence head's BCE against 1 - TV


def sequence_loss(
    draft: DSparkDraft,
    sequence: PackedSequence,
    *,
    anchors: Tensor,
    embedding: Tensor,
    head: Head,
    options: DSparkLossOptions,
    row_of_label: Tensor | None = None,
) -> SequenceLoss:
    """Draft a block at each of anchors [A] (ascending) and score it.

    Arguments as of DFlash's; `sequence.teacher` holds the target's last hidden states where a term
    or the confidence needs them.
    """
    blocks, hidden_ADH = draft_blocks(draft, sequence, anchors=anchors, embedding=embedding)
    kept = blocks.supervised_AD
    # Teacher forcing: the token before slot d is the anchor, then the labels.
    previous_AD = torch.cat([blocks.inputs_AK[:, :1], blocks.labels_AD[:, :-1]], dim=1)
    embeds_ADr = draft.embed_previous(previous_AD)
    latent = w2 = None
    if draft.markov_head is not None and embeds_ADr is not None:
        latent = draft.markov_head.latents(embeds_ADr, hidden_ADH)[kept]
        w2 = draft.markov_head.markov_w2.weight
        w2 = w2 if head.rows is None else F.embedding(head.rows, w2, sparse=True)
    labels = blocks.labels_AD[kept]
    plan = Plan(
        head=head,
        labels=labels if row_of_label is None else row_of_label[labels],
        teacher=_teacher(blocks, sequence, head.weight.dtype),
        terms=options.terms,
        sizes=kept.sum(1).tolist(),
        weigh=lambda first, last, logprob: slot_weights(options, kept[first:last], logprob),
    )
    slots = slot_terms(hidden_ADH[kept], latent, w2, plan)
    loss = slots.loss
    if draft.confidence_head is not None and options.confidence:
        embeds = None if embeds_ADr is None else embeds_ADr[kept]
        logits = draft.confidence_head(hidden_ADH[kept], embeds)
        bce = F.binary_cross_entropy_with_logits(
            logits, slots.acceptance.clamp(0, 1), reduction="none"
        )
        loss = loss + options.confidence * (bce * slots.weights).sum()
    return sum_blocks(loss, slots.weights, slots.hit, kept, options)


def _teacher(blocks: Blocks, sequence: PackedSequence, dtype: torch.dtype) -> TeacherRows | None:
    """The last hidden state before each slot's token, each position once."""
    if sequence.teacher is None:
        return None
    kept = blocks.supervised_AD
    before_AD = blocks.anchors_A[:, None] + torch.arange(kept.shape[1], device=kept.device)
    positions, row_of_slot = before_AD[kept].unique(return_inverse=True)
    return TeacherRows(sequence.teacher[positions].to(dtype), row_of_slot)
