"""What a serving engine is started with: its command line, its variables, what is shown of both."""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

HOST = "127.0.0.1"
# Of our interpreter; in the engine's they would make it import our packages.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
SIMULATED = "SGLANG_SIMULATE_"  # variables with which the engine makes its figures up
# Beginnings of variables that only a launch itself sets, so that what starts is what was checked
# and printed: a CPU platform whatever --device says, and how DSpark drafts and verifies.
STATED_ONLY = (SIMULATED, "SGLANG_USE_CPU_ENGINE", "SGLANG_RAGGED_VERIFY_MODE", "SGLANG_DSPARK_")
# What works without a GPU; the attention and sampling that need no kernels.
CPU_ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "8192"),
)
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
# Names of options and variables; the engine takes `--ap` and `--ad` for its two API keys.
SECRET = re.compile(r"^--a[pd]|key|token$|password|secret", re.I)
MASK = "***"


@dataclass(frozen=True)
class Launch:
    """How to start a server: `python -m sglang.launch_server` with these arguments."""

    python: str  # of the engine's environment
    arguments: tuple[str, ...]  # without host and port
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of ours
    host: str = HOST
    port: int = 30000

    @property
    def command(self) -> list[str]:
        address = ("--host", self.host, "--port", str(self.port))
        return [self.python, "-m", "sglang.launch_server", *self.arguments, *address]

    def shell(self) -> str:
        """The command as it can be pasted into a shell, one option a line, its secrets masked."""
        words = [shlex.quote(word) for word in without_secrets(self.command)]
        breaks = [" \\\n  " if word.startswith("--") else " " for word in words]
        shown = {
            key: MASK if SECRET.search(key) else value for key, value in self.environment.items()
        }
        named = [f"{key}={shlex.quote(value)} " for key, value in sorted(shown.items())]
        return "".join(named) + "".join(b + w for b, w in zip(breaks, words, strict=True))[1:]


def require_interpreter(python: str) -> None:
    """Raises ValueError where there is none of that name."""
    if shutil.which(python) is None:
        raise ValueError(
            f"{python}: no such interpreter; give the python of an environment that has sglang"
        )


def cpu_launch(ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment of a server without a GPU; each of several ranks gets a core."""
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    return CPU_ARGUMENTS, CPU_ENVIRONMENT | (cores if ranks > 1 else {})


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Our environment for another interpreter, with `more` on top."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in NOT_INHERITED and not key.startswith(STATED_ONLY)
    }
    return kept | dict(more)


def value_of(option: str, words: Sequence[str]) -> str | None:
    """What a command line gives an option; None where it does not name it.

    Read as the engine does: the last one counts, and so does a beginning of its name.
    """
    found = None
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if len(name) > len("--a") and option.startswith(name):
            found = value if equals else following
    return found


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with the values of keys and passwords masked."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = word.startswith("--") and SECRET.search(name) is not None
        shown.append(MASK if hide else f"{name}={MASK}" if secret and equals else word)
        hide = secret and not equals
    return shown
