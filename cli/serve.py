"""`spec serve`: a target with its drafter on a real engine, checked before and after the start."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .engine import PythonOption, find_python, require_python, tell
from .show import finding_lines

if TYPE_CHECKING:
    from ..serve.models import Models
    from ..serve.recipe import ServeRecipe
    from ..target.launch import Launch

EXAMPLE = (
    "Example: `spec serve -r qwen3-8b --python /opt/sglang/bin/python draft.path=./drafter "
    "smoke.floor=3`; without a GPU: `spec serve -r local-cpu`"
)


def serve(
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="A YAML file, or the name of a shipped recipe."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted `key=value` pairs that replace the recipe's.")
    ] = None,
    engine: Annotated[Literal["sglang"], typer.Option(help="Who serves.")] = "sglang",
    python: PythonOption = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the command, check it, and start nothing.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option(help="The engine's log; else runs/serve/RECIPE-PORT.log.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the shipped recipes.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every key of a recipe.")] = False,
) -> None:
    """Serve a target with its drafter on SGLang, as a recipe says.

    The command is checked first, the acceptance length once it runs. Exit code 1: a check failed.
    """
    if listing or keys:
        tell_recipes(keys=keys)
        return
    if recipe is None:
        raise ValueError("name a recipe: --recipe NAME or FILE; spec serve --list shows the names")
    from ..export.findings import has_defect
    from ..serve.alone import own_log, refuse_taken_port
    from ..serve.command import launch
    from ..serve.models import look_at_models
    from ..serve.recipe import load_serve_recipe
    from ..serve.rules import examine

    resolved = load_serve_recipe(recipe, overrides)
    models = look_at_models(resolved, only_print=only_print)
    interpreter = find_python(python)
    start = launch(resolved, models, interpreter or "python")
    if only_print:
        print(start.shell(), flush=True)
    findings = examine(resolved, models)
    for line in finding_lines(findings):
        tell(line)
    if has_defect(findings):
        raise typer.Exit(1)
    if not only_print:
        require_python(python)
        refuse_taken_port(resolved.engine.host, resolved.engine.port)
    tell_verdict(start, resolved, models, asked=interpreter is not None)
    if only_print:
        return
    from ..serve.run import serve as run

    name = Path(recipe).name.removesuffix(".yaml")
    file = log or Path("runs/serve") / f"{name}-{resolved.engine.port}.log"
    with own_log(file):
        tell(f"starting SGLang, log {file}")
        code = run(start, resolved, log=file, echo=show_line, tell=tell)
    raise typer.Exit(code)


def show_line(line: str) -> None:
    """A line of the engine; a reader that has gone does not end a server."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def tell_verdict(
    start: "Launch", resolved: "ServeRecipe", models: "Models", *, asked: bool
) -> None:
    """What the engine's own argument check says, where it can be asked; 1 where it refuses."""
    from ..serve.command import draft_quantization
    from ..serve.validate import validate

    if not asked:
        tell("not shown to the engine: give --python PATH of an environment that has sglang")
        return
    if not models.are_here:
        tell("not shown to the engine: it reads the config.json of both models, and one is absent")
        return
    verdict = validate(start, draft_quantization(resolved, models), resolved.engine)
    tell(verdict.line())
    if not verdict.accepted:
        raise typer.Exit(1)


def tell_recipes(*, keys: bool) -> None:
    from ..serve.recipe import SHIPPED_SERVE, ServeRecipe
    from . import show

    if keys:
        for line in show.schema_lines(ServeRecipe, {}):
            print(line)
        return
    for name, line in show.shipped_recipes(SHIPPED_SERVE):
        print(f"{name:<20}  {line}")
