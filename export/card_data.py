"""What a card says of the training data: sizes by kind and tag, longest sequence, temperature."""

from typing import Any

from ..dflash.files import stated
from ..eval.render import table

MAX_NAMED = 12  # tags of a long list
NOT_RECORDED = "not recorded"
KINDS = {
    "answers": "the target's answers to prompts",
    "conversations": "conversations as given",
    "rows": "rows of token ids as given",
}


def code(value: Any) -> str:
    """A name from a file, so that nothing in it is markup."""
    return f"`{' '.join(str(value).replace('`', '').split())}`"


def sources(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The sources that spec.json describes, or those of which it has a manifest at least."""
    found = stated(record, "training_data", "sources")
    if found:
        return found
    named: dict[str, Any] = stated(record, "recipe", "data") or {}
    old: list[dict[str, Any]] = []
    for name, manifest in (record.get("data") or {}).items():
        kind = "answers" if name.startswith("answers") else "conversations"
        temperature = (manifest.get("options") or {}).get("temperature")
        old.append(
            {
                "kind": kind,
                "names": named.get("prompts" if kind == "answers" else kind),
                "num_rows": manifest.get("num_kept"),
                "num_tokens": manifest.get("num_tokens"),
                "num_supervised": manifest.get("num_supervised"),
                "longest_row": None,
                "temperatures": None if temperature is None else [temperature],
                "tags": {},
            }
        )
    if old and named.get("rows"):
        old.append({"kind": "rows", "names": named["rows"], "temperatures": None, "tags": {}})
    return old


def training_data(record: dict[str, Any]) -> list[str]:
    """Sizes by kind of source, then by tag."""
    found = sources(record)
    if not found:
        return ["Not recorded: spec.json does not say what this drafter was trained on."]
    sizes = ("num_rows", "num_tokens", "num_supervised", "longest_row")
    lines = table(
        ("kind", "sources", "rows", "tokens", "supervised tokens", "longest row"),
        [
            [
                KINDS.get(source.get("kind") or "", code(source.get("kind"))),
                ", ".join(map(code, source.get("names") or ())) or NOT_RECORDED,
                *(_size(source.get(key)) for key in sizes),
            ]
            for source in found
        ],
        columns_of_text=2,
    )
    tagged = [item for source in found for item in (source.get("tags") or {}).items()]
    if len(tagged) > 1:
        tagged.sort(key=lambda item: (-(item[1].get("num_supervised") or 0), item[0]))
        rows = [
            [code(tag), _size(size.get("num_rows")), _size(size.get("num_supervised"))]
            for tag, size in tagged[:MAX_NAMED]
        ]
        rest = len(tagged) - len(rows)
        more = f" (the largest {len(rows)} of {len(tagged)})" if rest else ""
        lines += ["", f"By tag{more}:", "", *table(("tag", "rows", "supervised tokens"), rows)]
    return [*lines, "", "Supervised tokens are those that the drafter learned to propose."]


def _size(value: int | None) -> str:
    return NOT_RECORDED if value is None else f"{value:,}"


def contexts(record: dict[str, Any]) -> str:
    """How long the sequences were that it learned from."""
    longest = stated(record, "training_data", "longest_sequence")
    if longest is None:
        longest = (stated(record, "recipe", "train") or {}).get("seq_length")
    if longest is None:
        return "how long the training sequences were is not recorded"
    return (
        f"trained on sequences of at most {longest:,} tokens; whether it accepts as much in longer "
        "ones was not learned and has to be measured"
    )


def temperatures(record: dict[str, Any]) -> str:
    """The temperature at which the answers were sampled that it learned from."""
    found = [source.get("temperatures") for source in sources(record)]
    known = sorted({value for part in found for value in part or ()})
    said = f"answers trained on were sampled at {', '.join(f'{t:g}' for t in known)}"
    if not known:
        return "that of the answers trained on is not recorded"
    return said + (", that of others is not recorded" if None in found else "")
