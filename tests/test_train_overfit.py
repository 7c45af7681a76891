"""One sequence learned by heart, written to files, read back, decoded: every block is accepted."""

from pathlib import Path

import pytest
import torch
import yaml
from accelerate import PartialState
from transformers import Qwen3ForCausalLM

from spec.data.cache import CacheReader
from spec.data.prompts import Prompt
from spec.data.rows import Row
from spec.eval.acceptance import Rounds, measure
from spec.eval.decode import speculate
from spec.eval.drafter import NetworkDrafter
from spec.recipes.algorithms import algorithm_name, load_draft
from spec.recipes.load import load_recipe
from spec.recipes.schema import Recipe
from spec.target.generate import generate
from spec.target.model import Target
from spec.target.tiny import tiny_config, tiny_tokenizer
from spec.train.drafter import make_draft
from spec.train.material import Material
from spec.train.step import make_run, train_step

ROUND = 8  # tokens of a round that keeps its whole draft
ROUNDS = 8
NUM_TOKENS = 1 + ROUNDS * ROUND  # the prefill's token, then whole blocks
# A diffuse teacher takes longer than the one token that it chose.
DFLASH = ("draft.block_size=8", "train.steps=250")
DFLASH_SOFT = ("draft.block_size=8", "loss.labels=soft", "train.steps=700")
DSPARK = ("draft.algorithm=dspark", "draft.block_size=7", "draft.markov_rank=32")
PAPER = (*DSPARK, "train.steps=200")  # 0.1 CE + 0.9 L1 + confidence
SOFT = ("loss.ce=1", "loss.l1=0", "loss.labels=soft", "train.optimizer=muon", "train.steps=340")


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config())
    for weight in model.parameters():
        weight.data.mul_(4.0 if weight.dim() > 1 else 1.0)  # sharp: its text is varied
    return Target.of(model, tiny_tokenizer(), name="random")


def recipe_of(folder: Path, overrides: tuple[str, ...]) -> Recipe:
    content = {
        "out": "unused",
        "target": {"path": "unused", "dtype": "float32"},
        "data": {"rows": ["unused"]},
        "draft": {"num_layers": 2, "target_layer_ids": [1, 2, 3]},
        "loss": {"gamma": None},
        "train": {
            "steps": 1,
            "batch_size": 1,
            "num_anchors": 100,
            "lr": 3e-3,
            "dtype": "float32",
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return load_recipe(folder / "recipe.yaml", list(overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        DFLASH,
        (*DFLASH, "loss.weighting=dpace"),
        DFLASH_SOFT,
        PAPER,
        (*PAPER, "draft.markov_head_type=gated"),
        (*PAPER, "draft.markov_head_type=rnn"),
        (*DSPARK, *SOFT),
        (*DSPARK, *SOFT, "draft.markov_head_type=gated"),
        (*DSPARK, *SOFT, "draft.markov_head_type=rnn"),
    ],
    ids=" ".join,
)
def test_overfit_save_reload_decode(
    target: Target, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    prompt = list(b"write a function")
    answer = next(
        iter(generate(target, [prompt], max_new_tokens=NUM_TOKENS, batch_size=1, stop_token_ids=()))
    ).output_ids
    assert len(set(answer)) > 20
    row = Row("one", prompt + answer, [0] * len(prompt) + [1] * len(answer))
    recipe = recipe_of(tmp_path, overrides)
    cache = CacheReader(tmp_path, recipe.teacher)
    material = Material([row], [Prompt("p", [], "t")], cache, 0.0)
    run = make_run(recipe, target, make_draft(recipe.draft, target, 0), material)
    processes = PartialState(cpu=True)
    assert recipe.train.steps is not None
    for step in range(recipe.train.steps):
        train_step(run, 1.0 - step / recipe.train.steps, processes, elapsed=0.0)
        run.state.step += 1
    run.draft.save(tmp_path / "draft")
    draft = load_draft(tmp_path / "draft")
    assert algorithm_name(draft) == recipe.draft.algorithm
    assert draft.config.num_draft_tokens + 1 == ROUND
    drafter = NetworkDrafter(draft, target)
    decoded = speculate(
        target, drafter, [prompt], max_new_tokens=NUM_TOKENS, batch_size=1, stop_token_ids=()
    )[0]
    assert decoded.output_ids == answer
    rounds = Rounds(decoded.num_accepted, decoded.num_drafted, len(decoded.output_ids))
    tau = measure([rounds], ROUND - 1).acceptance_length
    assert tau is not None
    assert tau >= 0.98 * ROUND
