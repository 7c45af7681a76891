"""Calibration end to end with a drafter of known confidence, its files, and the timed steps."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spec.data.prompts import Prompt
from spec.dflash.draft import Choose, Proposal
from spec.dspark.calibration import read_sts
from spec.dspark.schedule import read_cost_table
from spec.eval.calibrate import (
    Calibration,
    calibrate,
    encode_prompts,
    measure_calibration,
    record_rounds,
    split_requests,
    write_calibration,
)
from spec.eval.decode import Decoded, speculate
from spec.eval.ngram import NgramDrafter
from spec.eval.profile import ladder, non_decreasing, profile, write_cost_table
from spec.eval.sts import write_sts
from spec.target.generate import generate
from spec.target.model import Target
from spec.target.sampling import Sampling

VOCABULARY = 61
SLOTS = 3
FACTOR = 4.0  # by which the drafter below exaggerates
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def target() -> Target:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w2"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.mul_(10.0 if weight.dim() > 1 else 1.0)
    return Target.of(model, tokenizer, name="tiny")


def prompts(num: int, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    texts = [" ".join(f"w{draw.randrange(3, VOCABULARY)}" for _ in range(6)) for _ in range(num)]
    return [Prompt(f"{i}", [{"role": "user", "content": t}], "a") for i, t in enumerate(texts)]


class Boaster:
    """Knows the target's answers, spoils slots by chance, and is FACTOR times too sure of them."""

    algorithm = "boaster"
    target_layer_ids: tuple[int, ...] | None = None
    num_draft_tokens = SLOTS

    def __init__(self, target: Target, *known: Sequence[Prompt]) -> None:
        self.random = random.Random(0)
        self.answers: dict[int, list[int]] = {}
        self.given: dict[int, int] = {}  # tokens of the answer so far
        ids, _ = encode_prompts(target, [p for some in known for p in some], NEW_TOKENS + SLOTS)
        answers = generate(
            target, ids, max_new_tokens=NEW_TOKENS + SLOTS, batch_size=32, stop_token_ids=()
        )
        self.known = {tuple(i): a.output_ids for i, a in zip(ids, answers, strict=True)}

    def allocate(self, num_slots: int, max_length: int) -> None: ...

    def begin(self, slot: int, prompt_ids: Sequence[int]) -> None:
        self.answers[slot] = self.known[tuple(prompt_ids)]
        self.given[slot] = 1 - len(prompt_ids)  # the first token is the target's own

    def observe(
        self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
    ) -> None:
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self.given[slot] += count

    def propose(self, slots: Tensor, anchors: Tensor, choose: Choose | None = None) -> Proposal:
        tokens, confidence = [], []
        for slot in slots.tolist():
            start = self.given[slot]
            right = (self.answers[slot][start:] + [0] * SLOTS)[:SLOTS]
            logits = [self.random.gauss(1.2, 1.0) for _ in right]
            kept = [self.random.random() < 1 / (1 + math.exp(-x)) for x in logits]
            tokens.append(
                [t if k else (t + 1) % VOCABULARY for t, k in zip(right, kept, strict=True)]
            )
            confidence.append([FACTOR * x for x in logits])
        return Proposal(torch.tensor(tokens), confidence=torch.tensor(confidence))


@pytest.fixture(scope="module")
def calibration(target: Target) -> Calibration:
    return calibrate(
        target,
        Boaster(target, prompts(60)),
        prompts(60),
        draft_name="boaster",
        max_new_tokens=NEW_TOKENS,
        batch_size=8,
    )


def answer(reason: str, accepted: list[int], num_tokens: int, drafted: int = SLOTS) -> Decoded:
    confidence = [[float(i)] * SLOTS for i in range(len(accepted))]
    drafts = [drafted] * len(accepted)
    return Decoded([7] * num_tokens, reason, accepted, drafts, 0.0, confidence)


