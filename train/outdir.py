"""The run's directory: a new one, one to go on with, or one that belongs to another recipe."""

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import yaml

from ..data.jsonl import atomic_file
from ..data.lock import exclusive
from ..recipes.schema import Recipe
from .checkpoint import checkpoints

# Keys that may differ between a run and its continuation: they change what is said or kept, not
# what is learned.
FREE_KEYS = {
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.keep",
    "train.processes",
    "wandb",
    "out",
}
FREE_PREFIXES = ("eval.", "wandb.")
MADE_BY_TRAINING = ("checkpoints", "draft", "report", "metrics.jsonl")


def lock_out(recipe: Recipe) -> AbstractContextManager[int]:
    """Holds the `out` directory; ValueError where another run is writing to it."""
    out = Path(recipe.out)
    return exclusive(out / ".lock", out)


def open_out(recipe: Recipe, *, resume: bool, main: bool) -> tuple[Path, Path | None]:
    """The `out` directory and the newest checkpoint in it, None for a fresh start.

    With resume=False an earlier run's training is removed; its target and data stay, if they were
    made the same way. Raises ValueError when the directory holds a run of another recipe.
    """
    out = Path(recipe.out)
    saved = out / "recipe.yaml"
    found = checkpoints(out / "checkpoints") if resume else []
    if saved.is_file() and (found or (out / "data").exists() or (out / "target").exists()):
        _check_same(recipe, saved, trained=bool(found))
    if main:
        out.mkdir(parents=True, exist_ok=True)
        for name in () if resume else MADE_BY_TRAINING:
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        with atomic_file(saved) as file:
            file.write(recipe.to_yaml().encode())
    return out, found[-1] if found else None


def _check_same(recipe: Recipe, saved: Path, *, trained: bool) -> None:
    old, new = _flat(yaml.safe_load(saved.read_text())), _flat(yaml.safe_load(recipe.to_yaml()))
    watched = [
        key
        for key in sorted({*old, *new})
        if key not in FREE_KEYS and not key.startswith(FREE_PREFIXES)
    ]
    if not trained:
        # Training starts from the beginning; only what the rows were made with has to agree.
        watched = [
            key for key in watched if key.startswith(("target.", "data.")) or key == "train.seed"
        ]
    changed = [key for key in watched if old.get(key) != new.get(key)]
    if changed:
        what = "; ".join(f"{key}: {old.get(key)} then, {new.get(key)} now" for key in changed[:5])
        hint = "use another `out`" + (" or --no-resume" if trained else "")
        raise ValueError(f"{saved.parent} holds a run of another recipe ({what}): {hint}")


def _flat(data: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
