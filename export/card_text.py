"""The text of a model card, section by section."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ..dflash.files import stated
from ..eval.render import length_text, sampling_text, share, table
from ..eval.report import Report
from .card_data import MAX_NAMED, NOT_RECORDED, code, contexts, temperatures, training_data
from .card_record import plain
from .card_serving import serving


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from."""

    name: str
    kind: str  # DFlash or DSpark
    facts: dict[str, Any]  # as `spec check` has them
    layout: str
    max_positions: int | None
    record: dict[str, Any]  # spec.json
    target: str | None
    reports: tuple[Report, ...]
    unquantized: Report | None  # of the drafter that a quantized one was made from
    side_files: tuple[str, ...]
    license: str | None


def body(c: CardFacts) -> str:
    """The card below its metadata."""
    sections = (
        ("", introduction(c)),
        ("## Target", target(c)),
        ("## Drafter", drafter(c)),
        ("## Serve", serving(c.facts, c.layout, c.target, c.side_files)),
        ("## Acceptance", acceptance(c)),
        ("## Training data", training_data(c.record)),
        ("## Recipe", recipe(c)),
        ("## Limits", limits(c)),
        ("## Licence", licence(c)),
    )
    lines = [f"# {c.name}", ""]
    for title, content in sections:
        lines += [*([title, ""] if title else []), *content, ""]
    return "\n".join(lines)


def introduction(c: CardFacts) -> list[str]:
    drafts = c.facts["num_draft_tokens"]
    owner = code(c.target) if c.target else "a target that its files do not name"
    return [
        f"A {c.kind} drafter for {owner}, for speculative decoding. It reads hidden states of that "
        f"model and proposes {drafts} tokens a round; the model itself verifies them in one "
        "forward pass. It is no language model of its own: it changes how many passes the "
        "target needs, not what the target says."
    ]


def target(c: CardFacts) -> list[str]:
    revision = stated(c.record, "target", "revision")
    ids = ", ".join(map(str, c.facts["target_layer_ids"] or []))
    layers = c.facts["num_target_layers"]
    return _pairs(
        {
            "target": code(c.target) if c.target else NOT_RECORDED,
            "revision (hash of config and weights)": code(revision) if revision else NOT_RECORDED,
            "decoder layers": NOT_RECORDED if layers is None else str(layers),
            "layers read": f"{ids or NOT_RECORDED} (counted from 0, the output of each)",
            "hidden size, vocabulary": f"{c.facts['hidden_size']}, {c.facts['vocab_size']}",
        }
    )


def drafter(c: CardFacts) -> list[str]:
    facts = c.facts
    sizes = ", ".join(
        f"{name} {count / 1e6:.1f} MB" for name, count in facts["stored_bytes"].items()
    )
    heads = ", ".join(f"{key} {value}" for key, value in (facts["heads"] or {}).items())
    rope = ", ".join(f"{key} {value}" for key, value in facts["rope"].items())
    return _pairs(
        {
            "algorithm": f"{c.kind}: {facts['slots']}",
            "layout": facts["layout"],
            "block size": f"{facts['block_size']} input positions, the anchor included",
            "draft tokens a round": str(facts["num_draft_tokens"]),
            "mask token": str(facts["mask_token_id"]),
            "draft layers": str(facts["draft_layers"]),
            "stored parameters": f"{facts['parameters'] / 1e6:.1f} M ({sizes})",
            **({"heads": heads} if heads else {}),
            "attention": facts["attention"],
            "RoPE": rope,
            "quantization": c.facts["quantization"] or "none",
        }
    )


def group_names(report: Report) -> list[str]:
    """`all`, and the groups with the most rounds where there are several."""
    groups = report["groups"]
    named = sorted((n for n in groups if n != "all"), key=lambda n: (-groups[n]["num_rounds"], n))
    return ["all", *(named[:MAX_NAMED] if len(named) > 1 else [])]


