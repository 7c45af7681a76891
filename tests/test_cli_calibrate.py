"""spec calibrate, then spec plan verify on what it wrote: a tiny target, a random drafter."""

import json
from pathlib import Path

import pytest
from toy_drafter import drafter
from typer.testing import CliRunner

from spec.cli.main import app
from spec.eval.sts import weights_digest
from spec.target.tiny import make_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("calibrate") / "target", steps=2)


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_calibrate_and_plan(target: Path, tmp_path: Path) -> None:
    draft = drafter(target, tmp_path / "run" / "draft", confidence=True)
    options = ("-p", "tiny", "--limit", "6", "--max-new-tokens", "8", "--max-batch-tokens", "4")
    options += ("--force",)  # few rounds
    shown = run("calibrate", "-t", target, "-d", draft, *options)
    assert "requests, measured on" in shown
    sts, sps = (json.loads((draft / name).read_text()) for name in ("sts.json", "sps.json"))
    assert (len(sts["temperatures"]), sts["dataset"]) == (3, "tiny")
    assert sps["sample_batch_tokens"] == [1, 2, 3, 4]
    report = json.loads((draft / "calibration" / "calibration.json").read_text())
    assert report["draft"] == "run/draft"
    assert str(tmp_path) not in json.dumps([report, sts, sps])
    run(
        *("plan", "verify", "--survival", draft / "calibration" / "calibration.json"),
        *("--sps", draft / "sps.json", "--concurrency", "1,2", "-o", tmp_path / "plan"),
    )
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert list(plan["policies"]) == ["1", "all", "scheduler"]


def test_without_timing_and_as_json(target: Path, tmp_path: Path) -> None:
    draft = drafter(target, tmp_path / "draft", confidence=True)
    options = ("-p", "tiny", "--limit", "4", "--max-new-tokens", "6", "--temperature", "1")
    options += ("--top-p", "0.9", "--top-k", "30", "--force")
    out = tmp_path / "elsewhere"
    shown = run(
        "calibrate", "-t", target, "-d", draft, *options, "--no-profile", "-o", out, "--json"
    )
    told = json.loads(shown)
    sampling = [told[key] for key in ("temperature", "top_p", "top_k")]
    assert sampling == [1.0, 0.9, 30] and "rounds" not in told
    stored = json.loads((draft / "sts.json").read_text())
    assert [stored[key] for key in ("temperature", "top_p", "top_k")] == sampling
    assert stored["draft_weights"] == told["draft_weights"] == weights_digest(draft)
    assert not (draft / "sps.json").exists() and not (draft / "calibration").exists()
    assert (out / "calibration.json").exists()


def test_few_rounds_leave_sts_json_alone(
    target: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    draft = drafter(target, tmp_path / "draft", confidence=True)
    options = ("-p", "tiny", "--limit", "4", "--max-new-tokens", "6", "--no-profile")
    result = CliRunner().invoke(app, ["calibrate", "-t", str(target), "-d", str(draft), *options])
    assert result.exit_code == 0, result.exception
    assert "draft: 4 requests to decode" in result.stderr
    assert not (draft / "sts.json").exists() and "wrote nothing in" in result.stdout
    earlier = json.dumps({"temperatures": [1.0, 2.0, 3.0]})
    (draft / "sts.json").write_text(earlier)
    run("calibrate", "-t", target, "-d", draft, *options)
    assert (draft / "sts.json").read_text() == earlier
    said = [str(each.message) for each in recwarn if "sts.json" in str(each.message)]
    assert [line.split(":")[0] for line in said] == [
        "wrote no sts.json",
        "kept the earlier sts.json",
    ]
    assert "expected at least 500" in said[1] and "--force" in said[1]
    assert (draft / "calibration" / "calibration.json").exists()
    run("calibrate", "-t", target, "-d", draft, *options, "--force")
    assert (draft / "sts.json").read_text() != earlier


def test_no_confidence_head_is_one_clear_line(target: Path, tmp_path: Path) -> None:
    draft = drafter(target, tmp_path / "draft", confidence=False)
    result = CliRunner().invoke(
        app, ["calibrate", "-t", str(target), "-d", str(draft), "-p", "tiny"]
    )
    assert isinstance(result.exception, ValueError)
    assert "has no confidence head" in str(result.exception)
    assert not (draft / "sts.json").exists()
