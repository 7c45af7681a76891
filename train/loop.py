"""The training loop: evaluate, save, stop, step, log, always in that order.

`train(recipe)` is the whole run, from the first row to the closing report.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState

from ..dflash.loss import check_soft_labels
from ..recipes.algorithms import algorithm_name
from ..recipes.schema import Recipe
from ..target.model import Target
from .checkpoint import load_checkpoint, save_checkpoint
from .closing import close_run
from .drafter import make_draft
from .launch import launch, launched
from .material import Material, gather_material, open_target
from .measure import keep_best, measure, save_draft
from .memory import keep_freed_memory
from .optim import lr_scale
from .outdir import lock_out, open_out
from .progress import Progress
from .samples import target_head
from .step import Run, StepResult, make_run, train_step

MAX_SKIPPED = 50  # steps in a row without an update after which a run is beyond recovery


@dataclass
class Session:
    """A run in its directory; `progress` is None on all but the main process."""

    run: Run
    target: Target
    material: Material
    out: Path
    processes: PartialState
    progress: Progress | None
    cpu_before: float  # CPU seconds of the data and of the sessions that came before


def train(recipe: Recipe, *, resume: bool = True, locked: bool = False) -> Path:
    """Run a recipe to its end (or to a SIGTERM) and return its `out` directory.

    `out` is held meanwhile, by the process that starts the others or else by the main one;
    `locked` says that it is held already. Raises ValueError for anything the user has to mend.
    """
    if recipe.unsupported is not None:
        raise ValueError(f"this recipe cannot run yet: {recipe.unsupported}")
    if recipe.train.processes > 1 and not launched():
        with lock_out(recipe) as lock:
            out, _ = open_out(recipe, resume=resume, main=True)
            launch(recipe, out / "recipe.yaml", resume=resume, lock=lock)
        return out
    processes = PartialState(cpu=recipe.train.device == "cpu")
    with lock_out(recipe) if processes.is_main_process and not locked else nullcontext():
        return _run(recipe, processes, resume=resume)


def _run(recipe: Recipe, processes: PartialState, *, resume: bool) -> Path:
    """This process's part of the run, from the first row to the closing report."""
    out, newest = open_out(recipe, resume=resume, main=processes.is_main_process)
    keep_freed_memory()
    target = open_target(recipe, out, processes)
    if recipe.teacher == "expected":
        check_soft_labels(target_head(target))
    draft = make_draft(recipe.draft, target, recipe.train.seed)
    material = gather_material(recipe, out, target, draft.config, processes)
    run = make_run(recipe, target, draft, material)
    run.masters.share(processes)
    if newest is not None:
        run.state = load_checkpoint(newest, run.masters, run.optimizers)
    progress = None
    if processes.is_main_process:
        progress = Progress(recipe, out, resumed_at=run.state.step)
        progress.say(describe(run, material))
    cpu_before = run.state.cpu_seconds if newest is not None else material.cpu_seconds
    run.cpu_start = time.process_time()
    session = Session(run, target, material, out, processes, progress, cpu_before)
    with stop_on_signal(run):
        ended = _loop(session)
    if progress is not None:
        progress.close()
    if ended and run.state.empty_steps + run.state.skipped_steps >= run.state.step:
        raise ValueError(
            f"none of {run.state.step} steps changed the drafter: {run.state.empty_steps} had no "
            f"label and {run.state.skipped_steps} no finite gradient; look at train.seq_length and "
            "the data"
        )
    if progress is not None and ended:
        close_run(recipe, out, target, material)
    processes.wait_for_everyone()
    return out


