"""What a card takes from files that anybody may have written: their types, and their text.

Types are checked here and nowhere else; a value that is not stated (null) is not recorded. Text
leaves without what is private, and outside code without what Markdown or HTML would act on.
"""

import math
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from ..eval.report import SCHEMA, Report

WHOLE, NUMBER, TEXT = (int,), (int, float), (str,)
TAG = {"num_rows": WHOLE, "num_supervised": WHOLE}
SOURCE = {
    "kind": TEXT,
    "names": [TEXT],
    "num_rows": WHOLE,
    "num_tokens": WHOLE,
    "num_supervised": WHOLE,
    "longest_row": WHOLE,
    "temperatures": [NUMBER],
    "tags": {...: TAG},
}
MANIFEST = {"num_kept": WHOLE, "num_tokens": WHOLE, "num_supervised": WHOLE}
# Of spec.json, what a card reads. `...` stands for any key, [x] for a list of x.
RECORD: dict[Any, Any] = {
    "target": {"name": TEXT, "revision": TEXT},
    "recipe": {
        "data": {"prompts": [TEXT], "conversations": [TEXT], "rows": [TEXT]},
        "train": {"seq_length": WHOLE},
    },
    "versions": {...: TEXT},
    "step": WHOLE,
    "heldout_acceptance_length": NUMBER,
    "training_data": {"longest_sequence": WHOLE, "sources": [SOURCE]},
    "data": {...: {**MANIFEST, "options": {"temperature": NUMBER}}},
    "quantization": {},
}
GROUP = {
    "num_requests": WHOLE,
    "num_rounds": WHOLE,
    "acceptance_length": NUMBER,
    "acceptance_length_ci95": [NUMBER],
    "acceptance_rate": NUMBER,
    "equal_to_plain": NUMBER,
}
COMPARED = {"draft": TEXT, "num_draft_tokens": WHOLE, "groups": {...: GROUP}}
REPORT_SHAPE: dict[Any, Any] = {
    **COMPARED,
    "algorithm": TEXT,
    "target": TEXT,
    "target_revision": TEXT,
    "engine": TEXT,
    "dtype": TEXT,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": WHOLE,
    "seed": WHOLE,
    "schedule": TEXT,
    "max_new_tokens": WHOLE,
    "comparisons": [COMPARED],
}
OPTIONAL = ("schedule", "comparisons", "target_revision")  # of a report; the rest has to be there
MAY_BE_NULL = ("acceptance_length", "acceptance_length_ci95", "acceptance_rate", "equal_to_plain")

# Where a path of some machine begins; hub ids, fractions and addresses have no such place.
START = r"(?:file:(?://)?)?(?:(?:~[\w.-]*|\.{1,2})?/{1,2}|[A-Za-z]:[\\/]{1,2}|\\\\)"
WHOLE_PATH = re.compile(rf"{START}[^\s/\\]")
# The same within text, and what follows the last slash. A folder's name may have spaces in it.
PATH = re.compile(
    rf"(?:(?<![\w.:/~\\])|(?<=:)(?=/[^/])){START}"
    r"(?:[^\s/\\\"'|]+(?: [^\s/\\\"'|.~]+)*[/\\]+)*([^\s/\\\"'|]+)"
)
CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
QUERY = re.compile(r"(\w://[^\s?#\"']*)[?#][^\s\"']*")
MARKUP = {"&": "&amp;", "<": "&lt;", "|": "&#124;", "`": "&#96;", "[": "&#91;"}


