"""Processes of tests that start some: the command of `spec`, and whether one has ended."""

import sys
import time
from pathlib import Path

SPEC = (sys.executable, "-c", "from spec.cli.main import main; main()")
WAIT = 60.0  # seconds; a busy machine starts interpreters slowly


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int, wait: float = WAIT) -> bool:
    """Whether it has gone, or goes while we wait: a killed process may take a moment."""
    end = time.monotonic() + wait
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not lives(pid)


def child_in(log: Path) -> int:
    """The child that a stand-in for an engine says it has started."""
    return int(log.read_text().split("child ")[1].split()[0])
