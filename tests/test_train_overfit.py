"""One sequence learned by heart, written to files, read back, decoded: every block is accepted."""

from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from transformers import Qwen3ForCausalLM

from spec.data.cache import CacheReader
from spec.data.prompts import Prompt
from spec.data.rows import Row
from spec.dflash.draft import DFlashDraft
from spec.eval.acceptance import Rounds, measure
from spec.eval.decode import NetworkDrafter, speculate
from spec.recipes.schema import Recipe
from spec.target.generate import generate
from spec.target.model import Target
from spec.target.tiny import tiny_config, tiny_tokenizer
from spec.train.drafter import make_draft
from spec.train.material import Material
from spec.train.step import make_run, train_step

BLOCK = 8
ROUNDS = 8
NUM_TOKENS = 1 + ROUNDS * BLOCK  # the prefill's token, then whole blocks


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config())
    for weight in model.parameters():
        weight.data.mul_(4.0 if weight.dim() > 1 else 1.0)  # sharp: its text is varied
    return Target.of(model, tiny_tokenizer(), name="random")


def recipe(labels: str, weighting: str) -> Recipe:
    return Recipe.model_validate(
        {
            "out": "unused",
            "target": {"path": "unused", "dtype": "float32"},
            "data": {"rows": ["unused"]},
            "draft": {"num_layers": 2, "block_size": BLOCK, "target_layer_ids": [1, 2, 3]},
            "loss": {"gamma": None, "labels": labels, "weighting": weighting},
            "train": {
                "steps": 250 if labels == "hard" else 700,  # a diffuse teacher takes longer
                "batch_size": 1,
                "num_anchors": 100,
                "lr": 3e-3,
                "dtype": "float32",
            },
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "weighting"), [("hard", "decay"), ("hard", "dpace"), ("soft", "decay")]
)
def test_overfit_export_reload_decode(
    target: Target, tmp_path: Path, labels: str, weighting: str
) -> None:
    prompt = list(b"write a function")
    answer = next(
        iter(generate(target, [prompt], max_new_tokens=NUM_TOKENS, batch_size=1, stop_token_ids=()))
    ).output_ids
    assert len(set(answer)) > 20
    row = Row("one", prompt + answer, [0] * len(prompt) + [1] * len(answer))
    made = recipe(labels, weighting)
    material = Material([row], [Prompt("p", [], "t")], CacheReader(tmp_path), 0.0)
    run = make_run(made, target, make_draft(made.draft, target, 0), material)
    processes = PartialState(cpu=True)
    assert made.train.steps is not None
    for step in range(made.train.steps):
        train_step(run, 1.0 - step / made.train.steps, processes, elapsed=0.0)
        run.state.step += 1
    run.draft.save(tmp_path / "draft")
    drafter = NetworkDrafter(DFlashDraft.load(tmp_path / "draft"), target)
    decoded = speculate(
        target, drafter, [prompt], max_new_tokens=NUM_TOKENS, batch_size=1, stop_token_ids=()
    )[0]
    assert decoded.output_ids == answer
    rounds = Rounds(decoded.num_accepted, decoded.num_drafted, len(decoded.output_ids))
    tau = measure([rounds], BLOCK - 1).acceptance_length
    assert tau is not None
    assert tau >= 0.98 * BLOCK
