"""Start the engine, see that it drafts, keep it until it or we are told to end."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..target.engine import Engine, Launch
from .recipe import ServeRecipe
from .smoke import smoke

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(
    launch: Launch,
    recipe: ServeRecipe,
    *,
    log: Path,
    echo: Callable[[str], None],
    tell: Callable[[str], None],
) -> int:
    """Serve until the end; our exit code. `echo` gets the engine's lines, `tell` our own.

    1: the smoke check failed, or the engine ended by itself. A signal leaves as SystemExit with
    128 + its number. In every case the engine has ended when this returns.
    """
    engine = Engine(launch, log=log, timeout=recipe.engine.start_timeout, echo=echo)
    with ends_in_order(), engine:
        tell(f"ready at {engine.url}, asking {len(recipe.smoke.prompts)} prompts")
        result = smoke(engine, recipe.smoke, recipe.engine.served_name or recipe.target.path)
        tell(result.line(recipe.smoke.floor))
        if not result.passed(recipe.smoke.floor):
            return 1
        tell(f"serving at {engine.url}; Ctrl-C ends it")
        code = engine.wait()
        tell(f"the engine ended by itself with exit code {code}; its log is {log}")
    return 1


@contextmanager
def ends_in_order() -> Iterator[None]:
    """A signal leaves the block once; more of them do not interrupt what ends the engine."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
