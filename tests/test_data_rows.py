"""Files of rows: what is read, what is rejected, what is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from spec.data.rows import Row, read_rows, write_rows

GOOD = {"id": "a", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "tags": ["code"]}


def write_lines(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.zst"])
def test_rows_come_back_as_written(tmp_path: Path, name: str) -> None:
    rows = [Row("a", [5, 6, 7], [0, 1, 1], ("code", "é")), Row("b", [0], [0])]
    assert write_rows(tmp_path / "new" / name, rows) == 2
    file = read_rows(tmp_path / "new" / name, vocab_size=8)
    assert file.rows == rows and file.rejected == []
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [Row("old", [1], [1])])
    with pytest.raises(ValueError, match="row new: lengths differ"):
        write_rows(path, [Row("fine", [1], [1]), Row("new", [1, 2], [1])])
    assert [row.id for row in read_rows(path).rows] == ["old"]
    assert [found.name for found in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_token_id_log_supervises_its_outputs(tmp_path: Path) -> None:
    log = {"id": 7, "prompt_ids": [5, 6], "output_ids": [7, 2], "finish_reason": "stop", "tag": "x"}
    (row,) = read_rows(write_lines(tmp_path / "log.jsonl", [log])).rows
    assert row == Row("7", [5, 6, 7, 2], [0, 0, 1, 1], ("x",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss_mask": [0, 1]}, "lengths differ"),
        ({"loss_mask": [0, 1, 2]}, "loss_mask value other than 0 or 1"),
        ({"loss_mask": [0, 1, -1]}, "loss_mask value other than 0 or 1"),
        ({"loss_mask": [0, 1, True]}, "loss_mask value other than 0 or 1"),
        ({"loss_mask": [0, 1, 0.5]}, "loss_mask value other than 0 or 1"),
        ({"loss_mask": None}, "loss_mask is not a list of token ids"),
        ({"input_ids": [5, 6, -1]}, "negative token id"),
        ({"input_ids": [5, 6, 10]}, "token id beyond the vocabulary"),
        ({"input_ids": [5, 6, "7"]}, "token id is not an integer"),
        ({"input_ids": [5, 6, 7.0]}, "token id is not an integer"),
        ({"input_ids": [5, 6, None]}, "token id is not an integer"),
        ({"input_ids": [], "loss_mask": []}, "no tokens"),
        ({"input_ids": "567"}, "input_ids is not a list of token ids"),
        ({"tags": [1]}, "tags are not a list of strings"),
    ],
)
def test_a_bad_row_is_rejected_by_its_id(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    entries = [GOOD] * 9 + [{**GOOD, "id": "bad", **change}]
    file = read_rows(write_lines(tmp_path / "rows.jsonl", entries), vocab_size=10)
    assert len(file.rows) == 9
    assert [(bad.id, bad.reason) for bad in file.rejected] == [("bad", reason)]


def test_lines_that_are_no_objects_are_known_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(GOOD)] * 18 + ["", "{", "[1]"]))
    file = read_rows(path)
    assert len(file.rows) == 18
    assert [(bad.id, bad.reason) for bad in file.rejected] == [
        ("rows:20", "not JSON"),
        ("rows:21", "not an object"),
    ]


def test_too_many_bad_rows_fail_with_their_reasons(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [GOOD] * 8 + [{**GOOD, "loss_mask": [1]}, {}])
    with pytest.raises(ValueError, match=r"2 of 10 rows rejected .*lengths differ: 1.*at most 10%"):
        read_rows(path)
    assert len(read_rows(path, max_rejected=0.2).rows) == 8


def test_empty_and_missing_files_say_so(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="no rows"):
        read_rows(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")


def test_json_files_hold_a_list_or_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, GOOD], indent=1))
    assert len(read_rows(path).rows) == 2
    assert len(read_rows(write_lines(path, [GOOD, GOOD, GOOD])).rows) == 3


def test_parquet_refuses_columns_that_merged_their_keys(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist([GOOD]), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet").rows == [Row("a", [5, 6, 7], [0, 1, 1], ("code",))]
    merged = [{**GOOD, "tools": [{"a": 1}]}, {**GOOD, "tools": [{"b": 1}]}]
    pq.write_table(pa.Table.from_pylist(merged), tmp_path / "tools.parquet")
    with pytest.raises(ValueError, match="'tools' is nested"):
        read_rows(tmp_path / "tools.parquet")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "x", "turns": ["\\ud83d broken"]}', "not valid Unicode"),
        (b'{"id": "x", "turns": ["\xff"]}', "not valid Unicode"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_line_that_is_no_text_is_rejected_and_the_file_goes_on(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    good = b'{"input_ids": [1, 2], "loss_mask": [0, 1]}\n'
    path.write_bytes(b"\xef\xbb\xbf" + good * 10 + line + b"\n" + good * 10)
    read = read_rows(path)
    assert (len(read.rows), [bad.reason for bad in read.rejected]) == (20, [reason])
