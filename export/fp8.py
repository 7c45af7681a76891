"""A drafter's projections to FP8, written only if it still drafts as well.

A drafter directory of any layout goes in, a native one comes out: e4m3 projections with float32
scales (see `dflash.fp8` for the schemes), everything else in bfloat16. The directory appears once
its acceptance length has been measured beside that of the drafter it was made from, by the same
arithmetic that engines use, and found close enough.
"""

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.prompts import Prompt
from ..dflash.config import DFlashConfig
from ..dflash.files import PROVENANCE, read_provenance
from ..dflash.fp8 import Quantization, part_of, quantize_weight
from ..dspark.calibration import STS
from ..dspark.schedule import SPS
from ..eval.files import write_json
from ..eval.report import REPORT
from ..eval.sts import weights_digest
from ..target.model import Target
from ..target.saving import atomic_directory
from .checkpoint import Checkpoint, read, write
from .fp8_acceptance import MeasureOptions, compare
from .layouts import LAYOUTS

LEAST_REQUESTS, ENOUGH_REQUESTS, ENOUGH_ROUNDS = 2, 20, 100  # of a measurement
LEAST_LENGTH = 1.1  # acceptance length below which there is nothing to lose
REST = torch.bfloat16  # type of all that is not quantized


class AcceptanceLostError(ValueError):
    """The quantized drafter accepts less than was allowed; nothing was written."""

    def __init__(self, message: str, summary: dict[str, Any]) -> None:
        super().__init__(message)
        self.summary = summary


@dataclass(frozen=True)
class Gate:
    """What the quantized drafter is measured on. `max_drop` is a share of the acceptance length."""

    target: Target
    prompts: Sequence[Prompt]
    options: MeasureOptions
    max_drop: float


def quantize_draft(
    draft: str | Path, out: str | Path, quantization: Quantization, *, name: str, gate: Gate | None
) -> dict[str, Any]:
    """Write the FP8 drafter of a drafter directory; returns what `spec quantize` prints.

    `name` is what reports call the drafter it is made from. Without a `gate` nothing is measured,
    and spec.json says so. Raises ValueError for a drafter that is quantized already, holds NaN or
    infinity or has a width that the scheme does not cover, and AcceptanceLostError.
    """
    found = read(draft)
    config, tensors = quantize_tensors(found, quantization)
    summary: dict[str, Any] = {
        "scheme": quantization.scheme,
        "kept": list(quantization.kept),
        **sizes(found, tensors),
    }
    with atomic_directory(Path(out)) as building:
        write(config, tensors, building, LAYOUTS["sglang"])
        if gate is not None:
            report = compare(
                gate.target,
                draft,
                building,
                gate.prompts,
                gate.options,
                names=(name, Path(out).resolve().name),
            )
            summary |= {**report["quantization"], "max_drop": gate.max_drop}
            check_drop(summary)
            write_json(building / REPORT, report)
        write_json(building / PROVENANCE, provenance(Path(draft), name, summary))
        if (Path(draft) / SPS).is_file():
            shutil.copyfile(Path(draft) / SPS, building / SPS)
    if (Path(draft) / STS).is_file():
        warnings.warn(
            f"{STS} of {name} was fitted on its unquantized weights and was left behind; run spec "
            "calibrate on the new drafter",
            stacklevel=2,
        )
    return summary


def quantize_tensors(
    found: Checkpoint, quantization: Quantization
) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Config and tensors of the FP8 drafter. Raises ValueError as `quantize_draft`."""
    if found.config.quantization is not None:
        raise ValueError(
            f"the drafter is FP8 already ({found.config.quantization.scheme}); give the one it was "
            "made from"
        )
    config = replace(found.config, quantization=quantization)
    tensors: dict[str, Tensor] = {}
    for name, value in found.tensors.items():
        part = part_of(name)
        if part is None or part in quantization.kept:
            tensors[name] = value.to(REST)
            if not tensors[name].isfinite().all():
                raise ValueError(f"{name} holds a value beyond bfloat16; train the drafter again")
            continue
        try:
            weight, scale = quantize_weight(value, quantization.scheme)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        tensors[name] = weight
        tensors[f"{name.rpartition('.')[0]}.{quantization.scale_name}"] = scale
    return config, tensors


def sizes(found: Checkpoint, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Bytes of the tensors, of the same drafter in bfloat16, and what of them is never FP8."""
    before = sum(value.numel() for value in found.tensors.values()) * REST.itemsize
    after = sum(value.numel() * value.itemsize for value in tensors.values())
    heads = sum(v.numel() for n, v in tensors.items() if n.startswith("markov_head."))
    return {
        "bytes_bfloat16": before,
        "bytes_fp8": after,
        "size_ratio": after / before,
        "markov_head_share_of_bfloat16": heads * REST.itemsize / before,
    }


def check_drop(summary: dict[str, Any]) -> None:
    """AcceptanceLostError where the acceptance length fell by more than `max_drop`.

    Warns of a measurement that tells little; ValueError for one that tells nothing.
    """
    if summary["num_requests"] < LEAST_REQUESTS:
        raise ValueError(
            f"measured on {summary['num_requests']} request, which has no interval; give "
            f"{ENOUGH_REQUESTS} prompts or more"
        )
    drop = -summary["relative_change"]
    if drop <= summary["max_drop"]:
        for doubt in doubts(summary):
            warnings.warn(doubt, stacklevel=2)
        return
    low, high = summary["relative_change_ci95"]
    raise AcceptanceLostError(
        f"acceptance length fell by {drop:.2%} from {summary['acceptance_length_before']:.3f} to "
        f"{summary['acceptance_length_after']:.3f} (95 % interval of the change {low:+.2%} to "
        f"{high:+.2%}), --max-drop allows {summary['max_drop']:.2%}; nothing was written: try "
        "--keep qkv, attention or mlp, --scheme block, or more prompts where the interval is wide",
        summary,
    )


def doubts(summary: dict[str, Any]) -> list[str]:
    """Why a small enough drop may say little."""
    found: list[str] = []
    requests, rounds = summary["num_requests"], summary["num_rounds_after"]
    if requests < ENOUGH_REQUESTS or rounds < ENOUGH_ROUNDS:
        found.append(
            f"{requests} requests with {rounds} rounds are too few to tell: give "
            f"{ENOUGH_REQUESTS} requests and {ENOUGH_ROUNDS} rounds or more"
        )
    low, _ = summary["relative_change_ci95"]
    if low < -summary["max_drop"]:
        found.append(
            f"the interval of the change reaches {low:+.2%}, beyond the {summary['max_drop']:.2%} "
            "of --max-drop: a greater loss is not ruled out; give more prompts"
        )
    if summary["acceptance_length_before"] < LEAST_LENGTH:
        found.append(
            f"the drafter accepts next to nothing as it is (acceptance length "
            f"{summary['acceptance_length_before']:.3f}), so there was little to lose; see spec "
            "check, or train it longer"
        )
    return found


def provenance(draft: Path, name: str, summary: dict[str, Any]) -> dict[str, Any]:
    """spec.json of the new directory: that of the old one, and how this one was made."""
    try:
        record = read_provenance(draft, strict=True)
    except ValueError as error:
        warnings.warn(f"{error}; the new drafter does not say how it was trained", stacklevel=2)
        record = {}
    made = {"from": name, "from_weights": weights_digest(draft), **summary}
    made |= {"measured": "acceptance_length_after" in summary}
    return {**record, "quantization": {**made, "spec-toolkit": version("spec-toolkit")}}
