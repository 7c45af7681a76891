"""A drafter's `model.safetensors` and `spec.json`.

The weights are read strictly, since engines ignore names they do not know; provenance, of which not
every drafter has any, as far as it goes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import is_deep
from .fp8 import E4M3, SCALE_NAMES

WEIGHTS = "model.safetensors"
PROVENANCE = "spec.json"


def read_weights(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a drafter directory, one file or sharded, a leading `model.` dropped."""
    root = Path(directory)
    tensors: dict[str, Tensor] = {}
    for name in weight_files(root):
        try:
            with safe_open(root / name, framework="pt") as file:
                for key in file.keys():
                    short = key.removeprefix("model.")
                    if short in tensors:
                        raise ValueError(f"{root}: {short} is stored twice; keep one of them")
                    tensors[short] = file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{root / name}: not a whole safetensors file ({error})") from None
    return tensors


def weight_files(root: Path) -> list[str]:
    """Names of the files with a drafter's tensors; FileNotFoundError or ValueError without them."""
    index = root / f"{WEIGHTS}.index.json"
    files = [WEIGHTS] if not index.is_file() else _shards(index)
    for name in files:
        if not (root / name).is_file():
            raise FileNotFoundError(f"no drafter weights at {root}: {name} is missing")
    return files


def _shards(index: Path) -> list[str]:
    """The files that a shard index names, beside it."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        bare = all(Path(name).name == name for name in names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        names, bare = [], False
    if not names or not bare:
        raise ValueError(f"{index}: expected a weight_map from tensor names to files beside it")
    return names


def check_values(tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Raise ValueError unless all weights are finite numbers of one floating-point type.

    Of those with a scale the weight is e4m3 and the scale float32, finite and above 0.
    """
    scales = {
        n: value for n, value in tensors.items() if n.rpartition(".")[2] in SCALE_NAMES.values()
    }
    scaled = {f"{name.rpartition('.')[0]}.weight" for name in scales}
    rest = {str(v.dtype) for n, v in tensors.items() if n not in scales and n not in scaled}
    dtypes = {dtype.removeprefix("torch.") for dtype in rest}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16", "float16"}:
        raise ValueError(
            f"{directory}: the weights are {', '.join(sorted(dtypes))}; expected all of them in "
            "one of float32, bfloat16, float16"
        )
    # e4m3 itself has no test for NaN.
    wide = (v if v.element_size() > 1 else v.float() for v in tensors.values())
    broken = [name for name, value in zip(tensors, wide, strict=True) if not value.isfinite().all()]
    if broken:
        raise ValueError(f"{directory}: {broken[0]} holds NaN or infinity; train or copy it again")
    for name in sorted(scaled & tensors.keys()):
        if tensors[name].dtype != E4M3:
            raise ValueError(
                f"{directory}: {name} has a scale and is {tensors[name].dtype}, expected {E4M3}; "
                "quantize the drafter again"
            )
    for name, scale in scales.items():
        if scale.dtype != torch.float32 or not bool((scale > 0).all()):
            raise ValueError(
                f"{directory}: {name} is {scale.dtype} and at least {scale.float().min():g}, "
                "expected torch.float32 above 0; quantize the drafter again"
            )


def check_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, torch.Size], directory: str | Path
) -> None:
    """Raise ValueError unless names and shapes are exactly the expected ones."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise ValueError(
            f"{directory}: the weights do not fit the config; missing {missing or 'none'}; "
            f"unexpected {extra or 'none'}"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ValueError(
                f"{directory}: {name} is {list(found[name].shape)}, the config says {list(shape)}"
            )


def read_provenance(directory: str | Path, *, strict: bool = False) -> dict[str, Any]:
    """spec.json of a drafter directory; empty where there is none, or, unless `strict`, no use.

    With `strict` raises ValueError for a file that is no JSON object.
    """
    path = Path(directory) / PROVENANCE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        if strict:
            raise ValueError(f"{path} is no JSON ({error}); restore it, or take it away") from None
        return {}
    if not isinstance(record, dict) or is_deep(record):
        if strict:
            found = "a deeply nested value" if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{path}: found {found}, expected an object; restore it")
        return {}
    return record


def stated(record: dict[str, Any], section: str, key: str) -> Any:
    """A value of spec.json; None where the section or the key is missing."""
    found = record.get(section)
    return found.get(key) if isinstance(found, dict) else None
