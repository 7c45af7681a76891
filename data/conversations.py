"""Conversations to rows: the loss mask comes from the ids, never from searching the text.

For the assistant message j, the prompt is the ids of `messages[:j]` with the generation prompt, and
the ids of `messages[:j + 1]` have to begin with them. What follows is the turn: supervised up to
and with its end-of-turn token (see turns.py), and not beyond.

An empty `<think></think>` that the template puts before an answer belongs to the prompt. A template
that renders a turn differently once more follows (it strips earlier reasoning) gives one row a
turn, each as the target would have seen it; a turn that does not begin with its prompt rejects the
conversation. What the template leaves out without a word (the reasoning, all messages of a role,
the tools) is counted and warned about.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..target.files import resolve
from ..target.model import load_tokenizer
from .jsonl import MAX_REJECTED, Rejected, check_rejected, count_reasons, read_objects, stem
from .manifest import Manifest, describe_inputs, describe_tokenizer
from .messages import (
    IGNORABLE,
    BadMessages,
    adapt,
    ignored_parts,
    parse_messages,
    parse_tools,
    render,
)
from .rows import Row, write_rows
from .tokens import Tokens
from .turns import Turn, TurnEnds, find_turn

TOO_LONG = "prompt longer than max_length"  # dropped and counted, but no fault of the file


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
    ignored: tuple[str, ...] = ()  # of IGNORABLE: what the template left out without a word


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
    """Ids and loss mask of a conversation, cut at `max_length` tokens.

    Warns of what the chat template leaves out.
    """
    encoded = _encode(conversation, tokenizer, max_length, stop_token_ids)
    if encoded.ignored:
        names = ", ".join(IGNORABLE[part] for part in encoded.ignored)
        warnings.warn(f"the chat template ignores {names}", stacklevel=2)
    return encoded


def _encode(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stop_token_ids: Sequence[int],
) -> Encoded:
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
        turns = [find_turn(tokens, messages, j, tools, ends, full) for j in places]
        ignored = ignored_parts(tokenizer, messages, tools)
    except BadMessages as error:
        return Encoded(rejected=[Rejected(id, error.reason, error.detail)])
    if all(full[: turn.end] == turn.ids[: turn.end] for turn in turns):
        rows = [_row(id, full, turns, conversation.tags)]
    else:
        names = [f"{id}#{n}" for n in range(1, len(turns) + 1)] if len(turns) > 1 else [id]
        rows = [
            _row(name, turn.ids, [turn], conversation.tags)
            for name, turn in zip(names, turns, strict=True)
        ]
    return _cut(rows, max_length, ignored)


def _row(id: str, ids: list[int], turns: list[Turn], tags: tuple[str, ...]) -> Row:
    mask = [0] * len(ids)
    for turn in turns:
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
    return Row(id, ids, mask, tags)


def _cut(rows: list[Row], max_length: int, ignored: tuple[str, ...]) -> Encoded:
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
    return Encoded(kept, rejected, num_cut, ignored)


def prepare(
    target: str | Path,
    conversations: Sequence[Path],
    out: Path,
    *,
    max_length: int,
    max_rejected: float = MAX_REJECTED,
    trust_remote_code: bool = False,
) -> Manifest:
    """Writes the rows of conversation files to `out`, and their manifest beside it.

    Needs the target's tokenizer, not its weights. Raises ValueError for a file with more than a
    share `max_rejected` of bad conversations; those whose prompt is too long are dropped and
    counted apart. What the chat template leaves out is counted in the manifest and warned about in
    one line. `trust_remote_code` lets a tokenizer run the code that lies beside it.
    """
    directory, name = resolve(target, need_weights=False)
    tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise ValueError(f"{name}: no tokenizer files; expected tokenizer.json beside config.json")
    stop = stop_tokens(directory)
    rows: list[Row] = []
    rejected: list[Rejected] = []
    counts = {"conversations": 0, "rows_cut": 0, **{f"{part}_ignored": 0 for part in IGNORABLE}}
    for path in conversations:
        first, num_kept = len(rejected), 0
        for item in read_conversations(path):
            encoded = (
                Encoded(rejected=[item])
                if isinstance(item, Rejected)
                else _encode(item, tokenizer, max_length, stop)
            )
            rows += encoded.rows
            rejected += encoded.rejected
            num_kept += bool(encoded.rows)
            counts["conversations"] += 1
            counts["rows_cut"] += encoded.num_cut
            for part in encoded.ignored:
                counts[f"{part}_ignored"] += 1
        bad = [entry for entry in rejected[first:] if entry.reason != TOO_LONG]
        check_rejected(path, num_kept, bad, max_rejected)
    _warn_of_ignored(counts)
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


def _warn_of_ignored(counts: dict[str, int]) -> None:
    found = {part: counts[f"{part}_ignored"] for part in IGNORABLE}
    where = ", ".join(f"{IGNORABLE[part]} in {number}" for part, number in found.items() if number)
    if where:
        total = counts["conversations"]
        warnings.warn(
            f"the chat template leaves out parts of the {total} conversations ({where}); the "
            "target never saw them: remove them from the rows, or use a template that shows them",
            stacklevel=3,
        )


def stop_tokens(directory: Path) -> tuple[int, ...]:
    """The stop tokens that a model directory's generation config names, if it has one."""
    if not (directory / "generation_config.json").is_file():
        return ()
    eos = GenerationConfig.from_pretrained(directory).eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
