"""Plans from recorded rounds: pruning by hand, throughput in closed form, the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spec.cli.main import app
from spec.dspark.calibration import survival
from spec.dspark.schedule import CostTable
from spec.eval.plan import (
    Survivals,
    plan_verification,
    pruning_curve,
    read_survivals,
    write_plan,
)

LOAD = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def table() -> CostTable:
    """30 ms a step, and more for every token once 64 keep the machine busy."""
    tokens = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
    seconds = [0.03 + 0.0001 * n + 0.0008 * max(0, n - 64) for n in tokens]
    return CostTable(tokens, tuple(1 / s for s in seconds))


def rounds(num: int, slots: int) -> Survivals:
    rng = np.random.default_rng(0)
    ability = rng.normal(1.0, 1.5, size=(num, 1))  # some texts are easy, others not
    return Survivals(survival(ability + rng.normal(0, 0.7, size=(num, slots))), "draft", "target")


def test_pruning_by_hand() -> None:
    confidence = np.array([[logit(0.9), logit(0.5)], [logit(0.6), logit(0.9)]])
    # Survivals: .9, .45 and .6, .54; two and zero tokens were accepted.
    rows = pruning_curve(confidence, [2, 0], [0.0, 0.5, 0.7, 0.95])
    assert [row["verified"] for row in rows] == [2.0, 1.5, 0.5, 0.0]
    assert [row["acceptance_rate"] for row in rows] == [0.5, pytest.approx(1 / 3), 1.0, None]
    assert [row["acceptance_length"] for row in rows] == [2.0, 1.5, 1.5, 1.0]
    # Temperature 10 at the second slot: sigmoid(0) stays one half, .9 falls to .555.
    calm = pruning_curve(confidence, [2, 0], [0.5], [1.0, 10.0])
    assert calm[0]["verified"] == 1.0


def test_throughput_of_fixed_lengths_in_closed_form() -> None:
    alike = Survivals(np.array([[0.8, 0.5, 0.2, 0.1, 0.1, 0.1]]), "d", "t")
    plan = plan_verification(alike, CostTable((1, 101), (10.0, 1 / 1.1)), [2, 10])
    # A step of n tokens takes 0.09 + 0.01 n seconds.
    assert list(plan["policies"]) == ["1", "3", "5", "all", "scheduler"]
    for name, length, expected in (("1", 1, 1.8), ("3", 3, 2.5), ("all", 6, 2.8)):
        figures = plan["policies"][name]
        for i, requests in enumerate((2, 10)):
            seconds = 0.09 + 0.01 * requests * (1 + length)
            assert figures["tokens_per_second"][i] == pytest.approx(requests * expected / seconds)
            assert figures["verified_per_step"][i] == requests * length
            assert figures["tokens_per_step"][i] == pytest.approx(requests * expected)
    # Two requests: 2/.11, then +.8 a slot: 2.8/.12, 3.6/.13 = 27.7; +.5: 4.1/.14 = 29.3, 4.6/.15 =
    # 30.7; +.2: 4.8/.16 = 30: stop with two slots each.
    assert plan["policies"]["scheduler"]["verified_per_step"][0] == 4


@pytest.mark.parametrize(
    "survivals", [rounds(500, 7), Survivals(rounds(500, 7).rounds.mean(0)[None], "", "")]
)
def test_the_scheduler_is_as_good_as_every_fixed_length(survivals: Survivals) -> None:
    policies = plan_verification(survivals, table(), LOAD)["policies"]
    scheduler = np.array(policies.pop("scheduler")["tokens_per_second"])
    for figures in policies.values():
        assert (scheduler >= 0.999 * np.array(figures["tokens_per_second"])).all()
    # And better than each at some load.
    assert all(
        (scheduler > 1.03 * np.array(f["tokens_per_second"])).any() for f in policies.values()
    )


def test_verification_shrinks_as_the_load_grows() -> None:
    verified = plan_verification(rounds(500, 7), table(), LOAD)["policies"]["scheduler"][
        "verified_per_step"
    ]
    shares = np.array(verified) / LOAD
    assert shares[0] > 6 and shares[-1] < 3
    assert (np.diff(shares) < 0.1).all()


def test_the_same_plan_twice() -> None:
    assert plan_verification(rounds(50, 4), table(), [4]) == plan_verification(
        rounds(50, 4), table(), [4]
    )


def test_survivals_come_from_either_report(tmp_path: Path) -> None:
    contents: dict[str, Any] = {
        "calibration": {
            "draft": "d",
            "target": "t",
            "temperatures": [2.0, 1.0],
            "rounds": {"confidence": [[2 * logit(0.75), 0.0]], "num_accepted": [1]},
        },
        "report": {"draft": "d", "groups": {"all": {"survival_at": [0.5, 0.6, None]}}},
    }
    for name, expected in (("calibration", [0.75, 0.375]), ("report", [0.5, 0.5, 0.0])):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(contents[name]))
        found = read_survivals(path)
        assert found.rounds[0] == pytest.approx(expected)
        assert found.draft == "d"
    for content, message in (
        ([], "neither"),
        ({"temperatures": [1.0]}, "neither"),
        ({"groups": {"all": {"survival_at": [None]}}}, "no round"),
    ):
        path = tmp_path / "other.json"
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            read_survivals(path)


def test_the_command_writes_a_plan_and_marks_what_was_not_timed(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(
        json.dumps({"draft": "d", "target": "t", "groups": {"all": {"survival_at": [0.8, 0.5]}}})
    )
    small = CostTable((1, 8), (20.0, 10.0))
    (tmp_path / "sps.json").write_text(json.dumps(small.to_json()))
    arguments = ["plan", "verify", "--survival", str(tmp_path / "report.json")]
    arguments += ["--sps", str(tmp_path / "sps.json"), "-o", str(tmp_path / "plan")]
    result = CliRunner().invoke(app, [*arguments, "--concurrency", "1,2,4"])
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["concurrency"] == [1, 2, 4]
    assert (tmp_path / "plan" / "plan.png").read_bytes()[:4] == b"\x89PNG"
    rows = {line.split()[0]: line for line in result.output.splitlines()}
    # Two tokens each: 3, 6 and 12 tokens, of which 8 were timed.
    assert rows["4"].endswith("*") and not rows["2"].endswith("*")
    shown = CliRunner().invoke(app, [*arguments, "--concurrency", "1", "--json"])
    assert json.loads(shown.stdout)["concurrency"] == [1]
    wrong = CliRunner().invoke(app, [*arguments, "--concurrency", "1,x"])
    assert isinstance(wrong.exception, ValueError)
    with pytest.raises(ValueError, match="from 1 on"):
        plan_verification(rounds(3, 2), table(), [0])


def test_a_plan_of_idle_verification_can_be_drawn(tmp_path: Path) -> None:
    dear = CostTable((1, 2), (10.0, 1.0))
    plan = plan_verification(rounds(20, 2), dear, [1, 2])
    assert plan["policies"]["scheduler"]["verified_per_step"] == [0.0, 0.0]
    assert write_plan(plan, tmp_path).name == "plan.json"
