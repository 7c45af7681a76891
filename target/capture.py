"""Capture context features: the outputs of chosen decoder layers, and what the head reads.

Shapes: B batch, L sequence, H hidden, n = number of captured layers.

Layer id k means the output of decoder layer k, counted from 0, which is HF `hidden_states[k + 1]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from .model import Target


@dataclass(frozen=True)
class Features:
    """What one sequence left behind."""

    context: Tensor  # [L, n*H], ascending layer order
    last: Tensor  # [L, H], output of the final norm


class Capture:
    """Context manager: after each forward pass of the target, `context` and `last` hold features.

    The tensors are the target's own, not copies; they are replaced at the next forward pass.
    Raises ValueError for layer ids that an engine could not capture.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], *, last: bool = True) -> None:
        check_layer_ids(layer_ids, target.num_layers)
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._want_last = last
        self._outputs: dict[int, Tensor] = {}
        self._last: Tensor | None = None
        self._context: Tensor | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        for k in self._layer_ids:
            hook = self._layer_hook(k)
            self._handles.append(self._target.layers[k].register_forward_hook(hook))
        if self._want_last:
            self._handles.append(self._target.final_norm.register_forward_hook(self._keep_last))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def context(self) -> Tensor:
        """[B, L, n*H], ascending layer order."""
        if self._context is None:
            missing = [k for k in self._layer_ids if k not in self._outputs]
            assert not missing, f"no forward pass inside the context reached layers {missing}"
            self._context = torch.cat([self._outputs[k] for k in self._layer_ids], dim=-1)
        return self._context

    @property
    def last(self) -> Tensor:
        """[B, L, H], the final norm's output."""
        assert self._last is not None, "no forward pass inside the context, or last=False"
        return self._last

    def _layer_hook(self, k: int):  # noqa: ANN202 - a torch hook
        def keep(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[k] = output if isinstance(output, Tensor) else output[0]
            self._context = None

        return keep

    def _keep_last(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self._last = output


@torch.no_grad()
def capture(
    target: Target, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]
) -> list[Features]:
    """Features of each sequence, equal bit for bit however the sequences are grouped.

    Each runs alone: padding, or merely a taller matrix product, changes the last bits in fp32.
    """
    features: list[Features] = []
    with Capture(target, layer_ids) as captured:
        for sequence in sequences:
            ids = torch.tensor([list(sequence)], dtype=torch.long, device=target.device)
            target.backbone(input_ids=ids, use_cache=False)
            features.append(Features(captured.context[0], captured.last[0]))
    return features


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    """Raise ValueError unless the ids rise strictly within 0 .. num_layers - 2."""
    ids = list(layer_ids)
    rising = all(a < b for a, b in pairwise(ids))
    if not ids or not rising or ids[0] < 0 or ids[-1] > num_layers - 2:
        raise ValueError(
            f"target_layer_ids {ids}: expected strictly rising ids from 0 to {num_layers - 2} "
            f"(id k is the output of layer k of {num_layers}; the last one cannot be captured)"
        )


def default_layer_ids(num_layers: int, n: int) -> tuple[int, ...]:
    """n ids spread evenly from 1 to num_layers - 3; raises ValueError where they do not fit."""
    first, last = 1, num_layers - 3
    if n < 1 or last - first + 1 < n:
        raise ValueError(
            f"{n} feature layers of a target with {num_layers} layers: expected 1 to "
            f"{max(last - first + 1, 0)}; set target_layer_ids by hand or lower the number"
        )
    if n == 1:
        return ((first + last) // 2,)
    return tuple(round(first + i * (last - first) / (n - 1)) for i in range(n))
