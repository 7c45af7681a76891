"""The end of a run.

The best drafter measured against plain decoding, and against what costs nothing to train.
"""

import json
from pathlib import Path
from typing import Any

from ..data.jsonl import atomic_file
from ..dflash.files import PROVENANCE
from ..eval.drafter import NetworkDrafter
from ..eval.ngram import NgramDrafter
from ..eval.report import Baseline, evaluate, write_report
from ..recipes.algorithms import load_draft
from ..recipes.schema import Recipe
from ..target.model import Target
from .drafter import make_draft
from .material import DTYPES, Material


def close_run(recipe: Recipe, out: Path, target: Target, material: Material) -> dict[str, Any]:
    """Write `out/report/` from `out/draft`.

    With eval.baselines also for an untrained drafter and n-gram lookup.
    """
    section = recipe.eval
    prompts = material.heldout[: section.final_prompts]
    dtype = DTYPES[recipe.train.dtype]
    baseline: Baseline = {}
    options: dict[str, Any] = {
        "max_new_tokens": section.max_new_tokens,
        "batch_size": section.batch_size,
        "baseline": baseline,
    }
    trained = NetworkDrafter(load_draft(out / "draft", dtype=dtype, device=target.device), target)
    report = evaluate(target, trained, prompts, draft_name="trained", **options)
    comparisons = []
    if section.baselines:
        fresh = make_draft(recipe.draft, target, recipe.train.seed).to(dtype).eval()
        comparisons = [
            evaluate(
                target,
                NetworkDrafter(fresh, target),
                prompts,
                draft_name="before training" if recipe.draft.init_from else "untrained",
                **options,
            ),
            evaluate(
                target,
                NgramDrafter(trained.num_draft_tokens),
                prompts,
                draft_name="ngram",
                **options,
            ),
        ]
    write_report(report, out / "report", comparisons=comparisons)
    _add_report(out / "draft" / PROVENANCE, report)
    print((out / "report" / "report.md").read_text())
    print(f"drafter: {out / 'draft'}\nreport:  {out / 'report'}")
    return report


def _add_report(path: Path, report: dict[str, Any]) -> None:
    """The drafter's provenance carries what was measured."""
    record = json.loads(path.read_text())
    record["acceptance_report"] = report
    with atomic_file(path) as file:
        file.write((json.dumps(record, indent=2) + "\n").encode())
