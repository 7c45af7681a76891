"""Steps per second against the tokens of a step, timed on this machine: `sps.json`.

A step is a whole round: the drafter proposes, the target reads anchors and drafts, the kept part is
committed. A step of n tokens is made of the fewest requests that hold n, as engines profile
themselves: ceil(n / (K + 1)) requests, whose drafts are verified as far as n allows. So a token
carries its share of a block's drafting, and of attention to its context. With more requests of
fewer tokens a step takes a little longer than the table says.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..dspark.schedule import SPS, CostTable
from ..target.generate import max_positions
from ..target.model import Target
from ..target.sampling import GREEDY, Sampling
from .decode import speculate
from .drafter import Drafter
from .files import write_json

WARM_STEPS = 2
TIMED_STEPS = 7


class _EnoughError(Exception):
    """Ends a decoding whose steps have been timed."""


def ladder(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and `largest`: two token counts an octave."""
    steps = {1, largest}
    power = 2
    while power <= largest:
        steps |= {n for n in (power, power * 3 // 2) if n <= largest}
        power *= 2
    return sorted(steps)


def profile(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_batch_tokens: int,
    sampling: Sampling = GREEDY,
) -> CostTable:
    """The cost table up to steps of `max_batch_tokens` tokens; `prompts` are the contexts, repeated
    where there are too few. Sampling takes time of its own: profile as you serve.

    Medians of a few steps each. Seconds are made to grow with the tokens (isotonic regression):
    where noise makes a larger step faster, a scheduler would see a gain that is none.
    """
    tokens = ladder(max_batch_tokens)
    # The smallest steps come first, and the first of all is slower than it will ever be again.
    _seconds(target, drafter, prompts, tokens[0], sampling)
    seconds = [_seconds(target, drafter, prompts, n, sampling) for n in tokens]
    return CostTable(tuple(tokens), tuple(1 / s for s in non_decreasing(seconds)))


def write_cost_table(table: CostTable, draft_dir: str | Path) -> None:
    """Write sps.json beside the drafter."""
    write_json(Path(draft_dir) / SPS, table.to_json())


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence in the least-squares sense (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # mean, size
    for value in values:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, width = blocks.pop()
            mean, size = (mean * size + before * width) / (size + width), size + width
        blocks.append((mean, size))
    return [mean for mean, size in blocks for _ in range(size)]


def _seconds(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    sampling: Sampling,
) -> float:
    """Median seconds of a step of `num_tokens` tokens."""
    width = drafter.num_draft_tokens + 1
    num_requests = -(-num_tokens // width)
    share, rest = divmod(num_tokens - num_requests, num_requests)
    lengths = torch.tensor([share + (r < rest) for r in range(num_requests)])
    # No request may end while steps are timed, whatever is accepted.
    max_new_tokens = (WARM_STEPS + TIMED_STEPS + 2) * width
    limit = max_positions(target)
    room = None if limit is None else max(1, limit - max_new_tokens - width)
    ticks: list[float] = []

    def schedule(confidence: Tensor) -> Tensor:
        confidence.cpu()  # waits until the accelerator is done with the step before
        ticks.append(time.perf_counter())
        if len(ticks) > WARM_STEPS + TIMED_STEPS:
            raise _EnoughError
        return lengths.to(confidence.device)

    with contextlib.suppress(_EnoughError):
        speculate(
            target,
            drafter,
            [list(ids[:room]) for ids in islice(cycle(prompts), num_requests)],
            max_new_tokens=max_new_tokens,
            batch_size=num_requests,
            stop_token_ids=(),
            sampling=sampling,
            schedule=schedule,
        )
    assert len(ticks) > WARM_STEPS + TIMED_STEPS, "the drafter gave no confidence"
    times = [after - before for before, after in pairwise(ticks)]
    return statistics.median(times[WARM_STEPS:])
