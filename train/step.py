"""One update: this rank's samples, the sum over all ranks, the optimizer.

A step divides by the sum of loss weights over all its samples, ranks and accumulation passes, so
that how samples were split never shows in the update. Nothing here touches files.
"""

import math
import time
from dataclasses import dataclass

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor

from ..data.loader import seeded
from ..dflash.draft import DFlashDraft
from ..dflash.loss import Head
from ..dflash.vocabulary import SampledHead
from ..recipes.algorithms import ALGORITHMS
from ..recipes.schema import Recipe
from ..target.model import Target
from .checkpoint import TrainState
from .material import DTYPES, Material
from .optim import Masters, make_optimizers, set_lr
from .samples import Samples, target_head


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
    cpu_seconds: float  # of training, all ranks of this session
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
    state: TrainState
    stopping: bool = False
    cpu_start: float = 0.0  # this process's CPU seconds when training began

    @property
    def num_steps(self) -> int | None:
        """Of the whole run; None where it is bounded by time."""
        section = self.recipe.train
        if section.epochs is None:
            return section.steps
        return math.ceil(section.epochs * len(self.samples.packs) / section.batch_size)

    @property
    def progress(self) -> float:
        """Share of the run that will be over after the next step; 1 at the last one."""
        section, state = self.recipe.train, self.state
        if self.num_steps is not None:
            return (state.step + 1) / self.num_steps
        assert section.minutes is not None
        # The next step is expected to take what the earlier ones took; the first, a thousandth.
        ended = state.seconds / (section.minutes * 60)
        return min(1.0, ended * (state.step + 1) / state.step if state.step else 1e-3)

    @property
    def finished(self) -> bool:
        section = self.recipe.train
        if self.num_steps is not None:
            return self.state.step >= self.num_steps
        assert section.minutes is not None
        return self.state.seconds >= section.minutes * 60


def make_run(recipe: Recipe, target: Target, draft: DFlashDraft, material: Material) -> Run:
    """Everything a step needs.

    Checks the mask token against the data and, for soft labels, the teacher.
    """
    section, dtype = recipe.train, DTYPES[recipe.train.dtype]
    check_mask_token(draft.config.mask_token_id, target, material)
    check_confidence(recipe, draft)
    if recipe.teacher is not None:
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
            seed=section.seed,
        ),
        embedding=target.embedding.to(dtype),
        head=head,
        sampled=sampled_head(recipe, head, material),
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


def check_confidence(recipe: Recipe, draft: DFlashDraft) -> None:
    """ValueError for a confidence head without a loss, or a loss without a head.

    The recipe cannot tell where the drafter is a warm start.
    """
    weight = recipe.loss.confidence
    has_head = any(name.startswith("confidence_head.") for name, _ in draft.named_parameters())
    if weight is not None and bool(weight) != has_head:
        raise ValueError(
            f"the drafter has {'a' if has_head else 'no'} confidence head and loss.confidence is "
            f"{weight}; set loss.confidence={1.0 if has_head else 0.0}"
        )


def train_step(run: Run, scale: float, processes: PartialState, *, elapsed: float) -> StepResult:
    """One update from this step's samples, this rank's share of them computed here.

    `scale` multiplies the peak learning rates; `elapsed` is this rank's training time, shared so
    that all ranks agree on it.
    """
    section, state = run.recipe.train, run.state
    began = time.monotonic()
    run.masters.flat_grad.zero_()
    device = run.masters.flat_grad.device
    totals = torch.zeros(
        5, dtype=torch.float64, device=device
    )  # weight, loss, blocks, accepted, tokens
    head, algorithm = run.head, ALGORITHMS[run.recipe.draft.algorithm]
    options = algorithm.options(run.recipe.loss, run.progress)
    if run.sampled is not None:
        head = run.sampled.draw(seeded("vocabulary", section.seed, state.step))
    first = state.step * section.batch_size
    for number in range(
        first + processes.process_index, first + section.batch_size, processes.num_processes
    ):
        sample = run.samples[number]
        out = algorithm.sequence_loss(
            run.draft,
            sample.sequence,
            anchors=sample.anchors,
            embedding=run.embedding,
            head=head,
            options=options,
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
        totals += torch.tensor([float(value) for value in counts]).to(totals)
    clocks = (
        elapsed + time.monotonic() - began,
        time.process_time() - run.cpu_start,
        float(run.stopping),
    )
    shared = torch.cat([totals, torch.tensor(clocks).to(totals)])
    shared = _sum(shared, processes).tolist()
    weight, loss, blocks, accepted, tokens, seconds, cpu_seconds, stop = shared
    run.masters.flat_grad.copy_(_sum(run.masters.flat_grad, processes))
    applied, norm = _update(run, weight, scale)
    return StepResult(
        loss=loss / weight if weight else 0.0,
        grad_norm=norm,
        train_acceptance=1 + accepted / blocks if blocks else 1.0,
        num_tokens=int(tokens),
        num_blocks=int(blocks),
        applied=applied,
        seconds=seconds / processes.num_processes,
        cpu_seconds=cpu_seconds,
        stop=stop > 0,
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
