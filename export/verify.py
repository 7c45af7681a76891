"""The parity gate: a drafter directory on the real engine, compared number by number.

In this order: `spec check`; our own loop on the prompts, and the probe for mistakes that the engine
would share; the engine without a drafter, for its context features and its plain answers; the
engine with the drafter, the same prompts one by one, all at once, and again out of its prefix
cache.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..data.jsonl import atomic_file
from ..data.prompts import Prompt
from ..dflash.files import read_provenance
from ..target.engine import EngineError
from ..target.launch import require_interpreter, without_secrets
from .check import check
from .diagnosis import diagnose_drafter, diagnose_features, diagnose_passes
from .engine_runs import PASSES, Ours, Plain, Tell, measure, run_passes, run_plain
from .findings import Finding, defect, has_defect, warning
from .parity import LayerMatch, PassResult, acceptance, compare_features
from .plan import Plan
from .probe import Probe

SCHEMA = 1
VERIFICATION = "verify.json"
MAX_TOLERANCE = 0.2
FEW_PROMPTS = 10
NOTHING_CACHED = defect(
    "no token came from the prefix cache in the pass that asks again",
    "serve without --disable-radix-cache and with room for the prompts",
    "SGLang",
)


@dataclass
class Verification:
    """The report of the gate."""

    facts: dict[str, Any]
    findings: list[Finding]
    layers: list[LayerMatch] = field(default_factory=list)
    passes: list[PassResult] = field(default_factory=list)
    probed: Probe | None = None

    @property
    def passed(self) -> bool:
        """Every pass ran, and nothing is a defect."""
        ran = [each.name for each in self.passes] == list(PASSES)
        return ran and not has_defect(self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self.facts,
            "passed": self.passed,
            "findings": [asdict(each) for each in self.findings],
            "hidden_states": [each.to_json() for each in self.layers],
            "passes": {each.name: each.to_json() for each in self.passes},
            "probe": None if self.probed is None else self.probed.to_json(),
        }


def verify(
    plan: Plan,
    prompts: Sequence[Prompt],
    *,
    tell: Tell,
    ours: Ours | None = None,
    plain: Plain | None = None,
) -> Verification:
    """Prove a drafter on the engine. A drafter that fails is a report, not an exception.

    `ours` is `measure`'s for this plan, and `plain` is `run_plain`'s for the same target, prompts
    and layers, where several drafters share it; None makes them here. Raises ValueError where the
    target, the prompts or the engine's interpreter are missing.
    """
    _check_plan(plan)
    result = Verification(_facts(plan), [])
    if plan.check_first:
        tell("check: the files, against the target")
        report = check(plan.directory, target=plan.target)
        result.findings += report.findings
        if report.has_defect:
            return result
    ours = ours or measure(plan, prompts, tell)
    gc.collect()
    torch.cuda.empty_cache()  # the engine needs the target's place; without a GPU this does nothing
    result.probed = ours.probed
    length = acceptance(ours.decoded, ours.num_draft_tokens)
    result.facts |= {
        "target": ours.target_name,
        "algorithm": ours.algorithm,
        "num_draft_tokens": ours.num_draft_tokens,
        "num_prompts": len(ours.prompts),
        "num_skipped": ours.num_skipped,
        "quantized": ours.quantized,
        # Of the acceptance length; 0: every histogram has to be equal. An activation on the edge
        # of an FP8 step falls to either side.
        "tolerance": 0.0 if plan.dtype == "float32" and not ours.quantized else plan.tolerance,
        "acceptance_length_ours": length,
    }
    result.findings += _few(ours)
    result.findings += diagnose_drafter(ours.probed, length, _recorded(plan.directory))
    try:
        plain = plain or run_plain(plan, ours, tell)
        result.facts["engine_version"] = plain.version
        result.layers = compare_features(plain.features, ours.features, ours.layer_ids)
        result.findings += diagnose_features(result.layers, plan.dtype)
        for compared in run_passes(plan, ours, plain, tell):
            result.passes.append(compared)
            if compared.name == "cached" and not compared.cached_tokens:
                result.findings.append(NOTHING_CACHED)
    except EngineError as error:
        cure = "read the log; spec serve --print shows what the engine's argument check says"
        result.findings.append(defect(str(error), cure, "SGLang"))
    result.findings += diagnose_passes(
        result.passes,
        exact_text=plan.dtype == "float32",
        tolerance=result.facts["tolerance"],
    )
    return result


def _check_plan(plan: Plan) -> None:
    """What can be known before anything is measured. Raises ValueError, or OSError for `logs`."""
    if not 0 <= plan.tolerance <= MAX_TOLERANCE:
        raise ValueError(f"tolerance is {plan.tolerance:g}; expected 0 to {MAX_TOLERANCE:g}")
    require_interpreter(plan.python)
    plan.logs.mkdir(parents=True, exist_ok=True)


def _few(ours: Ours) -> list[Finding]:
    """A warning where so few prompts are left that they prove little.

    Raises ValueError for fewer than two: a batch of one is no batch.
    """
    count, left_out = len(ours.prompts), sum(ours.num_skipped.values())
    if count < 2:
        raise ValueError(
            f"{count} prompt to verify with, {left_out} left out {ours.num_skipped or ''}; give at "
            "least 2, better 40"
        )
    if count >= FEW_PROMPTS and not left_out:
        return []
    return [
        warning(
            f"{count} prompts were decoded, {left_out} left out {ours.num_skipped or ''}",
            "give 40 that leave room for their answers",
        )
    ]


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "draft": plan.name,
        "target": Path(plan.target).name,
        "engine": "sglang",
        "dtype": plan.dtype,
        "device": plan.device,
        "tensor_parallel": plan.tensor_parallel,
        "max_new_tokens": plan.max_new_tokens,
        "engine_arguments": without_secrets(plan.engine_arguments),
        "stop_tokens": "ignored",
        "bonus_token_counted": True,
    }


def _recorded(directory: Path) -> float | None:
    """The acceptance length that spec.json says was measured after training."""
    try:
        report = read_provenance(directory)["acceptance_report"]
        return float(report["groups"]["all"]["acceptance_length"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_verification(result: Verification, out: Path) -> Path:
    """Write verify.json, whole or not at all."""
    path = out / VERIFICATION
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write((json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n").encode())
    return path
