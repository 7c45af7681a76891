"""The tiny target: its tokenizer, its language, its training."""

import ast
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from spec.target.grammar import distinct_samples
from spec.target.model import Target
from spec.target.tiny import NUM_BYTES, make_tiny_target, tiny_prompts, tiny_tokenizer


def test_one_token_a_byte_and_back() -> None:
    tokenizer = tiny_tokenizer()
    text = "def f(x):\n\treturn x  # naïve → 3\x00\x7f\r\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 272
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (NUM_BYTES, NUM_BYTES + 2)


def test_chat_template_and_prefix_property() -> None:
    tokenizer = tiny_tokenizer()
    user = {"role": "user", "content": "hi"}
    messages = [user, {"role": "assistant", "content": "ok"}]
    prompt = tokenizer.apply_chat_template(
        [user], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    start, end = NUM_BYTES + 1, NUM_BYTES + 2
    assert prompt == [start, *b"user\nhi", end, *b"\n", start, *b"assistant\n"]
    assert whole == [*prompt, *b"ok", end, *b"\n"]


def test_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\nwrite add2(a, b)<|im_end|>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_answers_are_programs_and_splits_are_disjoint() -> None:
    train = distinct_samples("train", seed=0, limit=1500)
    heldout = distinct_samples("heldout", seed=0, limit=500)
    for sample in train + heldout:
        ast.parse(sample.answer)
    assert not {s.request for s in train} & {s.request for s in heldout}
    again = distinct_samples("heldout", seed=1, limit=500)
    assert not {s.request for s in train} & {s.request for s in again}


def test_prompts_repeat_for_a_seed() -> None:
    first = tiny_prompts("train", seed=4, limit=20)
    assert first == tiny_prompts("train", seed=4, limit=20)
    assert first != tiny_prompts("train", seed=5, limit=20)
    assert all(len(m) == 1 and m[0]["role"] == "user" for m in first)
    assert len({m[0]["content"] for m in first}) == 20


def test_same_seed_same_weights_and_random_state_untouched(tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one = Target.load(make_tiny_target(tmp_path / "one", seed=2, steps=3))
    assert torch.equal(torch.rand(3), expected)
    two = Target.load(make_tiny_target(tmp_path / "two", seed=2, steps=3))
    other = Target.load(make_tiny_target(tmp_path / "other", seed=3, steps=3))
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
    assert not torch.equal(one.embedding, other.embedding)
    assert one.stop_token_ids == (NUM_BYTES + 2,)
    assert 380_000 < sum(p.numel() for p in one.model.parameters()) < 450_000


def test_an_existing_target_is_left_alone(tmp_path: Path) -> None:
    directory = make_tiny_target(tmp_path / "tiny", steps=1)
    before = (directory / "model.safetensors").read_bytes()
    assert make_tiny_target(directory, seed=9, steps=1) == directory
    assert (directory / "model.safetensors").read_bytes() == before
    assert list(tmp_path.iterdir()) == [directory]  # nothing half-built beside it


@pytest.mark.slow
def test_trained_target_answers_heldout_requests(tmp_path: Path) -> None:
    target = Target.load(make_tiny_target(tmp_path / "tiny"))
    tokenizer = target.require_tokenizer()
    samples = distinct_samples("heldout", seed=1, limit=50)
    right = valid = 0
    for sample in samples:
        message = {"role": "user", "content": sample.request}
        prompt = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        assert isinstance(prompt, list)
        whole = torch.tensor([[*prompt, *sample.answer.encode(), tokenizer.eos_token_id]])
        with torch.no_grad():
            # The right answer is the greedy one exactly when every token is the argmax before it.
            said = target.model(input_ids=whole).logits[0, len(prompt) - 1 : -1].argmax(-1)
        right += int(torch.equal(said, whole[0, len(prompt) :]))
        valid += int(said[-1] == tokenizer.eos_token_id)
    assert right >= 40 and valid >= 48
