"""What training rows are, by kind and size."""

from pathlib import Path

import pytest

from spec.data.manifest import Manifest
from spec.data.rows import Row
from spec.data.sources import TagSize, describe_source, stated_temperatures


def row(id: str, prompt: int, answer: int, *tags: str) -> Row:
    return Row(id, [1] * (prompt + answer), [0] * prompt + [1] * answer, tags)


def test_sizes_by_kind_and_tag() -> None:
    rows = [row("a", 3, 2, "prose"), row("b", 1, 7, "code", "long"), row("c", 2, 1, "code")]
    source = describe_source("rows", ["logs/a.jsonl", "b.jsonl.zst"], rows)
    assert source.names == ("a.jsonl", "b.jsonl.zst")
    assert (source.num_rows, source.num_tokens, source.num_supervised) == (3, 16, 10)
    assert source.longest_row == 8
    # Most supervised tokens first; a row counts for each of its tags.
    assert list(source.tags.items()) == [
        ("code", TagSize(2, 8)),
        ("long", TagSize(1, 7)),
        ("prose", TagSize(1, 2)),
    ]


def manifest(path: Path, **options: float) -> None:
    Manifest("t", "0", None, "chat template", options=options).save(path)


def test_temperatures_come_from_the_manifests_beside_the_rows(tmp_path: Path) -> None:
    manifest(tmp_path / "a.manifest.json", temperature=1.0)
    manifest(tmp_path / "b.manifest.json", temperature=0)
    manifest(tmp_path / "c.manifest.json")
    files = [tmp_path / f"{name}.jsonl" for name in "abcd"]
    assert stated_temperatures(files[:2]) == (0.0, 1.0)
    assert stated_temperatures(files[:1]) == (1.0,)


@pytest.mark.parametrize("name", ["c", "d", "e"])
def test_one_file_that_says_nothing_leaves_all_unknown(tmp_path: Path, name: str) -> None:
    manifest(tmp_path / "a.manifest.json", temperature=1.0)
    manifest(tmp_path / "c.manifest.json")
    (tmp_path / "e.manifest.json").write_text("{}")
    assert stated_temperatures([tmp_path / "a.jsonl", tmp_path / f"{name}.jsonl"]) is None
    assert stated_temperatures([]) is None
