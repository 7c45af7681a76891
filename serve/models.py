"""What the two directories of a serving recipe say, where they are on this machine.

Nothing is downloaded: a hub id that is not in the local cache is simply not known.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ..export.check import Report, check
from ..export.findings import Finding, note
from ..target.files import HUB_ID
from .recipe import ServeRecipe


@dataclass(frozen=True)
class TargetShape:
    """From the target's config.json alone; None where it does not say."""

    layers: int | None
    heads: int | None
    positions: int | None  # the longest context
    quantization: str | None  # quant_method, modelopt where a file of its own says so


@dataclass(frozen=True)
class Models:
    """Target and drafter as far as they are here."""

    target: TargetShape | None
    draft: Report | None  # what `spec check` finds, against the target where it is readable
    draft_shape: dict[str, Any]  # of the drafter's config.json; empty where it is not here
    absent: tuple[Finding, ...] = ()  # what could not be checked, and why

    @property
    def are_here(self) -> bool:
        return self.target is not None and self.draft is not None


def look_at_models(recipe: ServeRecipe) -> Models:
    """Read what is local. Raises ValueError or FileNotFoundError for an unreadable directory."""
    target, draft = local_directory(recipe.target.path), local_directory(recipe.draft.path)
    absent = [
        note(
            f"{key} {path} is not on this machine, so nothing of it could be checked",
            f"download it and set {key}=DIRECTORY to have it checked",
            "SGLang",
        )
        for key, path, directory in (
            ("target.path", recipe.target.path, target),
            ("draft.path", recipe.draft.path, draft),
        )
        if directory is None
    ]
    report, shape = None, {}
    if draft is not None:
        report, unread = _check(draft, target)
        absent += unread
        shape = json.loads((draft / "config.json").read_text())
    return Models(target and read_shape(target), report, shape, tuple(absent))


def local_directory(path: str) -> Path | None:
    """A directory as it is, a hub id's snapshot in the local cache, else None."""
    given = Path(path).expanduser()
    if given.is_dir():
        return given
    if not HUB_ID.fullmatch(path):
        return None
    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def read_shape(directory: Path) -> TargetShape:
    """Layers, heads and quantization of a target. Raises ValueError without a readable config."""
    try:
        whole = json.loads((directory / "config.json").read_text())
        text = whole.get("text_config") or whole
        quantized = whole.get("quantization_config") or text.get("quantization_config") or {}
        method = quantized.get("quant_method")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{directory}: no readable config.json ({error!r:.100}); expected a model directory"
        ) from None
    if method is None and (directory / "hf_quant_config.json").is_file():
        method = "modelopt"
    return TargetShape(
        layers=text.get("num_hidden_layers"),
        heads=text.get("num_attention_heads"),
        positions=text.get("max_position_embeddings"),
        quantization=method,
    )


def _check(draft: Path, target: Path | None) -> tuple[Report, list[Finding]]:
    """`spec check`; without the target where our own reader does not know its architecture."""
    if target is None:
        return check(draft, engine="sglang"), []
    try:
        return check(draft, target=str(target), engine="sglang"), []
    except ValueError as error:
        reason = note(
            f"the drafter was not compared with the target: {error}",
            "the engine may know the target all the same",
            "SGLang",
        )
        return check(draft, engine="sglang"), [reason]
