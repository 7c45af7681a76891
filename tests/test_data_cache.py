"""The feature cache: what goes in comes out, sizes are as announced, a lost shard costs time."""

from pathlib import Path

import pytest
import torch

from spec.data import cache
from spec.data.cache import CacheReader, CacheWriter, check_disk, estimate_bytes


def row(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    expected = torch.randn(length, 8, generator=g).bfloat16()
    expected[: length // 2] = 0  # the prompt teaches nothing
    return torch.randn(length, 16, generator=g).bfloat16(), expected


def test_rows_come_back_padded_to_their_tokens(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path, "part-0", "bfloat16", "expected")
    rows = {f"a/{n}": row(n, n) for n in (3, 7)}
    for name, (context, expected) in rows.items():
        writer.add(name, context, expected)
    writer.flush()
    reader = CacheReader(tmp_path, "expected")
    for name, (context, expected) in rows.items():
        assert name in reader
        read = reader.read(name, len(context) + 1)  # the row's last token was never fed
        assert read is not None
        assert torch.equal(read.context[:-1], context)
        assert not read.context[-1].any()
        assert read.teacher is not None
        assert torch.equal(read.teacher[:-1], expected)
        cut = reader.read(name, 2)
        assert cut is not None and cut.teacher is not None
        assert torch.equal(cut.context, context[:2])
        assert torch.equal(cut.teacher, expected[:2])
    assert "b" not in reader


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 6e4])
def test_float8_keeps_relative_precision_and_zero(tmp_path: Path, scale: float) -> None:
    context = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * scale
    writer = CacheWriter(tmp_path, "part-0", "float8")
    writer.add("a", context, None)
    writer.flush()
    read = CacheReader(tmp_path).read("a", 5)
    assert read is not None and read.teacher is None
    largest = context.abs().amax(1, keepdim=True)
    assert read.context.isfinite().all()
    assert ((read.context.float() - context).abs() <= 0.07 * largest).all()
    assert scale > 0 or not read.context.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_absent_and_counted(
    tmp_path: Path, dtype: str, value: float
) -> None:
    writer = CacheWriter(tmp_path, "part-0", dtype, "expected")
    for name in ("good", "context", "teacher"):
        context, expected = row(6, 1)
        part = {"good": None, "context": context, "teacher": expected}[name]
        if part is not None:
            part[4, 3] = value
        writer.add(name, context, expected)
    writer.flush()
    reader = CacheReader(tmp_path, "expected")
    assert reader.read("good", 7) is not None
    with pytest.warns(UserWarning, match="row 'context' holds values that are not finite"):
        assert reader.read("context", 7) is None
    assert reader.read("teacher", 7) is None  # counted without another line
    assert [name in reader for name in ("good", "context", "teacher")] == [True, False, False]
    assert reader.num_broken == 2


def test_shards_are_numbered_on_and_a_broken_one_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SHARD_BYTES", 100)
    for names in (("a", "b"), ("c",)):  # a second writer goes on, as after a restart
        writer = CacheWriter(tmp_path, "part-0", "bfloat16", "last")
        for name in names:
            writer.add(name, *row(4, 0))
        writer.flush()
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 3
    shards[0].write_bytes(shards[0].read_bytes()[:40])
    reader = CacheReader(tmp_path)
    assert [name in reader for name in ("a", "b", "c")] == [False, True, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_the_announced_size_is_the_size(tmp_path: Path, dtype: str) -> None:
    writer = CacheWriter(tmp_path, "part-0", dtype, "last")
    context, expected = torch.randn(2000, 64), torch.randn(2000, 16)
    writer.add("a", context, expected)
    writer.flush()
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    announced = estimate_bytes(2000, 64, 16, dtype, soft=True)
    assert size == pytest.approx(announced, rel=0.01)


def test_a_full_disk_is_noticed_before_the_first_byte(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.features=recompute"):
        check_disk(tmp_path / "features", 10**18)
    check_disk(tmp_path / "features", 10)
