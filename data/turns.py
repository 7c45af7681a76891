"""Where an assistant message lies in the ids of a conversation, and where the target stopped.

The ids of the prompt have to begin those of the conversation up to the message; what follows is the
turn. Its end-of-turn token is, in this order,

1. the turn's first stop token (the tokenizer's eos, the target's other stop tokens);
2. its last special token, where only white space follows (a base model's eos is not the chat's);
3. the stop token right after the turn in the conversation (the next header ends the turn), also
   where the template renders the turn itself differently once more follows;
4. none: the white space at the turn's end is left out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from .messages import BadMessages, render
from .tokens import Tokens

SOME_ANSWER = "answer-of-the-assistant"
EMPTY_THINK = re.compile(r"(<|\[)([\w:|]+)[>\]]\s*\1/\2[>\]]\s*\Z")


@dataclass(frozen=True)
class Turn:
    """`ids` of the conversation up to an assistant message; [start, end) are the target's own."""

    ids: list[int]
    start: int
    end: int


class TurnEnds:
    """Finds where a turn ends by its own tokens: rules 1, 2 and 4 of the module."""

    def __init__(self, tokens: Tokens, stop_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokens.tokenizer
        self.special = tokens.special
        eos = self.tokenizer.eos_token_id
        self.stop = {*stop_token_ids, *([eos] if isinstance(eos, int) else [])}

    def find(self, ids: list[int], start: int) -> tuple[int, bool]:
        """End of the supervised part of `ids[start:]`, and whether a token of its own closes it."""
        for place in range(start, len(ids)):
            if ids[place] in self.stop:
                return place + 1, True
        blank = list(takewhile(self._blank, reversed(ids[start:])))
        end = len(ids) - len(blank)
        return end, end > start and ids[end - 1] in self.special

    def _blank(self, token: int) -> bool:
        return token not in self.special and not str(self.tokenizer.decode([token])).strip()


def find_turn(
    tokens: Tokens,
    messages: list[dict[str, Any]],
    place: int,
    tools: list[dict[str, Any]] | None,
    ends: TurnEnds,
    full: list[int],
) -> Turn:
    """The turn of the assistant message `place`; `full` are the ids of the whole conversation.

    Raises BadMessages where the turn does not begin with its prompt.
    """
    tokenizer, until = tokens.tokenizer, messages[: place + 1]
    text = render(tokenizer, until, tools)
    ids = tokens.ids(text)
    prompt_text = render(tokenizer, until[:-1], tools, generation=True)
    header = _header(tokenizer, until, tools, prompt_text)
    prompt = tokens.ids(prompt_text)
    if header and text.startswith(header):
        start = tokens.count(text, header)
    elif ids[: len(prompt)] == prompt:
        start = len(prompt)
    else:
        start = len(ids)
    if start == len(ids):
        raise BadMessages(
            "a turn does not begin with its prompt",
            f"message {place}: the chat template renders what is before it differently",
        )
    end, closed = ends.find(ids, start)
    if not closed:
        unchanged = full[: len(ids)] == ids
        after = full[len(ids) :] if unchanged else _ids_after(tokens, messages, place, tools)
        if after and after[0] in ends.stop:
            return Turn([*ids, after[0]], start, len(ids) + 1)
    return Turn(ids, start, end)


def _ids_after(
    tokens: Tokens,
    messages: list[dict[str, Any]],
    place: int,
    tools: list[dict[str, Any]] | None,
) -> list[int]:
    """Ids behind a message that the template renders differently once more follows, if found.

    An answer that no template changes stands in for the message: what comes after it in the
    conversation, less what comes after it where it is the last, belongs to the next message.
    """
    plain = {key: value for key, value in messages[place].items() if key != "reasoning_content"}
    marked = [*messages[:place], {**plain, "content": SOME_ANSWER}, *messages[place + 1 :]]
    try:
        own = render(tokens.tokenizer, marked[: place + 1], tools).rpartition(SOME_ANSWER)[2]
        rest = render(tokens.tokenizer, marked, tools).rpartition(SOME_ANSWER)[2]
    except BadMessages:
        return []
    return tokens.ids(rest.removeprefix(own)) if rest.startswith(own) else []


def _header(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    prompt: str,
) -> str | None:
    """All that the template writes before the last message, where that is more than its prompt."""
    before, last = messages[:-1], messages[-1]
    answer = {"role": "assistant", "content": SOME_ANSWER}
    header = render(tokenizer, [*before, answer], tools).rpartition(SOME_ANSWER)[0]
    if len(header) <= len(prompt) or not header[len(prompt) :].strip():
        return None
    # The template knows no generation prompt: the header of an answer is no word of the target's.
    if before and prompt == render(tokenizer, before, tools):
        return header
    if last.get("reasoning_content"):
        return None
    # An empty reasoning block, or whatever else the template writes when thinking is off.
    if EMPTY_THINK.search(header):
        return header
    unthinking = render(tokenizer, before, tools, generation=True, enable_thinking=False)
    return header if header == unthinking else None