def test_rounds_whose_later_slots_are_unknown_are_left_out() -> None:
    def kept(*answers: Decoded) -> list[int]:
        rounds = record_rounds(answers, SLOTS)
        assert len(rounds.num_accepted) + rounds.num_left_out == sum(
            len(a.num_accepted) for a in answers
        )
        return rounds.num_accepted.tolist()

    # First token, then rounds of 2 + 1 and 1 + 1 tokens: the stop token is a bonus token.
    assert kept(answer("stop", [2, 1], 6)) == [2, 1]
    # The stop token is the first drafted one: no bonus, and slots 2 and 3 are unknown.
    assert kept(answer("stop", [2, 1], 5)) == [2]
    # All slots were accepted up to a stop token in the last one: nothing is unknown.
    assert kept(answer("stop", [2, 3], 7)) == [2, 3]
    # A round that the limit cuts is counted in full.
    assert kept(answer("length", [2, 1], 5)) == [2, 1]
    assert kept(answer("length", [2, 1], 6, drafted=2)) == []
    # The first token of all was a stop token.
    assert kept(answer("stop", [], 1)) == []
    both = record_rounds([answer("stop", [2, 1], 5), answer("length", [0, 1], 4)], SLOTS)
    assert both.confidence[:, 0].tolist() == [0.0, 0.0, 1.0]
    assert both.sizes() == {"num_requests": 2, "num_rounds": 3, "num_left_out": 1}


def test_the_split_is_by_prompt_and_the_same_each_time() -> None:
    asked = [[i] for i in range(9)]
    fitted, measured = split_requests([*asked, [4], [4]])
    assert sorted(fitted + measured) == asked
    assert (len(fitted), len(measured)) == (5, 4)
    assert split_requests(asked) == (fitted, measured)
    with pytest.raises(ValueError, match="1 prompt to calibrate"):
        split_requests([[1], [1]])


def test_overconfidence_is_found_and_mended_on_other_requests(calibration: Calibration) -> None:
    assert 30 == calibration["fit"]["num_requests"] == calibration["heldout"]["num_requests"]
    assert calibration["fit"]["num_rounds"] > 300
    assert calibration["temperatures"][0] == pytest.approx(FACTOR, rel=0.5)
    assert all(t > 1.5 for t in calibration["temperatures"])
    for k in range(SLOTS):
        assert calibration["ece_after"][k] < 0.6 * calibration["ece_before"][k]
        assert calibration["auc_after"][k] > 0.6
        happened, told = calibration["survival_at"][k], calibration["predicted_survival_after"][k]
        assert told == pytest.approx(happened, abs=0.08)
    assert calibration["auc_before"][0] == calibration["auc_after"][0]  # the order is the same
    rows = calibration["pruning"]
    assert rows[0]["threshold"] == 0.0 and rows[0]["verified"] == SLOTS
    assert rows[0]["acceptance_length"] == pytest.approx(1 + sum(calibration["survival_at"]))
    assert rows[8]["acceptance_rate"] > rows[0]["acceptance_rate"] + 0.1


def test_held_out_prompts_of_their_own_are_not_fitted_on(target: Target) -> None:
    result = calibrate(
        target,
        Boaster(target, prompts(6), prompts(3, seed=1)),
        [*prompts(6), *prompts(3, seed=1)],
        heldout=prompts(3, seed=1),
        draft_name="boaster",
        max_new_tokens=8,
        batch_size=4,
    )
    assert result["fit"]["num_requests"] == 6
    assert result["heldout"]["num_requests"] == 3


def test_a_drafter_without_confidence_is_refused_by_name(target: Target) -> None:
    with pytest.raises(ValueError, match="lookup has no confidence head"):
        calibrate(
            target,
            NgramDrafter(2),
            prompts(4),
            draft_name="lookup",
            max_new_tokens=4,
            batch_size=2,
        )


