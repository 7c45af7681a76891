"""The start, the check and the end, with a stand-in for the engine."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from fake_engine import as_interpreter
from processes import SPEC, WAIT, child_in, ends, lives
from serve_models import recipe

from spec.serve.command import launch
from spec.serve.models import look_at_models
from spec.serve.recipe import ServeRecipe
from spec.serve.run import serve
from spec.target.engine import EngineError, free_port


def asked(floor: float) -> ServeRecipe:
    smoke = {"floor": floor, "prompts": ["one", "two"]}
    engine = {"port": free_port(), "start_timeout": WAIT}
    return recipe("a/b", "c/d", draft={"num_draft_tokens": 3}, engine=engine, smoke=smoke)


def test_below_the_floor(tmp_path: Path) -> None:
    """Two rounds, one accepted draft: 1.5."""
    wanted, told, shown = asked(1.6), list[str](), list[str]()
    python = str(as_interpreter(tmp_path, [1, 1]))
    start, log = launch(wanted, look_at_models(wanted), python), tmp_path / "log"
    before = signal.getsignal(signal.SIGTERM)
    assert serve(start, wanted, log=log, echo=shown.append, tell=told.append) == 1
    assert "acceptance length 1.500 over 4 rounds of 2 prompts, floor 1.6" in told[-1]
    assert any("ready to roll" in line for line in shown)
    assert ends(child_in(log))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_wants_a_key(tmp_path: Path) -> None:
    """Its smoke check carries it; what is printed does not."""
    engine = {"port": free_port(), "start_timeout": WAIT, "arguments": ["--api-key", "secret-1"]}
    smoke = {"floor": 3.0, "prompts": ["one"]}
    draft = {"num_draft_tokens": 3}
    wanted = recipe("a/b", "c/d", draft=draft, engine=engine, smoke=smoke)
    told, shown = list[str](), list[str]()
    start = launch(wanted, look_at_models(wanted), str(as_interpreter(tmp_path, [1, 1])))
    assert serve(start, wanted, log=tmp_path / "log", echo=shown.append, tell=told.append) == 1
    assert "smoke check failed: acceptance length 1.500" in told[-1]
    assert "secret-1" in start.command
    assert "secret-1" not in "".join((start.shell(), *told, *shown, (tmp_path / "log").read_text()))


def test_an_engine_that_ends_by_itself(tmp_path: Path) -> None:
    wanted, told = asked(1.5), list[str]()
    start = launch(wanted, look_at_models(wanted), str(as_interpreter(tmp_path, [1, 1])))
    log = tmp_path / "log"

    def end_it(line: str) -> None:
        told.append(line)
        if line.startswith("serving at "):
            # The stand-in leads its group: end that, as a crash would.
            os.killpg(os.getpgid(child_in(log)), signal.SIGKILL)

    assert serve(start, wanted, log=log, echo=lambda _: None, tell=end_it) == 1
    assert "smoke check passed: acceptance length 1.500" in told[1]
    assert "ended by itself with exit code -9" in told[-1]


def test_an_engine_that_does_not_start(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'RuntimeError: no GPU here'\nexit 3\n")
    python.chmod(0o755)
    wanted = asked(1.0)
    start = launch(wanted, look_at_models(wanted), str(python))
    with pytest.raises(EngineError, match="exit code 3 before it was ready: RuntimeError: no GPU"):
        serve(start, wanted, log=tmp_path / "log", echo=print, tell=print)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both(number: signal.Signals, tmp_path: Path) -> None:
    """The whole verb, as a user runs it."""
    path, log, port = tmp_path / "own.yaml", tmp_path / "log", free_port()
    path.write_text(
        "target: {path: a/b}\ndraft: {path: c/d, num_draft_tokens: 3, quantization: none}\n"
        f"engine: {{port: {port}, start_timeout: {WAIT}}}\nsmoke: {{floor: 1.5, prompts: [one]}}\n"
    )
    python = as_interpreter(tmp_path, [1, 1])
    words = [*SPEC, "serve", "-r", str(path), "--python", str(python), "--log", str(log)]
    with subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Tests that run in the background inherit that it is ignored, and then so would the verb.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as ours:
        assert ours.stderr is not None
        for line in ours.stderr:
            if "Ctrl-C ends it" in line:
                break
        child = child_in(log)
        assert lives(child)
        ours.send_signal(number)
        try:
            assert ours.wait(WAIT) == 128 + number
        finally:
            ours.terminate()
    assert ends(child)
