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
    part_of,
    scheme_of,
)
from ..target.tensors import Stored
from .check_weights import some
from .findings import Finding, Subject, defect, warning
from .outline import is_scale, plain_tensors
from .quantization_config import (
    EIGHT_BITS,
    FLOATS,
    KEYS,
    LEFT_OUT_KEYS,
    leaves_out,
    left_out_by,
    method_of,
    packed_projections,
    stated_quantization,
)
from .ranks import SIZES, rank_obstacles

AGAIN = "quantize it again: spec quantize"
KINDS = {"channel": "e4m3 by output row, activations by token"}
KINDS["block"] = f"e4m3 by blocks of {BLOCK} x {BLOCK}, activations by {BLOCK} values"
# No drafter has weights beyond float16's range; a larger scale is a file gone wrong.
LARGEST_SCALE = torch.finfo(torch.float16).max / E4M3_MAX
RANKS = (1, 2, 4, 8, 16)
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
        return " ".join(str(each) for each in (method, data.get("quant_algo")) if each)
    kept = f"; {', '.join(found.kept)} unquantized" if found.kept else ""
    return f"{method}: {KINDS[found.scheme]}{kept}"


def check_quantization(s: Subject) -> Iterator[Finding]:
    """All findings about FP8 weights, their scales and `quantization_config`."""
    plain = plain_tensors(s)
    place, config = stated_quantization(s)
    if not isinstance(config, dict):
        yield defect(
            f"{place} is {config!r}, expected an object: engines fail on it",
            f"write the {place} that belongs to the weights, or remove it",
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
    packed = packed_projections(s, plain)
    bare = sorted(n for n in small if not {f"{n}_scale", f"{n}_scale_inv"} & scales.keys())
    if not packed and (not scales or bare):
        dtypes = ", ".join(sorted({stored.dtype for stored in plain.values()}))
        yield defect(
            f"{place} without scales"
            + (f" for {some(bare)}" if bare else f": all weights are {dtypes}"),
            f"quantize it again, or remove {place} from a file that is not",
        )
        return
    yield defect(
        "z-lab's package reads no FP8 weights", "give it the drafter this was made from", "z-lab"
    )
    yield from _together(plain)
    yield from _elsewhere(small)
    if scheme_of(config) is None:
        yield warning(
            f"{place} {describe(config)} is not one that spec decodes: its scales are not judged"
            + (f", nor is {some(sorted(packed))}" if packed else ""),
            "evaluate it in the engine, or spec quantize the drafter it was made from",
            "spec",
        )
        yield from _left_out(plain, config)
        return
    if place != KEYS[0]:
        yield warning(
            f"{place}, which SGLang reads and spec does not",
            f"call it {KEYS[0]}",
            "spec",
        )
    try:
        quantization = Quantization.from_json(config, "config.json")
    except ValueError as error:
        yield defect(str(error), f"correct {place}")
        return
    assert quantization is not None
    yield from _widths(s, quantization)
    yield from _left_out(plain, config)
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


def _left_out(plain: Mapping[str, Stored], config: dict[str, Any]) -> Iterator[Finding]:
    """What the file does not quantize is what is left out by names that SGLang knows."""
    (key, patterns), method = left_out_by(config), method_of(config)
    by_path = [pattern for pattern in patterns if "layers." in pattern]
    if method not in LEFT_OUT_KEYS:
        if by_path:
            yield warning(
                f"{key} names {some(by_path)}: SGLang gives projections of all layers the same "
                "bare names, so no path matches",
                "see that it names no projection by its path, or leave it out in every layer",
                "SGLang",
            )
        return
    small = {stored.dtype for stored in plain.values()} & set(EIGHT_BITS)
    fate = "fails on their shape" if "U8" in small else "multiplies by scales it never read"
    for part, names in PARTS.items():
        found = {
            stored.dtype
            for name, stored in plain.items()
            if part_of(name) == part and name.endswith(".weight")
        }
        quantized, out = bool(found & set(EIGHT_BITS)), leaves_out(config, part)
        if not found or quantized != out or not found <= {*FLOATS, *EIGHT_BITS}:
            continue
        if quantized:
            yield defect(
                f"{key} leaves out {part}_proj, whose weights are {some(sorted(found))}: SGLang "
                "would read them without their scales",
                f"take {', '.join(names)} out of {key}",
            )
            continue
        wanted = [PATTERNS[part]] if method == "compressed-tensors" else list(names)
        yield defect(
            f"{', '.join(names)} are {some(sorted(found))} and {key} does not leave them out: "
            f"SGLang takes {part}_proj for quantized in every layer and {fate}"
            + (f"; {some(by_path)} match nothing, since it knows no path" if by_path else ""),
            f"add to {key}: {', '.join(wanted)}",
        )


def tensor_parallel(s: Subject) -> list[int] | None:
    """Over how many ranks SGLang can spread the drafter; None where the sizes are not stated."""
    shape: dict[str, Any] = {key: s.whole(key) for key in SIZES}
    if any(not each or each < 1 for each in shape.values()):
        return None
    shape["quantization_config"] = stated_quantization(s)[1]
    return [ranks for ranks in RANKS if not rank_obstacles(shape, ranks)]


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
