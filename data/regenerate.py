"""Answers by the target itself: the only text a drafter is trained on.

Rows are appended as answers finish, so a run that stops goes on where it was: prompts whose id is
already in the file are skipped, and a last line that a crash left unfinished is cut off. The
manifest beside the rows (`<stem>.manifest.json`) is written first; going on with other options than
it names is refused, since the file would mix two kinds of answers.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..target.generate import generate
from ..target.model import Target
from ..target.sampling import GREEDY, Sampling
from ..target.teacher import Teacher
from .jsonl import Rejected, count_reasons, stem
from .lock import exclusive
from .manifest import Manifest, describe_tokenizer
from .progress import AnswerProgress, to_stderr
from .prompts import EncodedPrompt, Prompt, encode_prompts
from .rows import Row, read_rows, row_to_object

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


@dataclass(frozen=True)
class AnswerPlan:
    """What is to be answered: the prompts, tokenized, that have no row in `out` yet."""

    out: Path
    manifest: Manifest
    present: list[Row]
    todo: list[EncodedPrompt]
    rejected: list[Rejected]
    num_skipped: int  # their rows are there
    max_new_tokens: int
    sampling: Sampling
    started: float  # time.monotonic(), from which the deadline counts


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
    """`plan_answers` and `answer` in one, for the one process that writes `out`.

    Raises ValueError as they do, and where another process is at it.
    """
    _check_name(out)
    with exclusive(out.with_name(f".{out.name}.lock"), out):
        plan = plan_answers(
            target,
            prompts,
            out,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_p, top_k, seed),
        )
        return answer(
            target,
            plan,
            batch_size=batch_size,
            deadline_seconds=deadline_seconds,
            layer_ids=layer_ids,
            teacher=teacher,
            on_features=on_features,
            progress=progress,
        )


def plan_answers(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    max_length: int | None = None,
) -> AnswerPlan:
    """Reads what `out` (.jsonl) holds and tokenizes the prompts that have no row there.

    Prompts that leave no room for an answer within `max_length` tokens or the target's positions
    are rejected with the reason.

    Raises ValueError for two prompts of one id, a name that is not .jsonl, or a file with other
    options.
    """
    started = time.monotonic()
    _check_name(out)
    _check_ids(prompts)
    options = {**asdict(sampling), "max_new_tokens": max_new_tokens}
    manifest = _manifest(target, prompts, options)
    present = _resume(out, _manifest_path(out), manifest, target.vocab_size)
    ids = {row.id for row in present}
    wanted = [prompt for prompt in prompts if prompt.id not in ids]
    longest = None if max_length is None else max_length - max_new_tokens
    todo: list[EncodedPrompt] = []
    rejected: list[Rejected] = []
    for item in encode_prompts(wanted, target, room=max_new_tokens, max_tokens=longest):
        if isinstance(item, Rejected):
            rejected.append(item)
        else:
            todo.append(item)
    num_skipped = len(prompts) - len(wanted)
    return AnswerPlan(
        out, manifest, present, todo, rejected, num_skipped, max_new_tokens, sampling, started
    )


def answer(
    target: Target,
    plan: AnswerPlan,
    *,
    batch_size: int,
    deadline_seconds: float | None = None,
    layer_ids: Sequence[int] | None = None,
    teacher: Teacher | None = None,
    on_features: OnFeatures | None = None,
    progress: Callable[[str], None] | None = None,
) -> RegenerateSummary:
    """Appends a row for every prompt of the plan, in the order they finish.

    A row is the prompt's ids and the generated ones, mask 1 on the latter, the stop token included.
    With `on_features`, `layer_ids` says which features it gets. After `deadline_seconds` no answer
    is begun and the unfinished ones are kept as far as they came. `progress` takes a line every few
    seconds (default: stderr). A sampled answer depends on the seed and its prompt's id alone, so a
    resumed run gives the rows of an undisturbed one.
    """
    if on_features is not None and layer_ids is None:
        raise ValueError("on_features is given without layer_ids; say which features it gets")
    todo = plan.todo
    state = AnswerProgress(len(todo), plan.started, progress or to_stderr)
    with open(plan.out, "a", encoding="utf-8") as file:
        for result in generate(
            target,
            [item.ids for item in todo],
            max_new_tokens=plan.max_new_tokens,
            batch_size=batch_size,
            **asdict(plan.sampling),
            names=[item.prompt.id for item in todo],
            layer_ids=layer_ids if on_features is not None else None,
            teacher=teacher if on_features is not None else None,
            deadline=None if deadline_seconds is None else plan.started + deadline_seconds,
            keep_unfinished=deadline_seconds is not None,
        ):
            if len(result.output_ids) < MIN_UNFINISHED and result.finish_reason == "deadline":
                continue
            row = _row(todo[result.index], result.output_ids)
            if on_features is not None:
                assert result.context is not None
                on_features(row, result.context, result.teacher)
            # One write a row: a crash leaves whole lines and at most a part of one more.
            file.write(json.dumps(row_to_object(row), ensure_ascii=False) + "\n")
            file.flush()
            state.add(row, result.finish_reason)
    state.report()
    return _close(plan, state)


def _close(plan: AnswerPlan, state: AnswerProgress) -> RegenerateSummary:
    """Write the final manifest and sum up."""
    manifest = replace(
        plan.manifest,
        num_kept=len(plan.present) + state.num_rows,
        num_tokens=sum(len(row.input_ids) for row in plan.present) + state.num_tokens,
        num_supervised=sum(row.num_supervised for row in plan.present) + state.num_generated,
        rejected=count_reasons(plan.rejected),
    )
    manifest.save(_manifest_path(plan.out))
    return RegenerateSummary(
        num_rows=manifest.num_kept,
        num_new=state.num_rows,
        num_skipped=plan.num_skipped,
        num_left=len(plan.todo) - state.num_rows,
        num_new_tokens=state.num_generated,
        seconds=state.seconds,
        tokens_per_second=state.num_generated / state.seconds,
        finish_reasons=dict(state.finish_reasons),
        rejected=manifest.rejected,
        manifest_digest=manifest.digest,
    )


def _manifest_path(out: Path) -> Path:
    return out.with_name(f"{stem(out)}.manifest.json")


def _check_name(out: Path) -> None:
    if out.suffix != ".jsonl":
        raise ValueError(f"{out}: expected a name ending in .jsonl, to which rows are appended")


def _check_ids(prompts: Sequence[Prompt]) -> None:
    counts = Counter(prompt.id for prompt in prompts)
    repeated = [id for id, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} prompt ids occur more than once, first {repeated[0]!r}; a row is "
            "known by its prompt's id: give each its own"
        )


def _row(item: EncodedPrompt, output_ids: list[int]) -> Row:
    mask = [0] * len(item.ids) + [1] * len(output_ids)
    return Row(item.prompt.id, item.ids + output_ids, mask, (item.prompt.tag,))


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
