"""How this folder writes JSON and figures: whole or not at all, the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.jsonl import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One JSON object, a line a key: thousands of rounds stay one line."""
    lines = [f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in content.items()]
    with atomic_file(path) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def write_figure(path: Path, figure: Figure) -> None:
    """A PNG without the name and version of what drew it."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=144, metadata={"Software": None})
