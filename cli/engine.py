"""Where the engine of `spec serve` and `spec verify` is, and how they talk beside it."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

VARIABLE = "SPEC_ENGINE_PYTHON"  # the engine's interpreter, where --python is not given
MADE_HERE = Path(".venv-sglang/bin/python")  # by make engine
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python", help=f"Python of the engine's environment; else {VARIABLE}, {MADE_HERE}."
    ),
]


def find_python(given: str | None) -> str | None:
    """The engine's interpreter: as given, of the environment variable, or beside us."""
    found = given or os.environ.get(VARIABLE)
    return found or (str(MADE_HERE.absolute()) if MADE_HERE.is_file() else None)


def require_python(given: str | None) -> str:
    """`find_python`; ValueError where there is none."""
    found = find_python(given)
    if found is None:
        raise ValueError(
            f"no engine: --python and {VARIABLE} name none, {MADE_HERE} is not here; give the "
            "python of an environment that has sglang (make engine builds one for a CPU)"
        )
    return found


def tell(line: str) -> None:
    """Our own lines go to stderr: stdout is the engine's, the command's or the result's."""
    print(f"spec: {line}", file=sys.stderr, flush=True)
