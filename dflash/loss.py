"""DFlash losses without a [slots, vocabulary] tensor.

Cross-entropy against a teacher row e (the head's row of the label, or the teacher's expected row
sum_v p_t(v) W_v) is
    loss = logsumexp(W h) - h . e          d loss / d h = softmax(W h) W - e
and `softmax(W h) W` is attention of h over the head's rows. So one pass over the vocabulary in
tiles, with a running maximum as in flash attention, gives loss and gradient together: nothing is
recomputed and nothing of size [slots, V] exists. With the expected row the same pass is the
soft-label loss (KL up to the teacher's entropy), at the price of hard labels.

Shapes: N supervised slots, H hidden, V vocabulary, A anchors, D drafted slots.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE = 4096  # vocabulary rows a tile: [N, TILE] logits of a few hundred slots stay in cache
ROWS = 512  # slots handled at once


@dataclass(frozen=True)
class Head:
    """The target's head, `logits = softcap(scale * (W h + bias))`, or a sample of its rows."""

    weight: Tensor  # [V, H], in the compute dtype
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    # Of a sample: the token of each row, and the log of how many rows it stands for in the sum.
    rows: Tensor | None = None  # [V]
    log_share: Tensor | None = None  # [V]


@dataclass(frozen=True)
class SlotLoss:
    """Per supervised slot, [N] float32."""

    nll: Tensor  # cross-entropy against the teacher; carries the gradient
    label_logprob: Tensor  # log of the drafter's probability of the label, no gradient
    hit: Tensor  # bool: the label is the argmax (of a sampled head: over its rows, as lifted)


def slot_loss(
    hidden: Tensor, head: Head, labels: Tensor, expected: Tensor | None = None
) -> SlotLoss:
    """Cross-entropy of each slot: hidden [N, H], labels [N], expected rows [N, H] (teacher's
    expected head row) or None.

    Soft labels need a head without soft-capping (ValueError): there the expected row does not
    determine the loss.
    """
    if expected is not None:
        check_soft_labels(head)
    nll, logprob, hit = _HeadCrossEntropy.apply(hidden, head, labels, expected)
    return SlotLoss(nll, logprob, hit)


def check_soft_labels(head: Head) -> None:
    """ValueError where the teacher's expected row does not determine the soft-label loss."""
    if head.softcap is not None or head.bias is not None:
        raise ValueError(
            "soft labels need a head without soft-capping and bias; use loss.labels=hard for this "
            "target"
        )


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, head: Head, labels: Tensor, expected: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = [
            _forward_rows(
                rows,
                head,
                label,
                None if expected is None else expected[index * ROWS :][: len(rows)],
            )
            for index, (rows, label) in enumerate(
                zip(hidden.split(ROWS), labels.split(ROWS), strict=True)
            )
        ]
        nll, logprob, hit, grad = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(logprob, hit)
        return nll, logprob, hit

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_nll: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_nll[:, None].to(grad.dtype), None, None, None


def _forward_rows(
    hidden: Tensor, head: Head, labels: Tensor, expected: Tensor | None
) -> tuple[Tensor, ...]:
    """nll, label log-probability, hit, gradient of nll by hidden, for one chunk of slots."""
    top, log_total, grad, label_logit = _sweep(hidden, head, labels)
    if expected is None:
        teacher, nll = head.weight[labels].float(), log_total - label_logit
        if head.softcap is not None:
            teacher = teacher * (1 - (label_logit / head.softcap) ** 2)[:, None]
    else:
        teacher = expected.float()
        nll = log_total - head.scale * (hidden.float() * teacher).sum(1)
    grad = grad.sub_(teacher).mul_(head.scale)
    return nll, label_logit - log_total, label_logit >= top, grad.to(hidden.dtype)


def _sweep(hidden: Tensor, head: Head, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One pass over the vocabulary: largest logit [N], logsumexp [N], `sum_v p_v s_v W_v` [N, H] (s
    the softcap's slope,
    else 1), the label's logit [N]; all float32."""
    rows = torch.arange(len(hidden), device=hidden.device)
    top = hidden.new_full((len(hidden), 1), -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(top)
    label_logit = torch.zeros_like(top[:, 0])
    mean_row = hidden.new_zeros(hidden.shape, dtype=torch.float32)
    for start in range(0, len(head.weight), TILE):
        tile = head.weight[start : start + TILE]
        logits, slope = _logits(hidden, tile, head, start)
        here = (labels >= start) & (labels < start + len(tile))
        label_logit = torch.where(
            here, logits[rows, (labels - start).clamp(0, len(tile) - 1)], label_logit
        )
        new_top = torch.maximum(top, logits.amax(1, keepdim=True))
        shrink = (top - new_top).exp()
        probs = logits.sub_(new_top).exp_()
        total = total * shrink + probs.sum(1, keepdim=True)
        weighted = probs if slope is None else probs * slope
        mean_row.mul_(shrink).add_(weighted.to(tile.dtype) @ tile)
        top = new_top
    return top[:, 0], (top + total.log())[:, 0], mean_row.div_(total), label_logit


def _logits(hidden: Tensor, tile: Tensor, head: Head, start: int) -> tuple[Tensor, Tensor | None]:
    """float32 logits [N, tile] and, for a soft-capped head, d logit / d (scaled product)."""
    logits = (hidden @ tile.T).float()
    if head.bias is not None:
        logits = logits + head.bias[start : start + len(tile)]
    if head.scale != 1.0:
        logits = logits * head.scale
    slope = None
    if head.softcap is not None:
        squashed = torch.tanh(logits / head.softcap)
        logits, slope = squashed * head.softcap, 1 - squashed**2
    if head.log_share is not None:
        logits = logits + head.log_share[start : start + len(tile)]
    return logits, slope


def dpace_weights(label_probs_AD: Tensor, supervised_AD: Tensor, alpha: float) -> Tensor:
    """D-PACE: `w_k = sum_{m >= k} prod_{i <= m} q'_i`, q' = (1 - alpha) q + alpha, over supervised
    slots; detached, [A, D].

    The weight of a slot is the acceptance it can still bring: later slots count only as far as the
    drafter would get there.
    """
    q = ((1 - alpha) * label_probs_AD + alpha) * supervised_AD
    survival = q.cumprod(1)
    return survival.flip(1).cumsum(1).flip(1).detach() * supervised_AD


@torch.no_grad()
def expected_row(hidden: Tensor, head: Head) -> Tensor:
    """The teacher's expected head row `softmax(logits) W` [N, H], float32, of the target's last
    hidden states [N, H].
    """
    return _sweep(hidden, head, torch.zeros(len(hidden), dtype=torch.long, device=hidden.device))[2]
