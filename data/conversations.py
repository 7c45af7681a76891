"""Conversations to rows: the loss mask comes from the ids, never from searching the text.

For the assistant message j, the prompt is the ids of `messages[:j]` with the generation prompt, and
the ids of `messages[:j + 1]` have to begin with them. What follows is the turn: supervised up to
and with its end-of-turn token, and not beyond. The end-of-turn token is, in this order,

1. the turn's first stop token (the tokenizer's eos, the target's other stop tokens);
2. its last special token, where only white space follows (a base model's eos is not the chat's);
3. the stop token right after the turn in the conversation (the next header ends the turn);
4. none: the white space at the turn's end is left out.

An empty `<think></think>` that the template puts before an answer belongs to the prompt. A template
that renders a turn differently once more follows (it strips earlier reasoning) gives one row a
turn, each as the target would have seen it; a turn that does not begin with its prompt rejects the
conversation.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..target.files import resolve
from ..target.model import load_tokenizer
from .jsonl import MAX_REJECTED, Rejected, check_rejected, count_reasons, read_objects, stem
from .manifest import Manifest, describe_inputs, describe_tokenizer
from .messages import BadMessages, adapt, parse_messages, parse_tools, render
from .rows import Row, write_rows
from .tokens import Tokens

TOO_LONG = "prompt longer than max_length"  # dropped and counted, but no fault of the file
SOME_ANSWER = "answer-of-the-assistant"
EMPTY_THINK = re.compile(r"(<|\[)([\w:|]+)[>\]]\s*\1/\2[>\]]\s*\Z")


@dataclass(frozen=True)
class Conversation:
    """One row of a file, with normalized messages."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """The rows of a conversation: one, one a turn, or none with the reason."""

    rows: list[Row] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    num_cut: int = 0  # rows that lost their end to max_length
    reasoning_ignored: bool = False


@dataclass(frozen=True)
class Turn:
    """`ids` of the conversation up to an assistant message; [start, end) are the target's own."""

    ids: list[int]
    start: int
    end: int


def read_conversations(path: str | Path) -> Iterator[Conversation | Rejected]:
    """Conversations of a .jsonl(.zst), .json or .parquet file in OpenAI or ShareGPT shape."""
    for item in read_objects(path):
        if isinstance(item, Rejected):
            yield item
            continue
        id, entry = item
        tags = entry.get("tags") or [entry.get("tag") or stem(path)]
        try:
            if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
                raise BadMessages("tags are not a list of strings", f"found {tags!r}")
            yield Conversation(id, parse_messages(entry), parse_tools(entry), tuple(tags))
        except BadMessages as error:
            yield Rejected(id, error.reason, error.detail)


def encode(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    stop_token_ids: Sequence[int] = (),
) -> Encoded:
    """Ids and loss mask of a conversation, cut at `max_length` tokens."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template; give prompts to `spec regenerate` instead"
        )
    id, tools = conversation.id, conversation.tools
    places = [j for j, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if not places:
        return Encoded(rejected=[Rejected(id, "no assistant message")])
    try:
        messages = adapt(tokenizer, conversation.messages, tools)
        text = render(tokenizer, messages, tools)
        tokens = Tokens(tokenizer, check=text)
        ends = TurnEnds(tokens, stop_token_ids)
        full = tokens.ids(text)
        turns = [_turn(tokens, messages[: j + 1], tools, ends, full) for j in places]
        ignored = _ignores_reasoning(tokenizer, messages, tools)
    except BadMessages as error:
        return Encoded(rejected=[Rejected(id, error.reason, error.detail)])
    if ignored:
        warnings.warn("the chat template ignores reasoning_content", stacklevel=2)
    if all(full[: turn.end] == turn.ids[: turn.end] for turn in turns):
        rows = [_row(id, full, turns, conversation.tags)]
    else:
        names = [f"{id}#{n}" for n in range(1, len(turns) + 1)] if len(turns) > 1 else [id]
        rows = [
            _row(name, turn.ids, [turn], conversation.tags)
            for name, turn in zip(names, turns, strict=True)
        ]
    return _cut(rows, max_length, ignored)


class TurnEnds:
    """Finds where a turn ends; see the module's rule."""

    def __init__(self, tokens: Tokens, stop_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokens.tokenizer
        self.special = tokens.special
        eos = self.tokenizer.eos_token_id
        self.stop = {*stop_token_ids, *([eos] if isinstance(eos, int) else [])}

    def find(self, ids: list[int], start: int, full: list[int]) -> int:
        """End of the supervised part of `ids[start:]`; `full` is the whole conversation."""
        for place in range(start, len(ids)):
            if ids[place] in self.stop:
                return place + 1
        blank = list(takewhile(self._blank, reversed(ids[start:])))
        end = len(ids) - len(blank)
        if end > start and ids[end - 1] in self.special:
            return end
        if (
            full[: len(ids)] == ids
            and full[len(ids) : len(ids) + 1]
            and full[len(ids)] in self.stop
        ):
            return len(ids) + 1
        return end

    def _blank(self, token: int) -> bool:
        return token not in self.special and not str(self.tokenizer.decode([token])).strip()


def _turn(
    tokens: Tokens,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    ends: TurnEnds,
    full: list[int],
) -> Turn:
    """The turn of the last of `messages`."""
    tokenizer = tokens.tokenizer
    text = render(tokenizer, messages, tools)
    ids = tokens.ids(text)
    prompt_text = render(tokenizer, messages[:-1], tools, generation=True)
    header = _header(tokenizer, messages, tools, prompt_text)
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
            f"message {len(messages) - 1}: the chat template renders what is before it differently",
        )
    end = ends.find(ids, start, full)
    return Turn(full[:end] if end > len(ids) else ids, start, end)


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


