"""Training DSpark: what a block sees, how samples may be split, resume, keys, what is refused."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_drafter import dspark_config
from toy_run import final_state, made_run, recipe_of, worker, write_data, write_target

from spec.dflash.loss import Head
from spec.dflash.objective import PackedSequence
from spec.dspark import objective
from spec.dspark.draft import DSparkDraft
from spec.dspark.loss import SlotTerms, Terms, slot_terms
from spec.dspark.objective import DSparkLossOptions, sequence_loss
from spec.eval.drafter import NetworkDrafter
from spec.recipes.algorithms import algorithm_name, load_draft
from spec.target.model import Target
from spec.train import step as step_module
from spec.train.drafter import make_draft
from spec.train.loop import train
from spec.train.material import gather_material
from spec.train.step import Run, make_run, train_step

DSPARK = ("draft.algorithm=dspark", "draft.markov_rank=8")
TOKENS_ALONE = ("loss.l1=0", "loss.renyi=0", "draft.confidence_head=false")
KINDS = ("vanilla", "gated", "rnn")
TERMS = Terms(ce=0.1, l1=0.9, renyi=0.5, soft=False)
OPTIONS = DSparkLossOptions("decay", 4.0, 0.5, TERMS, confidence=1.0)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def is_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


class Ranks:
    """A step of two ranks in one process: what each would send, and the update of their sum."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, mute: int | None = None) -> None:
        self.sent: list[list[Tensor]] = []
        self.mute = mute  # a rank whose samples have no label
        monkeypatch.setattr(step_module, "_sum", self._send)

    def _send(self, tensor: Tensor, processes: PartialState) -> Tensor:
        self.sent[-1].append(tensor.clone())
        return tensor

    def step(self, run: Run, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> Tensor:
        """The gradient over the sum of weights, and the loss in front of it."""
        get = type(run.samples).__getitem__
        self.sent.clear()
        for rank in range(num_ranks):
            self.sent.append([])

            def sample(samples: Any, number: int) -> Any:
                found = get(samples, number)
                # Of one rank and of the one process alike, by the sample's number.
                unlabelled = self.mute is not None and number % 2 == self.mute
                return replace(found, anchors=found.anchors[:0]) if unlabelled else found

            with monkeypatch.context() as patch:
                patch.setattr(type(run.samples), "__getitem__", sample)
                patch.setattr(step_module, "_update", lambda *_: (True, 0.0))
                state: Any = SimpleNamespace(process_index=rank, num_processes=num_ranks)
                train_step(run, 1.0, state, elapsed=0.0)
        totals, grads = (torch.stack(rows).double().sum(0) for rows in zip(*self.sent, strict=True))
        return torch.cat([totals[1:2], grads]) / totals[0]


@pytest.mark.parametrize("mute", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_does_not_depend_on_the_ranks(
    target_dir: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    mute: int | None,
) -> None:
    """Rows of 2 to 30 labels; the second rank with as many, or with none at all."""
    options = (*DSPARK, f"draft.markov_head_type={kind}")
    run = made_run(recipe_of(target_dir, data, tmp_path / "run", *options), tmp_path / "run")
    ranks = Ranks(monkeypatch, mute=mute)
    alone = ranks.step(run, monkeypatch, 1)
    both = ranks.step(run, monkeypatch, 2)
    weights = [float(sent[0][0]) for sent in ranks.sent]
    assert weights[0] != weights[1]
    assert (weights[1] == 0) == (mute == 1)
    assert alone[0] > 0
    is_close(both, alone)


@pytest.mark.slow
def test_two_processes_killed_and_resumed_end_the_same(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    """Bit for bit; and they learn what one process learns."""
    options = (*DSPARK, "draft.markov_head_type=rnn", "train.save_every=1", "train.eval_every=1000")
    two = (*options, "train.processes=2")
    one, whole, killed = tmp_path / "one", tmp_path / "whole", tmp_path / "killed"
    assert worker(recipe_of(target_dir, data, one, *options)).wait() == 0
    assert worker(recipe_of(target_dir, data, whole, *two)).wait() == 0
    recipe = recipe_of(target_dir, data, killed, *two)
    process = worker(recipe)
    while not list((killed / "checkpoints").glob("step-*2")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "report").exists()
    assert worker(recipe).wait() == 0
    left, right, single = final_state(whole), final_state(killed), final_state(one)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    for name, value in single.items():
        torch.testing.assert_close(left[name], value, atol=1e-5, rtol=1e-3)


# What a block sees


def documents(seed: int = 0) -> PackedSequence:
    """Two documents, of 14 and 10 tokens."""
    g = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0] * 14 + [14] * 10)
    return PackedSequence(
        input_ids=torch.randint(0, 60, (24,), generator=g),
        loss_mask=torch.ones(24),
        starts=starts,
        ends=torch.where(starts == 0, 14, 24),
        features=torch.randn(24, 64, generator=g),
        teacher=torch.randn(24, 32, generator=g),
    )


def slots_of(
    monkeypatch: pytest.MonkeyPatch, draft: DSparkDraft, sequence: PackedSequence, anchors: Tensor
) -> Tensor:
    """Every number that the loss has of each block's slots, [A, D, 3]; all slots supervised."""
    g = torch.Generator().manual_seed(5)
    embedding, head = torch.randn(64, 32, generator=g), torch.randn(64, 32, generator=g)
    seen: list[SlotTerms] = []
    confidence: list[Tensor] = []

    def spy(*args: Any) -> SlotTerms:
        seen.append(slot_terms(*args))
        return seen[-1]

    assert draft.confidence_head is not None
    hook = draft.confidence_head.register_forward_hook(lambda *call: confidence.append(call[2]))
    with monkeypatch.context() as patch:
        patch.setattr(objective, "slot_terms", spy)
        out = sequence_loss(
            draft,
            sequence,
            anchors=anchors,
            embedding=embedding,
            head=Head(head),
            options=OPTIONS,
        )
    hook.remove()
    assert int(out.num_slots) == len(anchors) * 4
    numbers = torch.stack([seen[0].label_logprob, seen[0].acceptance, confidence[0]], dim=1)
    return numbers.detach().view(len(anchors), 4, 3)


def changed(sequence: PackedSequence, name: str, where: Tensor) -> PackedSequence:
    """Other values of one of its tensors at some positions."""
    value = getattr(sequence, name).clone()
    value[where] = value[where] + 1 if name == "input_ids" else value[where] * -3 + 1
    return replace(sequence, **{name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_sees_itself_and_what_lies_before_its_anchor(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nothing else moves one bit of its logits, acceptance or confidence."""
    torch.manual_seed(0)
    draft = DSparkDraft(dspark_config(markov_head_type=kind))
    sequence, anchors = documents(), torch.tensor([4, 5, 9, 16, 18])
    before = slots_of(monkeypatch, draft, sequence, anchors)
    index = torch.arange(24)
    for block, anchor in enumerate(anchors.tolist()):
        start, end = int(sequence.starts[anchor]), int(sequence.ends[anchor])
        visible = (index >= start) & (index < anchor)
        own_tokens = (index >= anchor) & (index <= anchor + 4)
        own_teacher = (index >= anchor) & (index < anchor + 4)
        elsewhere = (index < start) | (index >= end)
        for name, moves in (
            ("features", visible),
            ("input_ids", own_tokens),
            ("teacher", own_teacher),
        ):
            assert not torch.equal(
                slots_of(monkeypatch, draft, changed(sequence, name, moves), anchors)[block],
                before[block],
            ), f"{name} should move the block at {anchor}"
            for still in (~moves, ~moves & elsewhere):
                after = slots_of(monkeypatch, draft, changed(sequence, name, still), anchors)
                assert torch.equal(after[block], before[block]), f"{name}, block at {anchor}"


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_reaches_what_a_block_must_not_see(kind: str) -> None:
    torch.manual_seed(0)
    draft = DSparkDraft(dspark_config(markov_head_type=kind))
    sequence = documents()
    features = sequence.features.clone().requires_grad_()
    out = sequence_loss(
        draft,
        replace(sequence, features=features),
        anchors=torch.tensor([16, 19]),
        embedding=torch.randn(64, 32),
        head=Head(torch.randn(64, 32)),
        options=OPTIONS,
    )
    out.loss.backward()
    assert features.grad is not None
    reached = features.grad.any(1)
    assert reached.tolist() == [14 <= i < 19 for i in range(24)]


# Recipes


def first_step(
    target_dir: Path, data: Path, out: Path, *overrides: str
) -> tuple[float, dict[str, torch.Size]]:
    """The loss of a first step, and the parameters that it updates."""
    run = made_run(recipe_of(target_dir, data, out, *DSPARK, *overrides), out)
    result = train_step(run, 1.0, PartialState(cpu=True), elapsed=0.0)
    assert result.applied
    return result.loss, {name: value.shape for name, value in run.masters.state_dict().items()}


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("draft.markov_rank=4", []),
        ("draft.markov_rank=0", ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]),
        ("draft.markov_head_type=gated", ["markov_head.gate_proj.bias"]),
        ("draft.markov_head_type=rnn", ["markov_head.joint_proj.bias"]),
        ("draft.confidence_head=false", ["confidence_head.proj.weight"]),
        ("draft.confidence_head_with_markov=false", []),
        ("draft.block_size=3", []),
        ("draft.is_causal=true", []),
        ("loss.ce=0.2", []),
        ("loss.l1=0.4", []),
        ("loss.renyi=0.3", []),
        ("loss.confidence=0.5", []),
        ("loss.ce_until=0.5", []),
        ("loss.labels=soft", []),
        ("loss.gamma=2.0", []),
        ("loss.weighting=dpace", []),
        ("loss.sampled_rows=20", []),
    ],
)
def test_each_key_changes_something(
    target_dir: Path, data: Path, tmp_path: Path, key: str, names: list[str]
) -> None:
    loss, shapes = first_step(target_dir, data, tmp_path / "base")
    other_loss, other_shapes = first_step(target_dir, data, tmp_path / "other", key)
    if key.startswith("draft.") and not key.startswith(("draft.block_size", "draft.is_causal")):
        assert shapes != other_shapes
    else:
        assert (other_loss != loss, other_shapes) == (True, shapes)
    assert all((name in shapes) != (name in other_shapes) for name in names)


def test_alpha_counts_with_dpace(target_dir: Path, data: Path, tmp_path: Path) -> None:
    losses = {
        first_step(
            target_dir, data, tmp_path / str(alpha), "loss.weighting=dpace", f"loss.alpha={alpha}"
        )[0]
        for alpha in (0.2, 0.8)
    }
    assert len(losses) == 2


def test_the_cross_entropy_takes_the_others_weight_up_to_its_share(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    """The step that ends at half of the run is the last of the first half."""
    out = tmp_path / "run"
    run = made_run(recipe_of(target_dir, data, out, *DSPARK, "loss.ce_until=0.5"), out)
    plain = made_run(recipe_of(target_dir, data, out, *DSPARK), out)
    heavy = made_run(recipe_of(target_dir, data, out, *DSPARK, "loss.ce=1", "loss.l1=0"), out)
    losses: dict[str, list[float]] = {"run": [], "plain": [], "heavy": []}
    for name, one in (("run", run), ("plain", plain), ("heavy", heavy)):
        for number in range(6):
            one.state.step = number
            losses[name].append(train_step(one, 0.0, PartialState(cpu=True), elapsed=0.0).loss)
    assert losses["run"][:3] == losses["heavy"][:3]
    assert losses["run"][3:] == losses["plain"][3:]


@pytest.mark.parametrize("heads", [(), ("draft.markov_head_type=rnn",), ("draft.markov_rank=0",)])
def test_a_bfloat16_run_of_a_float32_target(
    target_dir: Path, data: Path, tmp_path: Path, heads: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    options = (*DSPARK, *heads, "train.dtype=bfloat16", "train.eval_every=1000")
    recipe = recipe_of(target_dir, data, out, *options)
    train(recipe)
    draft, masters = load_draft(out / "draft"), final_state(out)
    first = make_draft(recipe.draft, Target.load(target_dir), 0)
    assert algorithm_name(draft) == "dspark"
    assert (draft.dtype, draft.config) == (torch.bfloat16, first.config)
    for name, value in draft.state_dict().items():
        assert torch.equal(value, masters[name].bfloat16()), name
    assert not torch.equal(masters["fc.weight"], masters["fc.weight"].bfloat16().float())
    assert all(not torch.equal(masters[name], value) for name, value in first.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [("loss.labels=soft",), DSPARK, (*DSPARK, "loss.l1=0", "loss.ce=1")],
    ids=["dflash soft labels", "dspark", "dspark, the teacher for the confidence only"],
)
def test_a_teacher_that_is_not_the_target_is_refused(
    target_dir: Path, data: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Convention 6: a head that does more than the toolkit knows."""
    out = tmp_path / "run"
    recipe, target = recipe_of(target_dir, data, out, *options), Target.load(target_dir)
    draft = make_draft(recipe.draft, target, 0)
    material = gather_material(recipe, out, target, draft.config, PartialState(cpu=True))
    make_run(recipe, target, draft, material)
    forward = target.model.forward

    def capped(**arguments: object) -> object:
        out = forward(**arguments)
        out.logits = torch.tanh(out.logits / 3.0) * 3.0
        return out

    target.model.forward = capped
    with pytest.raises(ValueError, match="differ from the target's"):
        make_run(recipe, target, draft, material)
    # What the message advises needs no teacher.
    advice = ("loss.labels=hard", *(TOKENS_ALONE if DSPARK[0] in options else ()))
    recipe = recipe_of(target_dir, data, tmp_path / "tokens", *options, *advice)
    make_run(recipe, target, make_draft(recipe.draft, target, 0), material)


# Files that carry the target's embedding and head along


def carrying(draft: DSparkDraft, folder: Path, **tensors: Tensor) -> Path:
    """A drafter directory as DeepSpec writes it."""
    draft.save(folder)
    own = load_file(folder / "model.safetensors")
    names = {name.replace("__", "."): value.clone() for name, value in tensors.items()}
    save_file({**own, **names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_carried_embedding_is_compared_with_the_targets(
    target_dir: Path, data: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    target = Target.load(target_dir)
    recipe = recipe_of(target_dir, data, tmp_path / "run", *DSPARK)
    draft = make_draft(recipe.draft, target, 0)
    assert isinstance(draft, DSparkDraft)
    embedding, head = target.embedding.detach().to(dtype), target.head.detach().to(dtype)
    good = carrying(draft, tmp_path / "good", embed_tokens__weight=embedding, lm_head__weight=head)
    loaded = load_draft(good)
    assert len(loaded.carried) == 2
    NetworkDrafter(loaded, target)
    assert loaded.carried == {}
    rounded = Target.load(target_dir, dtype=torch.bfloat16)
    NetworkDrafter(load_draft(good), rounded)
    other = head.clone()
    other[7] *= 1.1
    bad = carrying(draft, tmp_path / "bad", embed_tokens__weight=embedding, lm_head__weight=other)
    for where in (target, rounded):
        with pytest.raises(ValueError, match="carries another lm_head.weight") as error:
            NetworkDrafter(load_draft(bad), where)
        assert "\n" not in str(error.value)
    warm = recipe.draft.model_copy(update={"init_from": str(bad)})
    with pytest.raises(ValueError, match="another embedding or head"):
        make_draft(warm, target, 0)


@pytest.mark.parametrize(("head", "weight"), [(True, "0"), (False, "1")])
def test_a_warm_start_and_the_confidences_loss_go_together(
    target_dir: Path, data: Path, tmp_path: Path, head: bool, weight: str
) -> None:
    first = recipe_of(
        target_dir, data, tmp_path / "one", *DSPARK, f"draft.confidence_head={str(head).lower()}"
    )
    made_run(first, tmp_path / "one").draft.save(tmp_path / "draft")
    again = recipe_of(
        target_dir,
        data,
        tmp_path / "two",
        "draft.algorithm=dspark",
        f"draft.init_from={tmp_path / 'draft'}",
        f"loss.confidence={weight}",
    )
    with pytest.raises(ValueError, match=f"set loss.confidence={1.0 if head else 0.0}"):
        made_run(again, tmp_path / "two")
