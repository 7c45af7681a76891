"""Drafters that engines can compute and the library cannot, by their config.json.

`own` is always the object of a config.json with `dflash_config` above the top level. Whoever reads
a drafter refuses these; `spec check`, which merely looks, warns of them.
"""

from typing import Any

# What makes another network of the same tensors in an engine (SGLang 0.5.23 reads all of these) and
# is not computed here, with the value that changes nothing; null never does.
NEUTRAL: dict[str, Any] = {
    "use_gemma_norm": False,  # norms multiply by 1 + weight
    "rope_is_neox_style": True,
    "is_neox_style": True,
    "attention_value_scale": 1.0,
    "attention_sink_bias": False,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "projector_type": None,  # "domino": a recurrent head
    "shift_label": False,
    "conv_kernel_size": 0,
    "conv_group_size": 0,
    "selector_rank": 0,
    "selector_top_k": 0,
    # DSpark's, each above the key that is read here.
    "dspark_config": {},
    "dspark_block_size": None,
    "dspark_markov_rank": None,
    "dspark_markov_head_type": None,
    "dspark_noise_token_id": None,
    "dspark_target_layer_ids": None,
}


def refuse_unsupported(own: dict[str, Any], where: str) -> None:
    """ValueError for a network that is not computed here; `own` has been through `from_json`."""
    kinds = own.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"{where}: layer_types {kinds}; only full_attention is supported")
    if slides_unsaid(own):
        raise ValueError(
            f"{where}: use_sliding_window without layer_types makes sliding_attention of layers; "
            "only full_attention is supported"
        )
    if own.get("attention_bias"):
        raise ValueError(f"{where}: attention_bias is not supported")
    if own.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act {own['hidden_act']!r} is not supported, only silu")
    if found := not_neutral(own):
        raise ValueError(
            f"{where}: {found} would make another network, which is not supported; evaluate it in "
            "the engine, or take the key out where it was trained without"
        )


def not_neutral(own: dict[str, Any]) -> str:
    """The keys of `NEUTRAL` that change something, with their values; "" where none does."""
    changed = {
        key: own[key] for key, neutral in NEUTRAL.items() if own.get(key) not in (None, neutral)
    }
    return ", ".join(f"{key} {value!r}" for key, value in changed.items())


def slides_unsaid(own: dict[str, Any]) -> bool:
    """Whether transformers, given no layer_types, makes sliding ones of `use_sliding_window`.

    Its defaults for what a Qwen3 config leaves out: a window of 4096, from layer 28 on.
    """
    if own.get("layer_types") or not own.get("use_sliding_window"):
        return False
    first, layers = own.get("max_window_layers", 28), own.get("num_hidden_layers")
    beyond = type(first) is not int or type(layers) is not int or layers > first
    return beyond and own.get("sliding_window", 4096) is not None
