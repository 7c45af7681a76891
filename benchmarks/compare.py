"""Algorithms and losses on the same data for the same CPU-seconds of training.

    python benchmarks/compare.py --recipe tiny --budget 15 60 --seeds 0 1 2 --out runs/compare

The target answers once, its features are held in memory, and each variant trains from scratch in
one process until its CPU time is spent (the learning rate ends there), then decodes the same
held-out prompts. One line a result in `OUT/results.jsonl`; results that are there are not made
again, so several processes may share the work with --variants. Prints the table of what is there.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file

from spec.data.cache import CacheReader, RowFeatures
from spec.data.rows import Row
from spec.dflash.loss import expected_row
from spec.recipes.load import load_recipe
from spec.recipes.schema import Recipe
from spec.target.capture import capture
from spec.target.model import Target
from spec.target.teacher import Teacher
from spec.train.drafter import make_config, make_draft
from spec.train.loop import lr_scale
from spec.train.material import Material, gather_material, open_target
from spec.train.measure import measure
from spec.train.samples import target_head
from spec.train.step import make_run, train_step

DFLASH = ["draft.algorithm=dflash"]
DSPARK = ["draft.algorithm=dspark"]
CE = ["loss.ce=1", "loss.l1=0"]
VARIANTS: dict[str, list[str]] = {
    "dflash-ce": [*DFLASH, "loss.labels=hard", "loss.weighting=decay"],
    "dflash-soft": [*DFLASH, "loss.labels=soft", "loss.weighting=decay"],
    "dflash-dpace": [*DFLASH, "loss.labels=hard", "loss.weighting=dpace"],
    "dflash-dpace-soft": [*DFLASH, "loss.labels=soft", "loss.weighting=dpace"],
    "dspark-vanilla-l1": [*DSPARK, "loss.labels=hard"],
    "dspark-vanilla-ce": [*DSPARK, "loss.labels=hard", *CE],
    "dspark-vanilla-soft": [*DSPARK, "loss.labels=soft", *CE],
    "dspark-vanilla-renyi": [*DSPARK, "loss.ce=0", "loss.l1=0", "loss.renyi=1"],
    "dspark-vanilla-ce-l1": [*DSPARK, "loss.labels=soft", "loss.ce_until=0.5"],
    "dspark-vanilla-dpace": [*DSPARK, "loss.labels=soft", *CE, "loss.weighting=dpace"],
    "dspark-gated": [*DSPARK, "loss.labels=soft", *CE, "draft.markov_head_type=gated"],
    "dspark-rnn": [*DSPARK, "loss.labels=soft", *CE, "draft.markov_head_type=rnn"],
    "dspark-rank0": [
        *DSPARK,
        "loss.labels=soft",
        *CE,
        "draft.markov_rank=0",
        "draft.confidence_head_with_markov=false",
    ],
}


class Preloaded(CacheReader):
    """The feature cache in memory, with whichever teacher a variant learns from."""

    def __init__(self, rows: dict[str, dict[str, torch.Tensor]], teacher: Teacher | None) -> None:
        self.teacher: Teacher | None = teacher
        self._rows = rows

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._rows

    def read(self, row_id: str, length: int) -> RowFeatures:
        row = self._rows[row_id]
        teacher = None if self.teacher is None else row[self.teacher][:length]
        return RowFeatures(row["context"][:length], teacher)


def preload(
    rows: list[Row], target: Target, layer_ids: tuple[int, ...], path: Path
) -> dict[str, dict[str, torch.Tensor]]:
    """Context, last hidden states and expected head rows of every row; kept in a file."""
    head = target_head(target)
    found: dict[str, dict[str, torch.Tensor]] = {}
    if path.exists():
        for name, value in load_file(path).items():
            row_id, kind = name.rsplit("|", 1)
            found.setdefault(row_id, {})[kind] = value
        return found
    for row in rows:
        features = capture(target, [row.input_ids], layer_ids)[0]
        teaches = torch.tensor([*row.loss_mask[1:], 0], dtype=torch.bool)
        last, expected = features.last, torch.zeros_like(features.last)
        expected[teaches] = expected_row(last[teaches], head).to(last.dtype)
        found[row.id] = {"context": features.context, "last": last, "expected": expected}
    save_file(
        {f"{row}|{kind}": value for row, kinds in found.items() for kind, value in kinds.items()},
        path,
    )
    return found


def train_for(
    recipe: Recipe, target: Target, material: Material, processes: PartialState
) -> dict[str, Any]:
    """Train until the CPU time is spent, then measure."""
    draft = make_draft(recipe.draft, target, recipe.train.seed)
    run = make_run(recipe, target, draft, material)
    section, state = recipe.train, run.state
    start = time.process_time()
    while not run.finished:
        scale = lr_scale(run.progress, schedule=section.schedule, warmup=section.warmup)
        train_step(run, scale, processes, elapsed=0.0)
        state.step, state.seconds = state.step + 1, time.process_time() - start
    prompts = material.heldout[: recipe.eval.final_prompts]
    tau = measure(draft, target, prompts, recipe.eval, processes)
    return {**tau.to_json(), "steps": state.step, "cpu_seconds": round(state.seconds, 1)}


def print_table(results: list[dict[str, Any]]) -> None:
    """Mean over seeds, and each seed's own, by budget and variant."""
    print("| CPU-s | variant | acceptance length | by seed | interval of seed 0 | steps |")
    print("| ---: | --- | ---: | --- | --- | ---: |")
    keys = sorted({(r["budget"], r["variant"]) for r in results})
    for budget, variant in keys:
        mine = sorted(
            (r for r in results if (r["budget"], r["variant"]) == (budget, variant)),
            key=lambda r: r["seed"],
        )
        lengths = [r["acceptance_length"] for r in mine]
        low, high = mine[0]["acceptance_length_ci95"]
        each = ", ".join(f"{length:.2f}" for length in lengths)
        mean = sum(lengths) / len(lengths)
        steps = sum(r["steps"] for r in mine) // len(mine)
        interval = f"[{low:.2f}, {high:.2f}]"
        print(f"| {budget:g} | {variant} | {mean:.2f} | {each} | {interval} | {steps} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="tiny", help="target, data, shape and optimizer")
    parser.add_argument("--budget", type=float, nargs="+", default=[60.0], help="CPU-seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--drafts", type=int, default=7, help="drafted tokens of each variant")
    parser.add_argument("--rows", type=int, help="train on the first so many answers")
    parser.add_argument("--rank", type=int, default=64, help="of DSpark's sequential head")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="key=value for every variant")
    args = parser.parse_args()
    torch.set_num_threads(1)
    processes = PartialState(cpu=True)
    path = args.out / "results.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    common = [f"out={args.out}", "train.processes=1", "data.features=cache", *args.overrides]
    base = load_recipe(args.recipe, [*common, *DSPARK, f"draft.block_size={args.drafts}"])
    target = open_target(base, args.out, processes)
    config = make_config(base.draft, target)
    material = gather_material(base, args.out, target, config, processes)
    chosen = material.rows[: args.rows]
    features = preload(chosen, target, config.target_layer_ids, args.out / "features.safetensors")
    for budget in args.budget:
        for seed in args.seeds:
            for name in args.variants:
                key = {"variant": name, "budget": budget, "seed": seed}
                if any(key.items() <= r.items() for r in results):
                    continue
                shape = [f"draft.block_size={args.drafts + 1}"]
                if VARIANTS[name][0] == DSPARK[0]:
                    shape = [f"draft.block_size={args.drafts}", f"draft.markov_rank={args.rank}"]
                bound = [f"train.minutes={budget / 60}", f"train.seed={seed}"]
                recipe = load_recipe(
                    args.recipe,
                    [*common, *shape, *VARIANTS[name], *bound],
                )
                cache = Preloaded(features, recipe.teacher)
                own = Material(chosen, material.heldout, cache, 0.0)
                result = {**key, **train_for(recipe, target, own, processes)}
                with path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                results.append(result)
                print(result, flush=True)
    print_table(results)


if __name__ == "__main__":
    main()
