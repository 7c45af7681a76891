"""The gate without an engine: what it refuses before it starts, and what it never writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from spec.export import engine_runs
from spec.export.engine_runs import Ours
from spec.export.findings import Finding
from spec.export.plan import Plan
from spec.export.verify import _facts, _few, verify
from spec.target.engine import Answer, EngineError


def plan(tmp_path: Path, **changes: Any) -> Plan:
    options = {"python": "/bin/sh", "logs": tmp_path / "logs", **changes}
    return Plan(tmp_path / "draft", "draft", str(tmp_path / "target"), **options)


def never(_line: str) -> None:
    raise AssertionError("nothing was to be measured")


@pytest.mark.parametrize("tolerance", [-0.1, 0.5, float("inf"), float("nan")])
def test_a_tolerance_that_lets_all_pass_is_refused(tmp_path: Path, tolerance: float) -> None:
    with pytest.raises(ValueError, match=r"tolerance is .*; expected 0 to 0\.2"):
        verify(plan(tmp_path, tolerance=tolerance), [], tell=never)


def test_an_absent_engine_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such interpreter"):
        verify(plan(tmp_path, python="/no/python"), [], tell=never)


def test_a_place_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        verify(plan(tmp_path, logs=tmp_path / "file" / "logs"), [], tell=never)


def ours(count: int, **skipped: int) -> Ours:
    facts: dict[str, Any] = {"algorithm": "dflash", "quantized": False, "probed": None}
    names: dict[str, Any] = {"target_name": "t", "target_path": Path()}
    rest: dict[str, Any] = {"decoded": [], "features": [], "layer_ids": (1,), **facts, **names}
    return Ours(prompts=[[1]] * count, num_skipped=skipped, num_draft_tokens=3, **rest)


def test_prompts_that_were_left_out_are_counted() -> None:
    def what(found: list[Finding]) -> str:
        (one,) = found
        assert one.severity == "warning"
        return one.what

    assert _few(ours(40)) == []
    assert "39 prompts were decoded, 1 left out {'long': 1}" in what(_few(ours(39, long=1)))
    assert "3 prompts were decoded" in what(_few(ours(3)))
    with pytest.raises(ValueError, match="1 prompt to verify with, 5 left out"):
        _few(ours(1, long=5))


def test_keys_of_the_engine_stay_out_of_the_report(tmp_path: Path) -> None:
    words = ("--api-key", "abc", "--tp-size", "2")
    shown = _facts(plan(tmp_path, engine_arguments=words))["engine_arguments"]
    assert shown == ["--api-key", "***", "--tp-size", "2"]


@pytest.mark.parametrize("meta", [{}, {"hidden_states": None}, {"hidden_states": [["x"]]}])
def test_hidden_states_of_another_shape_are_the_engines_fault(meta: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="expected hidden_states"):
        engine_runs._features(Answer([1], meta))


def test_rows_of_hidden_states_are_a_matrix() -> None:
    rows = engine_runs._features(Answer([1], {"hidden_states": [[[1.0, 2.0], [3.0, 4.0]], [5.0]]}))
    assert torch.equal(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