def acceptance(c: CardFacts) -> list[str]:
    """A table a report, with the conditions it was measured under."""
    lines: list[str] = []
    if c.reports or c.unquantized:
        lines += [
            "Acceptance length is the mean number of tokens a round yields, the target's own one "
            "included; 1 is what decoding without a drafter yields. In brackets its 95 % interval, "
            "by bootstrap over requests.",
            "",
        ]
    for report in c.reports:
        lines += [*_report(c, report), ""]
    if not c.reports:
        lines += [_not_measured(c), ""]
    if c.unquantized:
        lines += ["The drafter it was quantized from:", "", *_report(c, c.unquantized), ""]
    return lines[:-1]


def _not_measured(c: CardFacts) -> str:
    best = c.record.get("heldout_acceptance_length")
    said = "Not measured"
    if c.facts["quantized"]:
        said = "Not measured since it was quantized"
    elif isinstance(best, int | float):
        said = f"On held-out prompts while training: {best:.2f} (no interval recorded)"
    return f"{said}. `spec eval` makes a report, `spec card --report` puts it here."


def _report(c: CardFacts, report: Report) -> list[str]:
    on = "" if report["target"] == c.target else f" on {code(report['target'])}"
    verified = "" if report["schedule"] is None else f", verified by {plain(report['schedule'])}"
    lines = [
        f"Measured{on} in {plain(report['dtype'])} by {code(report['engine'])}: "
        f"{sampling_text(report)}, {report['num_draft_tokens']} draft tokens a round{verified}, "
        f"at most {report['max_new_tokens']} new tokens.",
        "",
        *table(
            (
                *("prompts", "requests", "rounds", "acceptance length", "acceptance rate"),
                "equal to plain decoding",
            ),
            [_row(name, report["groups"][name]) for name in group_names(report)],
        ),
    ]
    if others := report.get("comparisons"):
        rows = [
            [
                plain(each["draft"]),
                str(each["num_draft_tokens"]),
                length_text(each["groups"]["all"]),
            ]
            for each in [{**report, "draft": "this drafter"}, *others]
        ]
        lines += ["", "Others on the same prompts:", ""]
        lines += table(("drafter", "draft tokens", "acceptance length"), rows)
    return lines


def _row(name: str, group: dict[str, Any]) -> list[str]:
    return [
        code(name),
        str(group["num_requests"]),
        str(group["num_rounds"]),
        length_text(group),
        share(group["acceptance_rate"]),
        share(group["equal_to_plain"]),
    ]


def recipe(c: CardFacts) -> list[str]:
    """The recipe as it was resolved, and what ran it."""
    resolved = c.record.get("recipe")
    if not resolved:
        return ["Not recorded."]
    versions = ", ".join(f"{k} {v}" for k, v in plain(c.record.get("versions") or {}).items())
    step = c.record.get("step")
    best = (
        ""
        if step is None
        else f" The weights are those of step {step}, the best on held-out prompts."
    )
    text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).strip()
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)  # no line of the recipe ends it
    return [
        f"Made with {versions or 'versions that were not recorded'}.{best}",
        "",
        f"{fence}yaml",
        text,
        fence,
    ]


def limits(c: CardFacts) -> list[str]:
    """What it was trained and measured for; beyond that nothing is known."""
    positions = f" Its config allows {c.max_positions:,} positions." if c.max_positions else ""
    measured = sorted({report["temperature"] for report in c.reports})
    return [
        f"- **Contexts**: {contexts(c.record)}.{positions}",
        "- **Languages and subjects**: not recorded but for the training data above; expect less "
        "acceptance on text unlike them.",
        f"- **Temperature**: {temperatures(c.record)}; acceptance measured at "
        f"{', '.join(f'{t:g}' for t in measured) if measured else 'none'}. At other temperatures "
        "it differs.",
        "- **Target**: made for the revision above. A fine-tuned or quantized variant has other "
        "hidden states: measure before relying on it.",
    ]


def licence(c: CardFacts) -> list[str]:
    owner = code(c.target) if c.target else "the target"
    given = f"`{c.license}`." if c.license else "Not stated."
    return [
        f"{given} The drafter was trained on hidden states and answers of {owner}: check what "
        "that model's licence, and those of the prompts and data, say about what is made with them."
    ]


def _pairs(rows: Mapping[str, str]) -> list[str]:
    return table(("what", "value"), [list(row) for row in rows.items()], columns_of_text=2)
