"""Answers by the target itself: the only text a drafter is trained on.

Rows are appended as answers finish, so a run that stops goes on where it was: prompts whose id is
already in the file are skipped, and a last line that a crash left unfinished is cut off. The
manifest beside the rows (`<stem>.manifest.json`) is written first; going on with other options than
it names is refused, since the file would mix two kinds of answers.
"""

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..target.generate import generate, max_positions
from ..target.model import Target
from ..target.teacher import Teacher
from .jsonl import Rejected, count_reasons, stem
from .manifest import Manifest, describe_tokenizer
from .messages import BadMessages
from .prompts import Prompt, encode_prompt
from .rows import Row, read_rows, row_to_object

PROGRESS_SECONDS = 5.0
MIN_UNFINISHED = 8  # tokens from which an answer cut by the deadline is worth a row

# Called with each new row before it is stored, its context features [L, n*H] and what soft labels
# need [L, H] (None unless asked for). L is one less than the row: its last token is
# never fed.
OnFeatures = Callable[[Row, Tensor, Tensor | None], None]


@dataclass(frozen=True)
class RegenerateSummary:
    """What a call did; `num_rows` and the manifest count the whole file."""

    num_rows: int
    num_new: int
    num_skipped: int  # their rows were there
    num_left: int  # the deadline came first
    num_new_tokens: int  # generated ones
    seconds: float
    tokens_per_second: float
    finish_reasons: dict[str, int]
    rejected: dict[str, int]
    manifest_digest: str


def regenerate(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    deadline_seconds: float | None = None,
    layer_ids: Sequence[int] | None = None,
    teacher: Teacher | None = None,
    on_features: OnFeatures | None = None,
    progress: Callable[[str], None] | None = None,
) -> RegenerateSummary:
    """Appends a row for every prompt that has none in `out` (.jsonl), in the order they finish.

    A row is the prompt's ids and the generated ones, mask 1 on the latter, the stop token included.
    With `on_features`, `layer_ids` says which features it gets. After `deadline_seconds` no answer
    is begun and the unfinished ones are kept as far as they came. `progress` takes a line every few
    seconds (default: stderr). A sampled answer depends on its prompt's place among those of the
    call: at temperature 0 a resumed run gives the same rows, above it other samples.

    Raises ValueError for two prompts of one id, a name that is not .jsonl, or a file with other
    options.
    """
    started = time.monotonic()
    _check_arguments(prompts, out, layer_ids, on_features)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    manifest = _manifest(target, prompts, {**sampling, "max_new_tokens": max_new_tokens})
    manifest_path = out.with_name(f"{stem(out)}.manifest.json")
    present = _resume(out, manifest_path, manifest, target.vocab_size)
    ids = {row.id for row in present}
    wanted = [prompt for prompt in prompts if prompt.id not in ids]
    todo, rejected = _encode_all(target, wanted, max_new_tokens)
    state = _Progress(len(todo), started, progress or _to_stderr)
    with open(out, "a", encoding="utf-8") as file:
        for answer in generate(
            target,
            [prompt_ids for _, prompt_ids in todo],
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            **sampling,
            layer_ids=layer_ids if on_features is not None else None,
            teacher=teacher if on_features is not None else None,
            deadline=None if deadline_seconds is None else started + deadline_seconds,
            keep_unfinished=deadline_seconds is not None,
        ):
            prompt, prompt_ids = todo[answer.index]
            if len(answer.output_ids) < MIN_UNFINISHED and answer.finish_reason == "deadline":
                continue
            row = _row(prompt, prompt_ids, answer.output_ids)
            if on_features is not None:
                assert answer.context is not None
                on_features(row, answer.context, answer.teacher)
            # One write a row: a crash leaves whole lines and at most a part of one more.
            file.write(json.dumps(row_to_object(row), ensure_ascii=False) + "\n")
            file.flush()
            state.add(row, answer.finish_reason)
    state.report()
    manifest = replace(
        manifest,
        num_kept=len(present) + state.num_rows,
        num_tokens=sum(len(row.input_ids) for row in present) + state.num_tokens,
        num_supervised=sum(row.num_supervised for row in present) + state.num_generated,
        rejected=count_reasons(rejected),
    )
    manifest.save(manifest_path)
    return RegenerateSummary(
        num_rows=manifest.num_kept,
        num_new=state.num_rows,
        num_skipped=len(prompts) - len(wanted),
        num_left=len(todo) - state.num_rows,
        num_new_tokens=state.num_generated,
        seconds=state.seconds,
        tokens_per_second=state.num_generated / state.seconds,
        finish_reasons=dict(state.finish_reasons),
        rejected=manifest.rejected,
        manifest_digest=manifest.digest,
    )


