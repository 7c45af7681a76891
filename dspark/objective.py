"""DSpark's training objective on one packed sequence; DFlash's but for the heads and the teacher.

Shapes: A anchors, D drafted slots, N supervised ones, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dflash.block import Blocks, position_weights
from ..dflash.loss import Head, dpace_weights
from ..dflash.objective import PackedSequence, SequenceLoss, draft_blocks
from .draft import DSparkDraft
from .loss import Plan, TeacherRows, Terms, slot_terms


@dataclass(frozen=True)
class DSparkLossOptions:
    """How slots are weighted and what they learn; the recipe holds the defaults."""

    weighting: Literal["decay", "dpace"]
    gamma: float | None
    alpha: float
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
        weigh=lambda first, last, logprob: _weights(options, kept[first:last], logprob),
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
    has_slots_A = kept.any(1)
    hits_AD = torch.zeros_like(kept)
    hits_AD[kept] = slots.hit
    return SequenceLoss(
        loss=loss,
        weight=has_slots_A.sum().float() if options.weighting == "dpace" else slots.weights.sum(),
        num_blocks=has_slots_A.sum(),
        num_accepted=hits_AD.long().cumprod(1).sum(),
        num_slots=kept.sum(),
    )


def _teacher(blocks: Blocks, sequence: PackedSequence, dtype: torch.dtype) -> TeacherRows | None:
    """The last hidden state before each slot's token, each position once."""
    if sequence.teacher is None:
        return None
    kept = blocks.supervised_AD
    before_AD = blocks.anchors_A[:, None] + torch.arange(kept.shape[1], device=kept.device)
    positions, row_of_slot = before_AD[kept].unique(return_inverse=True)
    return TeacherRows(sequence.teacher[positions].to(dtype), row_of_slot)


def _weights(options: DSparkLossOptions, kept: Tensor, logprob: Tensor) -> Tensor:
    """Position weights of the kept slots of some blocks, [n]."""
    if options.weighting == "decay":
        weights_D = position_weights(kept.shape[1], options.gamma, device=kept.device)
        return weights_D.expand(kept.shape)[kept]
    probs_AD = torch.zeros_like(kept, dtype=torch.float32)
    probs_AD[kept] = logprob.exp()
    return dpace_weights(probs_AD, kept, options.alpha)[kept]
