"""The loop's promises.

Exact resume, updates that ignore how samples were split, schedule, skipped steps.
"""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from toy_run import STEPS, final_state, made_run, recipe_of, worker, write_data, write_target

from spec.target.model import Target
from spec.train import loop
from spec.train.loop import train
from spec.train.measure import save_draft
from spec.train.step import Run, train_step

DSPARK = ("draft.algorithm=dspark", "draft.markov_rank=8")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def assert_same_end(a: Path, b: Path) -> None:
    left, right = final_state(a), final_state(b)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    timings = {"seconds", "cpu_seconds", "tokens_per_second", "blocks_per_second"}
    lines = [
        [
            {k: v for k, v in json.loads(line).items() if k not in timings}
            for line in (out / "metrics.jsonl").open()
        ]
        for out in (a, b)
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == STEPS + 2  # a line a step and one a measurement


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_six_steps_equal_three_a_stop_and_three(
    target_dir: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    dtype: str,
) -> None:
    options = (f"train.optimizer={optimizer}", f"train.dtype={dtype}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(recipe_of(target_dir, data, whole, *options))
    step = train_step

    def dies_at_the_fifth(run: Run, *args: Any, **kwargs: Any) -> Any:
        if run.state.step == 4:
            raise KeyboardInterrupt
        return step(run, *args, **kwargs)

    monkeypatch.setattr(loop, "train_step", dies_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        train(recipe_of(target_dir, data, cut, *options))
    monkeypatch.setattr(loop, "train_step", step)
    train(recipe_of(target_dir, data, cut, *options))
    assert_same_end(whole, cut)


@pytest.mark.parametrize("algorithm", [(), DSPARK, (*DSPARK, "loss.weighting=dpace")])
def test_the_update_does_not_depend_on_packing_or_accumulation(
    target_dir: Path, data: Path, tmp_path: Path, algorithm: tuple[str, ...]
) -> None:
    """All rows and all their anchors in one step: as one packed sequence, or as many."""
    gradients = []
    for i, (seq_length, batch) in enumerate([(2000, 1), (64, 0), (100, 0)]):
        out = tmp_path / str(i)
        options = [f"train.seq_length={seq_length}", "train.num_anchors=100000", "train.clip=1e9"]
        options += algorithm
        run = made_run(recipe_of(target_dir, data, out, *options), out)
        packs = len(run.samples.packs)
        assert batch == 0 or packs == batch
        out = tmp_path / f"{i}b"
        run = made_run(recipe_of(target_dir, data, out, *options, f"train.batch_size={packs}"), out)
        result = train_step(run, 1.0, PartialState(cpu=True), elapsed=0.0)
        gradients.append((run.masters.flat_grad.clone(), result.loss, result.num_blocks))
    for gradient, loss, blocks in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0][0], atol=1e-6, rtol=1e-4)
        assert loss == pytest.approx(gradients[0][1], rel=1e-5)
        assert blocks == gradients[0][2]


def test_the_last_step_has_the_schedules_last_rate(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(recipe_of(target_dir, data, out, "train.warmup=0.5"))
    rates = [line["lr"] for line in map(json.loads, (out / "metrics.jsonl").open()) if "lr" in line]
    assert rates[:3] == pytest.approx([6e-4 / 3, 6e-4 * 2 / 3, 6e-4])
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_step_without_finite_gradient_is_skipped_and_counted(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = made_run(recipe_of(target_dir, data, out), out)
    before = {name: value.clone() for name, value in run.masters.state_dict().items()}
    run.head.weight[5, 0] = float("nan")
    result = train_step(run, 1.0, PartialState(cpu=True), elapsed=0.0)
    assert not result.applied
    assert run.state.skipped_steps == 1
    assert all(torch.equal(before[name], value) for name, value in run.masters.state_dict().items())


def test_a_step_without_a_label_changes_nothing(
    target_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run = made_run(recipe_of(target_dir, data, out), out)
    before = run.masters.state_dict()["fc.weight"].clone()
    get = type(run.samples).__getitem__

    def unlabelled(self: Any, number: int) -> Any:
        sample = get(self, number)
        return type(sample)(sample.sequence, sample.anchors[:0])

    monkeypatch.setattr(type(run.samples), "__getitem__", unlabelled)
    result = train_step(run, 1.0, PartialState(cpu=True), elapsed=0.0)
    assert (result.loss, result.applied, run.state.empty_steps) == (0.0, False, 1)
    assert torch.equal(run.masters.state_dict()["fc.weight"], before)


def test_another_recipe_in_the_same_out_is_refused(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(recipe_of(target_dir, data, out))
    with pytest.raises(ValueError, match="train.lr: 0.0006 then, 0.1 now"):
        train(recipe_of(target_dir, data, out, "train.lr=0.1"))
    train(recipe_of(target_dir, data, out, "train.lr=0.01"), resume=False)


def test_changed_inputs_are_noticed_on_resume(target_dir: Path, data: Path, tmp_path: Path) -> None:
    """Same names, other content: features and order would silently belong to something else."""
    own = tmp_path / "own"
    own.mkdir()
    for name in ("rows.jsonl", "heldout.jsonl"):
        (own / name).write_bytes((data / name).read_bytes())
    out = tmp_path / "run"
    train(recipe_of(target_dir, own, out))
    lines = (own / "rows.jsonl").read_text().splitlines()
    (own / "rows.jsonl").write_text("\n".join(lines[:5]) + "\n")
    for resume in (True, False):
        with pytest.raises(ValueError, match="rows.jsonl changed since the run"):
            train(recipe_of(target_dir, own, out), resume=resume)


def test_one_id_in_two_sources_is_refused(target_dir: Path, data: Path, tmp_path: Path) -> None:
    rows = f"data.rows=[{data / 'rows.jsonl'}, {data / 'rows.jsonl'}]"
    with pytest.raises(ValueError, match="24 row ids occur more than once"):
        train(recipe_of(target_dir, data, tmp_path / "run", rows))


def test_a_heldout_prompt_that_does_not_fit_is_left_out(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"turns": ["x" * 2040]}) + "\n")
    both = f"data.heldout=[{long}, {data / 'heldout.jsonl'}]"
    train(recipe_of(target_dir, data, tmp_path / "run", both))
    with pytest.raises(ValueError, match="no held-out prompt of 1 leaves room"):
        train(recipe_of(target_dir, data, tmp_path / "none", f"data.heldout=[{long}]"))


def test_a_run_in_which_nothing_changed_is_no_success(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="none of 6 steps changed the drafter"):
        train(recipe_of(target_dir, data, tmp_path / "run", "train.seq_length=2"))


def test_a_better_drafter_drops_the_calibration_of_the_last(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = made_run(recipe_of(target_dir, data, out), out)
    (out / "draft").mkdir(parents=True)
    for name in ("sts.json", "sps.json"):
        (out / "draft" / name).write_text("{}")
    save_draft(run.draft, run.state, run.recipe, out, Target.load(target_dir))
    assert {p.name for p in (out / "draft").iterdir()} == {
        "config.json",
        "model.safetensors",
        "spec.json",
    }


def test_a_run_leaves_what_it_promises_and_nothing_else(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(recipe_of(target_dir, data, out))
    assert {path.name for path in out.iterdir()} == {
        "recipe.yaml",
        "metrics.jsonl",
        "data",
        "checkpoints",
        "draft",
        "report",
    }
    provenance = json.loads((out / "draft" / "spec.json").read_text())
    assert str(tmp_path) not in json.dumps(provenance)
    assert str(target_dir.parent) not in json.dumps(provenance)
    assert str(data) not in json.dumps(provenance)
    (source,) = provenance["training_data"]["sources"]
    assert (source["kind"], source["names"], source["num_rows"]) == ("rows", ["rows.jsonl"], 24)
    assert provenance["training_data"]["longest_sequence"] == source["longest_row"] <= 64
    assert {p.name for p in (out / "draft").iterdir()} == {
        "config.json",
        "model.safetensors",
        "spec.json",
    }


@pytest.mark.parametrize("teacher", [("loss.labels=soft",), DSPARK])
def test_cached_features_are_used_and_say_what_capture_says(
    target_dir: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    teacher: tuple[str, ...],
) -> None:
    options = (
        "data.rows=[]",
        "data.prompts=[tiny]",
        "data.max_prompts=6",
        "data.max_new_tokens=12",
    )
    options += (*teacher, "loss.sampled_rows=50", "train.seq_length=300")
    runs = {}
    for features in ("cache", "recompute"):
        out = tmp_path / features
        runs[features] = made_run(
            recipe_of(target_dir, data, out, *options, f"data.features={features}"), out
        )
    for number in range(len(runs["cache"].samples.packs)):
        want = runs["recompute"].samples[number].sequence
        with monkeypatch.context() as patch:
            patch.setattr("spec.train.samples.capture", None)
            got = runs["cache"].samples[number].sequence
        assert torch.equal(got.input_ids, want.input_ids)
        # The cache holds bfloat16, and nothing for a row's last token, which no block ever sees.
        inner = torch.arange(len(got.ends)) < got.ends - 1
        torch.testing.assert_close(
            got.features[inner].float(), want.features[inner], atol=0.02, rtol=0.01
        )
        teaches = inner & torch.cat([want.loss_mask[1:], want.loss_mask[:1]])
        assert got.teacher is not None
        assert want.teacher is not None
        torch.testing.assert_close(
            got.teacher[teaches].float(), want.teacher[teaches], atol=0.02, rtol=0.01
        )
        assert not want.teacher[~teaches].any()
    assert train_step(runs["cache"], 1.0, PartialState(cpu=True), elapsed=0.0).applied


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (256, "pad, bos or a stop token"),
        (258, "pad, bos or a stop token"),
        (65, "occurs in the data"),
    ],
)
def test_the_mask_token_must_be_free(
    target_dir: Path, data: Path, tmp_path: Path, token: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(recipe_of(target_dir, data, tmp_path / "run", f"draft.mask_token_id={token}"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_ten_moments_the_run_ends_the_same(
    target_dir: Path, data: Path, tmp_path: Path, processes: int
) -> None:
    """kill -9 to the whole process group at random moments, resumed each time."""
    options = (f"train.processes={processes}", "train.save_every=1", "train.eval_every=1000")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    started = time.monotonic()
    assert worker(recipe_of(target_dir, data, whole, *options)).wait() == 0
    duration = time.monotonic() - started
    draw = random.Random(processes)
    for _ in range(10):
        process = worker(recipe_of(target_dir, data, killed, *options))
        # Most of a run is starting up; half of the kills aim at what comes after.
        time.sleep(duration * draw.uniform(0.3, 1.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert worker(recipe_of(target_dir, data, killed, *options)).wait() == 0
    left, right = final_state(whole), final_state(killed)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def running(text: str) -> list[int]:
    """Processes whose command line holds the text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "orphans"
    options = ("train.processes=2", "train.steps=100000", "train.eval_every=100000")
    process = worker(recipe_of(target_dir, data, out, *options))
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while running(str(out / "recipe.yaml")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running(str(out / "recipe.yaml")) == []


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on(target_dir: Path, data: Path, tmp_path: Path) -> None:
    options = (
        "train.processes=2",
        "train.save_every=1000",
        "train.steps=2000",
        "train.eval_every=1000",
    )
    out = tmp_path / "run"
    process = worker(recipe_of(target_dir, data, out, *options))
    while (
        not (out / "metrics.jsonl").exists()
        or len((out / "metrics.jsonl").read_text().splitlines()) < 3
    ):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    process.wait(timeout=60)
    saved = sorted((out / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    assert 3 <= json.loads((saved[0] / "state.json").read_text())["state"]["step"] < 2000


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(target_dir: Path, data: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert worker(recipe_of(target_dir, data, one)).wait() == 0
    assert worker(recipe_of(target_dir, data, two, "train.processes=2")).wait() == 0
    left, right = final_state(one), final_state(two)
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_wandb_offline_gets_the_metrics_and_stays_under_out(
    target_dir: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    recipe = recipe_of(target_dir, data, out, "wandb.project=test", "wandb.mode=offline")
    assert worker(recipe).wait() == 0
    recorded = list((out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(recorded) == 1
    assert recorded[0].stat().st_size > 1000
    assert not Path("wandb").exists()
