"""Measure a drafter against plain decoding and write what came out: report.json, a table, a plot.

The prompts of all groups run twice in one stream, with the same loop, sampling and batch size,
first without the drafter, then with it. A group's time is its requests' share of each round's wall
time. All but the three timing keys of a group is the same whenever the same inputs are measured
again.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..data.jsonl import atomic_file
from ..data.messages import BadMessages
from ..data.prompts import Prompt, encode_prompt
from ..dspark.schedule import Schedule
from ..target.files import target_revision
from ..target.generate import max_positions
from ..target.model import Target
from ..target.sampling import GREEDY, Sampling
from .acceptance import Rounds, measure
from .decode import Decoded, speculate
from .drafter import Drafter, NoDrafter
from .files import write_figure

SCHEMA = 1
REPORT = "report.json"
ENGINE = "spec"
TIMING_KEYS = ("tokens_per_second", "baseline_tokens_per_second", "speedup")

Report = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The answers to one group; their shares of the wall time add up to what it took."""

    decoded: list[Decoded]

    @property
    def seconds(self) -> float:
        return sum(d.seconds for d in self.decoded)

    @property
    def num_tokens(self) -> int:
        return sum(len(d.output_ids) for d in self.decoded)


Baseline = dict[str, Run]  # by group


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    draft_name: str,
    sampling: Sampling = GREEDY,
    schedule: Schedule | None = None,
    schedule_name: str | None = None,
    baseline: Baseline | None = None,
    room: int | None = None,
    runs: Baseline | None = None,
    progress: bool = True,
) -> Report:
    """The acceptance report of a drafter (DESIGN section 7); groups are the prompts' tags.

    `baseline` holds the plain runs by group; an empty one is filled, so several drafters can share
    it on the same prompts and with the same sampling. `room` is then the largest num_draft_tokens
    of them, since a prompt has to leave place for any drafter's last block. `schedule` cuts what is
    verified (see `decode.cut`); the report calls it `schedule_name`. `runs` is filled with the
    drafter's answers by group. Progress is told on stderr.

    Raises ValueError where no prompt fits, or for a schedule without a drafter's confidence.
    """
    assert (schedule is None) == (schedule_name is None), "a schedule has a name in the report"
    room = drafter.num_draft_tokens if room is None else room
    groups, skipped = encode_groups(target, prompts, max_new_tokens + room)
    baseline = {} if baseline is None else baseline
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    plainly: dict[str, Any] = {**options, "sampling": sampling}
    drafting: dict[str, Any] = {**plainly, "schedule": schedule}
    shortest = min((ids for group in groups.values() for ids in group), key=len)
    short = {"max_new_tokens": min(4, max_new_tokens), "batch_size": 1}
    # Kernels are chosen at their first call.
    speculate(target, None, [shortest], **{**plainly, **short})
    speculate(target, drafter, [shortest], **{**drafting, **short})
    requests = sum(map(len, groups.values()))
    with progress_bar(
        "evaluate", draft_name, requests, plainly=not baseline, shown=progress
    ) as advance:
        if not baseline:
            baseline |= _decode(target, NoDrafter(), groups, advance, **plainly)
        drafted = _decode(target, drafter, groups, advance, **drafting)
    if runs is not None:
        runs |= drafted
    parts = {"all": list(groups), **{name: [name] for name in groups}}
    figures = {
        part: _group(
            [drafted[name] for name in names],
            [baseline[name] for name in names],
            drafter.num_draft_tokens,
            greedily=sampling.temperature == 0,
        )
        for part, names in parts.items()
    }
    return {
        "schema": SCHEMA,
        "target": target.name,
        "target_revision": target_revision(target.path) if target.path.is_dir() else None,
        "draft": draft_name,
        "engine": ENGINE,
        "algorithm": drafter.algorithm,
        "num_draft_tokens": drafter.num_draft_tokens,
        "temperature": float(sampling.temperature),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "schedule": schedule_name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "num_threads": torch.get_num_threads(),
        **options,
        "bonus_token_counted": True,
        "num_skipped": dict(skipped),
        "groups": figures,
    }


def without_timing(report: Report) -> Report:
    """What two reports on the same inputs share."""
    groups = {
        name: {key: value for key, value in group.items() if key not in TIMING_KEYS}
        for name, group in report["groups"].items()
    }
    rest = {key: value for key, value in report.items() if key != "comparisons"}
    others = [without_timing(other) for other in report.get("comparisons", [])]
    return {**rest, "groups": groups, **({"comparisons": others} if others else {})}


