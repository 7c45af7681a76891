"""A drafter's `model.safetensors`, read strictly: engines ignore names they do not know."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS = "model.safetensors"


def read_weights(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a drafter directory, one file or sharded, a leading `model.` dropped."""
    root = Path(directory)
    index = root / f"{WEIGHTS}.index.json"
    files = [WEIGHTS] if not index.is_file() else _shards(index)
    tensors: dict[str, Tensor] = {}
    for name in files:
        if not (root / name).is_file():
            raise FileNotFoundError(f"no drafter weights at {root}: {name} is missing")
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


def _shards(index: Path) -> list[str]:
    """The files that a shard index names, beside it."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        bare = all(Path(name).name == name for name in names)
    except (ValueError, TypeError, KeyError, AttributeError):
        names, bare = [], False
    if not names or not bare:
        raise ValueError(f"{index}: expected a weight_map from tensor names to files beside it")
    return names


def check_values(tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Raise ValueError unless all weights are finite numbers of one floating-point type."""
    dtypes = {str(value.dtype).removeprefix("torch.") for value in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16", "float16"}:
        raise ValueError(
            f"{directory}: the weights are {', '.join(sorted(dtypes))}; expected all of them in "
            "one of float32, bfloat16, float16"
        )
    broken = [name for name, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(f"{directory}: {broken[0]} holds NaN or infinity; train or copy it again")


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
