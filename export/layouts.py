"""The layouts of a drafter directory: whose it is, and how its config.json says the same thing.

All four name the tensors alike and predict at the same slots for the same algorithm; they differ in
where config.json keeps a value and in how it counts layers. Every layout is read by turning its
config.json into the native one (DESIGN section 7), and written from the native one.

    sglang    native: what `spec train` writes and SGLang loads
    zlab      DFlash as z-lab publishes it: flat rope_theta, layer ids inside dflash_config
    deepspec  DSpark as DeepSpec saves it: the target's embedding and head are in the file
    vllm      speculators: the backbone nested, layer ids one higher (counted from the embedding)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..dflash.config import DFlashConfig
from ..dspark.config import DSparkConfig
from ..recipes.algorithms import ALGORITHMS, Parts
from . import speculators

LayoutName = Literal["sglang", "zlab", "deepspec", "vllm"]

TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight")
# DeepSpec's model demands this option of its training; nothing but its training reads it.
NUM_ANCHORS = 512


@dataclass(frozen=True)
class Layout:
    """One layout: its config.json, and which of the target's tensors its file has."""

    name: LayoutName
    title: str
    # (config, dtype of the weights, name of the target) -> config.json
    to_json: Callable[[DFlashConfig, str, str | None], dict[str, Any]]
    # (config.json, what messages call it) -> the native config.json
    to_native: Callable[[dict[str, Any], str], dict[str, Any]]
    # What in a config this layout, or the engine that reads it, has no way to say; None: nothing.
    obstacle: Callable[[DFlashConfig], str | None]
    target_tensors: tuple[str, ...] = ()  # may be in the file; they are the target's
    carries_target: bool = False  # must be in the file
    says_quantization: bool = True  # its config.json is read with `quantization_config`


def detect(config: dict[str, Any], *, where: str = "config.json") -> Layout:
    """The layout of a config.json.

    Raises ValueError for a drafter that none of them describes.
    """
    if kind := config.get("speculators_model_type"):
        if not isinstance(kind, str) or kind not in speculators.NATIVE:
            raise ValueError(
                f"{where}: speculators_model_type is {kind!r}, expected dflash or dspark; other "
                "drafters are not supported"
            )
        return LAYOUTS["vllm"]
    found = config.get("architectures") or []
    if not isinstance(found, list) or not (parts := parts_of(found)):
        known = ", ".join(each.config.architectures[0] for each in ALGORITHMS.values())
        raise ValueError(
            f"{where}: architectures is {found!r}, expected one of {known}, or a "
            "speculators_model_type of dflash or dspark"
        )
    if parts.config is DSparkConfig:
        return LAYOUTS["deepspec" if "num_anchors" in config else "sglang"]
    explicit = config.get("rope_parameters") is not None and config.get("is_causal") is not None
    return LAYOUTS["sglang" if explicit else "zlab"]


def parts_of(architectures: list[Any]) -> Parts | None:
    """The algorithm that a native `architectures` names."""
    for parts in ALGORITHMS.values():
        if any(name in parts.config.architectures for name in architectures):
            return parts
    return None


def read_native(native: dict[str, Any], where: str) -> DFlashConfig:
    """A native config.json as a DFlashConfig or DSparkConfig; ValueError as `from_json` says."""
    parts = parts_of(native["architectures"])
    assert parts is not None, "detect has seen it"
    return parts.config.from_json(native, where=where)


def all_keys(data: dict[str, Any], native: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says at any of its levels, native keys above those of its own layout."""
    levels = (data, data.get("transformer_layer_config"), native, native.get("dflash_config"))
    return {k: v for level in levels if isinstance(level, dict) for k, v in level.items()}


def expected_shapes(config: DFlashConfig) -> dict[str, torch.Size]:
    """Name and shape of every tensor of a drafter; ValueError for sizes that no tensor has."""
    parts = parts_of(list(config.architectures))
    assert parts is not None
    try:
        with torch.device("meta"):
            draft = parts.draft(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        words = " ".join(str(error).split())
        raise ValueError(
            f"config.json has sizes that no tensor can have ({words[:100]}); correct them"
        ) from None
    return {name: value.shape for name, value in draft.state_dict().items()}


def _same(data: dict[str, Any], where: str) -> dict[str, Any]:
    return data


def _to_native(config: DFlashConfig, dtype: str, target: str | None) -> dict[str, Any]:
    return config.to_json(dtype)


def _to_zlab(config: DFlashConfig, dtype: str, target: str | None) -> dict[str, Any]:
    data = config.to_json(dtype)
    rope = data.pop("rope_parameters")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    data["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    data["dflash_config"].pop("block_size")
    return data


def _to_deepspec(config: DFlashConfig, dtype: str, target: str | None) -> dict[str, Any]:
    data = config.to_json(dtype)
    data.pop("input_embedding_scale")
    return {**data, "num_anchors": NUM_ANCHORS}


def _sglang_obstacle(config: DFlashConfig) -> str | None:
    if isinstance(config, DSparkConfig) and not config.markov_rank:
        return (
            "markov_rank is 0 and SGLang's DSPARK wants one above 0 (nor is it DFlash: slot j "
            "predicts the token at anchor + j + 1)"
        )
    return None


def _unquantized_only(config: DFlashConfig) -> str | None:
    if config.quantization is None:
        return None
    return (
        "its weights are FP8, which only SGLang's layout describes here; write the drafter it was "
        "made from"
    )


def _zlab_obstacle(config: DFlashConfig) -> str | None:
    if isinstance(config, DSparkConfig):
        return "it is DSpark, whose slots predict one token later than DFlash's"
    return _unquantized_only(config)


def _deepspec_obstacle(config: DFlashConfig) -> str | None:
    if not isinstance(config, DSparkConfig):
        return (
            "it is DFlash; what DeepSpec calls dflash is DSpark with markov_rank 0, whose slots "
            "predict one token later"
        )
    return _unquantized_only(config) or speculators.unsaid(config)


def _vllm_obstacle(config: DFlashConfig) -> str | None:
    return _unquantized_only(config) or speculators.unsaid(config)


LAYOUTS: dict[LayoutName, Layout] = {
    layout.name: layout
    for layout in (
        Layout("sglang", "native, as SGLang loads it", _to_native, _same, _sglang_obstacle),
        Layout("zlab", "z-lab's DFlash", _to_zlab, _same, _zlab_obstacle),
        Layout(
            "deepspec",
            "DeepSpec's DSpark",
            _to_deepspec,
            _same,
            _deepspec_obstacle,
            target_tensors=TARGET_TENSORS,
            carries_target=True,
        ),
        Layout(
            "vllm",
            "speculators, as vLLM loads it",
            speculators.to_json,
            speculators.to_native,
            _vllm_obstacle,
            target_tensors=(*TARGET_TENSORS, *speculators.OTHER_TENSORS),
            says_quantization=False,
        ),
    )
}
