"""The run's own answers: each process lets the target answer its share of the prompts, once."""

import json
import sys
import time
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object

from ..data.cache import CacheWriter, check_disk, estimate_bytes
from ..data.jsonl import Rejected, count_reasons
from ..data.prompts import Prompt
from ..data.regenerate import AnswerPlan, answer, plan_answers
from ..data.rows import read_rows
from ..recipes.schema import Recipe
from ..target.model import Target
from ..target.sampling import Sampling


def answer_share(
    recipe: Recipe,
    out: Path,
    target: Target,
    prompts: list[Prompt],
    layer_ids: tuple[int, ...],
    state: PartialState,
) -> None:
    """Let the target answer this process's share of the prompts, features kept where wanted."""
    data, folder = recipe.data, out / "data"
    # A stop between answering and training must not answer for another `data.minutes`.
    done = folder / "answers.done"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"answers-{state.process_index}.jsonl"
    # A stopped run may have had another number of processes, and so other shares.
    others = [path for path in folder.glob("answers-*.jsonl") if path != mine]
    answered = {row.id for path in others if path.stat().st_size for row in read_rows(path).rows}
    plan = plan_answers(
        target,
        [p for p in prompts[state.process_index :: state.num_processes] if p.id not in answered],
        mine,
        max_new_tokens=data.max_new_tokens,
        sampling=Sampling(data.temperature, seed=recipe.train.seed),
        max_length=data.max_length,
    )
    _say_rejected(plan, state)
    writer = None
    if data.features == "cache":
        writer = _cache_writer(recipe, out, target, plan, layer_ids, state)
    answer(
        target,
        plan,
        batch_size=data.batch_size,
        deadline_seconds=None if data.minutes is None else data.minutes * 60,
        layer_ids=layer_ids if writer else None,
        teacher=recipe.teacher,
        on_features=writer.add_row if writer else None,
        progress=None if state.is_main_process else lambda line: None,
    )
    if writer is not None:
        writer.flush()
    state.wait_for_everyone()
    written = any(path.stat().st_size for path in folder.glob("answers-*.jsonl"))
    if data.minutes is not None and not written:
        # Not done: the next start tries again.
        raise ValueError(
            f"no answer to {len(prompts)} prompts was finished within data.minutes={data.minutes}; "
            "give it more (make quickstart: MINUTES=15), or lower data.batch_size"
        )
    cpu_seconds = sum(gather_object([time.process_time()]))
    if state.is_main_process:
        done.write_text(json.dumps({"cpu_seconds": cpu_seconds}))
    state.wait_for_everyone()


def _say_rejected(plan: AnswerPlan, state: PartialState) -> None:
    """The main process says how many prompts of all processes cannot be answered, and why."""
    rejected: list[Rejected] = gather_object(plan.rejected)
    if rejected and state.is_main_process:
        print(
            f"data: {len(rejected)} prompts left out: {count_reasons(rejected)}, first "
            f"{rejected[0]}",
            file=sys.stderr,
        )


def _cache_writer(
    recipe: Recipe,
    out: Path,
    target: Target,
    plan: AnswerPlan,
    layer_ids: tuple[int, ...],
    state: PartialState,
) -> CacheWriter:
    """This process's writer; the main one says what the cache takes and looks at the disk."""
    data, folder = recipe.data, feature_folder(out, layer_ids)
    tokens = sum(gather_object([sum(len(p.ids) + data.max_new_tokens for p in plan.todo)]))
    if state.is_main_process:
        sizes = {
            "num_features": len(layer_ids) * target.hidden_size,
            "hidden_size": target.hidden_size,
            "dtype": data.cache_dtype,
            "soft": recipe.teacher is not None,
        }
        print(f"feature cache: {estimate_bytes(1, **sizes)} bytes a token", file=sys.stderr)
        if data.minutes is None:
            size = estimate_bytes(tokens, **sizes)
            print(f"feature cache: at most {size / 1e9:.2f} GB in all", file=sys.stderr)
            check_disk(folder, size)
    return CacheWriter(folder, f"part-{state.process_index}", data.cache_dtype, recipe.teacher)


def feature_folder(out: Path, layer_ids: tuple[int, ...]) -> Path:
    """Features of other layers are other features: each choice has its folder."""
    return out / "data" / ("features-" + "-".join(map(str, layer_ids)))
