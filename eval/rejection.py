"""Which drafted tokens stay when the target samples: the output is distributed as the target's own.

Speculative sampling (Leviathan et al. 2023, section 2.3; Chen et al. 2023, theorem 1). A token x,
drawn from the drafter's q where the target has p, stays with probability min(1, p(x) / q(x)). The
first one that does not is replaced by a draw from (p - q)+, renormalized: together both ways give x
with probability min(p, q) + (p - q)+ = p. Where every verified token stays, one more is drawn from
the target. A drafter that takes its argmax has q = 1 at its token: that stays with probability
p(x), and what replaces it is drawn from p without x.

Shapes: B requests, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..target.sampling import draw


def keep_or_replace(
    target_probs: Tensor,
    draft_tokens: Tensor,
    num_drafted: Tensor,
    uniforms: Tensor,
    *,
    draft_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How many leading draft tokens stay [B], and the target's token after them [B].

    target_probs [B, K+1, V] stand after the anchor and after each of draft_tokens [B, K]; of row b
    the first num_drafted[b] are judged. draft_probs [B, K, V] are what they were drawn from (None:
    a point mass each). uniforms [B, K+1] in [0, 1), float64, must be independent of the draft:
    column k judges token k, column num_drafted[b] draws the last token.
    """
    num_slots = draft_tokens.shape[1]
    rows = torch.arange(len(draft_tokens), device=draft_tokens.device)
    picked = draft_tokens[..., None]
    p = target_probs[:, :num_slots].gather(-1, picked)[..., 0].double()
    q = 1.0 if draft_probs is None else draft_probs.gather(-1, picked)[..., 0].double()
    judged = torch.arange(num_slots, device=rows.device) < num_drafted[:, None]
    stays = (uniforms[:, :num_slots] * q < p) & judged
    num_accepted = stays.long().cumprod(dim=-1).sum(dim=-1)
    weights = target_probs[rows, num_accepted]
    rejected = num_accepted < num_drafted
    if bool(rejected.any()):
        at = num_accepted.clamp_max(num_slots - 1)
        if draft_probs is None:
            drafted = F.one_hot(draft_tokens[rows, at], weights.shape[-1]).to(weights.dtype)
        else:
            drafted = draft_probs[rows, at]
        weights = torch.where(rejected[:, None], residual(weights, drafted), weights)
    return num_accepted, draw(weights, uniforms[rows, num_drafted])


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ of [B, V], not normalized: what the target has more of than the drafter."""
    rest = (p - q).clamp_min(0)
    # p equals q up to rounding: then nearly nothing is rejected, and what is may be drawn from p.
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)
