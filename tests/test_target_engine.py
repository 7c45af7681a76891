"""The launcher: ready means ready, every failure is one line, and nothing is left running."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import as_interpreter
from processes import child_in, ends

from spec.target.engine import READY as READY_LINE
from spec.target.engine import (
    Answer,
    Engine,
    EngineError,
    ends_in_order,
    free_port,
    histogram_of,
)
from spec.target.launch import Launch

CHILD = "sleep 600 & echo child $!"
READY = f"echo '{READY_LINE}'"


def script(folder: Path, *lines: str) -> str:
    """An interpreter that runs these lines of shell instead of an engine."""
    path = folder / "python"
    path.write_text("\n".join(("#!/bin/bash", *lines)) + "\n")
    path.chmod(0o755)
    return str(path)


def engine(folder: Path, python: str, timeout: float = 30) -> Engine:
    return Engine(Launch(python, (), port=free_port()), log=folder / "log", timeout=timeout)


def test_it_is_ready_when_the_log_says_so_and_ends_with_its_children(tmp_path: Path) -> None:
    python = script(tmp_path, CHILD, "sleep 0.5", READY, "wait")
    began = time.monotonic()
    with engine(tmp_path, python) as running:
        assert time.monotonic() - began >= 0.5 and running.returncode is None
        pid = running.pid
    assert ends(pid) and ends(child_in(tmp_path / "log"))


def test_it_ends_when_the_block_fails(tmp_path: Path) -> None:
    python = script(tmp_path, CHILD, READY, "wait")
    with pytest.raises(RuntimeError, match="ours"), engine(tmp_path, python):
        raise RuntimeError("ours")
    assert ends(child_in(tmp_path / "log"))


def test_one_that_will_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec.target.engine.GRACE", 0.3)
    python = script(tmp_path, "trap '' TERM", CHILD, READY, "while true; do sleep 0.1; done")
    with engine(tmp_path, python) as running:
        pid = running.pid
    assert ends(pid) and ends(child_in(tmp_path / "log"))


def test_an_end_before_it_is_ready_shows_its_last_error(tmp_path: Path) -> None:
    lines = ("echo loading", "echo 'ValueError: no such backend' >&2", "echo bye", "exit 7")
    with (
        pytest.raises(EngineError, match=r"exit code 7 .*: ValueError: no such backend; its log"),
        engine(tmp_path, script(tmp_path, *lines)),
    ):
        pass


def test_silence_ends_it(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"not ready after 0\.5 seconds: loading"),
        engine(tmp_path, script(tmp_path, CHILD, "echo loading", "wait"), timeout=0.5),
    ):
        pass
    assert ends(child_in(tmp_path / "log"))


def test_no_interpreter_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such interpreter"), engine(tmp_path, "/no/python"):
        pass


def test_an_engine_that_died_is_told_apart_from_one_that_is_slow(tmp_path: Path) -> None:
    python = script(tmp_path, READY, "sleep 0.3", "echo 'RuntimeError: out of memory'")
    with engine(tmp_path, python) as running:
        assert running.wait() == 0
        with pytest.raises(EngineError, match="it has ended: RuntimeError: out of memory"):
            running.get("/server_info", timeout=1)


def test_an_answer_of_another_shape_is_refused(tmp_path: Path) -> None:
    """The stand-in answers a batch with one object."""
    python = str(as_interpreter(tmp_path, [1, 2]))
    with (
        engine(tmp_path, python) as running,
        pytest.raises(EngineError, match="2 prompts asked"),
    ):
        running.generate([[1], [2]], max_new_tokens=1)


@pytest.mark.parametrize("words", [("--api-key", "K"), ("--api-key=K",)])
def test_a_server_with_a_key_is_asked_with_it(words: tuple[str, ...], tmp_path: Path) -> None:
    """The one for what changes the server is another one, where it has two."""
    launch = Launch(str(as_interpreter(tmp_path, [1])), words, port=free_port())
    both = Launch(launch.python, (*words, "--admin-api-key=A"), port=free_port())
    for each in (launch, both):
        with Engine(each, log=tmp_path / "log", timeout=30) as running:
            assert "meta_info" in running.post("/generate", {"temperature": 0.0})
            running.forget_prefixes()


def test_a_key_that_no_request_can_carry(tmp_path: Path) -> None:
    """Told before anything starts, and not shown."""
    launch = Launch("/no/python", ("--api-key", "abc\n"))
    with pytest.raises(EngineError, match="the value of --api-key has a line break") as refused:
        Engine(launch, log=tmp_path / "log")
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize("stated", [{}, {"SGLANG_RAGGED_VERIFY_MODE": "compact"}])
def test_it_sees_the_modes_that_its_launch_states(
    stated: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "cap-accept")
    python = script(tmp_path, 'echo "mode $SGLANG_RAGGED_VERIFY_MODE."', READY, "sleep 600")
    launch = Launch(python, (), stated, port=free_port())
    with Engine(launch, log=tmp_path / "log", timeout=30):
        said = (tmp_path / "log").read_text().splitlines()[0]
    assert said == f"mode {stated.get('SGLANG_RAGGED_VERIFY_MODE', '')}."


def test_a_histogram_that_is_absent_is_empty() -> None:
    assert Answer([], {}).histogram == []
    assert Answer([], {"spec_correct_drafts_histogram": [1, 2]}).histogram == [1, 2]


@pytest.mark.parametrize("counts", [[-3, 0, 5], {"0": 1}, [1.5], "12", [True]])
def test_a_histogram_that_is_none_is_refused(counts: object) -> None:
    with pytest.raises(EngineError, match="expected a histogram"):
        histogram_of({"spec_correct_drafts_histogram": counts})


def test_a_listener_that_fails_does_not_stop_the_reading(tmp_path: Path) -> None:
    """Its terminal cannot show a line: the engine is ready all the same, the log is whole."""

    def echo(line: str) -> None:
        raise UnicodeEncodeError("ascii", line, 0, 1, "no such letter")

    python = script(tmp_path, "echo one", READY, "echo two", "sleep 600")
    launch = Launch(python, (), port=free_port())
    with Engine(launch, log=tmp_path / "log", timeout=30, echo=echo):
        end = time.monotonic() + 30
        while "two" not in (tmp_path / "log").read_text() and time.monotonic() < end:
            time.sleep(0.02)
    assert (tmp_path / "log").read_text().splitlines() == ["one", READY_LINE, "two"]


def test_a_log_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(OSError), engine(tmp_path, script(tmp_path, READY, "sleep 600")):
        pass


def test_a_body_that_breaks_off_is_one_line(tmp_path: Path) -> None:
    """It promises a hundred bytes and sends three."""
    port = free_port()
    answer = "HTTP/1.1 200 OK\\r\\nContent-Length: 100\\r\\n\\r\\nabc"
    server = (
        f"import socket; s = socket.create_server(('127.0.0.1', {port})); "
        "print('The server is fired up and ready to roll!', flush=True); "
        f"c, _ = s.accept(); c.recv(9999); c.sendall(b'{answer}'); c.close()"
    )
    python = script(tmp_path, f'exec {sys.executable} -c "{server}"')
    launch = Launch(python, (), port=port)
    with (
        Engine(launch, log=tmp_path / "log", timeout=30) as running,
        pytest.raises(EngineError, match="no answer from the engine"),
    ):
        running.get("/x", timeout=5)


def test_a_signal_during_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives while the engine's process is being made, before anybody knows its number."""
    start = subprocess.Popen

    def start_and_signal(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        started.append(process.pid)
        signal.raise_signal(signal.SIGTERM)
        return process

    started: list[int] = []
    monkeypatch.setattr("spec.target.engine.subprocess.Popen", start_and_signal)
    python = script(tmp_path, CHILD, READY, "wait")
    with pytest.raises(SystemExit), ends_in_order(), engine(tmp_path, python):
        pass
    assert ends(started[0])


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_in_order():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
