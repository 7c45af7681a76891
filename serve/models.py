"""What the two directories of a serving recipe say, where they are on this machine.

Nothing is downloaded: a hub id that is not in the local cache is simply not known.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ..export.check import Report, check
from ..export.findings import Finding
from ..target.files import HUB_ID
from .findings import defect, note
from .recipe import ServeRecipe


@dataclass(frozen=True)
class TargetShape:
    """From the target's config.json alone; None where it does not say."""

    layers: int | None
    heads: int | None
    positions: int | None  # the longest context


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

    @property
    def draft_quantization(self) -> str | None:
        """What the drafter's config.json says its weights are; None where it is not here."""
        if self.draft is None:
            return None
        own = self.draft_shape.get("quantization_config")
        return str(own.get("quant_method", "unnamed")) if isinstance(own, dict) and own else "none"


def look_at_models(recipe: ServeRecipe, *, only_print: bool = False) -> Models:
    """Read what is local. Raises ValueError or FileNotFoundError for an unreadable directory.

    A directory that does not exist is a defect, but where the command is only printed: it may be
    meant for another machine.
    """
    target, draft = local_directory(recipe.target.path), local_directory(recipe.draft.path)
    absent = [
        _absent(key, path, only_print=only_print)
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
    if not is_hub_id(path):
        return None
    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def is_hub_id(path: str) -> bool:
    """Whether a path may name a model on the hub; a directory of that name comes first."""
    return HUB_ID.fullmatch(path) is not None


def _absent(key: str, path: str, *, only_print: bool) -> Finding:
    if is_hub_id(path) or Path(path).expanduser().exists():  # a .gguf file is one
        return note(
            f"{key} {path} is not on this machine, so nothing of it could be checked",
            f"download it and set {key}=DIRECTORY to have it checked",
        )
    if not only_print:
        cure = f"set {key} to a model directory or a hub id"
        return defect(f"{key} {path}: no such directory", cure)
    lacks = ", so the command lacks what its files say" if key == "draft.path" else ""
    cure = "print it where the models are" if lacks else f"set {key} to where it is"
    return note(f"{key} {path}: no such directory here{lacks}", cure)


def read_shape(directory: Path) -> TargetShape:
    """Layers, heads and context of a target. Raises ValueError without a readable config."""
    try:
        whole = json.loads((directory / "config.json").read_text())
        text = whole.get("text_config") or whole
        return TargetShape(
            layers=text.get("num_hidden_layers"),
            heads=text.get("num_attention_heads"),
            positions=text.get("max_position_embeddings"),
        )
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{directory}: no readable config.json ({error!r:.100}); expected a model directory"
        ) from None


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
        )
        return check(draft, engine="sglang"), [reason]
