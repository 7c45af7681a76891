"""The toy shape that tests of drafters share."""

import json
from pathlib import Path
from typing import Any

import torch

from spec.dflash.config import DFlashConfig
from spec.dflash.draft import DFlashDraft
from spec.dspark.config import DSparkConfig
from spec.dspark.draft import DSparkDraft
from spec.target.model import Target

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "block_size": 4,
    "target_layer_ids": (1, 3),
    "num_target_layers": 6,
    "mask_token_id": 63,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
HEADS: dict[str, Any] = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def dflash_config(**changes: Any) -> DFlashConfig:
    return DFlashConfig(**{**SHAPE, **changes})


def dspark_config(**changes: Any) -> DSparkConfig:
    return DSparkConfig(**{**SHAPE, **HEADS, **changes})


def saved(folder: Path, config: DFlashConfig | None = None) -> Path:
    """Save a random drafter of a config, in float32."""
    torch.manual_seed(0)
    config = config or dflash_config()
    draft = DSparkDraft(config) if isinstance(config, DSparkConfig) else DFlashDraft(config)
    draft.initialize()
    draft.save(folder)
    return folder


def drafter(target: Path, directory: Path, *, confidence: bool) -> Path:
    """Save a random DSpark drafter that fits a target directory."""
    loaded = Target.load(str(target))
    torch.manual_seed(0)
    config = DSparkConfig(
        hidden_size=loaded.hidden_size,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=loaded.vocab_size,
        block_size=3,
        target_layer_ids=(1,),
        num_target_layers=loaded.num_layers,
        mask_token_id=loaded.vocab_size - 1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        markov_rank=4,
        enable_confidence_head=confidence,
    )
    DSparkDraft(config).save(directory)
    return directory


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of a drafter's config.json; None takes one away."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    for key, value in changes.items():
        data.pop(key, None)
        if value is not None:
            data[key] = value
    path.write_text(json.dumps(data))
