"""Read safetensors shards by header: what is stored, where, how large, without loading it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint as its header describes it."""

    file: Path
    dtype: str  # as safetensors writes it: BF16, F32, F8_E4M3, ...
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name, from the shards that its index names.

    Raises ValueError where a shard that the index names is missing, or lies elsewhere.
    """
    tensors: dict[str, Stored] = {}
    for file in _shards(directory):
        for name, entry in _header(file).items():
            start, end = entry["data_offsets"]
            tensors[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), end - start)
    return tensors


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return sorted(directory.glob("*.safetensors"))
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        bare = all(Path(name).name == name for name in files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        files, bare = [], False
    if not files or not bare:
        raise ValueError(
            f"{index}: expected a weight_map from tensor names to files beside it; copy it again"
        )
    missing = [name for name in files if not (directory / name).exists()]
    if missing:
        raise ValueError(
            f"{directory.name}: {len(missing)} of {len(files)} weight files are missing "
            f"({missing[0]} first); download them again"
        )
    return [directory / name for name in files]


def _header(file: Path) -> dict[str, dict]:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        try:
            header = json.loads(stream.read(size))
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            raise ValueError(
                f"{file.name}: no safetensors header; an unfinished download or a Git LFS pointer: "
                "download it again"
            ) from error
    header.pop("__metadata__", None)
    return header
