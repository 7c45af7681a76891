"""The end of a run: the best drafter measured against plain decoding, and against what costs nothing to train."""

from dataclasses import replace
from pathlib import Path

import torch

from ..data.prompts import encode_prompt
from ..dflash.draft import DFlashDraft
from ..eval.decode import NetworkDrafter
from ..eval.ngram import NgramDrafter
from ..eval.report import evaluate, write_report
from ..recipes.schema import Recipe
from ..target.model import Target
from .drafter import make_draft
from .material import Material


def close_run(recipe: Recipe, out: Path, target: Target, material: Material) -> None:
    """Write `out/report/` from `out/draft`, with an untrained drafter and n-gram lookup for comparison."""
