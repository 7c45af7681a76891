"""Whether a quantized drafter's config.json, weights and scales tell an engine the same thing.

SGLang builds each layer's four projections as config.json says and copies in whatever the file
holds: an unquantized weight is cast to e4m3 and multiplied by a scale that was never set, without
an error.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open

from ..dflash.fp8 import (
    BLOCK,
    E4M3_MAX,
    PARTS,
    PATTERNS,
    Part,
    Quantization,
    left_out,
    part_of,
    scheme_of,
)
from ..target.tensors import Stored
from .check_weights import EIGHT_BITS, is_scale, plain_tensors, some
from .findings import Finding, Subject, defect, warning

AGAIN = "quantize it again: spec quantize"
KINDS = {"channel": "e4m3 by output row, activations by token"}
KINDS["block"] = f"e4m3 by blocks of {BLOCK} x {BLOCK}, activations by {BLOCK} values"
# No drafter has weights beyond float16's range; a larger scale is a file gone wrong.
LARGEST_SCALE = torch.finfo(torch.float16).max / E4M3_MAX
WIDTH_KEYS = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")


def describe(data: Any) -> str | None:
    """A `quantization_config` in words; None where there is none."""
    if not data:
        return None
    if not isinstance(data, dict):
        return "unreadable"
    method, scheme = data.get("quant_method", "unnamed"), scheme_of(data)
    try:
        found = Quantization.from_json(data, "config.json") if scheme else None
    except ValueError:
        found = None
    if found is None:
        return str(method)
    kept = f"; {', '.join(found.kept)} unquantized" if found.kept else ""
    return f"{method}: {KINDS[found.scheme]}{kept}"


def check_quantization(s: Subject) -> Iterator[Finding]:
    """All findings about FP8 weights, their scales and `quantization_config`."""
    plain = plain_tensors(s)
    config = s.data.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        yield defect(
            f"quantization_config is {config!r}, expected an object: engines fail on it",
            "write the quantization_config that belongs to the weights, or remove it",
        )
        return
    small = {name for name, stored in plain.items() if stored.dtype in EIGHT_BITS}
    scales = {
        name.removeprefix("model."): stored for name, stored in s.tensors.items() if is_scale(name)
    }
    if not config:
        if small or scales:
            yield defect(
                f"quantized weights ({some(sorted(small) or sorted(scales))}) without "
                "quantization_config: the engine takes the numbers as they are",
                "write the quantization_config that belongs to the scales",
            )
        return
    bare = sorted(n for n in small if not {f"{n}_scale", f"{n}_scale_inv"} & scales.keys())
    if not scales or bare:
        dtypes = ", ".join(sorted({stored.dtype for stored in plain.values()}))
        yield defect(
            "quantization_config without scales"
            + (f" for {some(bare)}" if bare else f": all weights are {dtypes}"),
            "quantize it again, or remove quantization_config from a file that is not",
        )
        return
    yield defect(
        "z-lab's package reads no FP8 weights", "give it the drafter this was made from", "z-lab"
    )
    yield from _together(plain)
    yield from _elsewhere(small)
    if scheme_of(config) is None:
        yield warning(
            f"quantization_config {describe(config)} is not one that spec decodes",
            "evaluate it in the engine, or spec quantize the drafter it was made from",
            "spec",
        )
        return
    try:
        quantization = Quantization.from_json(config, "config.json")
    except ValueError as error:
        yield defect(str(error), "correct quantization_config")
        return
    assert quantization is not None
    yield from _widths(s, quantization)
    yield from _left_out(plain, quantization, config)
    yield from _scales(plain, scales, quantization)


def _together(plain: Mapping[str, Stored]) -> Iterator[Finding]:
    """q, k and v alike, gate and up alike, and every layer like the first."""
    types: dict[Part, dict[str, set[bool]]] = {}
    for name, stored in plain.items():
        part = part_of(name)
        if part is not None and name.endswith(".weight"):
            layer = name.split(".")[1]
            types.setdefault(part, {}).setdefault(layer, set()).add(stored.dtype in EIGHT_BITS)
    for part, layers in types.items():
        mixed = [layer for layer, found in layers.items() if len(found) > 1]
        if mixed:
            yield defect(
                f"of {', '.join(PARTS[part])} some are quantized and others not (layer "
                f"{some(mixed)}); engines join them into one matrix",
                "quantize all of them or none: spec quantize, --keep qkv or mlp",
            )
        elif len({next(iter(found)) for found in layers.values()}) > 1:
            quantized = [layer for layer, found in layers.items() if True in found]
            yield defect(
                f"{part}_proj is quantized in layer {some(quantized)} only; SGLang gives it the "
                "same name in every layer, so config.json cannot say so",
                "quantize it in all layers or in none",
            )


def _elsewhere(small: set[str]) -> Iterator[Finding]:
    """Only projections are made for scales."""
    others = sorted(name for name in small if part_of(name) is None)
    if others:
        yield defect(
            f"{some(others)} quantized: SGLang has no scale there and takes the numbers as they "
            "are",
            "store them in bfloat16; only attention and MLP projections can be quantized",
        )


def _widths(s: Subject, quantization: Quantization) -> Iterator[Finding]:
    hidden, size, heads, kv_heads = (s.whole(key) for key in WIDTH_KEYS)
    inner = s.whole("intermediate_size")
    if not (hidden and size and heads and kv_heads and inner):
        return
    obstacle = quantization.obstacle(
        hidden=hidden, heads=heads * size, kv_heads=kv_heads * size, inner=inner
    )
    if obstacle:
        yield defect(obstacle, "spec quantize --scheme channel, from the drafter it was made from")


def _left_out(
    plain: Mapping[str, Stored], quantization: Quantization, config: dict[str, Any]
) -> Iterator[Finding]:
    """What the file does not quantize is what config.json leaves out, by names SGLang knows."""
    key, patterns = left_out(config, quantization.scheme)
    for part, names in PARTS.items():
        found = {
            stored.dtype
            for name, stored in plain.items()
            if part_of(name) == part and name.endswith(".weight")
        }
        quantized = bool(found & set(EIGHT_BITS))
        if not found or quantized == (part not in quantization.kept):
            continue
        if quantized:
            yield defect(
                f"{key} leaves out {part}_proj, whose weights are {some(sorted(found))}: SGLang "
                "would read them without their scales",
                f"take {', '.join(names)} out of {key}",
            )
            continue
        wanted = [PATTERNS[part]] if quantization.scheme == "channel" else list(names)
        by_path = [p for p in patterns if "layers." in str(p)]
        yield defect(
            f"{', '.join(names)} are {some(sorted(found))} and {key} does not leave them out: "
            f"SGLang makes {part}_proj FP8 in every layer and multiplies by scales it never read"
            + (f"; {some(by_path)} match nothing, since it knows no path" if by_path else ""),
            f"add to {key}: {', '.join(wanted)}",
        )


def _scales(
    plain: Mapping[str, Stored], scales: Mapping[str, Stored], quantization: Quantization
) -> Iterator[Finding]:
    """A float32 scale of the right name and shape for each weight, finite and above 0."""
    wrong: list[str] = []
    for name, stored in plain.items():
        if stored.dtype not in EIGHT_BITS or part_of(name) is None or len(stored.shape) != 2:
            continue
        scale_name = f"{name.rpartition('.')[0]}.{quantization.scale_name}"
        scale, shape = scales.get(scale_name), quantization.scale_shape(*stored.shape)
        if stored.dtype != "F8_E4M3":
            wrong.append(f"{name} is {stored.dtype}, expected F8_E4M3")
        elif scale is None:
            wrong.append(f"{scale_name} is missing")
        elif scale.dtype != "F32" or scale.shape != shape:
            expected = f"F32 {list(shape)}"
            wrong.append(f"{scale_name} is {scale.dtype} {list(scale.shape)}, expected {expected}")
        elif not _sensible(scale, scale_name):
            wrong.append(f"{scale_name} holds NaN, 0 or less, or more than {LARGEST_SCALE:.0f}")
    kept = sorted(n for n in scales if plain_weight(n) not in plain)
    unscaled = sorted(
        n
        for n in scales
        if plain_weight(n) in plain and plain[plain_weight(n)].dtype not in EIGHT_BITS
    )
    if wrong:
        yield defect("FP8 weights and scales: " + "; ".join(wrong[:4]), AGAIN)
    other = sorted(n for n in scales if n.rpartition(".")[2] != quantization.scale_name)
    if other and not wrong:
        yield defect(
            f"{some(other)}: the scheme of quantization_config has {quantization.scale_name} only, "
            "and spec refuses others",
            AGAIN,
        )
    if kept or unscaled:
        yield defect(f"scales of no FP8 weight: {some(kept + unscaled)}", AGAIN)


def plain_weight(scale_name: str) -> str:
    """The weight that a scale belongs to."""
    return f"{scale_name.rpartition('.')[0]}.weight"


def _sensible(stored: Stored, name: str) -> bool:
    """Whether scales are numbers above 0 that make weights within float16's range."""
    with safe_open(stored.file, framework="pt") as file:
        names = set(file.keys())
        value = file.get_tensor(name if name in names else f"model.{name}")
    return bool(((value > 0) & (value <= LARGEST_SCALE)).all())
