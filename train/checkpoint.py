"""Checkpoints: complete or absent, never half.

`checkpoints/step-00000120/` holds `masters.safetensors` (float32), `optimizer.safetensors` and
`state.json`. It is written under another name and renamed once everything is on disk, so a
directory with that name can be trusted after kill -9. There is no random state to keep: order and
anchors are functions of (seed, epoch, sequence), see data/loader.py.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .optim import Masters


@dataclass
class TrainState:
    """Where a run stands; everything but the weights and the optimizer."""

    step: int = 0
    seconds: float = 0.0  # of training, over all its sessions
    cpu_seconds: float = 0.0  # of all processes, the making of the data included
    best_acceptance: float = 0.0
    best_step: int = -1
    last_acceptance: float | None = None
    skipped_steps: int = 0  # non-finite gradients
    empty_steps: int = 0  # batches without one label


def save_checkpoint(
    folder: Path,
    state: TrainState,
    masters: Masters,
    optimizers: list[torch.optim.Optimizer],
    *,
    keep: int,
) -> Path:
    """Write `folder/step-N` atomically and drop all but the newest `keep`."""
    final = folder / f"step-{state.step:08d}"
    scratch = folder / f".{final.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file(
        {name: value.cpu().contiguous() for name, value in masters.state_dict().items()},
        scratch / "masters.safetensors",
    )
    tensors, scalars = _flatten(optimizers)
    save_file(tensors, scratch / "optimizer.safetensors")
    (scratch / "state.json").write_text(
        json.dumps({"state": asdict(state), "optimizers": scalars}, indent=1)
    )
    for path in scratch.iterdir():
        path.chmod(0o644)  # safetensors makes files private
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.replace(scratch, final)
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(
    path: Path, masters: Masters, optimizers: list[torch.optim.Optimizer]
) -> TrainState:
    """Restore weights, optimizers and state.

    ValueError when the checkpoint belongs to another drafter.
    """
    stored = json.loads((path / "state.json").read_text())
    tensors = _read(path / "masters.safetensors")
    shapes = {name: tuple(value.shape) for name, value in masters.state_dict().items()}
    if {name: tuple(value.shape) for name, value in tensors.items()} != shapes:
        raise ValueError(
            f"{path} holds another drafter than the recipe describes; use a new `out` or "
            "--no-resume"
        )
    masters.load_state_dict(tensors)
    moments = _read(path / "optimizer.safetensors")
    for index, (optimizer, scalars) in enumerate(
        zip(optimizers, stored["optimizers"], strict=True)
    ):
        state = optimizer.state_dict()
        state["state"] = {
            int(parameter): {
                **values,
                **{
                    key.split("/", 2)[2]: moments[key]
                    for key in moments
                    if key.startswith(f"{index}/{parameter}/")
                },
            }
            for parameter, values in scalars.items()
        }
        optimizer.load_state_dict(state)
    return TrainState(**stored["state"])


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def _flatten(
    optimizers: list[torch.optim.Optimizer],
) -> tuple[dict[str, Tensor], list[dict[str, dict[str, Any]]]]:
    """Optimizer states as named tensors, and what is not a tensor as JSON."""
    tensors: dict[str, Tensor] = {}
    scalars: list[dict[str, dict[str, Any]]] = []
    for index, optimizer in enumerate(optimizers):
        scalars.append({})
        for parameter, values in optimizer.state_dict()["state"].items():
            rest = scalars[-1].setdefault(str(parameter), {})
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{index}/{parameter}/{key}"] = value.detach().cpu().contiguous()
                else:
                    rest[key] = value
    return tensors, scalars


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key).clone() for key in file.keys()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
