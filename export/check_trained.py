"""Whether config.json still says what the drafter was trained with, by its own spec.json.

Engine and evaluator believe config.json. A key that was changed since gives right text and few
accepted drafts, in both alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dflash.files import read_provenance
from ..dflash.rope import read_rope
from ..dspark.config import HEAD_KEYS
from .findings import Finding, Subject, defect

# What decides the meaning of the weights, and no layout or quantization changes.
KEYS = (
    *("target_layer_ids", "num_target_layers", "mask_token_id", "block_size", "is_causal"),
    *("input_embedding_scale", "rms_norm_eps", *HEAD_KEYS),
)


def check_trained(s: Subject) -> Iterator[Finding]:
    """A defect a key that differs; nothing where spec.json does not hold the config."""
    trained = _trained_config(s)
    if trained is None:
        return
    found, expected = (_by_native_keys(each) for each in (s.own, trained))
    for key in (*KEYS, "rope"):
        if key in found and key in expected and found[key] != expected[key]:
            yield defect(
                f"{key} is {found[key]}, the drafter was trained with {expected[key]} (spec.json)",
                f"write {expected[key]} back, or export it again from the run's draft directory",
            )


def _trained_config(s: Subject) -> dict[str, Any] | None:
    config = read_provenance(s.directory).get("config")
    return config if isinstance(config, dict) else None


def _by_native_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The keys above, dflash_config's over the top level's; the RoPE in one spelling."""
    nested = config.get("dflash_config")
    flat = {**config, **(nested if isinstance(nested, dict) else {})}
    known = {key: flat[key] for key in KEYS if flat.get(key) is not None}
    try:
        rope = read_rope(config, where="config.json")
    except (ValueError, TypeError, AttributeError):
        return known  # has a finding of its own
    return known | {"rope": rope}