def write_report(
    report: Report, out_dir: str | Path, *, comparisons: Sequence[Report] = ()
) -> Path:
    """Write report.json, report.md and acceptance.png; returns the path of report.json.

    `comparisons` are reports of other drafters on the same prompts; they join the table and the
    plot, and stand in report.json under that name.
    """
    # Late: the plot's library is slow to import, and most who measure write no report.
    from .render import markdown, plot

    out = Path(out_dir)
    if comparisons:
        report = {**report, "comparisons": list(comparisons)}
    write_figure(out / "acceptance.png", plot(report))
    with atomic_file(out / "report.md") as file:
        file.write(markdown(report).encode())
    path = out / REPORT
    with atomic_file(path) as file:
        file.write((json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    return path


def encode_groups(
    target: Target, prompts: Sequence[Prompt], needed: int
) -> tuple[dict[str, list[list[int]]], Counter[str]]:
    """Ids of the prompts that fit, by group in order of name; the others counted by reason."""
    tokenizer = target.require_tokenizer()
    limit = max_positions(target)
    groups: dict[str, list[list[int]]] = {}
    skipped: Counter[str] = Counter()
    for prompt in prompts:
        try:
            ids = encode_prompt(prompt, tokenizer)
        except BadMessages as error:
            skipped[error.reason] += 1
            continue
        if not ids:
            skipped["no tokens"] += 1
        elif max(ids) >= target.vocab_size:
            skipped["token id beyond the vocabulary"] += 1
        elif limit is not None and len(ids) + needed > limit:
            skipped["too long for the target"] += 1
        else:
            # "all" is the sum of the groups; a tag of that name must not pass for it.
            tag = prompt.tag if prompt.tag != "all" else "tag: all"
            groups.setdefault(tag, []).append(ids)
    if not groups:
        reasons = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "none given"
        raise ValueError(
            f"no prompt to decode ({reasons}); expected prompts that leave {needed} of "
            f"{target.name}'s "
            f"{limit} positions: shorten them or lower max_new_tokens"
        )
    return dict(sorted(groups.items())), skipped


def _decode(
    target: Target,
    drafter: Drafter,
    groups: dict[str, list[list[int]]],
    advance: Callable[[Decoded], None],
    **options: Any,
) -> dict[str, Run]:
    """All groups in one stream, so that the batch stays full; each gets its requests' time."""
    prompts = [ids for group in groups.values() for ids in group]
    decoded = iter(speculate(target, drafter, prompts, on_finished=advance, **options))
    return {name: Run([next(decoded) for _ in group]) for name, group in groups.items()}


def _group(
    runs: list[Run], plain: list[Run], num_draft_tokens: int, *, greedily: bool
) -> dict[str, Any]:
    decoded = [d for run in runs for d in run.decoded]
    rounds = [Rounds(d.num_accepted, d.num_drafted, len(d.output_ids)) for d in decoded]
    baseline = [d for run in plain for d in run.decoded]
    same = sum(a.output_ids == b.output_ids for a, b in zip(decoded, baseline, strict=True))
    fast, slow = _tokens_per_second(runs), _tokens_per_second(plain)
    return {
        **measure(rounds, num_draft_tokens).to_json(),
        # Two samples of one distribution are not the same text.
        "equal_to_plain": same / len(decoded) if greedily else None,
        "tokens_per_second": fast,
        "baseline_tokens_per_second": slow,
        "speedup": fast / slow,
    }


def _tokens_per_second(runs: list[Run]) -> float:
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


@contextmanager
def progress_bar(
    verb: str, name: str, requests: int, *, plainly: bool = False, shown: bool
) -> Iterator[Callable[[Decoded], None]]:
    """The number of requests on stderr, then a bar over their answers where that is a terminal.

    With `plainly` each is decoded without the drafter as well, and counts twice.
    """
    if shown:
        also = ", each without the drafter too" if plainly else ""
        print(f"{verb} {name}: {requests} requests to decode{also}", file=sys.stderr)
    tokens, started = 0, time.perf_counter()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not (shown and sys.stderr.isatty()),
        transient=True,
    )
    with bar:
        task = bar.add_task(f"{verb} {name}", total=requests * (1 + plainly), rate=0.0)

        def advance(decoded: Decoded) -> None:
            nonlocal tokens
            tokens += len(decoded.output_ids)
            bar.update(task, advance=1, rate=tokens / (time.perf_counter() - started))

        yield advance
