"""Load only what turns a hidden state into logits: embedding, final norm and head.

For training from cached or streamed hidden states, where the layers of the target run elsewhere.
The tensors are found by name ending and shape in whichever shard holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .files import resolve
from .logits import head_logits
from .model import Target, load_config, meta_target
from .tensors import Stored, read_tensor, stored_tensors

OTHER_TOWERS = ("vision", "visual", "audio", "mtp", ".layers.", "projector")


@dataclass(eq=False)
class TargetHead:
    """The target's ends without its middle. V vocabulary, H hidden."""

    embedding: Tensor  # [V, H] raw rows
    head: Tensor  # [V, H]; the embedding itself when tied
    head_bias: Tensor | None
    final_norm: nn.Module
    logit_scale: float
    logit_softcap: float | None

    def logits(self, last_hidden: Tensor) -> Tensor:
        """The target's own logits from final-norm outputs: [..., H] -> [..., V]."""
        return head_logits(
            last_hidden,
            self.head,
            bias=self.head_bias,
            scale=self.logit_scale,
            softcap=self.logit_softcap,
        )


def load_head(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> TargetHead:
    """Embedding, final norm and head of a target, read from their shards alone.

    Raises ValueError where the checkpoint does not hold exactly one candidate for a part.
    """
    directory, name = resolve(path, need_weights=True)
    config = load_config(directory, trust_remote_code=trust_remote_code)
    outline = meta_target(config, name=name, trust_remote_code=trust_remote_code)
    tensors = stored_tensors(directory)

    def read(part: str, like: Tensor, module: nn.Module, suffix: str) -> Tensor | None:
        found = _find(tensors, _own_name(outline, module, suffix), tuple(like.shape), name, part)
        return None if found is None else read_tensor(tensors[found], found).to(device, dtype)

    embedding_module = outline.model.get_input_embeddings()
    embedding = read("embedding", outline.embedding, embedding_module, "weight")
    head = None
    if not outline.tied:
        head = read("head", outline.head, outline.head_module, "weight")
    embedding = head if embedding is None else embedding
    if embedding is None:
        raise ValueError(f"{name}: no embedding in the weight files; download them again")
    bias = outline.head_bias
    return TargetHead(
        embedding=embedding,
        head=embedding if head is None else head,
        head_bias=None if bias is None else read("head bias", bias, outline.head_module, "bias"),
        final_norm=_load_norm(outline, tensors, name).to(device, dtype),
        logit_scale=outline.logit_scale,
        logit_softcap=outline.logit_softcap,
    )


def _load_norm(outline: Target, tensors: dict[str, Stored], name: str) -> nn.Module:
    norm = outline.final_norm
    values: dict[str, Tensor] = {}
    for suffix, parameter in norm.named_parameters():
        own = _own_name(outline, norm, suffix)
        found = _find(tensors, own, tuple(parameter.shape), name, "final norm")
        if found is None:
            raise ValueError(f"{name}: no {own} in the weight files; download them again")
        values[suffix] = read_tensor(tensors[found], found)
    norm = norm.to_empty(device="cpu")
    norm.load_state_dict(values, assign=True)
    return norm.requires_grad_(False).eval()


def _own_name(outline: Target, module: nn.Module, suffix: str) -> str:
    """The parameter's name in the model that transformers builds."""
    for prefix, candidate in outline.model.named_modules():
        if candidate is module:
            return f"{prefix}.{suffix}"
    raise AssertionError("a part of the outline is not in its model")


def _find(
    tensors: dict[str, Stored], own_name: str, shape: tuple[int, ...], name: str, part: str
) -> str | None:
    """The stored name: the model's own, else the one with its ending (wrappers rename prefixes)."""
    if own_name in tensors:
        candidates = [own_name]
    else:
        ending = ".".join(own_name.split(".")[-2:])
        candidates = [
            stored
            for stored in tensors
            if (stored == ending or stored.endswith(f".{ending}"))
            and not any(tower in stored for tower in OTHER_TOWERS)
        ]
    if len(candidates) > 1:
        raise ValueError(
            f"{name}: {len(candidates)} tensors could be the {part} ({', '.join(candidates[:3])}), "
            "expected 1; load the whole target instead"
        )
    if candidates and tensors[candidates[0]].shape != shape:
        raise ValueError(
            f"{name}: the {part} {candidates[0]} has shape {tensors[candidates[0]].shape}, the "
            f"config expects {shape}; config.json and weights do not belong together"
        )
    return candidates[0] if candidates else None
