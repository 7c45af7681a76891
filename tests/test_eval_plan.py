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
    survivals = survival(ability + rng.normal(0, 0.7, size=(num, slots)))
    # One draw a round: slot k is accepted where it lies below the survival of the first k.
    accepted = (rng.random((num, 1)) < survivals).sum(axis=1)
    return Survivals(survivals, "draft", "target", accepted)


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


def test_tokens_are_what_was_accepted_however_sure_the_drafter_was() -> None:
    # Two kinds of rounds: sure of all and wrong, unsure and right. One token costs nothing.
    boast, doubt = [0.9, 0.9, 0.9, 0.9], [0.2, 0.1, 0.1, 0.1]
    free = CostTable((1, 100), (10.0, 10.0))
    believed = np.array([boast] * 30 + [doubt] * 30)
    accepted = np.array([1] * 30 + [4] * 30)
    for part, kept in ((slice(0, 30), (1, 1, 1)), (slice(30, 60), (1, 3, 4))):
        survivals = Survivals(believed[part], "d", "t", accepted[part])
        plan = plan_verification(survivals, free, [2])
        assert plan["tokens_from"] == "num_accepted"
        for name, tokens in zip(("1", "3", "all"), kept, strict=True):
            # Two requests, each with a token of the target's own; ten steps a second.
            figures = plan["policies"][name]
            assert figures["tokens_per_step"] == [2 * (1 + tokens)]
            assert figures["tokens_per_second"] == [pytest.approx(20 * (1 + tokens))]
    # Dear tokens: the scheduler takes only likely ones, and is paid by what came of them.
    dear = CostTable((1, 2), (10.0, 5.5))
    alike = Survivals(np.array([boast, boast]), "d", "t", np.array([0, 0]))
    scheduler = plan_verification(alike, dear, [1])["policies"]["scheduler"]
    assert scheduler["verified_per_step"][0] > 0 and scheduler["tokens_per_step"] == [1.0]


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


def stored(name: str, **changes: Any) -> dict[str, Any]:
    """A calibration.json of one round, or a report.json of two rounds with three drafts each."""
    contents: dict[str, dict[str, Any]] = {
        "calibration": {
            "draft": "d",
            "target": "t",
            "temperatures": [2.0, 1.0],
            "rounds": {"confidence": [[2 * logit(0.75), 0.0]], "num_accepted": [1]},
        },
        "report": {
            "draft": "d",
            "num_draft_tokens": 3,
            "groups": {"all": {"survival_at": [0.5, 0.5, 0.0], "num_rounds": 2, "num_drafted": 6}},
        },
    }
    return {**contents[name], **changes}


def test_survivals_come_from_either_report(tmp_path: Path) -> None:
    path = tmp_path / "stored.json"
    for name, expected, accepted in (
        ("calibration", [0.75, 0.375], [1]),
        ("report", [0.5, 0.5, 0.0], None),
    ):
        path.write_text(json.dumps(stored(name)))
        found = read_survivals(path)
        assert found.rounds[0] == pytest.approx(expected)
        assert found.draft == "d"
        counts = found.num_accepted
        assert (None if counts is None else counts.tolist()) == accepted


def test_survivals_of_chosen_rounds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    group = {"survival_at": [0.9, 0.9, 0.9], "num_rounds": 2, "num_drafted": 5}
    path.write_text(json.dumps(stored("report", groups={"all": group})))
    with pytest.raises(ValueError, match="drafted 5 of 6 tokens.*measure without --threshold"):
        read_survivals(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "JSON list"),
        ('{"temperatures": [1.0]}', "neither"),
        (stored("calibration", rounds={"confidence": [[0.0, 0.0]]}), "lacks 'num_accepted'"),
        (stored("calibration", rounds=[]), "other types"),
        (stored("calibration", rounds={"confidence": [["a"]], "num_accepted": [0]}), "convert"),
        (stored("calibration", rounds={"confidence": [[0], [0, 1]], "num_accepted": []}), "array"),
        (stored("calibration", temperatures=[1.0]), "1 temperatures for 2 slots"),
        (stored("calibration", temperatures=[1.0, 0.0]), "positive numbers"),
        (stored("calibration", temperatures=[1.0, -2.0]), "positive numbers"),
        (stored("calibration", temperatures=2.0), "positive numbers"),
        (stored("calibration", temperatures=[True, 1.0]), "positive numbers"),
        (stored("report", groups={}), "lacks 'all'"),
        (stored("report", groups=[]), "other types"),
        (stored("report", groups={"all": {"survival_at": [0.5]}}), "lacks 'num_drafted'"),
        *(
            (
                stored(
                    "report",
                    groups={"all": {"survival_at": curve, "num_rounds": 2, "num_drafted": 6}},
                ),
                message,
            )
            for curve, message in (
                ([None] * 3, "no round"),
                ([0.5, 0.6, 0.1], "never rise"),
                ([0.5, None, 0.1], "never rise"),
                ([1.5, 0.5, 0.1], "from 0 to 1"),
            )
        ),
    ],
)
def test_what_holds_no_survivals_is_one_line_with_the_path(
    content: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        read_survivals(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_the_command_writes_a_plan_and_marks_what_was_not_timed(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(
        json.dumps(
            {
                "draft": "d",
                "target": "t",
                "num_draft_tokens": 2,
                "groups": {"all": {"survival_at": [0.8, 0.5], "num_rounds": 10, "num_drafted": 20}},
            }
        )
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
