"""Ids of many texts that begin alike: the renderings of a conversation, turn by turn.

Special tokens split a text before it is tokenized, so what lies between two of them has the same
ids wherever it stands. Each such piece is tokenized once: a session of a hundred turns costs its
own length, not a hundred times that. Whether a tokenizer keeps to this is checked on the whole
conversation.
"""

import re
from itertools import pairwise

from transformers import PreTrainedTokenizerBase


class Tokens:
    """`ids(text)` equals `tokenizer(text, add_special_tokens=False).input_ids`.

    `check` is a text for which that is tried out; where it fails, nothing is split.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, check: str) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {i for i, token in added.items() if token.special}
        self.special.update(tokenizer.all_special_ids)
        exact = [
            token.content
            for token in added.values()
            if token.special and not (token.lstrip or token.rstrip or token.single_word)
        ]
        longest_first = sorted(map(re.escape, exact), key=len, reverse=True)
        self._start = re.compile("|".join(longest_first)) if exact else None
        self._known: dict[str, list[int]] = {}
        if self.ids(check) != self._tokenize(check):
            self._start = None

    def ids(self, text: str) -> list[int]:
        result: list[int] = []
        for piece in self._pieces(text):
            found = self._known.get(piece)
            if found is None:
                found = self._known[piece] = self._tokenize(piece)
            result += found
        return result

    def count(self, text: str, header: str) -> int:
        """Tokens of `text` within its beginning `header`; one across the end counts as within."""
        if not self.tokenizer.is_fast:
            return len(self.ids(header))
        last = len(self._pieces(header)[-1])
        before, rest = header[:-last], text[len(header) - last :]
        offsets = self.tokenizer(
            rest, add_special_tokens=False, return_offsets_mapping=True
        ).offset_mapping
        inside = next((n for n, (first, _) in enumerate(offsets) if first >= last), len(offsets))
        return (len(self.ids(before)) if before else 0) + inside

    def _pieces(self, text: str) -> list[str]:
        """The text cut before every special token."""
        if self._start is None:
            return [text]
        cuts = [0, *(match.start() for match in self._start.finditer(text)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if a < b]

    def _tokenize(self, text: str) -> list[int]:
        # As apply_chat_template does: a rendered text already holds every special token.
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
