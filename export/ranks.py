"""Whether SGLang can spread a drafter over the ranks of tensor parallelism."""

from collections.abc import Mapping
from typing import Any

from ..dflash.fp8 import Quantization, scheme_of

SIZES = (
    *("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"),
    "intermediate_size",
)


def rank_obstacles(shape: Mapping[str, Any], ranks: int) -> list[str]:
    """What stands against so many ranks, by a drafter's config.json: heads, widths, FP8 blocks.

    The engine learns of the last while it loads, after all its checks. A size that is not stated
    is no obstacle.
    """
    sizes = [n if type(n := shape.get(key)) is int and n > 0 else 0 for key in SIZES]
    hidden, size, heads, kv_heads, inner = sizes
    found = [
        f"{ranks} ranks do not divide the drafter's {what}"
        for number, what in (
            (heads, f"{heads} attention heads"),
            (inner, f"intermediate_size {inner}"),
        )
        if number % ranks
    ]
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        found.append(
            f"{ranks} ranks fit the drafter's {kv_heads} key-value heads neither way: expected a "
            "divisor or a multiple"
        )
    quantization = _quantization(shape.get("quantization_config"))
    if found or ranks == 1 or quantization is None or 0 in sizes:
        return found
    split = quantization.obstacle(
        hidden=hidden,
        heads=heads // ranks * size,
        kv_heads=max(kv_heads // ranks, 1) * size,
        inner=inner // ranks,
    )
    return [] if split is None else [f"on each of {ranks} ranks of the drafter {split}"]


def _quantization(config: Any) -> Quantization | None:
    """None as well where `spec check` tells what is wrong with it."""
    try:
        return Quantization.from_json(config, "config.json") if scheme_of(config) else None
    except ValueError:
        return None
