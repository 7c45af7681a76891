"""`spec serve` on the real engine: a drafter that drafts is kept, one below the floor is not."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import trained_draft
from engine_env import engine_python
from processes import SPEC

from spec.target.engine import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WAIT = 300.0  # seconds; 20 to 60 on idle cores


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target and a drafter that have learned something."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "target").symlink_to(trained_draft.target_directory())
    (folder / "draft").symlink_to(trained_draft.trained_draft("dflash"))
    return folder


def command(run: Path, log: Path, port: int, *overrides: str) -> list[str]:
    """As a user types it, from a clone."""
    words = [*SPEC, "serve", "--recipe", "recipes/serve/local-cpu.yaml"]
    words += ["--python", engine_python(), "--log", str(log)]
    paths = [f"target.path={run / 'target'}", f"draft.path={run / 'draft'}"]
    return [*words, *paths, f"engine.port={port}", *overrides]


def left(port: int) -> list[str]:
    """Command lines of processes that still mention the port: the engine or its children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has gone
            if "sglang.launch_server" in words and str(port) in words:
                found.append(" ".join(words))
    return found


def test_above_the_floor_and_a_signal(run: Path, tmp_path: Path) -> None:
    port = free_port()
    words = command(run, tmp_path / "log", port, "smoke.floor=1.5")
    told: list[str] = []
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as ours:
        assert ours.stderr is not None
        for line in ours.stderr:
            told.append(line.decode())
            if "Ctrl-C ends it" in told[-1]:
                break
        group = left(port)
        ours.send_signal(signal.SIGTERM)
        code = ours.wait(WAIT)
    said = "".join(told)
    assert "accepted by SGLang" in said and "smoke check passed: acceptance length" in said, said
    assert group and code == 128 + signal.SIGTERM
    assert left(port) == []


def test_below_the_floor(run: Path, tmp_path: Path) -> None:
    """Seven drafts and the bonus make eight: more than any drafter reaches."""
    port = free_port()
    words = command(run, tmp_path / "log", port, "smoke.floor=7.99")
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * WAIT)
    assert done.returncode == 1
    assert "smoke check failed: acceptance length" in done.stderr, done.stderr
    assert "fired up and ready to roll" in done.stdout  # its log is streamed
    assert left(port) == []
