"""Rows: token ids with a loss mask, the one shape all training data takes.

A file holds `{"id", "input_ids", "loss_mask", "tags"?}` a line, or the token-id log's `{"id",
"prompt_ids", "output_ids", "tags"?}`, whose output ids are the supervised ones. Ids are read as
they are, never decoded and encoded again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jsonl import MAX_REJECTED, Rejected, check_rejected, read_objects, write_objects


@dataclass(frozen=True)
class Row:
    """One document: `loss_mask[i]` is 1 where the target itself generated `input_ids[i]`."""

    id: str
    input_ids: list[int]
    loss_mask: list[int]
    tags: tuple[str, ...] = ()

    @property
    def num_supervised(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class RowFile:
    """What a file gave: the valid rows in order, and the others with their reasons."""

    rows: list[Row]
    rejected: list[Rejected]


def check_row(row: Row, vocab_size: int | None = None) -> Rejected | None:
    """Why a row cannot be used, or None: lengths, ids in [0, vocab_size), mask values 0 and 1."""
    ids, mask = row.input_ids, row.loss_mask
    if not ids:
        return Rejected(row.id, "no tokens")
    if len(ids) != len(mask):
        return Rejected(row.id, "lengths differ", f"{len(ids)} ids, {len(mask)} mask values")
    if any(type(value) is not int or value not in (0, 1) for value in mask):
        bad = next(value for value in mask if type(value) is not int or value not in (0, 1))
        return Rejected(row.id, "loss_mask value other than 0 or 1", f"found {bad!r}")
    if any(type(value) is not int for value in ids):
        bad = next(value for value in ids if type(value) is not int)
        return Rejected(row.id, "token id is not an integer", f"found {bad!r}")
    if min(ids) < 0:
        return Rejected(row.id, "negative token id", f"found {min(ids)}")
    if vocab_size is not None and max(ids) >= vocab_size:
        return Rejected(
            row.id, "token id beyond the vocabulary", f"found {max(ids)}, vocabulary {vocab_size}"
        )
    return None


def row_from_object(id: str, entry: dict[str, Any]) -> Row | Rejected:
    """A row from either shape, not yet checked beyond its structure."""
    tags = entry.get("tags")
    tags = [entry["tag"]] if tags is None and entry.get("tag") is not None else tags
    if tags is not None and not (isinstance(tags, list) and all(isinstance(t, str) for t in tags)):
        return Rejected(id, "tags are not a list of strings", f"found {tags!r}")
    keys = ("input_ids", "loss_mask") if "input_ids" in entry else ("prompt_ids", "output_ids")
    for key in keys:
        if not isinstance(entry.get(key), list):
            found = ", ".join(sorted(entry)) or "nothing"
            return Rejected(id, f"{key} is not a list of token ids", f"the row has {found}")
    first, second = entry[keys[0]], entry[keys[1]]
    if keys[0] == "input_ids":
        return Row(id, first, second, tuple(tags or ()))
    mask = [0] * len(first) + [1] * len(second)
    return Row(id, first + second, mask, tuple(tags or ()))


def read_rows(
    path: str | Path, vocab_size: int | None = None, *, max_rejected: float = MAX_REJECTED
) -> RowFile:
    """Reads a .jsonl, .jsonl.zst, .json or .parquet file of rows.

    Raises ValueError when the file is missing, holds no row, or more than a share `max_rejected`
    of its rows is bad.
    """
    rows: list[Row] = []
    rejected: list[Rejected] = []
    for item in read_objects(path):
        row = item if isinstance(item, Rejected) else row_from_object(*item)
        bad = row if isinstance(row, Rejected) else check_row(row, vocab_size)
        if bad is not None:
            rejected.append(bad)
        elif isinstance(row, Row):
            rows.append(row)
    check_rejected(path, len(rows), rejected, max_rejected)
    if not rows:
        raise ValueError(f"{path}: no rows; expected one object a line with input_ids, loss_mask")
    return RowFile(rows, rejected)


def row_to_object(row: Row) -> dict[str, Any]:
    """The stored form of a row."""
    entry: dict[str, Any] = {
        "id": row.id,
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask,
    }
    if row.tags:
        entry["tags"] = list(row.tags)
    return entry


def write_rows(path: str | Path, rows: Iterable[Row]) -> int:
    """Writes rows as JSONL (.zst: compressed), all or nothing; ValueError on an invalid row."""

    def checked() -> Iterator[dict[str, Any]]:
        for row in rows:
            bad = check_row(row)
            if bad is not None:
                raise ValueError(f"{path}: row {bad}; nothing was written")
            yield row_to_object(row)

    return write_objects(path, checked())
