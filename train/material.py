"""What a run trains on.

The target, the rows, the held-out prompts; made once under `out` and found again on resume.
"""

import hashlib
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch
from accelerate import PartialState
from huggingface_hub import constants, try_to_load_from_cache

from ..data.cache import CacheReader, CacheWriter, check_disk, estimate_bytes
from ..data.conversations import prepare
from ..data.loader import seeded
from ..data.prompts import Prompt, encode_prompt, read_prompts
from ..data.regenerate import regenerate
from ..data.rows import Row, read_rows
from ..data.stdlib import Split, stdlib_prompts
from ..recipes.schema import Recipe
from ..target.gguf import convert_gguf, find_packaged_gguf
from ..target.model import Target
from ..target.tiny import make_tiny_target, tiny_prompts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUILT_IN = ("stdlib", "tiny")
TINY_PROMPTS = (
    4000  # the grammar never ends; a training split of this size is plenty for a tiny drafter
)


@dataclass(frozen=True)
class Material:
    rows: list[Row]
    heldout: list[Prompt]
    cache: CacheReader


def open_target(recipe: Recipe, out: Path, state: PartialState) -> Target:
    """Load the target.

    A tiny one is trained and a packaged GGUF converted under `out/target`, by the main process.
    """
    section = recipe.target
    own = out / "target"
    if state.is_main_process and not (own / "config.json").exists():
        if section.make == "tiny":
            make_tiny_target(own)
        elif section.gguf_package is not None and not _reachable(section.path):
            convert_gguf(find_packaged_gguf(section.gguf_package), own, dtype=DTYPES[section.dtype])
    state.wait_for_everyone()
    made = (own / "config.json").exists()
    path = own if made else section.path
    assert path is not None
    target = Target.load(
        path,
        dtype=DTYPES[section.dtype],
        device=recipe.train.device,
        trust_remote_code=section.trust_remote_code,
    )
    if made:
        # Its directory is called `target` in every run; reports should say which model it is.
        target.name = section.make or section.path or section.gguf_package or target.name
    return target


def _reachable(path: str | None) -> bool:
    """Whether the named target is here: a local path, a cached hub id, or a hub that answers."""
    if path is None:
        return False
    if Path(path).exists() or isinstance(try_to_load_from_cache(path, "config.json"), str):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    # The hub's own client would try for half a minute and print each failure.
    hub = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((hub.hostname or "", hub.port or 443), timeout=3):
            return True
    except OSError:
        return False


def gather_material(
    recipe: Recipe, out: Path, target: Target, layer_ids: tuple[int, ...], state: PartialState
) -> Material:
    """Rows of every source.

    Prompts answered (each process its share), conversations encoded, rows read.
    """
    data, folder = recipe.data, out / "data"
    files = [Path(name) for name in data.rows]
    if data.conversations:
        encoded = folder / "conversations.jsonl"
        if state.is_main_process and not encoded.exists():
            prepare(
                target.path,
                [Path(name) for name in data.conversations],
                encoded,
                max_length=data.max_length,
            )
        state.wait_for_everyone()
        files.append(encoded)
    prompts = _prompts(recipe, "train")
    if prompts:
        _answer(recipe, out, target, prompts, layer_ids, state)
        files += sorted(folder.glob("answers-*.jsonl"))
    rows = [row for path in files for row in read_rows(path, target.vocab_size).rows]
    # One order whatever the processes' shares and speeds were.
    rows = sorted(
        (row for row in rows if len(row.input_ids) <= data.max_length), key=lambda row: row.id
    )
    if not any(row.num_supervised > 1 for row in rows):
        raise ValueError(
            "no row has two tokens in a row that the target generated: there is nothing to learn "
            "from"
        )
    return Material(rows, _heldout(recipe, target), CacheReader(feature_folder(out, layer_ids)))


