"""The algorithms by name: where everything that depends on one looks it up."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..dflash import objective as dflash_objective
from ..dflash.config import DFlashConfig, read_config
from ..dflash.draft import DFlashDraft
from ..dflash.objective import LossOptions, SequenceLoss
from ..dspark import objective as dspark_objective
from ..dspark.config import DSparkConfig
from ..dspark.draft import DSparkDraft
from ..dspark.loss import Terms
from ..dspark.objective import DSparkLossOptions
from .schema import Algorithm, DraftSection, LossSection


@dataclass(frozen=True)
class Parts:
    """What an algorithm brings. `sequence_loss` takes the options that `options` makes."""

    config: type[DFlashConfig]
    draft: type[DFlashDraft]
    sequence_loss: Callable[..., SequenceLoss]
    # Of a recipe's loss section at a share of the run in [0, 1].
    options: Callable[[LossSection, float], Any]
    # The config's fields that are the algorithm's own.
    own_fields: Callable[[DraftSection], dict[str, Any]]


def _dflash_options(loss: LossSection, progress: float) -> LossOptions:
    return LossOptions(loss.weighting, loss.gamma, loss.alpha, loss.labels)


def _dspark_options(loss: LossSection, progress: float) -> DSparkLossOptions:
    assert loss.ce is not None and loss.l1 is not None and loss.renyi is not None
    assert loss.confidence is not None and loss.ce_until is not None
    ce, l1, renyi = loss.ce, loss.l1, loss.renyi
    if progress <= loss.ce_until:
        ce, l1, renyi = ce + l1 + renyi, 0.0, 0.0
    terms = Terms(ce=ce, l1=l1, renyi=renyi, soft=loss.labels == "soft")
    return DSparkLossOptions(loss.weighting, loss.gamma, loss.alpha, terms, loss.confidence)


def _heads(section: DraftSection) -> dict[str, Any]:
    return {
        "markov_rank": section.markov_rank,
        "markov_head_type": section.markov_head_type,
        "enable_confidence_head": section.confidence_head,
        "confidence_head_with_markov": section.confidence_head_with_markov,
    }


ALGORITHMS: dict[Algorithm, Parts] = {
    "dflash": Parts(
        DFlashConfig,
        DFlashDraft,
        dflash_objective.sequence_loss,
        _dflash_options,
        lambda section: {},
    ),
    "dspark": Parts(
        DSparkConfig, DSparkDraft, dspark_objective.sequence_loss, _dspark_options, _heads
    ),
}


def algorithm_name(draft: nn.Module) -> Algorithm:
    """The name of a drafter's algorithm."""
    return next(name for name, parts in ALGORITHMS.items() if type(draft) is parts.draft)


def algorithm_of(directory: str | Path) -> Algorithm:
    """The algorithm of a drafter directory, by its `architectures`; ValueError for another one."""
    found = read_config(directory).get("architectures") or []
    for name, parts in ALGORITHMS.items():
        if isinstance(found, list) and any(a in found for a in parts.config.architectures):
            return name
    known = ", ".join(parts.config.architectures[0] for parts in ALGORITHMS.values())
    raise ValueError(
        f"{Path(directory) / 'config.json'}: architectures is {found}, expected one of {known}"
    )


def load_draft(
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> DFlashDraft:
    """Load a drafter directory of whatever algorithm, strictly (see DFlashDraft.load)."""
    parts = ALGORITHMS[algorithm_of(directory)]
    return parts.draft.load(directory, dtype=dtype, device=device)
