"""The check after the start: does the drafter that was loaded really draft?

An engine serves the right text with a drafter that accepts nothing. So a few greedy answers are
asked for, and the acceptance length is counted from their rounds: 1 + accepted / rounds. (The
engine's headline divides tokens by rounds and is off by the prefill's token and the last cut.)
"""

from dataclasses import dataclass
from typing import Any

from ..eval.acceptance import of_histogram, sum_histograms
from ..target.engine import Engine, EngineError, histogram_of
from .recipe import SmokeSection


@dataclass(frozen=True)
class SmokeResult:
    """Rounds by number of accepted drafts, over all prompts."""

    histogram: list[int]
    num_prompts: int
    without_round: tuple[str, ...] = ()  # prompts whose answer had no speculative round

    @property
    def num_rounds(self) -> int:
        return sum(self.histogram)

    @property
    def acceptance_length(self) -> float | None:
        """None where no round was counted."""
        return of_histogram(self.histogram)[0] if self.num_rounds else None

    def line(self, floor: float) -> str:
        """The result in one line, with the next step where it is too low."""
        length = self.acceptance_length
        if length is None:
            return (
                f"smoke check failed: {self.num_prompts} answers without one speculative round; is "
                "this a speculative server, and are the answers longer than a token?"
            )
        if self.without_round:
            return (
                f"smoke check failed: {len(self.without_round)} of {self.num_prompts} answers "
                f"without one speculative round, the first to {self.without_round[0]!r:.80}; see "
                "the engine's log, or ask in smoke.prompts for more than a token"
            )
        figure = (
            f"acceptance length {length:.3f} over {self.num_rounds} rounds of {self.num_prompts} "
            f"prompts, floor {floor:g}"
        )
        if length >= floor:
            return f"smoke check passed: {figure}"
        return (
            f"smoke check failed: {figure}; spec verify tells what the engine reads differently, "
            "or set smoke.floor lower"
        )

    def passed(self, floor: float) -> bool:
        """Every prompt drafted, and all together enough."""
        length = self.acceptance_length
        return length is not None and length >= floor and not self.without_round


def smoke(engine: Engine, section: SmokeSection, model: str) -> SmokeResult:
    """Ask every prompt, one after the other. Raises EngineError for a refusal."""
    histograms = [_ask(engine, prompt, section, model) for prompt in section.prompts]
    pairs = zip(section.prompts, histograms, strict=True)
    return SmokeResult(
        sum_histograms(histograms),
        len(section.prompts),
        tuple(prompt for prompt, each in pairs if not sum(each)),
    )


def _ask(engine: Engine, prompt: str, section: SmokeSection, model: str) -> list[int]:
    """The histogram of one greedy answer."""
    if not section.chat:
        greedy = {"temperature": 0.0, "max_new_tokens": section.max_new_tokens}
        body = {"text": prompt, "sampling_params": greedy}
        answer = engine.post("/generate", body, timeout=section.timeout)
        return histogram_of(_part(answer, "meta_info"))
    answer = engine.post(
        "/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": section.max_new_tokens,
            "return_spec_tokens_details": True,
        },
        timeout=section.timeout,
    )
    return histogram_of(_part(answer, "sglext", "spec_tokens_details"))


def _part(answer: Any, *keys: str) -> dict[str, Any]:
    """What stands under these keys, empty where nothing does. Raises EngineError for no mapping."""
    found = answer
    for key in keys:
        found = (found.get(key) or {}) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise EngineError(
            f"expected an answer with {'.'.join(keys)}, the engine says {answer!r:.200}"
        )
    return found
