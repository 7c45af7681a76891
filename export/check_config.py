"""What in a drafter's config.json would be read wrongly, or refused, by whom."""

import re
from collections.abc import Iterator
from typing import Any

from ..dflash.rope import read_rope
from ..dflash.unsupported import not_neutral, slides_unsaid
from ..dspark.config import HEAD_KEYS, HEAD_TYPES, check_heads
from .findings import Finding, Subject, defect, note, warning
from .layouts import all_keys

LOCAL_PATH = re.compile(r"(/|~|\.{1,2}/|file:|[A-Za-z]:[\\/])")
REWRITE = "rewrite it: spec import DIR --out OUT"


def check_config(subject: Subject) -> Iterator[Finding]:
    """All findings about config.json alone."""
    for check in (
        _layout,
        _label,
        _block,
        _layers,
        _mask,
        _heads,
        _attention,
        _network,
        _rope,
        _paths,
    ):
        yield from check(subject)


def _layout(s: Subject) -> Iterator[Finding]:
    name = s.layout.name
    if name == "vllm":
        yield defect(
            "speculators layout: aux_hidden_state_layer_ids "
            f"{s.data.get('aux_hidden_state_layer_ids')} count the embedding as 0, one higher than "
            "SGLang's target_layer_ids, and the backbone is nested",
            f"{REWRITE} turns {s.data.get('aux_hidden_state_layer_ids')} into "
            f"{s.own.get('target_layer_ids')}",
            "SGLang",
        )
    else:
        yield warning(
            "vLLM's own layout is that of speculators",
            "spec export --draft DIR --to vllm --out OUT",
            "vLLM",
        )
    if name in ("vllm", "deepspec") or s.is_dspark:
        yield defect(
            "z-lab's package reads DFlash in its own layout only",
            "spec export --draft DIR --to zlab --out OUT, for a DFlash drafter",
            "z-lab",
        )
    if name != "deepspec":
        yield defect(
            "DeepSpec reads DSpark with the target's embedding and head in the file only",
            "spec export --draft DIR --to deepspec --target TARGET --out OUT, for a DSpark drafter",
            "DeepSpec",
        )
    scale = s.own.get("input_embedding_scale", 1.0)
    if scale != 1.0:
        yield warning(
            f"input_embedding_scale is {scale}, which SGLang does not read: it embeds with the "
            "target's own module",
            "serve it with a target whose embedding module scales by the same number",
            "SGLang",
        )


def _label(s: Subject) -> Iterator[Finding]:
    """DSpark's keys or tensors under DFlash's name: read one token late, heads dropped."""
    keys = [key for key in HEAD_KEYS if s.own.get(key) is not None]
    heads = [name for name in s.tensors if "markov_" in name or "confidence_head" in name]
    if not s.labelled_dspark and (keys or heads):
        has = f"the keys {', '.join(keys)}" if keys else f"{len(heads)} tensors of its heads"
        yield defect(
            f"a DSpark drafter labelled {s.data.get('architectures')}: it has {has}; as DFlash its "
            "heads are dropped and every slot is read one token late, without an error",
            'set architectures to ["Qwen3DSparkModel"] and serve it as DSPARK',
        )


def _block(s: Subject) -> Iterator[Finding]:
    value, least = s.own.get("block_size"), 1 if s.is_dspark else 2
    if value is None:
        default = "" if s.is_dspark else ": SGLang and z-lab take 16 without a word"
        yield defect(
            f"no block_size{default}",
            "state the one it was trained with: spec import DIR --block-size N --out OUT",
        )
    elif type(value) is not int or value < least:
        yield defect(
            f"block_size is {value!r}, expected a whole number of {least} or more",
            "write the one it was trained with",
        )


def _layers(s: Subject) -> Iterator[Finding]:
    ids, count = s.layer_ids, s.whole("num_target_layers")
    cure = "state those it was trained with: spec import DIR --layer-ids A,B,... --out OUT"
    if s.own.get("target_layer_ids") is None:
        yield defect(
            "no target_layer_ids: engines spread as many as there are draft layers evenly", cure
        )
    elif ids is None:
        yield defect(
            f"target_layer_ids is {s.own['target_layer_ids']!r}, expected a list of numbers", cure
        )
    elif ids != sorted(set(ids)):
        yield defect(
            f"target_layer_ids {ids} do not rise strictly: engines capture in ascending order, "
            "so fc reads the layers in another order than written",
            "write them ascending, with the columns of fc in the same order",
        )
    if ids and min(ids) < 0:
        yield defect(
            f"target_layer_ids {ids} name the embedding's output, which engines do not capture",
            "train with decoder layers only",
        )
    if ids and count is not None and max(ids) > count - 2:
        which = "the last layer" if max(ids) == count - 1 else f"a layer beyond the {count} there"
        yield defect(
            f"target_layer_ids {ids} name {which}, whose output engines cannot capture (SGLang "
            "fails at warm-up with an error about shapes)",
            f"train with layers 0 to {count - 2}",
        )
    if count is None:
        yield warning(
            f"num_target_layers is {s.own.get('num_target_layers')!r}: nobody can tell whether the "
            "last layer is among those read",
            "spec import DIR --target TARGET --out OUT",
        )


