"""What a data file was made from: hashes, options, seeds, counts.

Two runs with the same digest had the same inputs, tokenizer, template and options. Files are named,
never with their folders.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .jsonl import atomic_file
from .prompts import prompt_format


@dataclass(frozen=True)
class Manifest:
    """Saved as `<file>.manifest.json` beside the rows."""

    target: str
    tokenizer_sha256: str
    template_sha256: str | None  # None: no chat template
    prompt_format: str
    inputs: dict[str, str] = field(default_factory=dict)  # file name -> sha256
    options: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    num_kept: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    rejected: dict[str, int] = field(default_factory=dict)  # by reason
    counts: dict[str, int] = field(default_factory=dict)
    schema: int = 1

    def to_json(self) -> str:
        """The same text for the same content: sorted keys, no time, no place."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        with atomic_file(Path(path)) as file:
            file.write(self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> "Manifest":
        """Raises ValueError where the file is none."""
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}: not a data manifest ({error}); make the rows again"
            ) from None


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The manifest's fields about the tokenizer."""
    template = tokenizer.chat_template
    text = json.dumps(template, sort_keys=True) if template else None
    return {
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "template_sha256": hashlib.sha256(text.encode()).hexdigest() if text else None,
        "prompt_format": prompt_format(tokenizer),
    }


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of all that turns text into ids: vocabulary, merges, added tokens, normalizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # Set and reset by every call that pads or truncates.
        state.pop("padding", None)
        state.pop("truncation", None)
    else:
        added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        state = {"vocabulary": tokenizer.get_vocab(), "added": added}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def describe_inputs(paths: Iterable[str | Path]) -> dict[str, str]:
    """sha256 by file name; a name that occurs twice gets its number."""
    inputs: dict[str, str] = {}
    for path in map(Path, paths):
        name, number = path.name, 2
        while name in inputs:
            name, number = f"{path.name} ({number})", number + 1
        with open(path, "rb") as file:
            inputs[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return inputs
