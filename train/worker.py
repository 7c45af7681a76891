"""One process of a multi-process run.

`python -m spec.train.worker RECIPE.yaml [--no-resume]`, started by launch.py.
"""

import os
import sys

from ..recipes.schema import load_recipe
from .launch import end_with_parent
from .loop import train


def main(arguments: list[str]) -> int:
    """A user's mistake is one line from the main process and exit code 2."""
    end_with_parent()
    try:
        train(load_recipe(arguments[0]), resume="--no-resume" not in arguments)
    except (ValueError, OSError) as error:
        if os.environ.get("SPEC_TRACEBACK") == "1":
            raise
        rank = os.environ.get("RANK", "0")
        who = "spec" if rank == "0" else f"spec (process {rank})"
        print(f"{who}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
