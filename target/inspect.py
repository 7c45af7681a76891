"""Tell what a target is before any work: from its config, tokenizer and weight headers alone."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from .capture import default_layer_ids
from .files import resolve
from .logits import logit_scale, logit_softcap
from .mask_token import free_mask_tokens, suggest_mask_token
from .model import Target, load_config, load_tokenizer, meta_target
from .tensors import stored_tensors

__all__ = ["TargetFacts", "inspect_target", "suggest_mask_token"]

DEFAULT_FEATURES = 5
SHOWN_MASK_TOKENS = 5
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class TargetFacts:
    """What `spec inspect` prints. None where the files do not say."""

    name: str
    supported: bool
    why: str
    architecture: str
    layers: int | None
    hidden_size: int | None
    heads: int | None
    key_value_heads: int | None
    head_dim: int | None
    vocab_size_config: int | None
    embedding_rows: int | None
    tokenizer_length: int | None
    tied: bool | None
    norm: str | None  # plain, 1+w or layernorm
    rope: dict[str, Any]
    sliding_window: int | None
    logit_softcap: float | None
    logit_scale: float
    recurrent_state: bool | None
    chat_template: bool
    marks_generation: bool
    default_system_message: bool
    stop_tokens: tuple[str, ...]
    default_layer_ids: tuple[int, ...]
    free_mask_tokens: tuple[str, ...]
    suggested_mask_token_id: int | None
    parameters: int | None
    weight_bytes: dict[str, int]
    load_bytes_bf16: int | None
    load_bytes_fp32: int | None
    feature_bytes_per_token_bf16: int | None
    feature_bytes_per_token_fp8: int | None


def inspect_target(path: str | Path, *, trust_remote_code: bool = False) -> TargetFacts:
    """Facts about a directory, hub id or GGUF file, without loading a weight.

    Raises ValueError where there is no readable config; a model that is read but cannot be used is
    an answer (`supported`, `why`), not an error.
    """
    directory, name = resolve(path, need_weights=False)
    whole = load_config(directory, trust_remote_code=trust_remote_code)
    config = whole.get_text_config(decoder=True)
    tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code)
    outline, problems = None, []
    try:
        outline = meta_target(whole, name=name, trust_remote_code=trust_remote_code)
    except ValueError as error:
        problems.append(str(error))
    problems += _problems(outline, tokenizer, directory)
    layers = outline.num_layers if outline else getattr(config, "num_hidden_layers", None)
    layer_ids = _layer_ids(layers)
    hidden = outline.hidden_size if outline else getattr(config, "hidden_size", None)
    rows = outline.vocab_size if outline else getattr(config, "vocab_size", None)
    width = len(layer_ids) * hidden if hidden and layer_ids else None
    heads = getattr(config, "num_attention_heads", None)
    return TargetFacts(
        name=name,
        supported=not problems,
        why="; ".join(problems) or "embedding, layers, final norm and head found",
        architecture=", ".join(whole.architectures or [type(whole).__name__]),
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", heads),
        head_dim=_head_dim(config),
        vocab_size_config=getattr(config, "vocab_size", None),
        embedding_rows=rows,
        tokenizer_length=len(tokenizer) if tokenizer is not None else None,
        tied=outline.tied if outline else None,
        norm=_norm_kind(outline.final_norm) if outline else None,
        rope=_rope(config),
        sliding_window=_sliding_window(config),
        logit_softcap=outline.logit_softcap if outline else logit_softcap(config),
        logit_scale=logit_scale(config),
        recurrent_state=outline.has_recurrent_state if outline else None,
        **_template_facts(tokenizer),
        stop_tokens=_stop_tokens(directory, config, tokenizer),
        default_layer_ids=layer_ids,
        **_mask_facts(tokenizer, rows),
        **_weight_facts(directory, outline),
        feature_bytes_per_token_bf16=width * 2 if width else None,
        feature_bytes_per_token_fp8=width + 4 if width else None,  # one fp32 scale a token
    )


def _problems(
    outline: Target | None, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> list[str]:
    problems = []
    if outline is not None and outline.has_recurrent_state:
        problems.append(
            "some layers keep a recurrent state, which in-process decoding cannot roll back "
            "(features can be captured; measure acceptance on a serving engine)"
        )
    if outline is not None and outline.num_layers < 4:
        problems.append(f"{outline.num_layers} layers leave no default feature layer, expected 4")
    if tokenizer is None:
        problems.append("no tokenizer files (add tokenizer.json and tokenizer_config.json)")
    if not any(directory.glob("*.safetensors")):
        problems.append("no *.safetensors here yet")
    return problems


def _layer_ids(layers: int | None) -> tuple[int, ...]:
    if layers is None or layers < 4:
        return ()
    return default_layer_ids(layers, min(DEFAULT_FEATURES, layers - 3))


def _head_dim(config: PretrainedConfig) -> int | None:
    head_dim = getattr(config, "head_dim", None)
    hidden, heads = (getattr(config, key, None) for key in ("hidden_size", "num_attention_heads"))
    return head_dim or (hidden // heads if hidden and heads else None)


def _norm_kind(norm: nn.Module) -> str:
    """By experiment: what a weight of zero and of one do to a vector whose mean is not zero."""
    norm = norm.to_empty(device="cpu").float()
    (weight,) = [p for name, p in norm.named_parameters() if name.endswith("weight")] or [None]
    if weight is None:
        return "no weight"
    x = torch.arange(1.0, weight.shape[-1] + 1)[None]
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.zero_()
        if norm(x).abs().max() > 0:
            return "1+w"
        weight.fill_(1.0)
        return "layernorm" if norm(x).mean().abs() < 1e-3 else "plain"


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """Theta, type, partial factor and scaling, nested by layer type where the model has several."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not parameters and getattr(config, "rope_theta", None):
        parameters = {
            "rope_theta": config.rope_theta,
            **(getattr(config, "rope_scaling", {}) or {}),
        }
    facts = dict(parameters)
    partial = getattr(config, "partial_rotary_factor", None)
    if partial is not None and "partial_rotary_factor" not in facts:
        facts["partial_rotary_factor"] = partial
    return facts


