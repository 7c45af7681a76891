"""From the final norm's output to the target's own logits: weight, bias, factor, soft cap."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig


def head_logits(
    last_hidden: Tensor, head: Tensor, *, bias: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """[..., H] and head [V, H] -> [..., V], in the order in which the models apply them."""
    logits = F.linear(last_hidden, head, bias)
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


def logit_softcap(config: PretrainedConfig) -> float | None:
    cap = getattr(config, "final_logit_softcapping", None)
    return float(cap) if cap else None


def logit_scale(config: PretrainedConfig) -> float:
    """The factor on the head's output: Cohere and Falcon-H1 multiply, Granite divides."""
    for key in ("logit_scale", "lm_head_multiplier"):
        factor = getattr(config, key, None)
        if factor is not None:
            return float(factor)
    divisor = getattr(config, "logits_scaling", None)
    return 1.0 / float(divisor) if divisor else 1.0