def public(value: Any) -> Any:
    """A value without paths of some machine (their last part stays), credentials and queries."""
    if isinstance(value, dict):
        result: dict[Any, Any] = {}
        for key, item in value.items():
            name = public(key)
            while name in result or (name != key and name in value):
                name += "'"
            result[name] = public(item)
        return result
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    if not isinstance(value, str):
        return value
    if WHOLE_PATH.match(value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return CREDENTIALS.sub("", PATH.sub(r"\1", QUERY.sub(r"\1", value)))


def plain(value: Any) -> Any:
    """Text, or all text in a value, as one line in which nothing is markup."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if not isinstance(value, str):
        return value
    return " ".join("".join(MARKUP.get(c, c) for c in value).split())


def check_record(record: dict[str, Any], where: str) -> None:
    """Raise ValueError where spec.json says in another type what a card reads."""
    for wrong in misfits(record, RECORD, ""):
        raise ValueError(f"{where}: {wrong}; restore it, or take it away")


def check_report(
    report: Any,
    where: str,
    drafter: dict[str, Any],
    *,
    target: str | None,
    revision: str | None,
) -> Report:
    """A report that is whole and this drafter's, going by `check`'s facts; ValueError otherwise.

    `target` and `revision` are what the drafter's files call its target.
    """
    groups = report.get("groups") if isinstance(report, dict) else None
    if not isinstance(groups, dict) or "all" not in groups or report.get("schema") != SCHEMA:
        raise ValueError(f"{where}: no acceptance report; expected the report.json of `spec eval`")
    missing = {key for key in REPORT_SHAPE if key not in report} - set(OPTIONAL[1:])
    missing |= {
        key for g in groups.values() if isinstance(g, dict) for key in GROUP if key not in g
    }
    if missing:
        raise ValueError(f"{where} lacks {', '.join(sorted(missing))}: measure with `spec eval`")
    for wrong in chain(misfits(report, REPORT_SHAPE, ""), _nulls(report), _lengths(report)):
        raise ValueError(f"{where}: {wrong}; measure with `spec eval`")
    own = {"algorithm": drafter["algorithm"], "num_draft_tokens": drafter["num_draft_tokens"]}
    for key, value in own.items():
        if report[key] != value:
            raise ValueError(
                f"{where} is of another drafter: its {key} is {report[key]}, this one's is "
                f"{value}; give a report of this drafter"
            )
    # One model may be a hub id here, a directory there, and a directory of another name elsewhere.
    same = revision is not None and report.get("target_revision") == revision
    if not same and target and public(report["target"]).split("/")[-1] != target.split("/")[-1]:
        raise ValueError(
            f"{where} is of another target: {public(report['target'])}, this drafter's is "
            f"{target}; give a report of this drafter with its own target"
        )
    return report


def misfits(value: Any, shape: Any, where: str) -> Iterator[str]:
    """Where a JSON value has another type than `shape` says; null fits everywhere but in lists."""
    if value is None:
        return
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{where} is {_shown(value)}, expected an object"
            return
        for key, item in value.items():
            inner = shape.get(key, shape.get(...))
            if inner is None:
                continue
            if item is None and ... in shape and isinstance(inner, dict):
                yield f"{where}.{key} is null, expected an object"
            yield from misfits(item, inner, f"{where}.{key}" if where else str(key))
    elif isinstance(shape, list):
        if not isinstance(value, list) or None in value:
            yield f"{where} is {_shown(value)}, expected a list"
            return
        for i, item in enumerate(value):
            yield from misfits(item, shape[0], f"{where}.{i}")
    elif type(value) not in shape or (isinstance(value, float) and not math.isfinite(value)):
        expected = {WHOLE: "a whole number", NUMBER: "a number", TEXT: "text"}[shape]
        yield f"{where} is {_shown(value)}, expected {expected}"


def _nulls(report: Report) -> Iterator[str]:
    """What a report may not leave open."""
    for key in REPORT_SHAPE:
        if key not in OPTIONAL and report[key] is None:
            yield f"{key} is null"
    for each in (report, *(report.get("comparisons") or ())):
        for key in COMPARED:
            if each.get(key) is None:
                yield f"a compared drafter without {key}"
                return
        if each["groups"].get("all") is None:
            yield "a compared drafter without groups.all"
            return
        for name, group in each["groups"].items():
            for key in GROUP:
                if key not in group or (group[key] is None and key not in MAY_BE_NULL):
                    yield f"groups.{name}.{key} is null"


def _lengths(report: Report) -> Iterator[str]:
    """Acceptance lengths that no drafter of so many tokens can have."""
    for each in (report, *(report.get("comparisons") or ())):
        most = each["num_draft_tokens"] + 1
        for name, group in each["groups"].items():
            length, interval = group["acceptance_length"], group["acceptance_length_ci95"]
            if length is None and interval is None:
                continue
            if length is None or interval is None or len(interval) != 2:
                found: tuple[float, ...] = ()
            else:
                found = (length, *interval)
            if not found or not all(1 <= number <= most for number in found):
                yield (
                    f"groups.{name}: acceptance length {length} {interval}, expected numbers from "
                    f"1 to {most} with an interval of two"
                )
            elif found[1] > found[2]:
                yield f"groups.{name}: the interval {interval} ends before it begins"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
