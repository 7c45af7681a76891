"""The launcher: ready means ready, every failure is one line, and nothing is left running."""

import time
from pathlib import Path

import pytest
from fake_engine import as_interpreter

from spec.target.engine import Answer, Engine, EngineError, Launch, environment, free_port

CHILD = "sleep 600 & echo child $!"
READY = "echo 'The server is fired up and ready to roll!'"


def script(folder: Path, *lines: str) -> str:
    """An interpreter that runs these lines of shell instead of an engine."""
    path = folder / "python"
    path.write_text("\n".join(("#!/bin/bash", *lines)) + "\n")
    path.chmod(0o755)
    return str(path)


def engine(folder: Path, python: str, timeout: float = 30) -> Engine:
    return Engine(Launch(python, (), port=free_port()), log=folder / "log", timeout=timeout)


def gone(pid: int) -> bool:
    """Whether a process has ended, at once or within five seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def child_of(folder: Path) -> int:
    line = next(x for x in (folder / "log").read_text().splitlines() if x.startswith("child"))
    return int(line.split()[1])


def test_it_is_ready_when_the_log_says_so_and_ends_with_its_children(tmp_path: Path) -> None:
    python = script(tmp_path, CHILD, "sleep 0.5", READY, "wait")
    began = time.monotonic()
    with engine(tmp_path, python) as running:
        assert time.monotonic() - began >= 0.5 and running.returncode is None
        pid = running.pid
    assert gone(pid) and gone(child_of(tmp_path))


def test_it_ends_when_the_block_fails(tmp_path: Path) -> None:
    python = script(tmp_path, CHILD, READY, "wait")
    with pytest.raises(RuntimeError, match="ours"), engine(tmp_path, python):
        raise RuntimeError("ours")
    assert gone(child_of(tmp_path))


def test_one_that_will_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec.target.engine.GRACE", 0.3)
    python = script(tmp_path, "trap '' TERM", CHILD, READY, "while true; do sleep 0.1; done")
    with engine(tmp_path, python) as running:
        pid = running.pid
    assert gone(pid) and gone(child_of(tmp_path))


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
    assert gone(child_of(tmp_path))


def test_no_interpreter_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such interpreter"), engine(tmp_path, "/no/python"):
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


def test_the_command_can_be_pasted() -> None:
    launch = Launch("py", ("--model-path", "a b", "--tp-size", "2"), {"B": "0|1"}, port=7)
    assert launch.shell() == (
        "B='0|1' py -m sglang.launch_server \\\n  --model-path 'a b' \\\n  --tp-size 2 \\\n"
        "  --host 127.0.0.1 \\\n  --port 7"
    )


def test_our_packages_do_not_leak_into_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert environment({"A": "1"}).items() >= {("A", "1")}
    assert "PYTHONPATH" not in environment({}) and "PATH" in environment({})


def test_a_histogram_that_is_absent_is_empty() -> None:
    assert Answer([], {}).histogram == []
    assert Answer([], {"spec_correct_drafts_histogram": [1, 2]}).histogram == [1, 2]
