"""What a run trains on: prompts tokenized once, shares, room for held-out answers, one writer."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen3ForCausalLM

from spec.data.prompts import Prompt, encode_prompt, read_prompts
from spec.dflash.draft import DFlashDraft
from spec.recipes.load import load_recipe
from spec.recipes.schema import Recipe
from spec.target.model import Target
from spec.target.tiny import tiny_config, tiny_tokenizer
from spec.train import loop, worker
from spec.train.answers import answer_share
from spec.train.drafter import make_draft
from spec.train.loop import train
from spec.train.material import Material, gather_material
from spec.train.outdir import lock_out
from spec.train.step import make_run

NEW_TOKENS = 6  # of held-out answers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config())
    tokenizer = tiny_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Target.load(path)


def write_prompts(path: Path, texts: list[str]) -> Path:
    lines = [json.dumps({"id": f"{path.stem}{n}", "turns": [t]}) for n, t in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def recipe_of(target: Target, folder: Path, out: Path, *overrides: str) -> Recipe:
    """A recipe on six prompts, one of them longer than a row may be."""
    texts = [f"write {'a' * n}" for n in range(5)]
    content: dict[str, Any] = {
        "out": str(out),
        "target": {"path": str(target.path), "dtype": "float32"},
        "data": {
            "prompts": [str(write_prompts(folder / "p.jsonl", [*texts, "x" * 400]))],
            "heldout": [str(write_prompts(folder / "h.jsonl", ["write b", "write c"]))],
            "max_new_tokens": 12,
            "max_length": 200,
        },
        "draft": {"num_layers": 1, "block_size": 4, "num_features": 2},
        "train": {"steps": 2, "seq_length": 64, "num_anchors": 8, "batch_size": 2},
        "eval": {"max_new_tokens": NEW_TOKENS, "final_prompts": 2, "baselines": False},
    }
    path = folder / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path, list(overrides))


def material_of(recipe: Recipe, target: Target, block_size: int | None = None) -> Material:
    config = make_draft(recipe.draft, target, 0).config
    config = replace(config, block_size=block_size or config.block_size)
    return gather_material(recipe, Path(recipe.out), target, config, PartialState(cpu=True))


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def counted(prompt: Prompt, tokenizer: Any) -> list[int]:
        seen.append(prompt.id)
        return encode_prompt(prompt, tokenizer)

    monkeypatch.setattr("spec.data.prompts.encode_prompt", counted)
    return seen


def test_prompts_are_tokenized_once_and_those_left_out_are_counted(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = count_encoded(monkeypatch)
    recipe = recipe_of(target, tmp_path, tmp_path / "run", "data.features=cache")
    material = material_of(recipe, target)
    assert sorted(seen) == ["h0", "h1", *(f"p{n}" for n in range(6))]
    assert [row.id for row in material.rows] == [f"p{n}" for n in range(5)]
    told = capsys.readouterr().err
    assert "data: 1 prompts left out: {'prompt too long for max_length': 1}, first p5" in told
    manifest = json.loads((tmp_path / "run" / "data" / "answers-0.manifest.json").read_text())
    assert manifest["rejected"] == {"prompt too long for max_length": 1}


def test_a_process_tokenizes_its_share_and_its_rows_are_those_of_one_process(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("data.temperature=1.0", "data.features=cache")
    whole = material_of(recipe_of(target, tmp_path, tmp_path / "whole", *options), target)
    recipe = recipe_of(target, tmp_path, tmp_path / "run", *options)
    prompts = read_prompts(recipe.data.prompts[0])
    seen = count_encoded(monkeypatch)
    for index in (1, 0):
        (tmp_path / "run" / "data" / "answers.done").unlink(missing_ok=True)
        state: Any = SimpleNamespace(
            process_index=index,
            num_processes=2,
            is_main_process=index == 0,
            wait_for_everyone=lambda: None,
        )
        answer_share(recipe, tmp_path / "run", target, prompts, (1,), state)
        assert seen == [f"p{n}" for n in range(index, 6, 2)]
        seen.clear()
    assert material_of(recipe, target).rows == whole.rows


def test_a_time_too_short_for_one_answer_is_told_and_tried_again(
    target: Target, tmp_path: Path
) -> None:
    recipe = recipe_of(target, tmp_path, tmp_path / "run", "data.minutes=1e-9")
    with pytest.raises(ValueError, match=r"no answer to 6 prompts was finished .* give it more"):
        material_of(recipe, target)
    assert not (tmp_path / "run" / "data" / "answers.done").exists()
    recipe = recipe_of(target, tmp_path, tmp_path / "run")
    assert len(material_of(recipe, target).rows) == 5


def test_heldout_room_is_that_of_the_drafters_own_block(target: Target, tmp_path: Path) -> None:
    """A warm start brings its block size; the recipe's does not count then."""
    recipe = recipe_of(target, tmp_path, tmp_path / "run", "data.max_length=100000")
    tokenizer, positions = target.require_tokenizer(), tiny_config().max_position_embeddings
    empty = len(encode_prompt(Prompt("e", [{"role": "user", "content": ""}], "t"), tokenizer))
    write_prompts(tmp_path / "h.jsonl", ["x" * (positions - NEW_TOKENS - 9 - empty)])
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_prompts": 1})})
    assert len(material_of(recipe, target, block_size=9).heldout) == 1
    with pytest.raises(ValueError, match="no held-out prompt of 1 leaves room for 16 tokens"):
        material_of(recipe, target, block_size=10)


