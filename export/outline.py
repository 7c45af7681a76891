"""The tensors that a drafter of a config.json has, as far as it states its sizes."""

import re
from collections.abc import Iterable, Mapping

import torch

from ..dflash.config import MAX_LAYERS, DFlashConfig
from ..dflash.fp8 import SCALE_NAMES
from ..dspark.config import DSparkConfig
from ..target.tensors import Stored
from .findings import Subject
from .layouts import TARGET_TENSORS, expected_shapes
from .quantization_config import is_fp4, packed_projections, stated_quantization
from .speculators import OTHER_TENSORS

SCALES = (*SCALE_NAMES.values(), "input_scale", "weight_scale_2")  # of other quantizers too
LAYER = re.compile(r"layers\.(\d+)\.")
SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
CONFIDENCE = "confidence_head.proj.weight"
ATTENTION = re.compile(r"(layers\.\d+\.self_attn\.[qkvo]_proj)\.weight")


def outline(s: Subject) -> dict[str, torch.Size] | None:
    """The tensors that a drafter of this config has, as far as its sizes are stated.

    Values that shape no tensor do not matter here: they have findings of their own.
    """
    sizes = {key: s.whole(key) for key in SHAPE_KEYS}
    if any(size is None or size < 1 for size in sizes.values()):
        return None
    # Findings end at the layers that the file holds, however many the config says.
    held = num_layers(plain_tensors(s))
    sizes["num_hidden_layers"] = max(1, min(sizes["num_hidden_layers"] or 0, held, MAX_LAYERS))
    fc = plain_tensors(s).get("fc.weight")
    count = len(s.layer_ids or []) or (fc.shape[-1] // (sizes["hidden_size"] or 1) if fc else 1)
    common = {
        **sizes,
        "block_size": 2,
        "target_layer_ids": tuple(range(max(1, count))),
        "num_target_layers": max(1, count) + 1,
        "mask_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    try:
        if not s.is_dspark:
            return _with_biases(s, expected_shapes(DFlashConfig(**common)))
        found = expected_shapes(
            DSparkConfig(
                **common,
                markov_rank=s.whole("markov_rank") or 0,
                markov_head_type=s.own.get("markov_head_type") or "vanilla",
                enable_confidence_head=bool(s.own.get("enable_confidence_head")),
                confidence_head_with_markov=with_markov(s),
            )
        )
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError):
        return None
    return _with_biases(s, found)


def with_markov(s: Subject) -> bool:
    """Whether the confidence head reads the Markov embedding; by its width where nobody says."""
    stated, rank = s.own.get("confidence_head_with_markov"), s.whole("markov_rank") or 0
    if stated is not None or not s.own.get("enable_confidence_head"):
        return bool(stated)
    weight = plain_tensors(s).get(CONFIDENCE)
    return rank > 0 if weight is None else weight.shape[-1:] != (s.whole("hidden_size"),)


def own_vocabulary(s: Subject) -> int | None:
    """The size of a draft vocabulary smaller than the target's; None where it is the target's."""
    size = s.data.get("draft_vocab_size") if s.layout.name == "vllm" else None
    return size if type(size) is int and size != s.own.get("vocab_size") else None


def _with_biases(s: Subject, shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """With the biases of q, k, v and o where `attention_bias` is true."""
    if s.own.get("attention_bias") is not True:
        return shapes
    found = [(ATTENTION.fullmatch(name), size) for name, size in shapes.items()]
    return shapes | {f"{match[1]}.bias": size[:1] for match, size in found if match}


def as_stored(s: Subject, expected: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """`expected` as the quantization has it: two FP4 weights a byte, other packed ones left out."""
    plain, (_, config) = plain_tensors(s), stated_quantization(s)
    packed, halved = packed_projections(s, plain), is_fp4(config)
    found: dict[str, torch.Size] = {}
    for name, size in expected.items():
        half = halved and len(size) == 2 and name in plain and plain[name].dtype == "U8"
        if not behind(name, packed):
            found[name] = torch.Size((size[0], size[1] // 2)) if half else size
    return found


def judged_tensors(s: Subject) -> dict[str, Stored]:
    """The plain tensors without those of packed projections."""
    plain = plain_tensors(s)
    packed = packed_projections(s, plain)
    return {name: stored for name, stored in plain.items() if not behind(name, packed)}


def behind(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor belongs to one of these modules."""
    return name.rpartition(".")[0] in modules


def plain_tensors(s: Subject) -> dict[str, Stored]:
    """The drafter's own tensors without the prefix `model.`, scales and the target's left out."""
    theirs = {*TARGET_TENSORS, *OTHER_TENSORS}
    named = {name.removeprefix("model."): stored for name, stored in s.tensors.items()}
    return {k: v for k, v in named.items() if k not in theirs and not is_scale(k)}


def is_scale(name: str) -> bool:
    """Whether a tensor scales another, by its name."""
    return name.rpartition(".")[2] in SCALES


def num_layers(plain: Mapping[str, Stored]) -> int:
    return max((layer_of(name) for name in plain), default=-1) + 1


def layer_of(name: str) -> int:
    """The draft layer that a tensor belongs to; -1 for the others."""
    match = LAYER.match(name)
    return int(match[1]) if match else -1
