"""Piecewise tokenization equals tokenization at once, at the cost of the text's own length."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec.data.tokens import Tokens

SPECIAL = ["<a>", "<a>b", "<end>"]
TEXTS = [
    "",
    "xx",
    "<a>",
    "xx<a>xx y<end>\n\n<a>bx",
    "<a><a>b<end><end>y",
    "<a>xx <a",
    " <a> x <end> ",
]


def make_tokenizer(kind: str) -> Any:
    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: i for i, token in enumerate([*alphabet, "xx", "ĊĊ"])}
        backend = Tokenizer(models.BPE(vocabulary, [("x", "x"), ("Ċ", "Ċ")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        # The mark before the first word of the text alone: the same piece has other ids elsewhere.
        pieces = ["▁", *"xyab<>end \n", "▁x"]
        vocabulary = {token: i for i, token in enumerate(dict.fromkeys(pieces))}
        backend = Tokenizer(models.BPE(vocabulary, [("▁", "x")]))
        scheme = "first" if kind == "first" else "always"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("kind", ["bytes", "first", "always"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_give_the_ids_of_the_whole(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    tokens = Tokens(tokenizer, check=text)
    for end in range(len(text) + 1):
        part = text[:end] if kind == "bytes" else text
        assert tokens.ids(part) == tokenizer(part, add_special_tokens=False).input_ids


def test_a_header_is_counted_in_the_tokens_of_its_text() -> None:
    tokens = Tokens(make_tokenizer("bytes"), check="")
    # Tokens: <a>, y, <end>, both newlines, <a>.
    for header, count in (("<a>y<end>", 3), ("<a>y<end>\n", 4), ("<a>y<end>\n\n", 4), ("<a>y", 2)):
        assert tokens.count("<a>y<end>\n\n<a>", header) == count


def test_a_session_costs_its_own_length() -> None:
    tokenizer = make_tokenizer("bytes")
    turns = [f"<a>{'xy' * 20}{n}<end>" for n in range(60)]
    whole = "".join(turns)
    characters = 0
    tokenize = Tokens._tokenize

    class Counting(Tokens):
        def _tokenize(self, text: str) -> list[int]:
            nonlocal characters
            characters += len(text)
            return tokenize(self, text)

    tokens = Counting(tokenizer, check=whole)
    for n in range(60):
        assert tokens.ids("".join(turns[:n])) == tokenize(tokens, "".join(turns[:n]))
    assert characters < 2.1 * len(whole)  # once in pieces, once whole as the check
