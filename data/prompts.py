"""Prompts: what the target is asked, before it answers.

A file holds one object a line: `{"turns": [text, ...]}` (the first turn is the prompt; later turns
need the answer to it and are left out) or `{"messages": [...]}`, OpenAI or ShareGPT names, cut
after the last message the assistant has to answer. "id", "tag" and "tools" are optional; a prompt's
tag is its group in reports and defaults to the file's stem.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..target.generate import max_positions
from ..target.model import Target
from .jsonl import MAX_REJECTED, Rejected, check_rejected, count_reasons, read_objects, stem
from .messages import BadMessages, adapt, parse_messages, parse_tools, render


@dataclass(frozen=True)
class Prompt:
    """Messages up to the one to answer."""

    id: str
    messages: list[dict[str, Any]]
    tag: str
    tools: list[dict[str, Any]] | None = field(default=None)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its token ids: it is tokenized once, and the ids are passed on."""

    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True)
class PromptFile:
    """What a file gave."""

    prompts: list[Prompt]
    rejected: list[Rejected]


def read_prompt_file(path: str | Path, *, max_rejected: float = MAX_REJECTED) -> PromptFile:
    """Reads a file of prompts; ValueError when it holds none or too many bad ones."""
    prompts: list[Prompt] = []
    rejected: list[Rejected] = []
    seen: set[str] = set()
    for item in read_objects(path):
        prompt = item if isinstance(item, Rejected) else _prompt(*item, tag=stem(path))
        if isinstance(prompt, Prompt) and prompt.id in seen:
            prompt = Rejected(prompt.id, "id used twice")
        if isinstance(prompt, Rejected):
            rejected.append(prompt)
        else:
            seen.add(prompt.id)
            prompts.append(prompt)
    check_rejected(path, len(prompts), rejected, max_rejected)
    if not prompts:
        raise ValueError(f"{path}: no prompts; expected one object a line with turns or messages")
    return PromptFile(prompts, rejected)


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file; the few bad ones are left out with a warning that counts them."""
    file = read_prompt_file(path)
    if file.rejected:
        warnings.warn(
            f"{path}: {len(file.rejected)} prompts left out: {count_reasons(file.rejected)}, "
            f"first {file.rejected[0]}",
            stacklevel=2,
        )
    return file.prompts


def _prompt(id: str, entry: dict[str, Any], *, tag: str) -> Prompt | Rejected:
    own = entry.get("tag", tag)
    if not isinstance(own, str):
        return Rejected(id, "tag is not a string", f"found {own!r}")
    try:
        messages = _messages(entry)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise BadMessages("nothing to answer", "no user or tool message at the end")
        return Prompt(id, messages, own, parse_tools(entry))
    except BadMessages as error:
        return Rejected(id, error.reason, error.detail)


def _messages(entry: dict[str, Any]) -> list[dict[str, Any]]:
    if "turns" not in entry:
        return parse_messages(entry)
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise BadMessages("turns is not a list of texts", f"found {str(turns)[:60]!r}")
    return [{"role": "user", "content": turns[0]}]


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the prompt as the target sees it: chat template with its generation prompt.

    Without a chat template: the messages' texts, separated by blank lines, with the tokenizer's own
    special tokens (`prompt_format` names which of the two holds).
    """
    if tokenizer.chat_template:
        messages = adapt(tokenizer, prompt.messages, prompt.tools)
        text = render(tokenizer, messages, prompt.tools, generation=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    text = "\n\n".join(message["content"] for message in prompt.messages)
    return list(tokenizer(text).input_ids)


def encode_prompts(
    prompts: Iterable[Prompt], target: Target, *, room: int, max_tokens: int | None = None
) -> Iterator[EncodedPrompt | Rejected]:
    """Each prompt with its ids, as they are asked for, or why the target cannot answer it.

    A prompt may have `max_tokens` tokens and has to leave `room` of the target's positions.
    """
    tokenizer, positions = target.require_tokenizer(), max_positions(target)
    for prompt in prompts:
        try:
            ids = encode_prompt(prompt, tokenizer)
        except BadMessages as error:
            yield Rejected(prompt.id, error.reason, error.detail)
            continue
        if not ids:
            yield Rejected(prompt.id, "prompt without tokens")
        elif positions is not None and len(ids) + room > positions:
            detail = f"{len(ids)} tokens and {room} new ones, {positions} positions"
            yield Rejected(prompt.id, "prompt too long for the target", detail)
        elif max_tokens is not None and len(ids) > max_tokens:
            detail = f"{len(ids)} tokens, expected at most {max_tokens}"
            yield Rejected(prompt.id, "prompt too long for max_length", detail)
        elif max(ids) >= target.vocab_size:
            detail = f"found {max(ids)}, the target has {target.vocab_size} rows"
            yield Rejected(prompt.id, "token id beyond the vocabulary", detail)
        else:
            yield EncodedPrompt(prompt, ids)


def prompt_format(tokenizer: PreTrainedTokenizerBase) -> str:
    """`"chat template"` or `"plain text"`, for the manifest."""
    return "chat template" if tokenizer.chat_template else "plain text"
