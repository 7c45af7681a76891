"""Continuous batching gives what each prompt gets alone, and features of those very tokens."""

import random
import time
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spec.target.cache import SlotCache
from spec.target.capture import capture
from spec.target.generate import Generation, generate, prefill
from spec.target.model import Target

LAYERS = (1, 2)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=[2, 7],
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.mul_(10.0 if weight.dim() > 1 else 1.0)
    return Target.of(model, None, name="tiny")


def prompts(n: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, 61) for _ in range(draw.randrange(1, 30))] for _ in range(n)]


def plain(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding with one whole forward pass a token."""
    ids = list(prompt)
    for _ in range(count):
        logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def by_index(results: list[Generation]) -> list[Generation]:
    return sorted(results, key=lambda r: r.index)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_greedy_equals_plain_decoding_in_any_batch(target: Target, batch_size: int) -> None:
    some = prompts(7)
    results = by_index(
        list(generate(target, some, max_new_tokens=9, batch_size=batch_size, stop_token_ids=()))
    )
    assert [r.index for r in results] == list(range(7))
    for prompt, result in zip(some, results, strict=True):
        assert result.output_ids == plain(target, prompt, 9)
        assert result.finish_reason == "length"


def test_any_stop_token_ends_the_output_and_is_kept(target: Target) -> None:
    some = prompts(7)
    free = [plain(target, p, 12) for p in some]
    stops = {free[0][4], free[1][0]}
    results = by_index(
        list(generate(target, some, max_new_tokens=12, batch_size=2, stop_token_ids=sorted(stops)))
    )
    for answer, result in zip(free, results, strict=True):
        cut = next((i for i, t in enumerate(answer) if t in stops), None)
        assert result.output_ids == (answer if cut is None else answer[: cut + 1])
        assert result.finish_reason == ("length" if cut is None else "stop")
    assert results[1].output_ids == free[1][:1]
    assert target.stop_token_ids == (2, 7)


def test_sampled_answers_do_not_depend_on_the_batch(target: Target) -> None:
    some = prompts(6)
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "temperature": 0.9,
        "top_p": 0.95,
        "stop_token_ids": (),
    }
    runs = [
        [
            r.output_ids
            for r in by_index(list(generate(target, some, batch_size=b, seed=s, **options)))
        ]
        for b, s in ((1, 5), (4, 5), (4, 6))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_sampled_answer_belongs_to_its_prompts_name(target: Target) -> None:
    some, names = prompts(6), [f"p{i}" for i in range(6)]
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.9, "stop_token_ids": ()}

    def answers(places: list[int]) -> dict[int, list[int]]:
        results = generate(
            target,
            [some[i] for i in places],
            names=[names[i] for i in places],
            batch_size=2,
            **options,
        )
        return {places[r.index]: r.output_ids for r in results}

    whole = answers([0, 1, 2, 3, 4, 5])
    assert answers([4, 1]) == {i: whole[i] for i in (4, 1)}
    assert list(answers([0]).values()) != [
        r.output_ids for r in generate(target, some[:1], batch_size=1, **options)
    ]


def test_features_and_expected_rows_belong_to_their_tokens(target: Target) -> None:
    some = prompts(5)
    for result in generate(
        target,
        some,
        max_new_tokens=6,
        batch_size=2,
        layer_ids=LAYERS,
        teacher="expected",
        stop_token_ids=(),
    ):
        ids = some[result.index] + result.output_ids[:-1]
        [features] = capture(target, [ids], LAYERS)
        assert result.context is not None and result.teacher is not None
        torch.testing.assert_close(result.context, features.context, atol=2e-5, rtol=1e-4)
        rows = torch.softmax(target.logits(features.last), dim=-1) @ target.head
        rows[: len(some[result.index]) - 1] = 0
        torch.testing.assert_close(result.teacher, rows, atol=2e-5, rtol=1e-4)


def test_after_the_deadline_nothing_starts(target: Target) -> None:
    past = time.monotonic() - 1
    assert not list(generate(target, prompts(3), max_new_tokens=4, batch_size=2, deadline=past))
    # Three steps of two prompts, then the clock stands past the deadline.
    ticks = iter([0.0, 0.0, 0.0, 9.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(ticks))
        cut = list(
            generate(
                target,
                prompts(3),
                max_new_tokens=20,
                batch_size=2,
                deadline=5.0,
                keep_unfinished=True,
                stop_token_ids=(),
            )
        )
    assert [(r.index, r.finish_reason, len(r.output_ids)) for r in cut] == [
        (0, "deadline", 4),
        (1, "deadline", 4),
    ]
    assert cut[0].output_ids == plain(target, prompts(3)[0], 4)


def test_prefill_in_pieces_equals_prefill_at_once(target: Target) -> None:
    ids = [list(range(3, 50)), list(range(5, 20)), [9]]
    last: list[list[torch.Tensor]] = []
    for budget in (2048, 10):
        cache = SlotCache(target, 3, 64)
        ends = [torch.empty(0)] * 3
        for call in prefill(target, cache, list(enumerate(ids)), max_tokens=budget):
            assert call.hidden.shape[0] * call.hidden.shape[1] <= budget
            for b, row in enumerate(call.rows):
                if call.finished[b]:
                    ends[row] = call.hidden[b, call.counts[b] - 1]
        assert cache.lengths.tolist() == [47, 15, 1]
        last.append(ends)
    for once, pieces in zip(*last, strict=True):
        torch.testing.assert_close(once, pieces, atol=2e-5, rtol=1e-4)


def test_impossible_requests_are_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        list(generate(target, [[3], []], max_new_tokens=4, batch_size=2))
    with pytest.raises(ValueError, match="exceeds the 128 positions of tiny"):
        list(generate(target, [[3] * 120], max_new_tokens=9, batch_size=2))
    assert len(list(generate(target, [[3] * 120], max_new_tokens=8, batch_size=2))) == 1
    with pytest.raises(ValueError, match="top_p 0"):
        list(generate(target, [[3]], max_new_tokens=4, batch_size=2, top_p=0.0))
