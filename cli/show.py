"""How results are printed: records as aligned lines or JSON, recipes, errors in one line."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from .. import recipes

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ..export.findings import Finding


def one_line(error: Exception) -> str:
    """The message of an error on a single line."""
    return " ".join(str(error).split()) or type(error).__name__


def warning(message: Warning | str) -> str:
    """A warning as the one line that stderr gets."""
    return f"spec: warning: {' '.join(str(message).split())}\n"


def finding_lines(findings: "list[Finding]") -> list[str]:
    """Two lines a finding: what, and what to do."""
    lines: list[str] = []
    for each in findings:
        lines += [f"{each.severity} ({each.engine}): {each.what}", f"  -> {each.cure}"]
    return lines


def written(out: Path) -> str:
    """The last line of a verb that wrote a drafter, which was then read back."""
    return f"wrote {out}: read back equal, RoPE tables included"


def record(value: Any, *, as_json: bool) -> None:
    """Print a dataclass or a dict: a line a field, or one JSON object."""
    fields: dict[str, Any] = value if isinstance(value, dict) else dataclasses.asdict(value)
    if as_json:
        print(json.dumps(fields, indent=2, default=str))
        return
    width = max(len(name) for name in fields)
    for name, content in fields.items():
        print(f"{name.replace('_', ' '):<{width}}  {text(content)}")


def text(content: Any) -> str:
    """One field's value as people write it."""
    if content is None:
        return "none"
    if isinstance(content, bool):
        return "yes" if content else "no"
    if isinstance(content, float):
        return f"{content:,.0f}" if content.is_integer() else f"{content:.4g}"
    if isinstance(content, int) and abs(content) >= 10_000:
        return f"{content:,}"
    if isinstance(content, list | tuple):
        return ", ".join(text(item) for item in content) or "none"
    if isinstance(content, dict):
        return ", ".join(f"{key}={text(item)}" for key, item in content.items()) or "none"
    return str(content)


def shipped_recipes(folder: Path | None = None) -> list[tuple[str, str]]:
    """Name and one-line description (the file's first comment) of each shipped recipe."""
    assert recipes.__file__ is not None
    found = []
    for path in sorted((folder or Path(recipes.__file__).parent).glob("*.yaml")):
        comments = (line for line in path.read_text().splitlines() if line.startswith("#"))
        found.append((path.name.removesuffix(".yaml"), next(comments, "").lstrip("# ")))
    return found


def schema_lines(
    model: "type[BaseModel]", defaults: Mapping[str, Mapping[str, Any]], prefix: str = ""
) -> list[str]:
    """A line a key of a schema and its sections: dotted name, default, what it means.

    `defaults` are those that depend on the algorithm, by section and key.
    """
    lines: list[str] = []
    for name, field in model.model_fields.items():
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        sections = [kind for kind in kinds if hasattr(kind, "model_fields")]
        if sections:
            lines += schema_lines(sections[0], defaults, f"{prefix}{name}.")
            continue
        own = defaults.get(prefix.removesuffix("."), {}).get(name, field.default)
        default = "required" if field.is_required() else json.dumps(own)
        choices = [choice for kind in kinds for choice in get_args(kind) if isinstance(choice, str)]
        one_of = f"one of {', '.join(choices)}" if choices else ""
        meaning = "; ".join(filter(None, [field.description, one_of]))
        lines.append(f"{prefix + name:<33} {default:<14} {meaning}".rstrip())
    return lines