def _check_arguments(
    prompts: Sequence[Prompt],
    out: Path,
    layer_ids: Sequence[int] | None,
    on_features: OnFeatures | None,
) -> None:
    if out.suffix != ".jsonl":
        raise ValueError(f"{out}: expected a name ending in .jsonl, to which rows are appended")
    if on_features is not None and layer_ids is None:
        raise ValueError("on_features is given without layer_ids; say which features it gets")
    counts = Counter(prompt.id for prompt in prompts)
    repeated = [id for id, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} prompt ids occur more than once, first {repeated[0]!r}; a row is "
            "known by its prompt's id: give each its own"
        )


def _row(prompt: Prompt, prompt_ids: list[int], output_ids: list[int]) -> Row:
    mask = [0] * len(prompt_ids) + [1] * len(output_ids)
    return Row(prompt.id, prompt_ids + output_ids, mask, (prompt.tag,))


def _manifest(target: Target, prompts: Sequence[Prompt], options: dict[str, Any]) -> Manifest:
    tokenizer = target.require_tokenizer()
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(asdict(prompt), ensure_ascii=False).encode())
    return Manifest(
        target=target.name,
        **describe_tokenizer(tokenizer),
        inputs={"prompts": digest.hexdigest()},
        options={
            **options,
            "dtype": str(target.dtype).removeprefix("torch."),
            "stop_token_ids": list(target.stop_token_ids),
            "weights": _weights_digest(target),
        },
        seeds={"sampling": options["seed"]},
    )


def _weights_digest(target: Target) -> str:
    """Tells apart checkpoints of one name: the final norm and the first rows of the head."""
    tensors = [*target.final_norm.parameters(), target.head[:64]]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _resume(out: Path, manifest_path: Path, manifest: Manifest, vocab_size: int) -> list[Row]:
    """The rows that are there; cuts off a part of a line. Writes the manifest of a new file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        content = out.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with open(out, "r+b") as file:
                file.truncate(whole)
        if whole:
            _check_same(out, manifest_path, manifest)
            return read_rows(out, vocab_size, max_rejected=0.0).rows
    manifest.save(manifest_path)
    return []


def _check_same(out: Path, manifest_path: Path, manifest: Manifest) -> None:
    if not manifest_path.exists():
        raise ValueError(
            f"{out} exists without {manifest_path.name}: how its answers were made is not known; "
            "remove it or choose another name"
        )
    old = Manifest.load(manifest_path)
    before = {"target": old.target, "template": old.template_sha256, **old.options}
    before["tokenizer"] = old.tokenizer_sha256
    now = {"target": manifest.target, "template": manifest.template_sha256, **manifest.options}
    now["tokenizer"] = manifest.tokenizer_sha256
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        found = ", ".join(f"{key}: {before.get(key)} then, {now.get(key)} now" for key in changed)
        raise ValueError(
            f"{out} was begun with other options ({found}); go on with those, remove it, or choose "
            "another name"
        )


def _encode_all(
    target: Target, prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[list[tuple[Prompt, list[int]]], list[Rejected]]:
    """Ids of every prompt; those that the template refuses or that leave no room are rejected."""
    tokenizer = target.require_tokenizer()
    limit = max_positions(target)
    encoded: list[tuple[Prompt, list[int]]] = []
    rejected: list[Rejected] = []
    for prompt in prompts:
        try:
            ids = encode_prompt(prompt, tokenizer)
        except BadMessages as error:
            rejected.append(Rejected(prompt.id, error.reason, error.detail))
            continue
        if limit is not None and len(ids) + max_new_tokens > limit:
            detail = f"{len(ids)} tokens and {max_new_tokens} new ones, {limit} positions"
            rejected.append(Rejected(prompt.id, "prompt too long for the target", detail))
        elif ids and max(ids) >= target.vocab_size:
            detail = f"found {max(ids)}, the target has {target.vocab_size} rows"
            rejected.append(Rejected(prompt.id, "token id beyond the vocabulary", detail))
        elif ids:
            encoded.append((prompt, ids))
        else:
            rejected.append(Rejected(prompt.id, "prompt without tokens"))
    return encoded, rejected


@dataclass
class _Progress:
    """Counts of this call, and a line about them now and then."""

    num_wanted: int
    started: float
    say: Callable[[str], None]
    num_rows: int = 0
    num_tokens: int = 0
    num_generated: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    last: float = 0.0

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def add(self, row: Row, finish_reason: str) -> None:
        self.num_rows += 1
        self.num_tokens += len(row.input_ids)
        self.num_generated += row.num_supervised
        self.finish_reasons[finish_reason] += 1
        if self.seconds - self.last >= PROGRESS_SECONDS:
            self.report()

    def report(self) -> None:
        self.last = self.seconds
        left = self.seconds / max(self.num_rows, 1) * (self.num_wanted - self.num_rows)
        self.say(
            f"answers {self.num_rows}/{self.num_wanted}, {self.num_generated} tokens, "
            f"{self.num_generated / self.seconds:.0f} tokens/s, about {left:.0f} s left"
        )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
