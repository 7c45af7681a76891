"""Optimizers over float32 masters, whatever the drafter computes in.

All master gradients live in one flat float32 buffer: accumulation adds into it, one all-reduce
carries it, one norm clips it. With bf16 compute the network holds bf16 copies that are refreshed
after each update; nothing is cast anywhere else.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from torch import Tensor, nn

NOT_FOR_MUON = ("markov_head.markov_w", "confidence_head.")


class Masters:
    """float32 masters of a module's parameters and their flat gradient.

    In float32 the module's own parameters are the masters.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype) -> None:
        self.names = [name for name, _ in module.named_parameters()]
        self.params = [parameter for _, parameter in module.named_parameters()]
        self.shared = compute_dtype == torch.float32
        self.values = [p.detach() if self.shared else p.detach().clone() for p in self.params]
        sizes = [value.numel() for value in self.values]
        self.flat_grad = torch.zeros(sum(sizes), dtype=torch.float32, device=self.values[0].device)
        self.masters: list[Tensor] = []
        for value, grad in zip(self.values, self.flat_grad.split(sizes), strict=True):
            master = nn.Parameter(value)
            master.grad = grad.view_as(value)
            self.masters.append(master)
        if not self.shared:
            module.to(compute_dtype)

    def accumulate(self) -> None:
        """Add the module's gradients to the masters' and forget them."""
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is not None:
                assert master.grad is not None
                master.grad.add_(param.grad)
                param.grad = None

    @torch.no_grad()
    def share(self, processes: PartialState) -> None:
        """Every process starts from the main one's weights, whatever its own arithmetic gave."""
        if processes.num_processes > 1:
            for master in self.masters:
                broadcast(master.data, from_process=0)
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the module's compute copies up to date with the masters."""
        if not self.shared:
            torch._foreach_copy_(self.params, self.masters)  # pyright: ignore

    def state_dict(self) -> dict[str, Tensor]:
        return {
            name: master.detach() for name, master in zip(self.names, self.masters, strict=True)
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(state[name])
        self.refresh()


def make_optimizers(
    masters: Masters,
    kind: Literal["adamw", "muon"],
    *,
    lr: float,
    muon_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> list[torch.optim.Optimizer]:
    """AdamW over everything, or Muon for the matrices and AdamW for the norms.

    Each group remembers its peak rate as `peak_lr`, which `set_lr` scales.
    """
    # Muon's orthogonal updates are for maps between hidden states, not for tables of tokens.
    matrices = [
        master
        for name, master in zip(masters.names, masters.masters, strict=True)
        if kind == "muon" and master.ndim == 2 and not name.startswith(NOT_FOR_MUON)
    ]
    taken = {id(m) for m in matrices}
    rest = [m for m in masters.masters if id(m) not in taken]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    ]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_scale(progress: float, *, schedule: Literal["cosine", "constant"], warmup: float) -> float:
    """Share of the peak rate at `progress` in [0, 1] of the run.

    Linear warm-up, then cosine to 0 or constant.
    """
    if progress < warmup:
        return progress / warmup
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def set_lr(optimizers: Iterable[torch.optim.Optimizer], scale: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
