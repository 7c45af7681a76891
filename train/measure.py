"""Held-out acceptance length during training; the best drafter kept as engines read it."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from ..data.jsonl import atomic_file
from ..data.prompts import Prompt, encode_prompt
from ..data.sources import Source
from ..dflash.draft import DFlashDraft
from ..dflash.files import PROVENANCE
from ..dspark.calibration import STS
from ..dspark.schedule import SPS
from ..eval.acceptance import Rounds
from ..eval.acceptance import measure as measure_rounds
from ..eval.decode import speculate
from ..eval.drafter import NetworkDrafter
from ..recipes.schema import EvalSection, Recipe
from ..target.files import target_revision
from ..target.model import Target
from .checkpoint import TrainState


@dataclass(frozen=True)
class Measured:
    """Acceptance length with its 95 % interval over requests."""

    acceptance_length: float
    ci95: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_length_ci95": list(self.ci95),
        }

    def text(self) -> str:
        return f"{self.acceptance_length:.3f} [{self.ci95[0]:.2f}, {self.ci95[1]:.2f}]"


def measure(
    draft: DFlashDraft,
    target: Target,
    prompts: Sequence[Prompt],
    section: EvalSection,
    processes: PartialState,
) -> Measured:
    """Decode held-out prompts speculatively, each process its share.

    The rounds of all are counted together.
    """
    tokenizer = target.require_tokenizer()
    mine = [
        encode_prompt(p, tokenizer)
        for p in prompts[processes.process_index :: processes.num_processes]
    ]
    draft.eval()
    decoded = speculate(
        target,
        NetworkDrafter(draft, target),
        mine,
        max_new_tokens=section.max_new_tokens,
        batch_size=section.batch_size,
    )
    draft.train()
    rounds = [Rounds(d.num_accepted, d.num_drafted, len(d.output_ids)) for d in decoded]
    if processes.num_processes > 1:
        rounds = gather_object(rounds)
    result = measure_rounds(rounds, draft.config.num_draft_tokens)
    # An answer of a single token has no round; a drafter cannot help there, which is an acceptance
    # length of 1.
    return Measured(result.acceptance_length or 1.0, result.acceptance_length_ci95 or (1.0, 1.0))


def keep_best(state: TrainState, tau: Measured) -> bool:
    """Note a measurement in the state; whether it is the best so far."""
    state.last_acceptance = tau.acceptance_length
    if tau.acceptance_length <= state.best_acceptance:
        return False
    state.best_acceptance, state.best_step = tau.acceptance_length, state.step
    return True


def save_draft(
    draft: DFlashDraft,
    state: TrainState,
    recipe: Recipe,
    out: Path,
    target: Target,
    sources: Sequence[Source] = (),
) -> None:
    """Write `out/draft`, ready to load, with its provenance.

    A calibration of the weights that were there before is no longer true and goes.
    """
    draft.save(out / "draft")
    for name in (STS, SPS):
        (out / "draft" / name).unlink(missing_ok=True)
    write_provenance(out, draft, recipe, target, state, sources)


def _without_folders(value: Any) -> Any:
    """Paths of this machine as bare names; hub ids stay."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    local = isinstance(value, str) and (value.startswith((".", "~", "/")) or Path(value).exists())
    return Path(value).name if local else value


def write_provenance(
    out: Path,
    draft: DFlashDraft,
    recipe: Recipe,
    target: Target,
    state: TrainState,
    sources: Sequence[Source],
) -> None:
    """`draft/spec.json`: what this drafter was made from, and as what. No paths."""
    manifests = sorted((out / "data").glob("*.manifest.json"))
    record = {
        # A copy: config.json goes through many hands, and `spec check` compares.
        "config": draft.config.to_json(str(draft.dtype).removeprefix("torch.")),
        "recipe": _without_folders(recipe.model_dump(mode="json", exclude={"out"})),
        "data": {path.name: json.loads(path.read_text()) for path in manifests},
        "training_data": {
            "longest_sequence": min(
                recipe.train.seq_length, max((s.longest_row for s in sources), default=0)
            ),
            "sources": [asdict(source) for source in sources],
        },
        "target": {"name": target.name, "revision": target_revision(target.path)},
        "step": state.step,
        "heldout_acceptance_length": state.best_acceptance,
        "versions": {
            "spec-toolkit": version("spec-toolkit"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
    }
    with atomic_file(out / "draft" / PROVENANCE) as file:
        file.write((json.dumps(record, indent=2) + "\n").encode())
