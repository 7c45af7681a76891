"""A port or a log that another process has is told before anything starts."""

import fcntl
import socket
from pathlib import Path

import pytest
from fake_engine import as_interpreter
from typer.testing import CliRunner

from spec.cli.main import app
from spec.serve.alone import own_log, refuse_taken_port
from spec.target.engine import free_port

RECIPE = "target: {path: a/b}\ndraft: {path: c/d, num_draft_tokens: 3, quantization: none}\n"


def command(folder: Path, port: int, log: Path) -> list[str]:
    """spec serve with a stand-in that would write the log and then fail at the smoke check."""
    path = folder / "own.yaml"
    path.write_text(RECIPE + "smoke: {floor: 3.5, prompts: [one]}\n")
    python = as_interpreter(folder, [1, 1])
    words = ["serve", "-r", str(path), "--python", str(python), f"engine.port={port}"]
    return [*words, "--log", str(log)]


def test_a_taken_port_keeps_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of the first\n")
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        first.listen()
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ValueError, match=f"engine.host {host}, engine.port {port}: Addr"):
                refuse_taken_port(host, port)
        refused = CliRunner().invoke(app, command(tmp_path, port, log)).exception
    assert isinstance(refused, ValueError) and "already in use; end what" in str(refused)
    assert log.read_text() == "of the first\n"


def test_a_log_that_is_written(tmp_path: Path) -> None:
    """The first server still loads its weights: its port is free."""
    log = tmp_path / "log"
    log.write_text("of the first\n")
    with log.open("a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        refused = CliRunner().invoke(app, command(tmp_path, free_port(), log)).exception
    assert isinstance(refused, ValueError)
    assert str(refused).startswith(f"{log} is the log of a server that runs or starts; end it")
    assert log.read_text() == "of the first\n"


def test_what_is_free(tmp_path: Path) -> None:
    refuse_taken_port("127.0.0.1", free_port())
    for _ in range(2):  # given back
        with own_log(tmp_path / "new" / "log"):
            assert (tmp_path / "new" / "log").read_text() == ""
    with own_log(Path("/dev/null")), own_log(Path("/dev/null")):
        pass


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(ValueError, match=r"engine.host 192\.0\.2\.1, .*; end what holds it, or"):
        refuse_taken_port("192.0.2.1", 30000)
    with pytest.raises(ValueError, match="engine.host no-such-host.invalid"):
        refuse_taken_port("no-such-host.invalid", 30000)