def test_a_cached_row_that_is_not_finite_is_recomputed_and_counted(
    target: Target, tmp_path: Path
) -> None:
    options = ("data.features=cache", "train.dtype=float32")
    recipe = recipe_of(target, tmp_path, tmp_path / "run", *options)
    draft = make_draft(recipe.draft, target, 0)
    good = make_run(recipe, target, draft, material_of(recipe, target)).samples
    (shard,) = (tmp_path / "run" / "data").glob("features-*/*.safetensors")
    tensors = load_file(shard)
    tensors["p2/context"][0, 0] = float("nan")
    shard.unlink()  # the first reader keeps the old one mapped
    save_file(tensors, shard)
    bad = make_run(recipe, target, draft, material_of(recipe, target)).samples
    with pytest.warns(UserWarning, match="row 'p2' holds values that are not finite"):
        pairs = [(good[n].sequence, bad[n].sequence) for n in range(len(good.packs))]
    for want, got in pairs:
        inner = torch.arange(len(got.ends)) < got.ends - 1
        torch.testing.assert_close(
            got.features[inner].float(), want.features[inner].float(), atol=0.02, rtol=0.01
        )
    assert (good.num_broken, bad.num_broken) == (0, 1)


def test_a_row_cached_without_a_teacher_is_recomputed_where_one_is_wanted(
    target: Target, tmp_path: Path
) -> None:
    options = ("data.features=cache", "train.dtype=float32")
    material_of(recipe_of(target, tmp_path, tmp_path / "run", *options), target)
    recipe = recipe_of(target, tmp_path, tmp_path / "run", *options, "loss.labels=soft")
    draft = make_draft(recipe.draft, target, 0)
    samples = make_run(recipe, target, draft, material_of(recipe, target)).samples
    teacher = samples[0].sequence.teacher
    assert teacher is not None and teacher.any()


def test_two_runs_in_one_out_are_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    recipe = recipe_of(target, tmp_path, out)
    several = recipe_of(target, tmp_path, out, "train.processes=2")
    with lock_out(recipe):
        for again in (recipe, several):
            with pytest.raises(ValueError, match=f"another run is writing to {out}"):
                train(again)
        assert [path.name for path in out.iterdir()] == [".lock"]
    held: list[bool] = []

    def launch(*_args: object, lock: int, **_options: object) -> None:
        with pytest.raises(ValueError, match="another run is writing"):
            lock_out(recipe).__enter__()
        held.append(lock > 2)

    monkeypatch.setattr(loop, "launch", launch)
    train(several)
    assert held == [True]
    train(recipe)
    assert not (out / ".lock").exists()


@pytest.mark.parametrize("flags", [[], ["--locked"], ["--no-resume", "--locked"]])
def test_a_worker_of_ours_does_not_lock_again(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    recipe = recipe_of(target, tmp_path, tmp_path / "run")
    monkeypatch.setattr(loop, "_run", lambda *_args, **options: options["resume"])
    with lock_out(recipe):
        code = worker.main([str(tmp_path / "run.yaml"), *flags])
    assert code == (0 if "--locked" in flags else 2)


def test_the_lock_is_given_back_when_a_run_fails(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(target, tmp_path, tmp_path / "run")

    def fails(*_args: object, **_options: object) -> DFlashDraft:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "make_draft", fails)
    with pytest.raises(KeyboardInterrupt):
        train(recipe)
    with lock_out(recipe):
        pass
