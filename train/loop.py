"""The training loop: evaluate, save, stop, step, log, always in that order.

`train(recipe)` is the whole run; `train_step` is one update and knows nothing of files. A step
divides by the sum of loss weights over all its samples, ranks and accumulation passes, so that how
samples were split never shows in the update.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor

from ..data.loader import seeded
from ..dflash.draft import DFlashDraft
from ..dflash.loss import Head
from ..dflash.objective import LossOptions, sequence_loss
from ..dflash.vocabulary import SampledHead
from ..recipes.schema import Recipe
from ..target.model import Target
from .checkpoint import TrainState, load_checkpoint, save_checkpoint
from .closing import close_run
from .drafter import make_draft
from .launch import launch, launched
from .material import DTYPES, Material, gather_material, open_target
from .measure import keep_best, measure
from .memory import keep_freed_memory
from .optim import Masters, lr_scale, make_optimizers, set_lr
from .outdir import open_out
from .progress import Progress
from .samples import Samples, target_head

MAX_SKIPPED = 50  # non-finite steps in a row after which a run is beyond recovery


@dataclass
class StepResult:
    """Sums over all ranks."""

    loss: float  # mean over the weights
    grad_norm: float
    train_acceptance: float  # 1 + accepted tokens a block, against the labels
    num_tokens: int
    num_blocks: int
    applied: bool  # False: no label in the batch, or a non-finite gradient
    seconds: float  # training time when the step ended, mean over ranks
    stop: bool  # a rank was asked to stop


@dataclass
class Run:
    """What a step needs."""

    recipe: Recipe
    draft: DFlashDraft
    masters: Masters
    optimizers: list[torch.optim.Optimizer]
    samples: Samples
    embedding: Tensor
    head: Head
    sampled: SampledHead | None
    options: LossOptions
    state: TrainState
    stopping: bool = False

    @property
    def progress(self) -> float:
        """Share of the run that will be over after the next step; 1 at the last one."""
        section = self.recipe.train
        if section.steps is not None:
            return (self.state.step + 1) / section.steps
        assert section.minutes is not None
        return min(1.0, self.state.seconds / (section.minutes * 60))

    @property
    def finished(self) -> bool:
        section = self.recipe.train
        if section.steps is not None:
            return self.state.step >= section.steps
        return self.progress >= 1.0


def train(recipe: Recipe, *, resume: bool = True) -> Path:
    """Run a recipe to its end (or to a SIGTERM) and return its `out` directory.

    Raises ValueError for anything the user has to mend.
    """
    processes = None
    if launched() or recipe.train.processes == 1:
        processes = PartialState(cpu=recipe.train.device == "cpu")
    out, newest = open_out(
        recipe, resume=resume, main=processes is not None and processes.is_main_process
    )
    if processes is None:
        launch(recipe, out / "recipe.yaml", resume=resume)
        return out
    keep_freed_memory()
    target = open_target(recipe, out, processes)
    draft = make_draft(recipe.draft, target, recipe.train.seed)
    material = gather_material(recipe, out, target, draft.config.target_layer_ids, processes)
    run = make_run(recipe, target, draft, material)
    if newest is not None:
        run.state = load_checkpoint(newest, run.masters, run.optimizers)
    progress = (
        Progress(recipe, out, resumed_at=run.state.step) if processes.is_main_process else None
    )
    if progress is not None:
        progress.say(describe(run, material))
    with stop_on_signal(run):
        ended = _loop(run, target, material, out, processes, progress)
    if progress is not None:
        progress.close()
        if ended:
            close_run(recipe, out, target, material)
    processes.wait_for_everyone()
    return out


def _loop(
    run: Run,
    target: Target,
    material: Material,
    out: Path,
    processes: PartialState,
    progress: Progress | None,
) -> bool:
    """True when the run came to its end, False when it was asked to stop."""
    section, state = run.recipe.train, run.state
    start = time.monotonic() - state.seconds
    evaluated = saved = state.step
    skipped_in_a_row, stop = 0, False
    while True:
        if (state.step % section.eval_every == 0 and state.step > evaluated) or run.finished:
            tau = measure(
                run.draft,
                target,
                material.heldout[: run.recipe.eval.prompts],
                run.recipe.eval,
                processes,
            )
            evaluated = state.step
            keep_best(
                run.draft,
                state,
                tau.acceptance_length,
                run.recipe,
                out,
                target,
                main=processes.is_main_process,
            )
            if progress is not None:
                progress.record(
                    {"step": state.step, "seconds": round(state.seconds, 2), **tau.to_json()}
                )
                progress.say(f"step {state.step}: held-out acceptance length {tau.text()}")
        if (state.step % section.save_every == 0 or run.finished or stop) and state.step > saved:
            if processes.is_main_process:
                save_checkpoint(
                    out / "checkpoints", state, run.masters, run.optimizers, keep=section.keep
                )
            processes.wait_for_everyone()
            saved = state.step
        if run.finished or stop:
            return run.finished
        began, lr = (
            time.monotonic(),
            lr_scale(run.progress, schedule=section.schedule, warmup=section.warmup),
        )
        result = train_step(run, lr, processes, elapsed=time.monotonic() - start)
        state.step, state.seconds, stop = state.step + 1, result.seconds, result.stop
        skipped_in_a_row = 0 if result.applied else skipped_in_a_row + 1
        if skipped_in_a_row >= MAX_SKIPPED:
            raise ValueError(
                f"{MAX_SKIPPED} steps in a row had no finite gradient or no label; lower train.lr "
                "or look at the data"
            )
        if progress is not None and state.step % section.log_every == 0:
            _log(progress, run, result, lr, time.monotonic() - began)


def train_step(run: Run, scale: float, processes: PartialState, *, elapsed: float) -> StepResult:
    """One update from this step's samples, this rank's share of them computed here.

    `scale` multiplies the peak learning rates; `elapsed` is this rank's training time, shared so
    that all ranks agree on it.
    """
    section, state = run.recipe.train, run.state
    began = time.monotonic()
    run.masters.flat_grad.zero_()
    totals = torch.zeros(
        6, dtype=torch.float64
    )  # weight, loss, blocks, accepted, tokens, skipped slots
    head = run.head
    if run.sampled is not None:
        head = run.sampled.draw(seeded("vocabulary", section.seed, state.step))
    first = state.step * section.batch_size
    for number in range(
        first + processes.process_index, first + section.batch_size, processes.num_processes
    ):
        sample = run.samples[number]
        out = sequence_loss(
            run.draft,
            sample.sequence,
            anchors=sample.anchors,
            embedding=run.embedding,
            head=head,
            options=run.options,
            row_of_label=None if run.sampled is None else run.sampled.row_of_label,
        )
        if out.num_slots > 0:
            out.loss.backward()
            run.masters.accumulate()
        counts = (
            out.weight,
            out.loss.detach(),
            out.num_blocks,
            out.num_accepted,
            len(sample.sequence.input_ids),
        )
        totals[:5] += torch.tensor([float(value) for value in counts], dtype=torch.float64)
    shared = torch.tensor(
        [elapsed + time.monotonic() - began, float(run.stopping)], dtype=torch.float64
    )
    totals = _sum(torch.cat([totals, shared]), processes)
    weight, loss, blocks, accepted, tokens = totals[:5].tolist()
    run.masters.flat_grad.copy_(_sum(run.masters.flat_grad, processes))
    applied, norm = _update(run, weight, scale)
    return StepResult(
        loss=loss / weight if weight else 0.0,
        grad_norm=norm,
        train_acceptance=1 + accepted / blocks if blocks else 1.0,
        num_tokens=int(tokens),
        num_blocks=int(blocks),
        applied=applied,
        seconds=float(totals[6]) / processes.num_processes,
        stop=bool(totals[7] > 0),
    )


def _update(run: Run, weight: float, scale: float) -> tuple[bool, float]:
    """Divide, clip, step; (whether it was applied, gradient norm before clipping)."""
    if weight == 0:
        run.state.empty_steps += 1
        return False, 0.0
    grad = run.masters.flat_grad.div_(weight)
    norm = float(grad.norm())
    if not torch.isfinite(torch.tensor(norm)):
        run.state.skipped_steps += 1
        return False, norm
    clip = run.recipe.train.clip
    if norm > clip:
        grad.mul_(clip / norm)
    set_lr(run.optimizers, scale)
    for optimizer in run.optimizers:
        optimizer.step()
    run.masters.refresh()
    return True, norm


def _sum(tensor: Tensor, processes: PartialState) -> Tensor:
    return reduce(tensor, "sum") if processes.num_processes > 1 else tensor  # pyright: ignore[reportReturnType]


def make_run(recipe: Recipe, target: Target, draft: DFlashDraft, material: Material) -> Run:
    """Everything a step needs.

    Checks the mask token against the data and, for soft labels, the teacher.
    """
    section, dtype = recipe.train, DTYPES[recipe.train.dtype]
    check_mask_token(draft.config.mask_token_id, target, material)
    soft = recipe.loss.labels == "soft"
    if soft:
        target.check_teacher(material.rows[0].input_ids[:64])
    masters = Masters(draft, dtype)
    draft.train()
    head = target_head(target, dtype)
    return Run(
        recipe=recipe,
        draft=draft,
        masters=masters,
        optimizers=make_optimizers(
            masters,
            section.optimizer,
            lr=section.lr,
            muon_lr=section.muon_lr,
            weight_decay=section.weight_decay,
            betas=section.betas,
        ),
        samples=Samples(
            material.rows,
            target=target,
            cache=material.cache,
            layer_ids=draft.config.target_layer_ids,
            seq_length=section.seq_length,
            num_anchors=section.num_anchors,
            soft_labels=soft,
            seed=section.seed,
        ),
        embedding=target.embedding.to(dtype),
        head=head,
        sampled=sampled_head(recipe, head, material),
        options=LossOptions(**recipe.loss.model_dump(exclude={"sampled_rows"})),
        state=TrainState(),
    )


def sampled_head(recipe: Recipe, head: Head, material: Material) -> SampledHead | None:
    """The softmax over a part of the vocabulary: all labels and some of the rest, if asked for."""
    if recipe.loss.sampled_rows is None:
        return None
    labels = {
        token
        for row in material.rows
        for token, generated in zip(row.input_ids, row.loss_mask, strict=True)
        if generated
    }
    kept = torch.tensor(sorted(labels), device=head.weight.device)
    return SampledHead(head, kept, recipe.loss.sampled_rows)


def check_mask_token(mask: int, target: Target, material: Material) -> None:
    """Convention 8: a row of the embedding that means nothing else."""
    tokenizer = target.tokenizer
    reserved = {
        *target.stop_token_ids,
        getattr(tokenizer, "pad_token_id", None),
        getattr(tokenizer, "bos_token_id", None),
    }
    if mask in reserved:
        raise ValueError(
            f"mask token {mask} is the target's pad, bos or a stop token; `spec inspect` lists "
            "free ones"
        )
    user = next((row.id for row in material.rows if mask in row.input_ids), None)
    if user is not None:
        raise ValueError(
            f"mask token {mask} occurs in the data (row {user}); set draft.mask_token_id to a "
            "free one"
        )


def describe(run: Run, material: Material) -> str:
    """What a run is about to do, in numbers."""
    section, config = run.recipe.train, run.draft.config
    supervised = sum(row.num_supervised for row in material.rows)
    length = f"{section.steps} steps" if section.steps is not None else f"{section.minutes} minutes"
    parameters = sum(p.numel() for p in run.draft.parameters())
    cut = f", {run.samples.num_cut} cut at seq_length" if run.samples.num_cut else ""
    return (
        f"drafter: {parameters / 1e6:.1f} M parameters, {config.num_hidden_layers} layers, block "
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
    }
    progress.record(values)
    share = run.progress
    left = state.seconds / share * (1 - share) if share > 0 else 0.0
    progress.line(values, seconds_left=left, last_acceptance=state.last_acceptance)
