"""One process of a multi-process run.

`python -m spec.train.worker RECIPE.yaml [--no-resume] [--locked]`, started by launch.py (which
holds `out` already and says so with `--locked`) or by a launcher of the user's.
"""

import os
import sys

from ..recipes.load import load_recipe
from .launch import end_with_parent
from .loop import train


def main(arguments: list[str]) -> int:
    """A user's mistake is one line from the main process and exit code 2."""
    end_with_parent()
    try:
        recipe, locked = load_recipe(arguments[0]), "--locked" in arguments
        train(recipe, resume="--no-resume" not in arguments, locked=locked)
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
