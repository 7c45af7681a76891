"""Where a drafter directory says how it is quantized, and what SGLang leaves out by it."""

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..dflash import fp8
from ..dflash.fp8 import PARTS, Part, part_of, scheme_of
from ..target.tensors import Stored
from .findings import Subject

KEYS = ("quantization_config", "compression_config")  # of config.json, in SGLang's order
FILE = "hf_quant_config.json"  # read where config.json has neither
FLOATS = ("F64", "F32", "BF16", "F16")
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")
ONE_A_NUMBER = (*FLOATS, "F8_E4M3", "F8_E5M2", "I8")  # types of which one value is one weight
# Which keys name what is not quantized, by method.
LEFT_OUT_KEYS = {
    "compressed-tensors": fp8.LEFT_OUT_KEYS["channel"],
    "fp8": fp8.LEFT_OUT_KEYS["block"],
    "modelopt": ("ignore", "exclude_modules"),
}
ANY_KEYS = tuple(dict.fromkeys(key for keys in LEFT_OUT_KEYS.values() for key in keys))


def stated_quantization(s: Subject) -> tuple[str, Any]:
    """The place that SGLang reads, and what stands there; an empty object where there is none."""
    for key in KEYS:
        if s.data.get(key) is not None:
            return key, _flat(s.data[key])
    path = s.directory / FILE
    if not path.is_file():
        return KEYS[0], {}
    try:
        return FILE, _flat(json.loads(path.read_text()))
    except (ValueError, RecursionError):
        return FILE, "not JSON"


def _flat(data: Any) -> Any:
    """ModelOpt's own object may be nested in `quantization`, and leave out its name."""
    if not isinstance(data, dict):
        return data
    inner = data.get("quantization")
    found = inner if isinstance(inner, dict) else data
    return {"quant_method": "modelopt", **found} if "quant_algo" in found else found


def method_of(config: dict[str, Any]) -> str:
    """Whose rules say what is left out; another name than its own where it says it elsewhere."""
    method, groups = str(config.get("quant_method", "unnamed")), config.get("config_groups")
    if method.startswith("modelopt"):
        return "modelopt" if config.get("quant_algo") != "MIXED_PRECISION" else "modelopt mixed"
    if method != "compressed-tensors":
        return method
    listed = groups.values() if isinstance(groups, dict) else [None]
    all_linear = all(isinstance(g, dict) and g.get("targets") == ["Linear"] for g in listed)
    return method if all_linear else "compressed-tensors by targets"


def left_out_by(config: dict[str, Any]) -> tuple[str, list[str]]:
    """The key that names what is not quantized, and the names there."""
    keys = LEFT_OUT_KEYS.get(method_of(config), ANY_KEYS)
    key, names = fp8.first_stated(config, keys)
    return key, [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


def leaves_out(config: dict[str, Any], part: Part) -> bool:
    """Whether SGLang leaves a part unquantized, going by its bare name."""
    method, (_, patterns) = method_of(config), left_out_by(config)
    joined = f"{part}_proj"
    if method == "compressed-tensors":
        return any(_matches(p, joined) for p in patterns)
    single = {p.removeprefix("model.").rstrip(".") for p in patterns}
    by_name = set(PARTS[part]) <= single
    return by_name or (method != "fp8" and any(fnmatchcase(joined, p) for p in patterns))


def _matches(pattern: str, name: str) -> bool:
    try:
        return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else pattern == name
    except re.error:
        return False


def packed_projections(s: Subject, plain: Mapping[str, Stored]) -> set[str]:
    """Projections whose weights are packed in a way that nobody here understands.

    Only where a quantization is stated that is not one of the two that are read.
    """
    _, config = stated_quantization(s)
    if not isinstance(config, dict) or not config or scheme_of(config) is not None:
        return set()
    whole = (*ONE_A_NUMBER, *(["U8"] if is_fp4(config) else []))
    return {
        name.rpartition(".")[0]
        for name, stored in plain.items()
        if part_of(name) is not None
        and (stored.dtype not in whole or name.rpartition(".")[2] not in ("weight", "bias"))
    }


def is_fp4(config: Any) -> bool:
    """Whether a byte holds two weights side by side, as ModelOpt's NVFP4 has it."""
    return (
        isinstance(config, dict)
        and method_of(config) == "modelopt"
        and "FP4" in str(config.get("quant_algo"))
    )
