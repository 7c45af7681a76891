"""The optional feature cache: what the target's forward pass left, kept on disk for rows that are
trained on many times.

Shards are safetensors files of about 64 MB with two tensors a row: `<id>/context` [L, n*H], the
context features, and `<id>/expected` or `<id>/last` [E, H], what soft labels need at the row's last
E positions with a generated successor (target/teacher.py). With float8, a third, `<id>/scale` [L],
holds one scale a position. Rows whose features are missing are recomputed, so a lost shard costs
time only; so are those whose stored values are not finite.
"""

import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..dflash.fp8 import E4M3_MAX
from ..target.teacher import Teacher
from .rows import Row

SHARD_BYTES = 64 << 20


@dataclass(frozen=True)
class RowFeatures:
    """Features of one row of L tokens.

    The last token is never a block's context, so its row may be zero.
    """

    context: Tensor  # [L, n*H]
    teacher: Tensor | None  # [L, H], zero where the next token was not generated


def estimate_bytes(
    num_tokens: int, num_features: int, hidden_size: int, dtype: str, *, soft: bool
) -> int:
    """Size on disk of a cache for `num_tokens` tokens; num_features is n*H."""
    context = num_features * 2 if dtype == "bfloat16" else num_features + 4
    return num_tokens * (context + (2 * hidden_size if soft else 0))


def check_disk(folder: Path, num_bytes: int) -> None:
    """Raise ValueError when the disk under `folder` has not 10 % more room than the estimate."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes * 1.1:
        raise ValueError(
            f"the feature cache needs about {num_bytes / 1e9:.1f} GB under {folder.name}/ and "
            f"{free / 1e9:.1f} GB are free; "
            "set data.features=recompute, data.cache_dtype=float8, or fewer tokens"
        )


class CacheWriter:
    """Collects rows and writes a shard whenever enough came together; `close` writes the rest."""

    def __init__(self, folder: Path, name: str, dtype: str, teacher: Teacher | None = None) -> None:
        self.folder, self.dtype, self.teacher = folder, dtype, teacher
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(p.stem.rsplit("-", 1)[1]) for p in folder.glob(f"{name}-*.safetensors")]
        self._name, self._next = name, max(taken, default=-1) + 1
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0

    def add_row(self, row: Row, context: Tensor, teacher: Tensor | None) -> None:
        """`add` in the form that regeneration calls."""
        self.add(row.id, context, teacher)

    def add(self, row_id: str, context: Tensor, teacher: Tensor | None) -> None:
        """context [L, n*H]; teacher [L, H], whose leading zero rows are not stored."""
        if self.dtype == "float8":
            scale = context.float().abs().amax(1).clamp_min(1e-12) / E4M3_MAX
            self._put(f"{row_id}/scale", scale)
            self._put(
                f"{row_id}/context", (context.float() / scale[:, None]).to(torch.float8_e4m3fn)
            )
        else:
            self._put(f"{row_id}/context", context.to(torch.bfloat16))
        if teacher is not None:
            assert self.teacher is not None, "a teacher came without its kind"
            used = teacher.any(1).nonzero()
            first = int(used[0]) if len(used) else len(teacher)
            self._put(f"{row_id}/{self.teacher}", teacher[first:].to(torch.bfloat16))
        if self._bytes >= SHARD_BYTES:
            self.flush()

    def _put(self, key: str, value: Tensor) -> None:
        self._pending[key] = value.detach().contiguous().cpu()
        self._bytes += value.nbytes

    def flush(self) -> None:
        """Write what is pending as one shard, atomically."""
        if not self._pending:
            return
        path = self.folder / f"{self._name}-{self._next:05d}.safetensors"
        scratch = path.with_suffix(".tmp")
        save_file(self._pending, scratch)
        os.replace(scratch, path)
        self._next, self._pending, self._bytes = self._next + 1, {}, 0


class CacheReader:
    """Reads rows back, memory-mapped, with one kind of teacher; a broken shard counts as absent.

    `num_broken` rows held values that are not finite, and count as absent from then on.
    """

    def __init__(self, folder: Path, teacher: Teacher | None = None) -> None:
        self.teacher: Teacher | None = teacher
        self.num_broken = 0
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file: Any = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError):
                continue
            self._files[path.name] = file
            self._where |= dict.fromkeys(file.keys(), path.name)

    def __contains__(self, row_id: str) -> bool:
        return f"{row_id}/context" in self._where

    def read(self, row_id: str, length: int) -> RowFeatures | None:
        """Features of a row of `length` tokens, padded with zero rows at the end.

        None where a stored value is not finite: it would reach other blocks, since 0 x NaN is NaN.
        KeyError for an unknown row.
        """
        context = self._get(f"{row_id}/context")
        if f"{row_id}/scale" in self._where:
            context = (context.float() * self._get(f"{row_id}/scale")[:, None]).to(torch.bfloat16)
        stored = len(context)
        teacher = None
        if f"{row_id}/{self.teacher}" in self._where:
            part = self._get(f"{row_id}/{self.teacher}")
            teacher = part.new_zeros(max(length, stored), part.shape[1])
            teacher[stored - len(part) : stored] = part
            teacher = teacher[:length]
        if stored < length:
            context = torch.cat([context, context.new_zeros(length - stored, context.shape[1])])
        if not (_finite(context) and (teacher is None or _finite(teacher))):
            self._forget(row_id)
            return None
        return RowFeatures(context[:length], teacher)

    def _forget(self, row_id: str) -> None:
        if not self.num_broken:
            warnings.warn(
                f"feature cache: row {row_id!r} holds values that are not finite; it and others "
                "like it are recomputed",
                stacklevel=3,
            )
        self.num_broken += 1
        del self._where[f"{row_id}/context"]

    def _get(self, key: str) -> Tensor:
        return self._files[self._where[key]].get_tensor(key)


def _finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
