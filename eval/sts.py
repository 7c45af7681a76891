"""The calibrated temperatures beside a drafter: when they are worth writing, what they belong to.

`sts.json` is read by engines, which want `temperatures` and ignore keys they do not know. Those say
how the fitted rounds were sampled and of which weights they are.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ..dspark.calibration import GRID, STS, read_object
from ..target.sampling import Sampling
from .files import write_json

MIN_ROUNDS = 500  # fewer say too little for 15 bins a slot


def objection(calibration: dict[str, Any]) -> str | None:
    """Why the temperatures of a calibration are not worth serving with; None where they are."""
    rounds = calibration["fit"]["num_rounds"]
    if rounds < MIN_ROUNDS:
        return (
            f"{rounds} rounds to fit on, expected at least {MIN_ROUNDS}: give more prompts or "
            "longer answers"
        )
    before, after = (float(np.mean(calibration[f"ece_{when}"])) for when in ("before", "after"))
    if after > before:
        return (
            f"the held-out calibration error rose from {before:.4f} to {after:.4f}, expected it to "
            "fall: give more prompts, or prompts alike in both parts"
        )
    return None


def edge_slots(temperatures: list[float]) -> list[int]:
    """Slots, counted from 1, whose temperature is the smallest or largest that is tried."""
    ends = GRID[[0, -1]]
    return [k for k, t in enumerate(temperatures, start=1) if np.isclose(t, ends).any()]


def write_sts(calibration: dict[str, Any], draft_dir: str | Path, *, dataset: str) -> None:
    """Write sts.json; the calibration errors in it are those of the held-out requests."""
    content = {
        "temperatures": calibration["temperatures"],
        "dataset": dataset,
        "num_samples": calibration["fit"]["num_rounds"],
        "ece_before": calibration["ece_before"],
        "ece_after": calibration["ece_after"],
        **{key: calibration[key] for key in ("temperature", "top_p", "top_k", "draft_weights")},
    }
    write_json(Path(draft_dir) / STS, content)


def difference_from_fit(draft_dir: str | Path, sampling: Sampling) -> str | None:
    """In what a drafter and a way of sampling differ from what its sts.json was fitted on.

    None where they do not, or where the file does not say.
    """
    stored = read_object(Path(draft_dir) / STS)
    found: list[str] = []
    for key, value in (
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("top_k", sampling.top_k),
    ):
        fitted = stored.get(key)
        if fitted is not None and fitted != value:
            found.append(f"{key} is {value:g}, fitted at {fitted}")
    weights = stored.get("draft_weights")
    if weights is not None and weights != weights_digest(draft_dir):
        found.append("the drafter's weights have changed since")
    return "; ".join(found) or None


def weights_digest(directory: str | Path) -> str:
    """A hash of every tensor's name, dtype, shape and content, however many files hold them."""
    tensors: dict[str, bytes] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                content = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
                content.update(tensor.reshape(-1).view(torch.uint8).numpy())
                tensors[name] = content.digest()
    return hashlib.sha256(b"".join(tensors[name] for name in sorted(tensors))).hexdigest()[:16]