def _answer(
    recipe: Recipe,
    out: Path,
    target: Target,
    prompts: list[Prompt],
    layer_ids: tuple[int, ...],
    state: PartialState,
) -> None:
    """Let the target answer this process's share of the prompts, features kept where wanted."""
    data, folder = recipe.data, out / "data"
    # A stop between answering and training must not answer for another `data.minutes`.
    done = folder / "answers.done"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    keep = None
    if data.features == "cache":
        writer = _cache_writer(recipe, out, target, prompts, layer_ids, state)
        keep = writer.add_row
    regenerate(
        target,
        prompts[state.process_index :: state.num_processes],
        folder / f"answers-{state.process_index}.jsonl",
        max_new_tokens=data.max_new_tokens,
        batch_size=data.batch_size,
        temperature=data.temperature,
        seed=recipe.train.seed,
        deadline_seconds=None if data.minutes is None else data.minutes * 60,
        layer_ids=layer_ids if keep else None,
        expected=recipe.loss.labels == "soft",
        on_features=keep,
        progress=None if state.is_main_process else lambda line: None,
    )
    if data.features == "cache":
        writer.flush()
    state.wait_for_everyone()
    if state.is_main_process:
        done.touch()
    state.wait_for_everyone()


def _cache_writer(
    recipe: Recipe,
    out: Path,
    target: Target,
    prompts: list[Prompt],
    layer_ids: tuple[int, ...],
    state: PartialState,
) -> CacheWriter:
    """This process's writer; the main one says what the cache takes and looks at the disk."""
    data, folder = recipe.data, feature_folder(out, layer_ids)
    if state.is_main_process:
        sizes = {
            "num_features": len(layer_ids) * target.hidden_size,
            "hidden_size": target.hidden_size,
            "dtype": data.cache_dtype,
            "soft": recipe.loss.labels == "soft",
        }
        print(f"feature cache: {estimate_bytes(1, **sizes)} bytes a token", file=sys.stderr)
        if data.minutes is None:
            tokenizer = target.require_tokenizer()
            tokens = sum(len(encode_prompt(p, tokenizer)) + data.max_new_tokens for p in prompts)
            size = estimate_bytes(tokens, **sizes)
            print(f"feature cache: at most {size / 1e9:.2f} GB in all", file=sys.stderr)
            check_disk(folder, size)
    return CacheWriter(folder, f"part-{state.process_index}", data.cache_dtype)


def feature_folder(out: Path, layer_ids: tuple[int, ...]) -> Path:
    """Features of other layers are other features: each choice has its folder."""
    return out / "data" / ("features-" + "-".join(map(str, layer_ids)))


def _prompts(recipe: Recipe, split: Split) -> list[Prompt]:
    data = recipe.data
    prompts: list[Prompt] = []
    for source in data.prompts:
        prompts += (
            built_in_prompts(source, split, recipe.train.seed)
            if source in BUILT_IN
            else read_prompts(source)
        )
    return prompts[: data.max_prompts]


def built_in_prompts(
    source: str, split: Split, seed: int, limit: int = TINY_PROMPTS
) -> list[Prompt]:
    """`stdlib`.

    Functions of the standard library; `tiny`: requests of the tiny target's grammar.
    """
    if source == "stdlib":
        return stdlib_prompts(split, seed=seed)
    messages = tiny_prompts(split, seed=seed, limit=limit)
    return [Prompt(f"tiny/{split}/{i}", message, "tiny") for i, message in enumerate(messages)]


def _heldout(recipe: Recipe, target: Target) -> list[Prompt]:
    """Held-out prompts in a fixed shuffled order, so that a short measurement mixes all tags."""
    data = recipe.data
    prompts = [prompt for name in data.heldout for prompt in read_prompts(name)]
    if not data.heldout:
        for source in (name for name in data.prompts if name in BUILT_IN):
            prompts += built_in_prompts(
                source, "heldout", recipe.train.seed, recipe.eval.final_prompts
            )
    if not prompts:
        raise ValueError(
            "no held-out prompts: name files under data.heldout (training prompts must not be "
            "measured on)"
        )
    order = torch.randperm(len(prompts), generator=seeded("heldout", recipe.train.seed)).tolist()
    tokenizer = target.require_tokenizer()
    limit = recipe.data.max_length
    kept = [prompts[i] for i in order if len(encode_prompt(prompts[i], tokenizer)) <= limit]
    return kept[: max(recipe.eval.prompts, recipe.eval.final_prompts)]


def target_revision(target: Target) -> str:
    """Tells checkpoints of one name apart.

    A hash of the config and of every weight file's name, size and header.
    """
    digest = hashlib.sha256()
    for path in sorted([target.path / "config.json", *target.path.glob("*.safetensors")]):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 16))
    return digest.hexdigest()[:16]
