"""`spec serve`: a target with its drafter on a real engine, checked before and after the start."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from ..export.findings import Finding
    from ..serve.models import Models
    from ..serve.recipe import ServeRecipe
    from ..target.engine import Launch

EXAMPLE = (
    "Example: `spec serve -r qwen3-8b --python .venv-sglang/bin/python draft.path=./drafter "
    "smoke.floor=3`"
)
PYTHON = "SPEC_ENGINE_PYTHON"  # the engine's interpreter, where --python is not given
MADE_HERE = Path(".venv-sglang/bin/python")


def serve(
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="A YAML file, or the name of a shipped recipe."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted `key=value` pairs that replace the recipe's.")
    ] = None,
    engine: Annotated[Literal["sglang"], typer.Option(help="Who serves.")] = "sglang",
    python: Annotated[
        str | None,
        typer.Option(help=f"Python of the engine's environment; else {PYTHON}, {MADE_HERE}."),
    ] = None,
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
    from ..serve.command import launch
    from ..serve.models import look_at_models
    from ..serve.recipe import load_serve_recipe
    from ..serve.rules import examine

    resolved = load_serve_recipe(recipe, overrides)
    models = look_at_models(resolved)
    interpreter = find_python(python)
    start = launch(resolved, models, interpreter or "python")
    if only_print:
        print(start.shell(), flush=True)
    findings = examine(resolved, models)
    tell_findings(findings)
    if any(finding.severity == "defect" for finding in findings):
        raise typer.Exit(1)
    if not only_print and interpreter is None:
        raise ValueError(
            f"no engine: give --python PATH of an environment that has sglang, or set {PYTHON}"
        )
    tell_verdict(start, resolved, models, asked=interpreter is not None)
    if only_print:
        return
    from ..serve.run import serve as run

    name = Path(recipe).name.removesuffix(".yaml")
    file = log or Path("runs/serve") / f"{name}-{resolved.engine.port}.log"
    tell(f"starting SGLang, log {file}")
    raise typer.Exit(run(start, resolved, log=file, echo=show_line, tell=tell))


def find_python(given: str | None) -> str | None:
    """The engine's interpreter: as given, of the environment variable, or beside us."""
    found = given or os.environ.get(PYTHON)
    return found or (str(MADE_HERE.absolute()) if MADE_HERE.is_file() else None)


def tell(line: str) -> None:
    """Our own lines go to stderr: stdout is the engine's, or the command's."""
    print(f"spec: {line}", file=sys.stderr, flush=True)


def show_line(line: str) -> None:
    """A line of the engine; a reader that has gone does not end a server."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def tell_findings(findings: "list[Finding]") -> None:
    for each in findings:
        tell(f"{each.severity}: {each.what}")
        if each.severity != "note":  # a note is one line
            tell(f"  -> {each.cure}")


def tell_verdict(
    start: "Launch", resolved: "ServeRecipe", models: "Models", *, asked: bool
) -> None:
    """What the engine's own argument check says, where it can be asked; 1 where it refuses."""
    from ..serve.validate import validate

    if not asked:
        tell("not shown to the engine: give --python PATH of an environment that has sglang")
        return
    if not models.are_here:
        tell("not shown to the engine: it reads the config.json of both models, and one is absent")
        return
    verdict = validate(start, resolved.draft.quantization, resolved.engine.gpu)
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
