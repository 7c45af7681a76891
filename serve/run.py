"""Start the engine, see that it drafts, keep it until it or we are told to end."""

from collections.abc import Callable
from pathlib import Path

from ..target.engine import Engine, ends_in_order
from ..target.launch import Launch
from .recipe import ServeRecipe
from .smoke import smoke


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
