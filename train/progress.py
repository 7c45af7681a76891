"""What a run says while it runs: `metrics.jsonl` always, a line for people, wandb when asked."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from ..recipes.schema import Recipe


class Progress:
    """Only the main process makes one.

    Numbers go to the file at once; the line is rewritten on a terminal.
    """

    def __init__(self, recipe: Recipe, out: Path, *, resumed_at: int) -> None:
        self._path = out / "metrics.jsonl"
        _truncate(self._path, resumed_at)
        self._file = self._path.open("a", encoding="utf-8")
        self._terminal = sys.stderr.isatty()
        self._printed = 0.0
        self._wandb = _start_wandb(recipe, out)

    def record(self, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl, flushed."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])

    def line(
        self, values: dict[str, Any], *, seconds_left: float, last_acceptance: float | None
    ) -> None:
        """The state of the run in a line: every ten seconds, or at once on a terminal."""
        now = time.monotonic()
        if not self._terminal and now - self._printed < 10:
            return
        self._printed = now
        tau = "not measured yet" if last_acceptance is None else f"{last_acceptance:.2f}"
        text = (
            f"step {values['step']} | loss {values['loss']:.3f} | lr {values['lr']:.1e} | "
            f"{values['tokens_per_second']:,.0f} tokens/s | train acceptance "
            f"{values['train_acceptance']:.2f} | "
            f"held-out acceptance {tau} | {duration(seconds_left)} left"
        )
        print(
            f"\r{text}\x1b[K" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def say(self, text: str) -> None:
        """A line of its own."""
        print(f"\r{text}\x1b[K" if self._terminal else text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def duration(seconds: float) -> str:
    """75 -> 1m15s."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    )


def _truncate(path: Path, step: int) -> None:
    """Drop the lines after `step`: a resumed run writes them again. A torn last line goes too."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if values.get("step", 0) <= step:
            kept.append(line + "\n")
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(kept), encoding="utf-8")
    scratch.replace(path)


def _start_wandb(recipe: Recipe, out: Path) -> Any:
    if recipe.wandb is None:
        return None
    try:
        import wandb
    except ImportError:
        raise ValueError(
            "the recipe asks for wandb, which is not installed: pip install 'spec-toolkit[wandb]'"
        ) from None
    return wandb.init(
        project=recipe.wandb.project,
        name=recipe.wandb.name,
        mode=recipe.wandb.mode,
        dir=str(out),
        config=recipe.model_dump(mode="json"),
    )
