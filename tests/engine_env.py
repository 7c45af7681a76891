"""The serving engine's environment, for tests marked `engine`."""

import os
from pathlib import Path

import pytest

MADE_HERE = Path(__file__).resolve().parents[1] / ".venv-sglang" / "bin" / "python"


def engine_python() -> str:
    """Its interpreter: of SPEC_ENGINE_PYTHON, else what `make engine` makes. Fails without one."""
    found = os.environ.get("SPEC_ENGINE_PYTHON") or str(MADE_HERE)
    if not Path(found).is_file():
        pytest.fail("no serving engine: run make engine, or set SPEC_ENGINE_PYTHON")
    return found
