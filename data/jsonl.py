"""Files of JSON objects, one a line: read leniently, written atomically.

A bad line becomes a `Rejected` and the file goes on; a file with too many of them fails with a
summary. Lines are parsed one by one with `json` and never merged into columns: a key that one row
lacks does not appear in it as null, and a tool schema keeps its order.
"""

import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MAX_REJECTED = 0.1  # share of a file's rows that may be bad before the file itself is refused


@dataclass(frozen=True)
class Rejected:
    """A row left out: `reason` is a short phrase that is counted, `detail` says what was found."""

    id: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]] | Rejected]:
    """Objects of a .jsonl, .jsonl.zst, .json or .parquet file, each with its id.

    The id is the row's own "id" (as text), or `<file stem>:<number>`, counted from 1 over the lines
    (.jsonl) or the entries (.json, .parquet).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected .jsonl, .jsonl.zst, .json or .parquet")
    for number, entry in _entries(path):
        place = f"{stem(path)}:{number}"
        if isinstance(entry, str):
            try:
                entry = json.loads(entry)
            except (ValueError, RecursionError) as error:
                yield Rejected(place, "not JSON", str(error))
                continue
            # Half of a surrogate pair is no text: nothing could be tokenized or written from it.
            if not _is_text(entry):
                yield Rejected(place, "not valid Unicode", "an unpaired surrogate or a broken byte")
                continue
        if not isinstance(entry, dict):
            yield Rejected(place, "not an object", f"found {type(entry).__name__}")
            continue
        own = entry.get("id")
        yield (place if own is None or isinstance(own, (dict, list)) else str(own)), entry


def _is_text(entry: Any) -> bool:
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def stem(path: str | Path) -> str:
    """`logs/code.jsonl.zst` -> `code`: the name of a file's group and of its unnamed rows."""
    return Path(path).name.split(".")[0]


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(path), 1)
        return
    with open_text(path) as file:
        if path.suffix == ".json":
            text = file.read()
            try:
                whole = json.loads(text)
                yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
                return
            except ValueError:
                file = io.StringIO(text)  # many published .json files hold one object a line
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def check(name: str, kind: Any) -> None:
        if pa.types.is_nested(kind):
            if name in ("tools", "functions", "arguments", "parameters"):
                raise ValueError(
                    f"{path}: column {name!r} is nested, which gives every row the keys of all "
                    "others; store it as a JSON string"
                )
            for i in range(kind.num_fields):
                check(kind.field(i).name, kind.field(i).type)

    file = pq.ParquetFile(path)
    for field in file.schema_arrow:
        check(field.name, field.type)
    for batch in file.iter_batches(batch_size=256):
        yield from batch.to_pylist()


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """A text file for reading, decompressed when its name ends in .zst."""
    if path.suffix != ".zst":
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            yield file
        return
    import zstandard

    with open(path, "rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
        yield io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")


def write_objects(path: str | Path, objects: Iterable[dict[str, Any]]) -> int:
    """Writes one object a line, all or nothing (.zst: compressed); returns their number."""
    path = Path(path)
    number = 0
    with atomic_file(path) as file, _compressed(file, path) as stream:
        for entry in objects:
            stream.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())
            number += 1
    return number


@contextmanager
def _compressed(file: IO[bytes], path: Path) -> Iterator[Any]:
    if path.suffix != ".zst":
        yield file
        return
    import zstandard

    with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
        yield stream


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Readers see the old file or the new one, never a part; parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def count_reasons(rejected: Iterable[Rejected]) -> dict[str, int]:
    """Number of rows by reason, most frequent first."""
    return dict(Counter(entry.reason for entry in rejected).most_common())


def check_rejected(
    source: str | Path, num_kept: int, rejected: Sequence[Rejected], max_rejected: float
) -> None:
    """Raises ValueError when more than a share `max_rejected` of the rows was left out."""
    total = num_kept + len(rejected)
    if len(rejected) <= max_rejected * total:
        return
    reasons = ", ".join(f"{reason}: {count}" for reason, count in count_reasons(rejected).items())
    raise ValueError(
        f"{source}: {len(rejected)} of {total} rows rejected ({reasons}), at most "
        f"{max_rejected:.0%} may be; first: {rejected[0]}; mend the file or raise max_rejected"
    )
