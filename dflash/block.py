"""The maths of a block: which positions it holds, what it may see, what it has to predict.

Shapes: S tokens in a packed sequence, A anchors, K = block_size, D = num_draft_tokens. Slot j sits
at position anchor + j; draft index d = 0..D-1 predicts the token at anchor + d + 1. In DFlash that
is slot d + 1 (the anchor's slot predicts nothing, D = K - 1), in DSpark slot d (D = K). A block
sees its own slots and the context features strictly before its anchor, in the same document.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of one packed sequence, anchors ascending."""

    anchors_A: Tensor  # index of each anchor in the packed sequence
    starts_A: Tensor  # index of the first token of the anchor's document
    inputs_AK: Tensor  # token ids: the anchor, then mask tokens
    positions_AK: Tensor  # RoPE positions, counted from the document's start
    labels_AD: Tensor  # the token each drafted slot has to predict; 0 where not supervised
    supervised_AD: Tensor  # bool: False from the first position on that the target did not generate


def make_blocks(
    input_ids: Tensor,
    *,
    loss_mask: Tensor,
    starts: Tensor,
    ends: Tensor,
    anchors: Tensor,
    block_size: int,
    num_draft_tokens: int,
    mask_token_id: int,
) -> Blocks:
    """Lay blocks on a packed sequence.

    input_ids [S]; loss_mask [S] marks tokens the target generated; starts, ends [S] bound each
    token's document (end exclusive); anchors [A] ascending. Slots past the document's end or past
    the first unsupervised token are not supervised.
    """
    offsets_D = torch.arange(1, num_draft_tokens + 1, device=input_ids.device)
    targets_AD = anchors[:, None] + offsets_D
    inside_AD = targets_AD < ends[anchors][:, None]
    targets_AD = torch.where(inside_AD, targets_AD, 0)
    supervised_AD = (inside_AD & loss_mask.bool()[targets_AD]).cumprod(1).bool()
    inputs_AK = torch.full((len(anchors), block_size), mask_token_id, device=input_ids.device)
    inputs_AK[:, 0] = input_ids[anchors]
    starts_A = starts[anchors]
    positions_AK = (anchors - starts_A)[:, None] + torch.arange(block_size, device=input_ids.device)
    labels_AD = torch.where(supervised_AD, input_ids[targets_AD], 0)
    return Blocks(anchors, starts_A, inputs_AK, positions_AK, labels_AD, supervised_AD)


def position_weights(
    num_draft_tokens: int, gamma: float | None, *, device: torch.device | str = "cpu"
) -> Tensor:
    """`w_k = exp(-(k - 1) / gamma)` for k = 1..D, [D].

    All ones when gamma is None (DFlash paper, loss decay).
    """
    k = torch.arange(num_draft_tokens, dtype=torch.float32, device=device)
    return torch.ones_like(k) if gamma is None else torch.exp(-k / gamma)
