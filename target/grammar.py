"""A small synthetic language of programs: what the tiny target speaks.

A request such as `write add3(a, key, m)` fixes its answer completely, so greedy answers can be
marked right or wrong, and a drafter has something to learn: names are copied from the prompt,
lines repeat, layout is regular. There are some 65,000 requests; held-out ones are new combinations.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

# Each name has a first letter of its own: one copied byte decides the rest of the name.
NAMES = ("a", "b", "cost", "e", "g", "hi", "key", "lo", "m", "val", "y", "z")
FOLDS = {"add": "+", "sub": "-", "mul": "*"}
TESTS = {"below": "<", "above": ">"}
HELDOUT_SHARE = 8  # one request in eight is held out, by a hash of its text


@dataclass(frozen=True)
class Sample:
    """One request and the only right answer to it."""

    request: str
    answer: str


def _fold(rng: random.Random) -> Sample:
    op = rng.choice(sorted(FOLDS))
    names = rng.sample(NAMES, rng.randint(2, 4))
    lines = [f"    out = {names[0]}"]
    lines += [f"    out = out {FOLDS[op]} {name}" for name in names[1:]]
    return _sample(f"{op}{len(names)}", names, [*lines, "    return out"])


def _loop(rng: random.Random) -> Sample:
    op = rng.choice(sorted(FOLDS))
    items, start, step = rng.sample(NAMES, 3)
    lines = [
        f"    out = {start}",
        f"    for x in {items}:",
        f"        out = out {FOLDS[op]} {step}",
        "    return out",
    ]
    return _sample(f"loop_{op}", [items, start, step], lines)


def _count(rng: random.Random) -> Sample:
    test = rng.choice(sorted(TESTS))
    items, limit, step = rng.sample(NAMES, 3)
    lines = [
        "    n = 0",
        f"    for x in {items}:",
        f"        if x {TESTS[test]} {limit}:",
        f"            n = n + {step}",
        "    return n",
    ]
    return _sample(f"count_{test}", [items, limit, step], lines)


def _scale(rng: random.Random) -> Sample:
    factor, *names = rng.sample(NAMES, rng.randint(2, 4))
    lines = [f"    {name} = {name} * {factor}" for name in names]
    lines += [f"    return {' + '.join(names)}"]
    return _sample("scale", [factor, *names], lines)


def _pick(rng: random.Random) -> Sample:
    test = rng.choice(sorted(TESTS))
    left, right, other = rng.sample(NAMES, 3)
    lines = [
        f"    if {left} {TESTS[test]} {right}:",
        f"        return {left}",
        f"    return {other}",
    ]
    return _sample(f"pick_{test}", [left, right, other], lines)


KINDS: tuple[Callable[[random.Random], Sample], ...] = (_fold, _loop, _count, _scale, _pick)


def samples(split: Split, *, seed: int) -> Iterator[Sample]:
    """Endless samples of one split, kinds in equal parts; the splits never share a request."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        sample = rng.choice(KINDS)(rng)
        if _is_heldout(sample.request) == (split == "heldout"):
            yield sample


def distinct_samples(split: Split, *, seed: int, limit: int) -> list[Sample]:
    """`limit` different samples; the same for the same seed."""
    assert limit <= 5000, f"{limit}: too close to the number of held-out requests"
    found: dict[str, Sample] = {}
    for sample in samples(split, seed=seed):
        if len(found) == limit:
            break
        found.setdefault(sample.request, sample)
    return list(found.values())


def _sample(title: str, names: Sequence[str], body: list[str]) -> Sample:
    signature = f"{title}({', '.join(names)})"
    return Sample(f"write {signature}", "\n".join([f"def {signature}:", *body]))


def _is_heldout(request: str) -> bool:
    return hashlib.sha256(request.encode()).digest()[0] % HELDOUT_SHARE == 0