def _mask(s: Subject) -> Iterator[Finding]:
    value, vocab = s.own.get("mask_token_id"), s.whole("vocab_size")
    if value is None:
        yield defect(
            "no mask_token_id: SGLang falls back to a token <|MASK|>, which the target may not "
            "have",
            "state the one it was trained with: spec import DIR --mask-token-id N --out OUT",
        )
    elif type(value) is not int or value < 0 or (vocab is not None and value >= vocab):
        yield defect(
            f"mask_token_id is {value!r}, no row of the vocabulary of {vocab}",
            "write the one it was trained with; spec inspect TARGET lists free rows",
        )


def _heads(s: Subject) -> Iterator[Finding]:
    if not s.labelled_dspark:
        return
    flat = s.data if s.layout.name != "vllm" else s.own
    nested = [key for key in HEAD_KEYS if s.own.get(key) is not None and flat.get(key) is None]
    if nested:
        yield defect(
            f"{', '.join(nested)} only inside dflash_config; SGLang looks for them at the top "
            "level and refuses",
            f"move them to the top level; or {REWRITE}",
            "SGLang",
        )
    rank, kind = s.own.get("markov_rank"), s.own.get("markov_head_type")
    if rank == 0:
        yield defect(
            "markov_rank is 0: SGLang's DSPARK refuses it, and as DFLASH its slots would be read "
            "one token late",
            "train it with draft.markov_rank above 0; spec eval decodes it as it is",
            "SGLang",
        )
        return
    if rank is None:
        yield defect("a DSpark drafter without markov_rank", "write the rank of markov_head")
        return
    if kind is None or s.own.get("enable_confidence_head") is None:
        missing = "markov_head_type" if kind is None else "enable_confidence_head"
        yield defect(f"a DSpark drafter without {missing}", "write what it was trained with")
    found = {key: s.own[key] for key in HEAD_KEYS if s.own.get(key) is not None}
    try:
        check_heads(**{"enable_confidence_head": False, **found})
    except ValueError as error:
        yield defect(str(error), f"write what it was trained with ({', '.join(HEAD_TYPES)})")
    if s.own.get("sample_from_anchor", True) is not True:
        yield defect(
            "sample_from_anchor is false: the anchor's slot drafts nothing",
            "train a drafter whose anchor slot predicts the first token",
            "spec",
        )


def _attention(s: Subject) -> Iterator[Finding]:
    kinds, count = s.own.get("layer_types"), s.whole("num_hidden_layers")
    causal = s.own.get("is_causal")
    if causal is not None and not isinstance(causal, bool):
        yield defect(f"is_causal is {causal!r}, expected true or false", "write true or false")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != (count or len(kinds))):
        yield defect(
            f"layer_types is {kinds!r}, expected a list of {count}, one a draft layer",
            "write full_attention once a layer",
        )
        return
    if "sliding_attention" in (kinds or []):
        if causal is None:
            yield defect(
                "sliding_attention without is_causal: SGLang and z-lab make such a block causal",
                "write is_causal: false for a bidirectional block, true for a causal one",
            )
        if type(s.own.get("sliding_window")) is not int:
            yield defect(
                "sliding_attention without sliding_window, which SGLang refuses",
                "write the window it was trained with",
            )
        yield warning(
            "spec neither trains nor decodes sliding_attention", "evaluate it in the engine", "spec"
        )
    elif causal is None:
        yield note(
            "is_causal is not stated; full_attention is bidirectional by every engine's default",
            f"say so explicitly; or {REWRITE}",
        )
    if s.own.get("attention_bias") or s.own.get("hidden_act", "silu") != "silu":
        yield warning(
            f"attention_bias is {s.own.get('attention_bias', False)}, hidden_act "
            f"{s.own.get('hidden_act', 'silu')}: spec reads only silu without biases",
            "evaluate it in the engine",
            "spec",
        )


def _network(s: Subject) -> Iterator[Finding]:
    own = all_keys(s.data, s.own)
    if found := not_neutral(own):
        yield warning(
            f"{found}: SGLang computes another network by it, which spec cannot read",
            "evaluate it in the engine; or take the key out where it was trained without",
            "spec",
        )
    if slides_unsaid(own):
        yield warning(
            "use_sliding_window without layer_types: transformers makes sliding_attention of "
            "layers, which spec neither trains nor decodes",
            "write layer_types as it was trained; evaluate sliding ones in the engine",
            "spec",
        )


def _rope(s: Subject) -> Iterator[Finding]:
    cure = "write rope_parameters (rope_theta, rope_type) as it was trained"
    try:
        rope = read_rope(s.own, where="config.json")
    except (ValueError, TypeError, AttributeError) as error:
        yield defect(str(error), cure)
        return
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield defect(
            f"partial_rotary_factor is {rope['partial_rotary_factor']}: spec and z-lab rotate the "
            "whole head, SGLang a part of it",
            "train the drafter with its own RoPE over the whole head",
        )
    theta = rope.get("rope_theta")
    if not isinstance(theta, int | float) or theta <= 0:
        yield defect(f"rope_theta is {theta!r}, expected a number above 0", cure)


def _paths(s: Subject) -> Iterator[Finding]:
    local = [key for key, value in _strings(s.data) if LOCAL_PATH.match(value)]
    if local:
        yield defect(
            f"paths of another machine in config.json: {', '.join(local)}",
            "remove these keys, or write a hub id",
        )


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Each string of a JSON value with its dotted key."""
    if isinstance(value, str):
        yield name, value
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from _strings(item, f"{name}.{key}" if name else str(key))
