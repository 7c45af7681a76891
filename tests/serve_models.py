"""Small targets and drafters for serving recipes: directories that the engine's checks accept."""

import json
from pathlib import Path
from typing import Any

from toy_drafter import dflash_config, dspark_config

from spec.dflash.draft import DFlashDraft
from spec.dspark.draft import DSparkDraft
from spec.serve.recipe import ServeRecipe

ROPE = {"rope_type": "default", "rope_theta": 50000.0}
# Fits tests/toy_drafter.py: 6 layers, hidden size 32, 64 tokens.
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**E4M3, "strategy": "channel", "dynamic": False},
            "input_activations": {**E4M3, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def target(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A target that is a config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**(config or QWEN3), **changes}))
    return folder


def drafter(folder: Path, *, dspark: bool = False, **changes: Any) -> Path:
    """A random drafter with the shape of tests/toy_drafter.py."""
    if dspark:
        DSparkDraft(dspark_config(**changes)).save(folder)
    else:
        DFlashDraft(dflash_config(**changes)).save(folder)
    return folder


def recipe(target: Path | str, draft: Path | str, /, **sections: dict[str, Any]) -> ServeRecipe:
    """A recipe for the two, with keys of its sections replaced."""
    data: dict[str, Any] = {"smoke": {"floor": 2.0}, **sections}
    data["target"] = {"path": str(target), **sections.get("target", {})}
    data["draft"] = {"path": str(draft), **sections.get("draft", {})}
    return ServeRecipe.model_validate(data)