def _loop(session: Session) -> bool:
    """True when the run came to its end, False when it was asked to stop."""
    run, state, section = session.run, session.run.state, session.run.recipe.train
    start = time.monotonic() - state.seconds
    evaluated = saved = state.step
    idle, stop = 0, False
    while True:
        if (state.step % section.eval_every == 0 and state.step > evaluated) or run.finished:
            _evaluate(session)
            evaluated = state.step
        if (state.step % section.save_every == 0 or run.finished or stop) and state.step > saved:
            _save(session)
            saved = state.step
        if run.finished or stop:
            return run.finished
        began = time.monotonic()
        scale = lr_scale(run.progress, schedule=section.schedule, warmup=section.warmup)
        result = train_step(run, scale, session.processes, elapsed=began - start)
        state.step, state.seconds, stop = state.step + 1, result.seconds, result.stop
        state.cpu_seconds = session.cpu_before + result.cpu_seconds
        idle = 0 if result.applied else idle + 1
        if idle >= MAX_SKIPPED:
            raise ValueError(
                f"{MAX_SKIPPED} steps in a row had no finite gradient or no label; lower train.lr "
                "or look at the data"
            )
        if session.progress is not None and state.step % section.log_every == 0:
            _log(session.progress, run, result, scale, time.monotonic() - began)


def _evaluate(session: Session) -> None:
    """Measure held-out acceptance length and keep the drafter when it is the best so far."""
    run, state = session.run, session.run.state
    section = run.recipe.eval
    prompts = session.material.heldout[: section.prompts]
    tau = measure(run.draft, session.target, prompts, section, session.processes)
    best = keep_best(state, tau)
    if session.progress is None:
        return
    if best:
        sources = session.material.sources
        save_draft(run.draft, state, run.recipe, session.out, session.target, sources)
    session.progress.record(
        {
            "step": state.step,
            "seconds": round(state.seconds, 2),
            "cpu_seconds": round(state.cpu_seconds, 2),
            **tau.to_json(),
        }
    )
    session.progress.say(f"step {state.step}: held-out acceptance length {tau.text()}")


def _save(session: Session) -> None:
    run = session.run
    if session.processes.is_main_process:
        folder, keep = session.out / "checkpoints", run.recipe.train.keep
        save_checkpoint(folder, run.state, run.masters, run.optimizers, keep=keep)
    session.processes.wait_for_everyone()


def describe(run: Run, material: Material) -> str:
    """What a run is about to do, in numbers."""
    section, config = run.recipe.train, run.draft.config
    supervised = sum(row.num_supervised for row in material.rows)
    length = f"{run.num_steps} steps" if run.num_steps is not None else f"{section.minutes} minutes"
    parameters = sum(p.numel() for p in run.draft.parameters())
    cut = f", {run.samples.num_cut} cut at seq_length" if run.samples.num_cut else ""
    return (
        f"drafter: {algorithm_name(run.draft)}, {parameters / 1e6:.1f} M parameters, "
        f"{config.num_hidden_layers} layers, block "
        f"{config.block_size}, "
        f"target layers {list(config.target_layer_ids)}, mask token {config.mask_token_id}\n"
        f"data: {len(material.rows)} rows, {supervised} supervised tokens, "
        f"{len(run.samples.packs)} packed sequences{cut}\n"
        f"run: {length}, {section.batch_size} sequences of {section.seq_length} tokens and "
        f"{section.num_anchors} anchors a step, "
        f"{section.optimizer}, from step {run.state.step}"
    )


@contextmanager
def stop_on_signal(run: Run) -> Iterator[None]:
    """SIGTERM lets the current step end and saves a checkpoint."""

    def ask(_number: int, _frame: object) -> None:
        run.stopping = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log(progress: Progress, run: Run, result: StepResult, scale: float, seconds: float) -> None:
    state = run.state
    values = {
        "step": state.step,
        "seconds": round(state.seconds, 3),
        "loss": result.loss,
        "train_acceptance": result.train_acceptance,
        "lr": scale * run.recipe.train.lr,
        "grad_norm": result.grad_norm,
        "tokens_per_second": result.num_tokens / seconds,
        "blocks_per_second": result.num_blocks / seconds,
        "skipped_steps": state.skipped_steps,
        "empty_steps": state.empty_steps,
        "broken_cache_rows": run.samples.num_broken,
    }
    progress.record(values)
    share = run.progress
    left = state.seconds / share * (1 - share) if share > 0 else 0.0
    progress.line(values, seconds_left=left, last_acceptance=state.last_acceptance)
