"""Which rows of the embedding ordinary text never uses, so that one can stand for "masked"."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

# (rows of the embedding, id): what published drafters of these families use.
PUBLISHED = ((151936, 151669), (163840, 163838), (154880, 154856), (129280, 128799))
RESERVED = re.compile(r"reserved|unused|extra_?\d|place.?holder|dummy|no_use", re.I)
NOT_TEXT = re.compile(r"image|video|audio|vision|speech|img|tool|think", re.I)
MASK_LIKE = re.compile(r"\bmask\b|\[mask\]|<mask>", re.I)


def suggest_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """The id to mask with: the family's published one where it is free, else the best free row.

    `vocab_size` is the number of rows of the embedding. Raises ValueError where every row is used.
    """
    free = free_mask_tokens(tokenizer, vocab_size)
    for rows, token_id in PUBLISHED:
        taken = token_id in _ends(tokenizer) | _ids(tokenizer, "pad_token_id")
        usable = token_id in free or token_id == tokenizer.unk_token_id
        if rows == vocab_size and usable and not taken:
            return token_id
    if not free:
        raise ValueError(
            f"no free row for a mask token: all {vocab_size} rows of the embedding belong to text, "
            "template or control tokens; set draft.mask_token_id to a token your data never holds"
        )
    return free[0]


def free_mask_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Free rows, best first: mask or reserved tokens, rows beyond the tokenizer, idle specials.

    Never pad, end, start or unknown, nothing the chat template writes, no image or tool marks.
    """
    known = set(tokenizer.get_vocab().values())
    padded = [i for i in range(vocab_size) if i not in known]
    reserved: list[int] = []
    idle: list[int] = []
    for token_id, text in _idle_specials(tokenizer, vocab_size):
        named = MASK_LIKE.search(text) or RESERVED.search(text)
        (reserved if named else idle).append(token_id)
    # Specials added last are the rarest in what the target was trained on.
    return reserved + padded + idle[::-1]


def _idle_specials(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[tuple[int, str]]:
    template = _template_text(tokenizer)
    taken = _ends(tokenizer) | _ids(tokenizer, "pad_token_id", "unk_token_id")
    idle = []
    for token_id, added in sorted(tokenizer.added_tokens_decoder.items()):
        text = added.content
        ordinary = not added.special or token_id >= vocab_size or token_id in taken
        if ordinary or text in template or NOT_TEXT.search(text):
            continue
        idle.append((token_id, text))
    return idle


def _ids(tokenizer: PreTrainedTokenizerBase, *keys: str) -> set[int]:
    ids = (getattr(tokenizer, key, None) for key in keys)
    return {token_id for token_id in ids if isinstance(token_id, int)}


def _ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Start, end and separator ids, and specials whose name says that they end something."""
    ends = _ids(tokenizer, "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id")
    for token_id, added in tokenizer.added_tokens_decoder.items():
        if re.search(r"end_?of|eos|eot|eom|im_(start|end)|pad\b|\[pad|bos", added.content, re.I):
            ends.add(token_id)
    return ends


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(dict(template).values())
