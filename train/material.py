"""What a run trains on.

The target, the rows, the held-out prompts; made once under `out` and found again on resume.
"""

import json
import socket
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import torch
from accelerate import PartialState
from huggingface_hub import constants, try_to_load_from_cache

from ..data.cache import CacheReader
from ..data.conversations import prepare
from ..data.jsonl import Rejected, atomic_file, count_reasons
from ..data.loader import seeded
from ..data.manifest import describe_inputs
from ..data.prompts import EncodedPrompt, Prompt, encode_prompts, read_prompts
from ..data.rows import Row, read_rows
from ..data.sources import Kind, Source, describe_source, stated_temperatures
from ..data.stdlib import Split, stdlib_prompts
from ..dflash.config import DFlashConfig
from ..recipes.schema import Recipe
from ..target.files import target_revision
from ..target.gguf import convert_gguf, find_packaged_gguf
from ..target.model import Target
from ..target.tiny import make_tiny_target, tiny_prompts
from .answers import answer_share, feature_folder

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
    cpu_seconds: float  # that answering the prompts took, of all processes
    sources: tuple[Source, ...] = ()  # what the rows are, by kind and size


def open_target(recipe: Recipe, out: Path, state: PartialState) -> Target:
    """Load the target.

    A tiny one is trained and a packaged GGUF converted under `out/target`, by the main process.
    """
    section = recipe.target
    own = out / "target"
    if state.is_main_process and not (own / "config.json").exists():
        if section.make == "tiny":
            print("target: training the tiny one, about 15 CPU-seconds", file=sys.stderr)
            make_tiny_target(own)
        elif section.gguf_package is not None and not _reachable(section.path):
            print("target: converting the packaged GGUF file", file=sys.stderr)
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
    recipe: Recipe, out: Path, target: Target, config: DFlashConfig, state: PartialState
) -> Material:
    """Rows of every source, for a drafter with this config.

    Prompts answered (each process its share), conversations encoded, rows read.
    """
    data, folder, layer_ids = recipe.data, out / "data", config.target_layer_ids
    if state.is_main_process:
        check_inputs(recipe, out, target)
    state.wait_for_everyone()
    files: dict[Kind, list[Path]] = {"rows": [Path(name) for name in data.rows]}
    if data.conversations:
        encoded = folder / "conversations.jsonl"
        if state.is_main_process and not encoded.exists():
            prepare(
                target.path,
                [Path(name) for name in data.conversations],
                encoded,
                max_length=data.max_length,
                trust_remote_code=recipe.target.trust_remote_code,
            )
        state.wait_for_everyone()
        files["conversations"] = [encoded]
    prompts = _prompts(recipe, "train")
    if prompts:
        answer_share(recipe, out, target, prompts, layer_ids, state)
        # A process whose share was empty, or that the deadline met early, has an empty file.
        files["answers"] = [p for p in sorted(folder.glob("answers-*.jsonl")) if p.stat().st_size]
    rows, sources = _read_files(recipe, files, target.vocab_size, aloud=state.is_main_process)
    done = folder / "answers.done"
    cpu_seconds = json.loads(done.read_text())["cpu_seconds"] if done.exists() else 0.0
    cache = CacheReader(feature_folder(out, layer_ids), recipe.teacher)
    # The bonus token after the last proposal has a position, too.
    heldout = _heldout(recipe, target, room=config.num_draft_tokens + 1)
    return Material(rows, heldout, cache, cpu_seconds, sources)


def _read_files(
    recipe: Recipe, files: dict[Kind, list[Path]], vocab_size: int, *, aloud: bool
) -> tuple[list[Row], tuple[Source, ...]]:
    """The rows of all files in order of id, and what they are; with `aloud` says what is left out.

    Raises ValueError where there is nothing to learn from.
    """
    data = recipe.data
    names: dict[Kind, list[str]] = {
        "rows": data.rows,
        "conversations": data.conversations,
        "answers": data.prompts,
    }
    rejected: list[Rejected] = []
    everything: list[Row] = []
    kept: list[Row] = []
    sources: list[Source] = []
    for kind, paths in files.items():
        found = [read_rows(path, vocab_size) for path in paths]
        rejected += [bad for file in found for bad in file.rejected]
        rows = [row for file in found for row in file.rows]
        short = [row for row in rows if len(row.input_ids) <= data.max_length]
        everything += rows
        kept += short
        if short:
            temperatures = stated_temperatures(paths)
            sources.append(describe_source(kind, names[kind], short, temperatures))
    if rejected and aloud:
        reasons = count_reasons(rejected)
        print(
            f"data: {len(rejected)} rows rejected: {reasons}, first {rejected[0]}", file=sys.stderr
        )
    _check_ids(everything)
    if len(kept) < len(everything) and aloud:
        print(
            f"data: {len(everything) - len(kept)} rows longer than data.max_length="
            f"{data.max_length} left out",
            file=sys.stderr,
        )
    if not any(row.num_supervised > 1 for row in kept):
        raise ValueError(
            "no row has two tokens in a row that the target generated: there is nothing to learn "
            "from"
        )
    return sorted(kept, key=lambda row: row.id), tuple(sources)


def check_inputs(recipe: Recipe, out: Path, target: Target) -> None:
    """ValueError when the target or an input file is no longer what this `out` began with."""
    data = recipe.data
    files = [*data.prompts, *data.conversations, *data.rows, *data.heldout]
    now = describe_inputs([name for name in files if name not in BUILT_IN])
    now["target"] = target_revision(target.path)
    path = out / "data" / "inputs.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(json.dumps(now, indent=2).encode())
        return
    then = json.loads(path.read_text())
    changed = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} changed since the run in {out} began; use another `out`"
        )


def _check_ids(rows: list[Row]) -> None:
    """ValueError when two rows have one id: features are kept by id."""
    counts = Counter(row.id for row in rows)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} row ids occur more than once over all sources of rows, first "
            f"{repeated[0]!r}; give each row its own id"
        )


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
    """Functions of the standard library, or requests in the tiny target's grammar."""
    if source == "stdlib":
        return stdlib_prompts(split, seed=seed)
    messages = tiny_prompts(split, seed=seed, limit=limit)
    return [Prompt(f"tiny/{split}/{i}", message, "tiny") for i, message in enumerate(messages)]


def _heldout(recipe: Recipe, target: Target, *, room: int) -> list[Prompt]:
    """Held-out prompts in a fixed shuffled order, so that a short measurement mixes all tags.

    Each leaves room for its answer and for `room` more: the drafter's last block.
    """
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
    wanted = max(recipe.eval.prompts, recipe.eval.final_prompts)
    room += recipe.eval.max_new_tokens
    shuffled = (prompts[i] for i in order)
    encoded = encode_prompts(shuffled, target, room=room, max_tokens=data.max_length)
    fitting = (item.prompt for item in encoded if isinstance(item, EncodedPrompt))
    kept = list(islice(fitting, wanted))
    if not kept:
        raise ValueError(
            f"no held-out prompt of {len(prompts)} leaves room for {room} tokens of answer within "
            f"{target.name}'s positions; shorten them or lower eval.max_new_tokens"
        )
    return kept
