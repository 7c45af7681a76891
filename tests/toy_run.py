"""A random target, a few rows and a short recipe that tests of training share."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, Qwen3ForCausalLM

from spec.recipes.load import load_recipe
from spec.recipes.schema import Recipe
from spec.target.model import Target
from spec.target.tiny import tiny_config, tiny_tokenizer
from spec.train.drafter import make_draft
from spec.train.material import gather_material
from spec.train.step import Run, make_run

STEPS = 6


def write_target(path: Path) -> Path:
    """A random target; what it says does not matter."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config())
    tokenizer = tiny_tokenizer()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_data(folder: Path) -> Path:
    """Rows of uneven length with uneven numbers of labels, and two held-out prompts."""
    draw = random.Random(1)
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(24):
            prompt, answer = draw.randrange(3, 20), draw.randrange(2, 30)
            ids = [draw.randrange(32, 127) for _ in range(prompt + answer)]
            file.write(
                json.dumps({"id": f"r{i}", "prompt_ids": ids[:prompt], "output_ids": ids[prompt:]})
                + "\n"
            )
    with (folder / "heldout.jsonl").open("w") as file:
        for text in ("write a", "write b"):
            file.write(json.dumps({"turns": [text]}) + "\n")
    return folder


def recipe_of(target_dir: Path, data: Path, out: Path, *overrides: str) -> Recipe:
    """A run of STEPS steps on `write_target`'s and `write_data`'s files."""
    path = out.with_suffix(".yaml")
    content: dict[str, Any] = {
        "out": str(out),
        "target": {"path": str(target_dir), "dtype": "float32"},
        "data": {"rows": [str(data / "rows.jsonl")], "heldout": [str(data / "heldout.jsonl")]},
        "draft": {"num_layers": 1, "block_size": 4, "num_features": 2},
        "train": {
            "steps": STEPS,
            "seq_length": 64,
            "num_anchors": 8,
            "batch_size": 4,
            "dtype": "float32",
            "save_every": 3,
            "eval_every": 3,
            "log_every": 1,
        },
        "eval": {"prompts": 2, "final_prompts": 2, "max_new_tokens": 6, "baselines": False},
    }
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path, list(overrides))


def final_state(out: Path) -> dict[str, Tensor]:
    """Weights and optimizer of the last checkpoint."""
    folder = out / "checkpoints" / f"step-{STEPS:08d}"
    weights = load_file(folder / "masters.safetensors")
    return weights | load_file(folder / "optimizer.safetensors")


def made_run(recipe: Recipe, out: Path) -> Run:
    """A run before its first step, as the loop makes it."""
    processes = PartialState(cpu=True)
    target = Target.load(recipe.target.path or "")
    draft = make_draft(recipe.draft, target, recipe.train.seed)
    material = gather_material(recipe, out, target, draft.config, processes)
    return make_run(recipe, target, draft, material)


def worker(recipe: Recipe) -> subprocess.Popen[bytes]:
    """`spec train` as a user runs it."""
    path = Path(recipe.out).with_suffix(".resolved.yaml")
    path.write_text(recipe.to_yaml())
    command = [
        sys.executable,
        "-c",
        "from spec.cli.main import main; main()",
        "train",
        "--recipe",
        str(path),
    ]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
