"""spec quantize as a user runs it: what it prints, its exit codes, what it leaves on the disk."""

import json
from pathlib import Path

import pytest
import torch
from toy_drafter import drafter
from typer.testing import CliRunner, Result

from spec.cli.main import app
from spec.dflash.fp8 import Quantization
from spec.recipes.algorithms import load_draft
from spec.target.tiny import make_tiny_target

MEASURED = ("-p", "tiny", "--limit", "3", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("quantize") / "target", steps=2)


@pytest.fixture
def draft(target: Path, tmp_path: Path) -> Path:
    return drafter(target, tmp_path / "run" / "draft", confidence=True)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_quantize_then_use_it(target: Path, draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "fp8"
    options = ("-d", draft, "--to", "fp8", "-t", target, *MEASURED, "--max-drop", "100")
    result = run(*options, "-o", out)
    assert result.exit_code == 0, result.output
    for words in ("acceptance length  ", "change  ", "Markov head", f"wrote {out}"):
        assert words in result.stdout
    files = {"config.json", "model.safetensors", "report.json", "spec.json"}
    assert files <= {path.name for path in out.iterdir()}
    assert load_draft(out, dtype=torch.float32).config.quantization == Quantization("channel")
    report = tmp_path / "report"
    shown = CliRunner().invoke(
        app, ["eval", "-t", str(target), "-d", str(out), *MEASURED, "-o", str(report)]
    )
    assert shown.exit_code == 0, shown.output
    own, other = (
        json.loads((folder / "report.json").read_text())["groups"]["all"]
        for folder in (out, report)
    )
    assert own["survival_at"] == other["survival_at"]
    again = run(*options, "-o", out)
    assert isinstance(again.exception, ValueError) and "already exists" in str(again.exception)


def test_json_and_what_is_kept(target: Path, draft: Path, tmp_path: Path) -> None:
    options = ("--keep", "attention", "--keep", "qkv", "--max-drop", "100", "--json")
    result = run(
        "-d", draft, "--to", "fp8", "-o", tmp_path / "fp8", "-t", target, *MEASURED, *options
    )
    told = json.loads(result.stdout)
    assert told["kept"] == ["qkv", "o"] and 0.5 < told["size_ratio"] < 1
    assert told["num_requests"] == 3 and len(told["relative_change_ci95"]) == 2
    stored = load_draft(tmp_path / "fp8").config.quantization
    assert stored == Quantization("channel", ("qkv", "o"))


def test_a_drop_is_exit_code_1(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "spec.export.fp8_acceptance.relative_change", lambda *_: (-0.02, (-0.03, -0.01))
    )
    result = run("-d", draft, "--to", "fp8", "-o", tmp_path / "fp8", "-t", target, *MEASURED)
    assert result.exit_code == 1
    assert "fell by 2.00%" in result.stderr and "--max-drop allows 1.00%" in result.stderr
    assert "change  " in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_without_prompts_it_has_to_be_asked_for(draft: Path, tmp_path: Path) -> None:
    result = run("-d", draft, "--to", "fp8", "-o", tmp_path / "fp8")
    assert isinstance(result.exception, ValueError) and "--no-measure" in str(result.exception)
    result = run("-d", draft, "--to", "fp8", "-o", tmp_path / "fp8", "--no-measure")
    assert result.exit_code == 0 and "not measured" in result.stdout
    said = json.loads((tmp_path / "fp8" / "spec.json").read_text())
    assert said["quantization"]["measured"] is False
    assert not (tmp_path / "fp8" / "report.json").exists()


def test_what_no_measure_would_ignore(draft: Path, target: Path, tmp_path: Path) -> None:
    for ignored in (("-t", target), ("-p", "tiny")):
        result = run("-d", draft, "--to", "fp8", "-o", tmp_path / "fp8", "--no-measure", *ignored)
        assert isinstance(result.exception, ValueError)
        assert "ignored beside --no-measure" in str(result.exception)
    assert not (tmp_path / "fp8").exists()


def test_one_request_tells_nothing(draft: Path, target: Path, tmp_path: Path) -> None:
    options = ("-p", "tiny", "--limit", "1", "--max-new-tokens", "4", "--max-drop", "100")
    result = run("-d", draft, "--to", "fp8", "-o", tmp_path / "fp8", "-t", target, *options)
    assert isinstance(result.exception, ValueError)
    assert "measured on 1 request" in str(result.exception)
    assert not (tmp_path / "fp8").exists()


def test_an_unreadable_record_is_not_dropped_in_silence(draft: Path, tmp_path: Path) -> None:
    (draft / "spec.json").write_text("{broken")
    with pytest.warns(UserWarning, match=r"spec\.json is no JSON .* how it was trained"):
        result = run("-d", draft, "--to", "fp8", "-o", tmp_path / "fp8", "--no-measure")
    assert result.exit_code == 0


def test_blocks_of_narrow_widths_are_refused(draft: Path, tmp_path: Path) -> None:
    options = ("-o", tmp_path / "fp8", "--no-measure", "--scheme", "block")
    result = run("-d", draft, "--to", "fp8", *options)
    assert isinstance(result.exception, ValueError)
    assert "hidden_size is 96" in str(result.exception)
    assert "use the scheme channel" in str(result.exception)
