"""Small manners around loading and saving: all or nothing on disk, no bars, errors in one line."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging as hf_logging


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """A directory to fill, renamed to `directory` when the block ends without an error.

    Raises ValueError where `directory` already exists and is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory}: already exists; remove it or give another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield building
        building.chmod(0o755)  # mkdtemp makes it private, safetensors its files
        for path in building.iterdir():
            path.chmod(0o755 if path.is_dir() else 0o644)
        if directory.exists():
            directory.rmdir()
        building.rename(directory)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


@contextmanager
def quiet_progress() -> Iterator[None]:
    """No bar for a load that takes a second; the setting is put back afterwards."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def refusal(name: str, what: str, error: Exception) -> str:
    """One line from a library's long message: which thing, what went wrong, its own words."""
    words = " ".join(str(error).split())
    return f"{name}: {what} ({type(error).__name__}: {words[:300]})"
