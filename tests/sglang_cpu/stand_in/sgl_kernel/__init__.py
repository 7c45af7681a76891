"""The few functions of SGLang's compiled kernels that a CPU without AMX needs, in plain torch.

Any other name imports, and raises when it is called.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

__version__ = "0.4.10"  # SGLang compares it with what it was released with


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, places: Tensor, width: int
) -> None:
    """table[rows[b], starts[b]:ends[b]] takes the next places, request by request."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    taken = 0
    for row, start, end in spans:
        chunk = places[taken : taken + end - start]
        table[row, start:end] = chunk.to(table.dtype)
        taken += len(chunk)


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, places: Tensor, width: int
) -> None:
    """The way back: the next places take table[rows[b], starts[b]:ends[b]]."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    taken = 0
    for row, start, end in spans:
        places[taken : taken + end - start] = table[row, start:end].to(places.dtype)
        taken += end - start


def copy_all_layer_kv_cache_cpu(
    pointers: Tensor, strides: Tensor, to_rows: Tensor, from_rows: Tensor
) -> None:
    """In each buffer at pointers[i] with rows of strides[i] bytes: row to[j] becomes row from[j].

    All rows are read before one is written, since the two may overlap.
    """
    moves = list(zip(to_rows.tolist(), from_rows.tolist(), strict=True))
    for base, size in zip(pointers.tolist(), strides.tolist(), strict=True):
        read = [ctypes.string_at(base + source * size, size) for _, source in moves]
        for (goal, _), data in zip(moves, read, strict=True):
            ctypes.memmove(base + goal * size, data, size)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_options: object) -> NoReturn:
        raise NotImplementedError(f"{name} is a GPU kernel; its CPU stand-in was never written")

    return missing