def _sliding_window(config: PretrainedConfig) -> int | None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    used = any("sliding" in kind for kind in kinds) if kinds else window is not None
    return window if used else None


def _template_facts(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, bool]:
    template = tokenizer.chat_template if tokenizer is not None else None
    text = template if isinstance(template, str) else "\n".join((template or {}).values())
    return {
        "chat_template": bool(text),
        "marks_generation": bool(GENERATION_TAG.search(text)),
        "default_system_message": bool(text) and _adds_system_message(tokenizer),
    }


def _adds_system_message(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether a render without a system message opens with a system turn all the same."""
    assert tokenizer is not None
    user = {"role": "user", "content": "PROBE-USER"}
    try:
        without = str(tokenizer.apply_chat_template([user], tokenize=False))
        system = {"role": "system", "content": "PROBE-SYSTEM"}
        rendered = str(tokenizer.apply_chat_template([system, user], tokenize=False))
    except Exception:  # a template raises whatever it likes, for one on a system role it refuses
        return False
    header = rendered.split("PROBE-SYSTEM")[0]
    if "PROBE-SYSTEM" not in rendered or not without.startswith(header):
        return False
    # A template that folds the system text into the user's turn has nothing left before the user.
    added = without[len(header) :].split("PROBE-USER")[0].strip()
    return bool(added) and "system" in header.lower()


def _stop_tokens(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[str, ...]:
    file = directory / "generation_config.json"
    generation = json.loads(file.read_text()) if file.exists() else {}
    ids: list[int] = []
    own = getattr(tokenizer, "eos_token_id", None)
    for source in (generation.get("eos_token_id"), getattr(config, "eos_token_id", None), own):
        ids += source if isinstance(source, list) else [source] if source is not None else []
    return tuple(_named(token_id, tokenizer) for token_id in dict.fromkeys(ids))


def _named(token_id: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None:
        return str(token_id)
    token = tokenizer.convert_ids_to_tokens(token_id)
    return f"{token_id} {token}" if token else f"{token_id} (no token)"


def _mask_facts(tokenizer: PreTrainedTokenizerBase | None, rows: int | None) -> dict[str, Any]:
    if tokenizer is None or rows is None:
        return {"free_mask_tokens": (), "suggested_mask_token_id": None}
    free = free_mask_tokens(tokenizer, rows)
    shown = tuple(_named(token_id, tokenizer) for token_id in free[:SHOWN_MASK_TOKENS])
    suggested = suggest_mask_token(tokenizer, rows) if free else None
    return {"free_mask_tokens": shown, "suggested_mask_token_id": suggested}


def _weight_facts(directory: Path, outline: Target | None) -> dict[str, Any]:
    stored = stored_tensors(directory).values()
    by_dtype: dict[str, int] = {}
    for tensor in stored:
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.num_bytes
    # The outline counts tied rows once and quantized weights at their true number.
    count = sum(p.numel() for p in outline.model.parameters()) if outline else None
    if count is None and stored:
        count = sum(tensor.numel for tensor in stored)
    return {
        "parameters": count,
        "weight_bytes": by_dtype,
        "load_bytes_bf16": count * 2 if count else None,
        "load_bytes_fp32": count * 4 if count else None,
    }
