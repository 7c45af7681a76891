"""Ask the engine itself, in its own environment, whether it accepts a command line.

Takes seconds and no GPU: `--device cuda` is resolved from the two config.json alone.
"""

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..target.launch import Launch, environment
from .recipe import EngineSection

SCRIPT = Path(__file__).parent / "server_args.py"
TIMEOUT = 300.0  # seconds; importing the engine takes most of them
# What the engine makes of the command, and the option that says it.
TAKEN = {
    "model_path": "--model-path",
    "algorithm": "--speculative-algorithm",
    "draft_model_path": "--speculative-draft-model-path",
}
THRESHOLDS = ("accept_threshold_single", "accept_threshold_acc")
# No hub, no download.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class Verdict:
    """What the engine says of a command line."""

    version: str
    words: str | None  # of its refusal, one line
    resolved: dict[str, Any]
    assumed: str | None = None  # the GPU, where the machine has none

    @property
    def accepted(self) -> bool:
        return self.words is None

    def line(self) -> str:
        gpu = f", as on a {self.assumed} GPU" if self.assumed else ""
        who = f"SGLang {self.version}'s ServerArgs{gpu}"
        return f"accepted by {who}" if self.accepted else f"refused by {who}: {self.words}"


def validate(launch: Launch, quantization: str | None, engine: EngineSection) -> Verdict:
    """Run the engine's own checks on a command; the drafter has to be read as `quantization`.

    Raises ValueError where that interpreter has no such engine.
    """
    address = ("--host", launch.host, "--port", str(launch.port))
    asked = json.dumps({"arguments": [*launch.arguments, *address], "gpu": engine.gpu})
    try:
        done = subprocess.run(
            [launch.python, str(SCRIPT)],
            input=asked,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=environment({**OFFLINE, **launch.environment}),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _mute(launch, error) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise _mute(launch, (done.stderr.strip().splitlines() or ["it printed nothing"])[-1])
    said = json.loads(lines[-1])
    verdict = Verdict(said["version"], said["words"], said["resolved"], said["gpu"])
    if verdict.accepted:
        return replace(verdict, words=_difference(launch, quantization, verdict.resolved))
    return verdict


def _difference(launch: Launch, quantization: str | None, resolved: dict[str, Any]) -> str | None:
    """What the engine took from the command that the recipe does not say; None where it agrees."""
    found = resolved.get("draft_quantization") or "none"
    if found != quantization:
        return f"it would read the drafter as {found}, draft.quantization is {quantization}"
    for key, option in TAKEN.items():
        # Ours stands first on the command line; of two the engine takes the last.
        asked = launch.arguments[launch.arguments.index(option) + 1]
        taken = resolved.get(key, asked)
        if taken != asked:
            return f"it would take {taken!r:.100} for {option}, the recipe says {asked}"
    for key in THRESHOLDS:
        if resolved.get(key, 1.0) != 1.0:
            return f"{key} is {resolved[key]}: its output would not be the target's"
    return None


def _mute(launch: Launch, why: object) -> ValueError:
    return ValueError(
        f"{launch.python}: cannot be asked about the command ({why}); give the python of an "
        "environment that has sglang"
    )
