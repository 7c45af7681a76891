"""What training rows are, by kind and size: for a drafter's provenance and its model card."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .jsonl import stem
from .manifest import Manifest
from .rows import Row

# The target's answers to prompts in this run; conversations as they were given; rows as given.
Kind = Literal["answers", "conversations", "rows"]


@dataclass(frozen=True)
class TagSize:
    num_rows: int
    num_supervised: int


@dataclass(frozen=True)
class Source:
    """All training rows of one kind, as they were kept."""

    kind: Kind
    names: tuple[str, ...]  # built-in sources and files, without their folders
    num_rows: int
    num_tokens: int
    num_supervised: int
    longest_row: int
    # Of the answers, where a manifest says it; None: not known.
    temperatures: tuple[float, ...] | None = None
    tags: dict[str, TagSize] = field(default_factory=dict)  # most supervised tokens first


def describe_source(
    kind: Kind,
    names: Iterable[str | Path],
    rows: Sequence[Row],
    temperatures: tuple[float, ...] | None = None,
) -> Source:
    """Sizes of the rows of one kind; a row with several tags counts for each."""
    by_tag: dict[str, list[Row]] = {}
    for row in rows:
        for tag in row.tags:
            by_tag.setdefault(tag, []).append(row)
    sizes = {
        tag: TagSize(len(found), sum(row.num_supervised for row in found))
        for tag, found in by_tag.items()
    }
    return Source(
        kind=kind,
        names=tuple(Path(name).name for name in names),
        num_rows=len(rows),
        num_tokens=sum(len(row.input_ids) for row in rows),
        num_supervised=sum(row.num_supervised for row in rows),
        longest_row=max((len(row.input_ids) for row in rows), default=0),
        temperatures=temperatures,
        tags=dict(sorted(sizes.items(), key=lambda item: (-item[1].num_supervised, item[0]))),
    )


def stated_temperatures(files: Iterable[str | Path]) -> tuple[float, ...] | None:
    """What the manifests beside files of rows say of the sampling; None where one says nothing."""
    found: set[float] = set()
    for path in map(Path, files):
        try:
            options = Manifest.load(path.with_name(f"{stem(path)}.manifest.json")).options
        except (OSError, ValueError):
            return None  # rows from elsewhere need none
        if not isinstance(options.get("temperature"), int | float):
            return None
        found.add(float(options["temperature"]))
    return tuple(sorted(found)) or None
