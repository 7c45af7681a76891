"""spec eval with sampling and a confidence threshold: a tiny target, a random drafter."""

import json
from pathlib import Path

import pytest
from toy_drafter import drafter

from spec.cli import main as cli
from spec.eval.sts import weights_digest
from spec.target.files import target_revision
from spec.target.tiny import make_tiny_target

SAMPLED = ("--temperature", "0.8", "--top-p", "0.9", "--top-k", "30", "--seed", "7")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("eval") / "target", steps=2)


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    return drafter(target, target.parent / "run" / "draft", confidence=True)


def run(*arguments: str | Path) -> int:
    """The exit code of `spec eval` on two prompts."""
    common = ("-p", "tiny", "--limit", "2", "--max-new-tokens", "8")
    try:
        cli.main(["eval", *common, *map(str, arguments)])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def report(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def test_sampling_and_threshold_reach_the_report(target: Path, draft: Path, tmp_path: Path) -> None:
    drafts = ("-d", draft, "-d", "ngram")
    # Confidence of a random head is near one half: its square is below, so one token is verified.
    assert run("-t", target, *drafts, "-o", tmp_path, *SAMPLED, "--threshold", "0.3") == 0
    found = report(tmp_path)
    said = [found[key] for key in ("temperature", "top_p", "top_k", "seed", "schedule")]
    assert said == [0.8, 0.9, 30, 7, "confidence threshold 0.3, raw"]
    group = found["groups"]["all"]
    assert 0 < group["num_drafted"] < 3 * group["num_rounds"]
    assert group["equal_to_plain"] is None
    [other] = found["comparisons"]
    assert (other["temperature"], other["schedule"]) == (0.8, None)


def test_the_thresholds_ends(target: Path, draft: Path, tmp_path: Path) -> None:
    for threshold, drafted in (("0", 3), ("1", 0)):
        assert run("-t", target, "-d", draft, "-o", tmp_path, "--threshold", threshold) == 0
        group = report(tmp_path)["groups"]["all"]
        assert group["num_drafted"] == drafted * group["num_rounds"]
        assert group["equal_to_plain"] == 1.0


def test_a_calibrated_drafter_is_cut_by_its_calibration(target: Path, tmp_path: Path) -> None:
    draft = drafter(target, tmp_path / "draft", confidence=True)
    (draft / "sts.json").write_text(json.dumps({"temperatures": [1.0, 1.0, 1.0]}))
    assert run("-t", target, "-d", draft, "-o", tmp_path, "--threshold", "0.5") == 0
    assert report(tmp_path)["schedule"] == "confidence threshold 0.5, calibrated"


def test_a_calibration_of_something_else_is_warned_of(
    target: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    draft = drafter(target, tmp_path / "draft", confidence=True)
    fit = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "draft_weights": weights_digest(draft)}
    for changes, warned in (
        ({}, None),
        ({"temperature": 0.0}, "temperature is 0.8, fitted at 0.0"),
        ({"draft_weights": "0123"}, "the drafter's weights have changed"),
    ):
        recwarn.clear()
        content = {"temperatures": [1.0, 1.0, 1.0], **fit, **changes}
        (draft / "sts.json").write_text(json.dumps(content))
        out = tmp_path / "out"
        assert run("-t", target, "-d", draft, "-o", out, *SAMPLED, "--threshold", "0.5") == 0
        said = [str(each.message) for each in recwarn if "sts.json" in str(each.message)]
        assert len(said) == (warned is not None)
        assert warned is None or warned in said[0]


def test_what_cannot_be_is_one_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = drafter(target, tmp_path / "draft", confidence=False)
    out = ("-t", target, "-o", tmp_path / "out")
    cases = [
        (("-d", without, "--threshold", "0.5"), "no confidence head"),
        (("-d", "ngram", "--threshold", "0.5"), "ngram has no confidence head"),
        (("-d", "ngram", "--top-k", "3"), "at temperature 0"),
        (("-d", "ngram", "--temperature", "1", "--top-p", "0"), "0 < top_p <= 1"),
    ]
    for arguments, message in cases:
        assert run(*out, *arguments) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1, shown
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_another_target_is_warned_of(
    target: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    draft = drafter(target, tmp_path / "draft", confidence=False)
    made_for = {"name": "another", "revision": "0123456789abcdef"}
    for stored, warned in (
        ({"target": {**made_for, "revision": target_revision(target)}}, False),
        ({"recipe": {}}, False),
        ({"target": made_for}, True),
    ):
        (draft / "spec.json").write_text(json.dumps(stored))
        assert run("-t", target, "-d", draft, "-o", tmp_path / "out") == 0
        assert [str(each.message).split(",")[0].split(" was ")[1] for each in recwarn] == (
            ["trained for another (0123456789abcdef)"] if warned else []
        )
