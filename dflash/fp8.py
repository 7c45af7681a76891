"""FP8 projections of a drafter: how config.json names them, how they are stored and computed.

Two schemes, both with e4m3 weights and float32 scales:

    channel   one scale an output row, activations rounded with a scale a token; compressed-tensors'
              layout: `weight_scale [out, 1]`
    block     one scale a 128 x 128 block, activations rounded with a scale every 128 values; the
              layout of `quant_method: fp8`: `weight_scale_inv [ceil(out/128), ceil(in/128)]`

Computed as engines do it, but with the products in float32: weights times their scales, activations
rounded to e4m3 and back. Everything else of a drafter stays as it is.

Engines join q, k, v and gate, up into one matrix each, so those are quantized together or not at
all (`PARTS`). In SGLang the four of every layer are `qkv_proj`, `o_proj`, `gate_up_proj`,
`down_proj`, without a path before them: what is to be left out has to match those bare names.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
SMALLEST_MAX = 1e-12  # of a group of activations; engines divide by no less

Scheme = Literal["channel", "block"]
SCALE_NAMES: dict[Scheme, str] = {"channel": "weight_scale", "block": "weight_scale_inv"}
Part = Literal["qkv", "o", "gate_up", "down"]
PARTS: dict[Part, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
LEFT_OUT_KEYS: dict[Scheme, tuple[str, ...]] = {
    "channel": ("ignore",),
    "block": ("ignored_layers", "modules_to_not_convert"),
}
# Matches a part's projections by their own and by the joined name, with a path before it or none.
PATTERNS: dict[Part, str] = {
    "qkv": r"re:(.*\.)?(q|k|v|qkv)_proj$",
    "o": r"re:(.*\.)?o_proj$",
    "gate_up": r"re:(.*\.)?(gate|up|gate_up)_proj$",
    "down": r"re:(.*\.)?down_proj$",
}
# Linear to every reader of the format, quantized by nobody.
NEVER = (r"re:(.*\.)?fc$", r"re:(.*\.)?markov_head\..*", r"re:(.*\.)?confidence_head\..*")
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True}


@dataclass(frozen=True)
class Quantization:
    """Which projections are FP8, and how; written to `quantization_config`."""

    scheme: Scheme
    kept: tuple[Part, ...] = ()  # not quantized, in PARTS' order

    @property
    def scale_name(self) -> str:
        return SCALE_NAMES[self.scheme]

    def covers(self, projection: str) -> bool:
        """Whether the projection of this name (`q_proj`, ...) is FP8."""
        return not any(projection in PARTS[part] for part in self.kept)

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """The shape of the scales of a weight [out, in]."""
        if self.scheme == "channel":
            return out_features, 1
        return -(-out_features // BLOCK), -(-in_features // BLOCK)

    def obstacle(self, *, hidden: int, heads: int, kv_heads: int, inner: int) -> str | None:
        """What engines refuse in a drafter of these widths; None where they load it.

        `heads` and `kv_heads` are numbers of heads times head_dim. An input is cut into groups of
        128; so is each output that is joined with another.
        """
        if self.scheme == "channel":
            return None
        widths = {"hidden_size": hidden}
        if not {"qkv", "o"} <= set(self.kept):
            widths["the attention heads' width"] = heads
        if "qkv" not in self.kept:
            widths["the key-value heads' width"] = kv_heads
        if not {"gate_up", "down"} <= set(self.kept):
            widths["intermediate_size"] = inner
        odd = [f"{name} is {width}" for name, width in widths.items() if width % BLOCK]
        if not odd:
            return None
        return (
            f"{', '.join(odd)}; engines load blocks of {BLOCK} x {BLOCK} only where each is a "
            f"multiple of {BLOCK}: use the scheme channel, which has no such demand"
        )

    def to_json(self) -> dict[str, Any]:
        """The content of `quantization_config`."""
        if self.scheme == "block":
            kept = [name for part in self.kept for name in PARTS[part]]
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": ["fc", "markov_head", "confidence_head", *kept],
            }
        group = {
            "targets": ["Linear"],
            "weights": {**WEIGHTS, "dynamic": False},
            "input_activations": {**ACTIVATIONS, "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [*NEVER, *(PATTERNS[part] for part in self.kept)],
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self | None:
        """Read `quantization_config` as SGLang does; None where there is none.

        Raises ValueError for what is neither of the two schemes.
        """
        if not data:
            return None
        scheme = scheme_of(data)
        if scheme is None:
            method = data.get("quant_method") if isinstance(data, dict) else data
            raise ValueError(
                f"{where}: the weights are quantized ({method!r}) in another way than the two that "
                "are read: compressed-tensors float-quantized by channel with dynamic activations "
                f"by token, or fp8 in blocks of [{BLOCK}, {BLOCK}] with dynamic activations; take "
                "the drafter they were made from, and spec quantize"
            )
        key, patterns = left_out(data, scheme)
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise ValueError(f"{where}: {key} is {patterns!r}, expected a list of names")
        return cls(scheme, tuple(p for p in PARTS if _is_left_out(scheme, patterns, p, where)))


def left_out(data: dict[str, Any], scheme: Scheme) -> tuple[str, Any]:
    """The key of `quantization_config` that names what is not quantized, and what stands there."""
    return first_stated(data, LEFT_OUT_KEYS[scheme])


def first_stated(data: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, Any]:
    """The first of these keys that is not empty, which SGLang takes, and what stands there."""
    key = next((key for key in keys if data.get(key)), keys[-1])
    return key, data.get(key) or []


def scheme_of(data: Any) -> Scheme | None:
    """Which of the two schemes a `quantization_config` describes; None for another."""
    if not isinstance(data, dict):
        return None
    if any(data.get(key) for key in ("kv_cache_scheme", "sparsity_config")):
        return None  # a cache or sparse weights that nobody here decodes
    if data.get("quant_method") == "fp8":
        dynamic = data.get("activation_scheme", "dynamic") == "dynamic"
        return "block" if dynamic and data.get("weight_block_size") == [BLOCK, BLOCK] else None
    groups = data.get("config_groups")
    if data.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict):
        return None
    if data.get("format") != "float-quantized" or len(groups) != 1:
        return None
    (group,) = groups.values()
    return "channel" if isinstance(group, dict) and _is_by_channel(group) else None


def _is_by_channel(group: dict[str, Any]) -> bool:
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(activations, dict):
        return False
    return (
        group.get("targets") == ["Linear"]
        and all(weights.get(key, True) == value for key, value in WEIGHTS.items())
        and all(activations.get(key, True) == value for key, value in ACTIVATIONS.items())
        and not weights.get("dynamic")
        and activations.get("dynamic") is True
    )


def _is_left_out(scheme: Scheme, patterns: list[str], part: Part, where: str) -> bool:
    """Whether SGLang leaves a part unquantized, going by its bare name."""
    if scheme == "block":
        names = {pattern.removeprefix("model.") for pattern in patterns}
        found = [name in names for name in PARTS[part]]
        if any(found) and not all(found):
            raise ValueError(
                f"{where}: quantization_config leaves out some of {', '.join(PARTS[part])} and not "
                "the others; engines join them: name all or none"
            )
        return all(found)
    try:
        return any(
            re.match(p[3:], f"{part}_proj") if p.startswith("re:") else p == f"{part}_proj"
            for p in patterns
        )
    except re.error as error:
        raise ValueError(f"{where}: ignore {patterns}: not a pattern ({error})") from None


def quantize_weight(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as e4m3 and its float32 scales.

    The largest value of a row or block becomes 448. A row or block of zeros gets scale 1 and stays
    zero. Raises ValueError for NaN or infinity.
    """
    assert weight.ndim == 2 and weight.numel(), f"a weight of shape {list(weight.shape)}"
    full = weight.float()
    if not full.isfinite().all():
        raise ValueError("the weight holds NaN or infinity; train or copy the drafter again")
    sizes = (1, full.shape[1]) if scheme == "channel" else (BLOCK, BLOCK)
    rows, columns = (-(-n // size) for n, size in zip(full.shape, sizes, strict=True))
    padded = F.pad(
        full, (0, columns * sizes[1] - full.shape[1], 0, rows * sizes[0] - full.shape[0])
    )
    largest = padded.view(rows, sizes[0], columns, sizes[1]).abs().amax(dim=(1, 3))
    # Below the smallest normal number a quotient would lose its digits, or be zero.
    scale = (largest / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scale[largest == 0] = 1.0
    return (full / _spread(scale, full.shape)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [out, in] times its scales, in float32."""
    return weight.float() * _spread(scale, weight.shape)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales a row [out, 1] or a block, so that they multiply a weight [out, in]."""
    if scale.shape == (shape[0], 1):
        return scale
    rows = scale.repeat_interleave(BLOCK, 0) if scale.shape[0] != shape[0] else scale
    return rows.repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def round_activations(x: Tensor, group: int) -> Tensor:
    """x [..., n * group] to e4m3 and back, with a scale for every `group` values; float32."""
    grouped = x.float().unflatten(-1, (-1, group))
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_MAX) / E4M3_MAX
    rounded = (grouped / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float()
    return (rounded * scale).flatten(-2)


class FP8Linear(nn.Module):
    """A projection without bias whose weight is e4m3. `.to(dtype)` changes neither it nor its
    scales; the float32 product of both is kept from the first call on.
    """

    weight: Tensor

    def __init__(self, in_features: int, out_features: int, quantization: Quantization) -> None:
        super().__init__()
        self.group = in_features if quantization.scheme == "channel" else BLOCK
        self.scale_name = quantization.scale_name
        shape = quantization.scale_shape(out_features, in_features)
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=E4M3))
        self.register_buffer(self.scale_name, torch.ones(shape, dtype=torch.float32))
        self.dense: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.dense is None:
            self.dense = dequantize(self.weight, getattr(self, self.scale_name))
        return (round_activations(x, self.group) @ self.dense.t()).to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A cast would round the weights once more and the scales for the first time.
        device = fn(torch.empty(0, device=self.weight.device)).device
        for name in ("weight", self.scale_name):
            setattr(self, name, getattr(self, name).to(device))
        self.dense = None
        return self


def projection(
    quantization: Quantization | None, name: str, in_features: int, out_features: int
) -> nn.Linear | FP8Linear:
    """The projection `name` of a drafter layer, FP8 where `quantization` covers it."""
    if quantization is None or not quantization.covers(name):
        return nn.Linear(in_features, out_features, bias=False)
    return FP8Linear(in_features, out_features, quantization)


def has_own_dtype(name: str, tensor: Tensor) -> bool:
    """Whether a stored tensor keeps its type whatever the drafter's: e4m3, or its scales."""
    return tensor.dtype == E4M3 or name.rpartition(".")[2] in SCALE_NAMES.values()


def part_of(name: str) -> Part | None:
    """The part that a tensor's name belongs to; None for all that is never quantized."""
    words = name.split(".")
    if words[0] != "layers" or len(words) < 3:
        return None
    return next((part for part, names in PARTS.items() if words[-2] in names), None)
