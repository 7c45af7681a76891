"""The toy shape that tests of drafters share."""

from typing import Any

from spec.dflash.config import DFlashConfig
from spec.dspark.config import DSparkConfig

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