def test_no_full_round_is_an_error() -> None:
    with pytest.raises(ValueError, match="no full round to fit in 1 requests"):
        measure_calibration(
            record_rounds([answer("stop", [], 1)], SLOTS),
            record_rounds([answer("length", [1], 3)], SLOTS),
        )


def test_files_hold_what_an_engine_reads(calibration: Calibration, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    path = write_calibration(calibration, tmp_path / "out")
    write_sts(calibration, draft, dataset="code")
    stored = json.loads((draft / "sts.json").read_text())
    # The engine's rules: a temperature a drafted token, all above 0; lists of floats; an int.
    # Keys that it does not know are ignored.
    assert {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"} <= set(stored)
    for key in ("temperatures", "ece_before", "ece_after"):
        assert len(stored[key]) == SLOTS
        assert all(isinstance(value, float) and math.isfinite(value) for value in stored[key])
    assert min(stored["temperatures"]) > 0
    assert isinstance(stored["num_samples"], int) and isinstance(stored["dataset"], str)
    assert read_sts(draft / "sts.json") == calibration["temperatures"]
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "calibration.json",
        "pruning.png",
        "reliability.png",
    ]
    read = json.loads(path.read_text())
    assert read["temperatures"] == calibration["temperatures"]
    assert np.shape(read["rounds"]["confidence"]) == (len(read["rounds"]["num_accepted"]), SLOTS)
    assert sum(read["reliability_after"][0]["count"]) == read["heldout"]["num_rounds"]
    assert (path.parent / "reliability.png").read_bytes()[:4] == b"\x89PNG"


def test_broken_temperatures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    for content, message in (
        ("{", "not JSON"),
        ("[1.0]", "JSON list"),
        *(
            (f'{{"temperatures": {found}}}', "positive numbers")
            for found in ("[]", "[1, 0]", "[-1]", "[true]", "[NaN]", "[Infinity]", '"1"', "null")
        ),
        ("{}", "positive numbers"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            read_sts(path)
        assert str(caught.value).startswith(f"{path}: ")


def test_seconds_never_fall_as_steps_grow() -> None:
    assert non_decreasing([1, 2, 3]) == [1, 2, 3]
    assert non_decreasing([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]
    assert non_decreasing([3, 2, 1]) == [2, 2, 2]
    assert non_decreasing([2, 1, 6, 1]) == [1.5, 1.5, 3.5, 3.5]


def test_the_ladder_has_two_steps_an_octave_and_its_end() -> None:
    assert ladder(1) == [1]
    assert ladder(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]


def test_timed_steps_make_a_table_that_an_engine_reads(target: Target, tmp_path: Path) -> None:
    contexts, _ = encode_prompts(target, prompts(2), 10)
    table = profile(target, Boaster(target, prompts(2)), contexts, max_batch_tokens=10)
    write_cost_table(table, tmp_path)
    stored = json.loads((tmp_path / "sps.json").read_text())
    assert set(stored) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    assert stored["sample_batch_tokens"] == [1, 2, 3, 4, 6, 8, 10]
    rates = stored["sample_steps_per_sec"]
    assert all(a >= b > 0 for a, b in itertools.pairwise(rates))
    assert stored["max_batch_tokens"] == 10
    assert read_cost_table(tmp_path / "sps.json") == table


def test_steps_are_timed_as_they_are_sampled(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sampling] = []

    def spy(*arguments: Any, **options: Any) -> list[Decoded]:
        seen.append(options["sampling"])
        return speculate(*arguments, **options)

    monkeypatch.setattr("spec.eval.profile.speculate", spy)
    contexts, _ = encode_prompts(target, prompts(1), 10)
    sampled = Sampling(0.8, 0.9, 20, seed=3)
    profile(target, Boaster(target, prompts(1)), contexts, max_batch_tokens=2, sampling=sampled)
    assert seen == [sampled] * 3  # the first step, then those of 1 and 2 tokens
