"""Regeneration on a tiny random target: rows, resuming, refusals, features."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from spec.data.manifest import Manifest
from spec.data.prompts import Prompt, encode_prompt
from spec.data.regenerate import RegenerateSummary, answer, plan_answers, regenerate
from spec.data.rows import Row, read_rows
from spec.target.capture import capture
from spec.target.generate import generate
from spec.target.model import Target

LAYERS = (0, 1)
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
)
TEMPLATE += "user {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"


def make_target(seed: int = 0) -> Target:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=39,
        initializer_range=0.3,
    )
    words = ["user", "assistant", *(f"w{n}" for n in range(37)), "<end>"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", eos_token="<end>", chat_template=TEMPLATE
    )
    return Target.of(Qwen3ForCausalLM(config), tokenizer, name="tiny")


def make_prompts(num: int) -> list[Prompt]:
    texts = [" ".join(f"w{n * 7 % 37}" for n in range(i, 2 * i + 1)) for i in range(num)]
    return [
        Prompt(f"p{i}", [{"role": "user", "content": text}], "even" if i % 2 == 0 else "odd")
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def run(target: Target, prompts: list[Prompt], out: Path, **options: Any) -> RegenerateSummary:
    options = {"max_new_tokens": 8, "batch_size": 3, "progress": lambda line: None, **options}
    return regenerate(target, prompts, out, **options)


def by_id(out: Path) -> dict[str, Row]:
    return {row.id: row for row in read_rows(out).rows}


def test_rows_are_the_prompt_and_what_the_target_says(target: Target, tmp_path: Path) -> None:
    out, prompts, lines = tmp_path / "rows.jsonl", make_prompts(7), []
    summary = run(target, prompts, out, progress=lines.append)
    ids = [encode_prompt(prompt, target.require_tokenizer()) for prompt in prompts]
    answers = generate(target, ids, max_new_tokens=8, batch_size=1)
    plain = {prompts[a.index].id: a.output_ids for a in answers}
    rows = by_id(out)
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        row = rows[prompt.id]
        assert row.input_ids == prompt_ids + plain[prompt.id]
        assert row.loss_mask == [0] * len(prompt_ids) + [1] * len(plain[prompt.id])
        assert row.tags == (prompt.tag,)
    assert (summary.num_rows, summary.num_new, summary.num_skipped, summary.num_left) == (
        7,
        7,
        0,
        0,
    )
    assert summary.num_new_tokens == sum(map(len, plain.values()))
    assert sum(summary.finish_reasons.values()) == 7
    assert "answers 7/7" in lines[-1] and "tokens/s" in lines[-1]
    manifest = Manifest.load(tmp_path / "rows.manifest.json")
    assert manifest.num_kept == 7 and manifest.digest == summary.manifest_digest
    assert manifest.num_tokens == sum(len(row.input_ids) for row in rows.values())
    assert manifest.num_supervised == summary.num_new_tokens
    assert manifest.options["temperature"] == 0.0 and manifest.seeds == {"sampling": 0}


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 1.0])
def test_an_interrupted_run_ends_like_an_undisturbed_one(
    target: Target, tmp_path: Path, keep: float
) -> None:
    whole, torn, prompts = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl", make_prompts(9)
    run(target, prompts, whole)
    run(target, prompts[:6], torn)
    content = torn.read_bytes()
    torn.write_bytes(content[: int(len(content) * keep) - 3 * (keep == 1.0)])
    num_left = torn.read_bytes().count(b"\n")
    summary = run(target, prompts, torn)
    assert by_id(torn) == by_id(whole)
    assert summary.num_skipped == num_left and summary.num_new == 9 - num_left
    manifests = [Manifest.load(tmp_path / f"{name}.manifest.json") for name in ("whole", "torn")]
    assert manifests[0] == manifests[1]
    before = torn.read_bytes()
    assert run(target, prompts, torn).num_new == 0 and torn.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 0.7}, "temperature: 0.0 then, 0.7 now"),
        ({"max_new_tokens": 9}, "max_new_tokens: 8 then, 9 now"),
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"top_k": 3}, "top_k: 0 then, 3 now"),
    ],
)
def test_going_on_with_other_options_is_refused(
    target: Target, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    out = tmp_path / "rows.jsonl"
    run(target, make_prompts(2), out)
    before = out.read_bytes()
    with pytest.raises(ValueError, match=named):
        run(target, make_prompts(3), out, **options)
    assert out.read_bytes() == before


def test_going_on_with_another_target_or_template_is_refused(
    target: Target, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    run(target, make_prompts(2), out)
    with pytest.raises(ValueError, match="weights: "):
        run(make_target(seed=1), make_prompts(3), out)
    other = make_target()
    other.require_tokenizer().chat_template = "again " + TEMPLATE
    with pytest.raises(ValueError, match="template: "):
        run(other, make_prompts(3), out)
    (tmp_path / "rows.manifest.json").unlink()
    with pytest.raises(ValueError, match=r"without rows\.manifest\.json"):
        run(target, make_prompts(3), out)


def test_features_come_before_the_row_is_stored(target: Target, tmp_path: Path) -> None:
    out, seen = tmp_path / "rows.jsonl", {}

    def keep(row: Row, context: torch.Tensor, expected: torch.Tensor | None) -> None:
        assert row.id not in out.read_text()
        seen[row.id] = (row, context, expected)

    run(target, make_prompts(4), out, layer_ids=LAYERS, teacher="expected", on_features=keep)
    assert set(seen) == {"p0", "p1", "p2", "p3"}
    for row, context, expected in seen.values():
        (alone,) = capture(target, [row.input_ids[:-1]], LAYERS)
        assert context.shape == (len(row.input_ids) - 1, len(LAYERS) * target.hidden_size)
        torch.testing.assert_close(context, alone.context.reshape_as(context), atol=1e-5, rtol=1e-4)
        assert expected is not None
        generated = row.loss_mask.index(1)
        probabilities = target.logits(alone.last.reshape(-1, target.hidden_size)).softmax(-1)
        torch.testing.assert_close(
            expected[generated - 1 :],
            (probabilities @ target.head)[generated - 1 :],
            atol=1e-4,
            rtol=1e-4,
        )
    with pytest.raises(ValueError, match="without layer_ids"):
        run(target, make_prompts(1), out, on_features=keep)


def test_prompts_that_cannot_be_answered_are_counted(target: Target, tmp_path: Path) -> None:
    good, other, long = make_prompts(3)
    bad = replace(other, messages=[{"role": "user", "content": "bad"}])
    long = replace(long, messages=[{"role": "user", "content": "w1 " * 60}])
    summary = run(target, [good, bad, long], tmp_path / "rows.jsonl")
    assert summary.rejected == {
        "the chat template refuses the messages": 1,
        "prompt too long for the target": 1,
    }
    assert set(by_id(tmp_path / "rows.jsonl")) == {good.id}
    assert Manifest.load(tmp_path / "rows.manifest.json").rejected == summary.rejected


def test_the_deadline_leaves_the_rest_for_the_next_call(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    summary = run(target, make_prompts(4), out, deadline_seconds=0.0)
    assert (summary.num_new, summary.num_left) == (0, 4)
    assert run(target, make_prompts(4), out).num_rows == 4


def test_names_and_ids_that_do_not_work_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ending in \.jsonl"):
        run(target, make_prompts(1), tmp_path / "rows.jsonl.zst")
    with pytest.raises(ValueError, match="first 'p0'"):
        run(target, make_prompts(1) * 2, tmp_path / "rows.jsonl")


def test_a_sampled_run_repeats_with_its_seed(target: Target, tmp_path: Path) -> None:
    options = {"temperature": 1.0, "seed": 3}
    run(target, make_prompts(5), tmp_path / "a.jsonl", **options)
    run(target, make_prompts(5), tmp_path / "b.jsonl", **options, batch_size=5)
    run(target, make_prompts(5), tmp_path / "c.jsonl", temperature=1.0, seed=4)
    assert by_id(tmp_path / "a.jsonl") == by_id(tmp_path / "b.jsonl")
    assert by_id(tmp_path / "a.jsonl") != by_id(tmp_path / "c.jsonl")


@pytest.mark.parametrize("first", [[0, 1, 2], [4, 2]])
def test_a_sampled_run_that_was_interrupted_ends_like_an_undisturbed_one(
    target: Target, tmp_path: Path, first: list[int]
) -> None:
    whole, torn, prompts = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl", make_prompts(6)
    options = {"temperature": 1.0, "seed": 3}
    run(target, prompts, whole, **options)
    run(target, [prompts[i] for i in first], torn, **options)
    run(target, prompts, torn, **options)
    assert by_id(torn) == by_id(whole)


def test_each_prompt_is_tokenized_once(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def counted(prompt: Prompt, tokenizer: Any) -> list[int]:
        seen.append(prompt.id)
        return encode_prompt(prompt, tokenizer)

    monkeypatch.setattr("spec.data.prompts.encode_prompt", counted)
    run(target, make_prompts(3), tmp_path / "rows.jsonl")
    assert seen == ["p0", "p1", "p2"]
    run(target, make_prompts(4), tmp_path / "rows.jsonl")
    assert seen == ["p0", "p1", "p2", "p3"]


def test_a_plan_counts_what_is_longer_than_max_length(target: Target, tmp_path: Path) -> None:
    """p0 has 3 tokens, p1 4, p2 5, p3 6; with 8 new ones."""
    prompts = make_prompts(4)
    lengths = [len(encode_prompt(prompt, target.require_tokenizer())) for prompt in prompts]
    assert lengths == [3, 4, 5, 6]
    plan = plan_answers(target, prompts, tmp_path / "r.jsonl", max_new_tokens=8, max_length=12)
    assert [(item.prompt.id, len(item.ids)) for item in plan.todo] == [("p0", 3), ("p1", 4)]
    assert [(bad.id, bad.reason) for bad in plan.rejected] == [
        ("p2", "prompt too long for max_length"),
        ("p3", "prompt too long for max_length"),
    ]
    summary = answer(target, plan, batch_size=2, progress=lambda line: None)
    assert summary.rejected == {"prompt too long for max_length": 2} and summary.num_new == 2


def test_two_calls_at_once_on_one_file_are_refused(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"

    def again(row: Row, context: torch.Tensor, expected: torch.Tensor | None) -> None:
        with pytest.raises(ValueError, match=r"another run is writing to .*rows\.jsonl"):
            run(target, make_prompts(1), out)

    run(target, make_prompts(1), out, layer_ids=LAYERS, on_features=again)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "rows.manifest.json"}


def test_a_manifest_tells_template_tokenizer_and_inputs_apart(tmp_path: Path) -> None:
    def digest(change: dict[str, Any], template: str = TEMPLATE, token: str = "") -> str:
        target = make_target()
        tokenizer = target.require_tokenizer()
        tokenizer.chat_template = template
        if token:
            tokenizer.add_tokens([token])
        name = f"{len(list(tmp_path.iterdir()))}.jsonl"
        options = {"max_new_tokens": 2, "batch_size": 2, "progress": lambda line: None, **change}
        return regenerate(target, make_prompts(2), tmp_path / name, **options).manifest_digest

    same = digest({})
    assert same == digest({"batch_size": 1})
    digests = [same, digest({"seed": 1}), digest({}, TEMPLATE + " "), digest({}, token="new")]
    assert len(set(digests)) == 4


def test_a_file_that_is_no_manifest_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.manifest.json"
    for content in ("{", "[]", json.dumps({"target": "x", "surprise": 1})):
        path.write_text(content)
        with pytest.raises(ValueError, match="not a data manifest"):
            Manifest.load(path)
