"""The acceptance length of the smoke check, by worked numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spec.serve.recipe import SmokeSection
from spec.serve.smoke import SmokeResult, smoke
from spec.target.engine import Engine, EngineError
from spec.target.launch import Launch


class Talker(Engine):
    """An engine that never runs; its answers have these histograms, one after the other."""

    def __init__(self, *histograms: list[int]) -> None:
        super().__init__(Launch("python", ()), log=Path("unused"))
        self.histograms = iter(histograms)
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 600.0) -> Any:
        self.asked.append((path, body))
        details = {"spec_correct_drafts_histogram": next(self.histograms)}
        if path == "/generate":
            return {"meta_info": details}
        return {"sglext": {"spec_tokens_details": details}}


def section(*prompts: str, chat: bool = True) -> SmokeSection:
    return SmokeSection(
        floor=2.0, prompts=list(prompts), chat=chat, max_new_tokens=32, timeout=60.0
    )


def test_one_plus_accepted_over_rounds() -> None:
    """Rounds that kept 3, 2, 1 and 0: six accepted in four rounds."""
    result = SmokeResult([1, 1, 1, 1], 1)
    assert (result.num_rounds, result.acceptance_length) == (4, 2.5)
    assert result.passed(2.5) and not result.passed(2.51)
    assert result.line(2.5) == (
        "smoke check passed: acceptance length 2.500 over 4 rounds of 1 prompts, floor 2.5"
    )
    assert "floor 3; spec verify tells" in result.line(3)


def test_no_round_is_a_failure() -> None:
    nothing = SmokeResult([], 2)
    assert nothing.acceptance_length is None and not nothing.passed(1.0)
    assert "2 answers without one speculative round" in nothing.line(1.0)


def test_sums_over_prompts_not_means_of_means() -> None:
    """Three rounds that kept nothing, one that kept four: 1 + 4 / 4, not the mean of 1 and 5."""
    engine = Talker([3], [0, 0, 0, 0, 1])
    result = smoke(engine, section("one", "two"), "name")
    assert result.histogram == [3, 0, 0, 0, 1]
    assert result.acceptance_length == 2.0
    path, body = engine.asked[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("name", 0.0, 32)
    assert body["return_spec_tokens_details"] is True


def test_plain_text() -> None:
    engine = Talker([1, 1])
    assert smoke(engine, section("one", chat=False), "name").acceptance_length == 1.5
    path, body = engine.asked[0]
    assert (path, body["text"]) == ("/generate", "one")
    assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 32}


@pytest.mark.parametrize("answer", [{}, {"sglext": None}, {"sglext": {}}])
def test_an_engine_without_a_drafter(answer: dict[str, Any]) -> None:
    engine = Talker()
    engine.post = lambda *_args, **_options: answer  # pyright: ignore[reportAttributeAccessIssue]
    assert smoke(engine, section("one"), "name").acceptance_length is None


def test_every_prompt_needs_a_round() -> None:
    """Far above the floor by one prompt alone; the third had rounds that kept nothing."""
    result = smoke(
        Talker([0, 0, 0, 9], [], [1], [0, 0]), section("one", "two", "three", "four"), "name"
    )
    assert result.acceptance_length == 3.7 and result.without_round == ("two", "four")
    assert not result.passed(2.0)
    assert "2 of 4 answers without one speculative round, the first to 'two'" in result.line(2.0)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("answer", [[1], "no", {"meta_info": [1], "sglext": [1]}])
def test_an_answer_of_another_kind(answer: Any, chat: bool) -> None:
    engine = Talker()
    engine.post = lambda *_args, **_options: answer  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EngineError, match="expected an answer with .*, the engine says"):
        smoke(engine, section("one", chat=chat), "name")


@pytest.mark.parametrize("histogram", [[-3, 0, 5], [1.5], {"1": 2}])
def test_what_is_no_histogram(histogram: Any) -> None:
    with pytest.raises(EngineError, match="expected a histogram of accepted drafts"):
        smoke(Talker(histogram), section("one"), "name")
