"""One writer at a time, whatever becomes of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec.data import lock
from spec.data.lock import exclusive

HOLD = """
import subprocess, sys, time
from pathlib import Path
from spec.data.lock import exclusive
with exclusive(Path(sys.argv[1]), Path("out")) as descriptor:
    child = subprocess.Popen(["sleep", sys.argv[2]], pass_fds=(descriptor,))
    print(child.pid, flush=True)
    time.sleep(60)
"""


def hold(path: Path, child_seconds: float) -> tuple[subprocess.Popen[str], int]:
    """A process that has the lock, and the process id of its child, which was given it."""
    command = [sys.executable, "-c", HOLD, str(path), str(child_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_second_holder_is_told_who_the_first_is_and_nothing_stays(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with exclusive(path, Path("runs/a")):
        started = time.monotonic()
        with pytest.raises(ValueError, match=f"writing to runs/a .process {os.getpid()}.; let"):
            exclusive(path, Path("runs/a")).__enter__()
        assert time.monotonic() - started < lock.ENDING_SECONDS / 3
        assert path.exists()
    assert not path.exists()
    with pytest.raises(KeyError), exclusive(path, Path("runs/a")):
        raise KeyError
    assert not path.exists()
    with exclusive(path, Path("runs/a")):
        pass


def test_a_killed_holder_leaves_the_lock_when_its_children_have_ended(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    process, child = hold(path, 60)
    try:
        with pytest.raises(ValueError, match=f"process {process.pid}"):
            exclusive(path, tmp_path).__enter__()
        process.kill()
        process.wait()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lock, "ENDING_SECONDS", 0.3)
            with pytest.raises(ValueError, match="another run is writing"):
                exclusive(path, tmp_path).__enter__()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
    with exclusive(path, tmp_path):
        pass


def test_the_end_of_the_children_is_waited_for(tmp_path: Path) -> None:
    process, _ = hold(tmp_path / ".lock", 1.5)
    process.kill()
    process.wait()
    with exclusive(tmp_path / ".lock", tmp_path):
        pass
