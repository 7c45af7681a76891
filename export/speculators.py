"""The speculators layout of a drafter's config.json, which vLLM reads.

Differences from the native one: the backbone's fields are nested in `transformer_layer_config`
(those at Qwen3's defaults may be left out), `aux_hidden_state_layer_ids` count the embedding's
output as 0 (so the output of decoder layer k is k + 1 there), and the file may have a draft
vocabulary of its own.
"""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.qwen3 import Qwen3Config

from ..dflash.config import BACKBONE_KEYS, DFlashConfig
from ..dspark.config import HEAD_KEYS, DSparkConfig

VERSION = "0.9.0"  # of the layout that is written
# Tensors of the target, or of a draft vocabulary, that a file may have beside embedding and head.
OTHER_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
NATIVE = {"dflash": DFlashConfig, "dspark": DSparkConfig}
BACKBONE_EXTRAS = ("rope_parameters", "layer_types", "hidden_act", "attention_bias")


def unsaid(config: DFlashConfig) -> str | None:
    """What of a config this layout has no key for; None where it says everything."""
    if config.is_causal:
        return "is_causal is true, and blocks are always bidirectional there"
    if config.input_embedding_scale != 1.0:
        return f"input_embedding_scale is {config.input_embedding_scale:g} and has no key there"
    return None


def to_json(config: DFlashConfig, dtype: str, target: str | None) -> dict[str, Any]:
    """The config.json for vLLM. `target` is what the file names as the model it belongs to."""
    native = config.to_json(dtype)
    kind = "dspark" if isinstance(config, DSparkConfig) else "dflash"
    backbone = (*BACKBONE_KEYS, *BACKBONE_EXTRAS, "rope_theta", "attention_dropout")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            **{key: native[key] for key in backbone},
        },
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [k + 1 for k in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.first_slot == 0,
        "sliding_window_non_causal": False,
        **({key: native[key] for key in HEAD_KEYS} if kind == "dspark" else {}),
        # Not a key of speculators, which keeps the ones it does not know.
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def to_native(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The native config.json of a speculators one; what it leaves out stays out.

    Raises ValueError for other slots or vocabularies than the native ones.
    """
    kind = data["speculators_model_type"]
    backbone = _backbone(data, where)
    _check_slots(data, kind, where)
    vocab = backbone.get("vocab_size")
    if data.get("draft_vocab_size", vocab) != vocab:
        raise ValueError(
            f"{where}: draft_vocab_size is {data['draft_vocab_size']} of {vocab}; only drafters "
            "that use the target's whole head are supported: train one with the full vocabulary"
        )
    ids = data.get("aux_hidden_state_layer_ids")
    if ids is not None and (not isinstance(ids, list) or any(type(k) is not int for k in ids)):
        raise ValueError(
            f"{where}: aux_hidden_state_layer_ids is {ids!r}, expected a list of layer numbers"
        )
    native = {
        "architectures": [NATIVE[kind].architectures[0]],
        "model_type": "qwen3",
        **backbone,
        "is_causal": False,
        "block_size": data.get("block_size"),
        "target_layer_ids": None if ids is None else [k - 1 for k in ids],
        "mask_token_id": data.get("mask_token_id"),
        "num_target_layers": data.get("num_target_layers"),
        "dtype": data.get("dtype", data.get("torch_dtype")),
    }
    heads = HEAD_KEYS if kind == "dspark" else ()
    return native | {key: data[key] for key in heads if data.get(key) is not None}


def _backbone(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The nested fields, Qwen3's own defaults where they were left out."""
    nested = data.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise ValueError(f"{where}: transformer_layer_config is {nested!r}, expected an object")
    # A default means something only for the model whose default it is.
    own = nested.get("model_type", "qwen3") == "qwen3"
    try:
        filled = Qwen3Config(**{k: v for k, v in nested.items() if k != "dtype"}).to_dict()
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: transformer_layer_config was refused: {error}") from None
    keys = (*BACKBONE_KEYS, *BACKBONE_EXTRAS)
    return {key: filled[key] for key in keys if own or key in nested}


def _check_slots(data: dict[str, Any], kind: str, where: str) -> None:
    """`sample_from_anchor` says which slot drafts first; DSpark's default is true, DFlash's not."""
    first = data.get("sample_from_anchor", kind == "dspark")
    if first is not (kind == "dspark"):
        slots = "slot j predicts the token at anchor + j" + (" + 1" if first else "")
        raise ValueError(
            f"{where}: {kind} with sample_from_anchor {first} ({slots}), expected "
            f"{kind == 'dspark'}; drafters with other slots than their algorithm's are not "
            "supported"
        )