def _ignores_reasoning(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> bool:
    """Whether the first turn with reasoning renders the same without it."""
    for j, message in enumerate(messages):
        if message.get("reasoning_content"):
            plain = {key: value for key, value in message.items() if key != "reasoning_content"}
            kept = render(tokenizer, messages[: j + 1], tools)
            return kept == render(tokenizer, [*messages[:j], plain], tools)
    return False


def _row(id: str, ids: list[int], turns: list[Turn], tags: tuple[str, ...]) -> Row:
    mask = [0] * len(ids)
    for turn in turns:
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
    return Row(id, ids, mask, tags)


def _cut(rows: list[Row], max_length: int, reasoning_ignored: bool) -> Encoded:
    kept: list[Row] = []
    rejected: list[Rejected] = []
    num_cut = 0
    for row in rows:
        length = len(row.input_ids)
        row = Row(row.id, row.input_ids[:max_length], row.loss_mask[:max_length], row.tags)
        if row.num_supervised:
            kept.append(row)
            num_cut += length > max_length
        else:
            rejected.append(Rejected(row.id, TOO_LONG, f"{length} tokens, max_length {max_length}"))
    return Encoded(kept, rejected, num_cut, reasoning_ignored)


def prepare(
    target: str | Path,
    conversations: Sequence[Path],
    out: Path,
    *,
    max_length: int,
    max_rejected: float = MAX_REJECTED,
) -> Manifest:
    """Writes the rows of conversation files to `out`, and their manifest beside it.

    Needs the target's tokenizer, not its weights. Raises ValueError for a file with more than a
    share `max_rejected` of bad conversations; those whose prompt is too long are dropped and
    counted apart.
    """
    directory, name = resolve(target, need_weights=False)
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(f"{name}: no tokenizer files; expected tokenizer.json beside config.json")
    stop = stop_tokens(directory)
    rows: list[Row] = []
    rejected: list[Rejected] = []
    counts = {"conversations": 0, "rows_cut": 0, "reasoning_ignored": 0}
    for path in conversations:
        first, num_kept = len(rejected), 0
        for item in read_conversations(path):
            encoded = (
                Encoded(rejected=[item])
                if isinstance(item, Rejected)
                else encode(item, tokenizer, max_length, stop_token_ids=stop)
            )
            rows += encoded.rows
            rejected += encoded.rejected
            num_kept += bool(encoded.rows)
            counts["conversations"] += 1
            counts["rows_cut"] += encoded.num_cut
            counts["reasoning_ignored"] += encoded.reasoning_ignored
        bad = [entry for entry in rejected[first:] if entry.reason != TOO_LONG]
        check_rejected(path, num_kept, bad, max_rejected)
    if not rows:
        raise ValueError(f"no rows from {len(conversations)} files: {count_reasons(rejected)}")
    write_rows(out, rows)
    manifest = Manifest(
        target=name,
        **describe_tokenizer(tokenizer),
        inputs=describe_inputs(conversations),
        options={"max_length": max_length, "stop_token_ids": list(stop)},
        num_kept=len(rows),
        num_tokens=sum(len(row.input_ids) for row in rows),
        num_supervised=sum(row.num_supervised for row in rows),
        rejected=count_reasons(rejected),
        counts=counts,
    )
    manifest.save(out.with_name(f"{stem(out)}.manifest.json"))
    return manifest


def stop_tokens(directory: Path) -> tuple[int, ...]:
    """The stop tokens that a model directory's generation config names, if it has one."""
    if not (directory / "generation_config.json").is_file():
        return ()
    eos = GenerationConfig.from_pretrained(directory).eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
