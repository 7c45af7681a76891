"""Prompts from files and from the standard library."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec.data import stdlib
from spec.data.prompts import (
    Prompt,
    encode_prompt,
    prompt_format,
    read_prompt_file,
    read_prompts,
)

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
WORDS = ["user", "assistant", "end", "one", "two", "three", "unknown", "bos"]


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="unknown"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="unknown")
    tokenizer.chat_template = template
    return tokenizer


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_and_messages_are_read_with_their_tags(tmp_path: Path) -> None:
    path = write(
        tmp_path / "code.jsonl",
        {"turns": ["one", "two"]},
        {"id": "x", "messages": [user("one"), {"role": "assistant", "content": "two"}], "tag": "t"},
        {"conversations": [{"from": "human", "value": "three"}], "tools": [{"name": "f"}]},
    )
    assert read_prompts(path) == [
        Prompt("code:1", [user("one")], "code"),
        Prompt("x", [user("one")], "t"),
        Prompt("code:3", [user("three")], "code", [{"name": "f"}]),
    ]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"turns": []}, "turns is not a list of texts"),
        ({"turns": "one"}, "turns is not a list of texts"),
        ({"messages": [{"role": "system", "content": "one"}]}, "nothing to answer"),
        ({"messages": [{"role": "critic", "content": "one"}]}, "unknown role"),
        ({"prompt": "one"}, "no messages"),
        ({"turns": ["one"], "tag": 3}, "tag is not a string"),
        ({"turns": ["one"], "id": "same"}, "id used twice"),
    ],
)
def test_a_bad_prompt_is_left_out_and_counted(
    tmp_path: Path, entry: dict[str, Any], reason: str
) -> None:
    good = [{"turns": ["one"], "id": "same"}, *({"turns": ["two"]} for _ in range(8))]
    path = write(tmp_path / "p.jsonl", *good, entry)
    file = read_prompt_file(path)
    assert len(file.prompts) == 9 and [bad.reason for bad in file.rejected] == [reason]
    with pytest.warns(UserWarning, match="1 prompts left out"):
        assert read_prompts(path) == file.prompts
    with pytest.raises(ValueError, match="2 of 11 rows rejected"):
        read_prompts(write(path, *good, entry, entry))


def test_a_prompt_is_encoded_with_the_generation_prompt() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    prompt = Prompt("p", [user("one two")], "t")
    ids = encode_prompt(prompt, tokenizer)
    assert [WORDS[i] for i in ids] == ["user", "one", "two", "end", "assistant"]
    assert ids == tokenizer.apply_chat_template(
        prompt.messages, add_generation_prompt=True, return_dict=False
    )
    assert prompt_format(tokenizer) == "chat template"


def test_without_a_template_a_prompt_is_plain_text() -> None:
    tokenizer = make_tokenizer(None)
    ids = encode_prompt(Prompt("p", [user("one"), user("two")], "t"), tokenizer)
    assert [WORDS[i] for i in ids] == ["one", "two"]
    assert prompt_format(tokenizer) == "plain text"


@pytest.fixture(scope="module")
def library() -> dict[stdlib.Split, list[Prompt]]:
    return {
        "train": stdlib.stdlib_prompts("train", seed=0),
        "heldout": stdlib.stdlib_prompts("heldout", seed=0),
    }


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in prompts]


@pytest.mark.slow
def test_the_library_gives_thousands_of_prompts_of_every_kind(
    library: dict[stdlib.Split, list[Prompt]],
) -> None:
    assert len(library["train"]) > 4000 and len(library["heldout"]) > 400
    for prompts in library.values():
        assert {prompt.tag for prompt in prompts} == set(stdlib.KINDS)
        assert len({prompt.id for prompt in prompts}) == len(prompts)
        assert max(map(len, texts(prompts))) < 800
        # A short run sees every kind too, and each function once before any comes again.
        assert {prompt.tag for prompt in prompts[:100]} == set(stdlib.KINDS)
        functions = [prompt.id.rsplit("/", 1)[0] for prompt in prompts[:100]]
        assert len(set(functions)) == 100


@pytest.mark.slow
def test_splits_share_no_module_and_no_code(library: dict[stdlib.Split, list[Prompt]]) -> None:
    packages = {
        split: {prompt.id.split("/")[1].split(".")[0] for prompt in prompts}
        for split, prompts in library.items()
    }
    assert not packages["train"] & packages["heldout"]
    assert not set(texts(library["train"])) & set(texts(library["heldout"]))
    digests = [function.digest for function in stdlib.library_functions()]
    assert len(set(digests)) == len(digests)


@pytest.mark.slow
def test_the_order_follows_the_seed_and_a_limit_is_a_prefix(
    library: dict[stdlib.Split, list[Prompt]],
) -> None:
    assert stdlib.stdlib_prompts("heldout", seed=0, limit=50) == library["heldout"][:50]
    assert stdlib.stdlib_prompts("heldout", seed=1, limit=50) != library["heldout"][:50]


SOURCE = '''
class A:
    def documented(self, x):
        """Doubles.

        For numbers.
        """
        y = x  # copied
        return y + x

def renamed(self, x):
    y = x  # copied

    return y + x

def short(x):
    return x
'''


def test_functions_are_cut_into_their_parts(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(SOURCE)
    found = {function.name: function for function in stdlib._functions(path, "m")}
    assert set(found) == {"A.documented", "renamed"}
    function = found["A.documented"]
    assert function.doc == "Doubles.\n\nFor numbers."
    assert function.head == (
        'def documented(self, x):\n    """Doubles.\n\n    For numbers.\n    """'
    )
    assert function.bare == "def documented(self, x):\n    y = x  # copied\n    return y + x"
    assert function.digest == found["renamed"].digest  # neither name nor layout nor docstring
    path.write_text("def broken(:\n")
    assert list(stdlib._functions(path, "m")) == []
