"""Start a serving engine in its own environment, wait until it answers, talk to it, end it.

The engine (SGLang) pins packages of its own, so it is never imported: it runs as a subprocess of
another interpreter, in a process group of its own that ends with the `with` block, whatever
happens inside. Capture, the parity gate and `spec serve` all start it here.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self, TextIO

from .launch import HOST, Launch, environment, require_interpreter, value_of

# `/health` answers before the warm-up request has run; this line does not come before.
READY = "The server is fired up and ready to roll!"
GRACE = 10.0  # seconds between asking the engine to end and ending it
ADMINISTERED = "/flush_cache"  # asks for --admin-api-key where the server has one
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*")
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


class EngineError(ValueError):
    """The engine did not start, ended, or refused a request; one line with its own words."""


@dataclass(frozen=True)
class Answer:
    """What the engine answered to one request, and what it counted."""

    output_ids: list[int]
    meta: dict[str, Any]

    @property
    def histogram(self) -> list[int]:
        return histogram_of(self.meta)


class Engine:
    """Context manager: a running server. Entering returns when it really answers.

    Everything it prints goes to `log`, and line by line to `echo`. Raises ValueError without an
    interpreter, EngineError where it ends or says nothing for `timeout` seconds before it is ready.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        log: Path,
        timeout: float = 600.0,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self.launch = launch
        self._key = _key(launch, "--api-key")
        self._admin_key = _key(launch, "--admin-api-key") or self._key
        self.log = log
        self.timeout = timeout
        self._echo = echo
        self._ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        require_interpreter(self.launch.python)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = self.log.open("w", encoding="utf-8")
        try:
            # A signal between the start and its being known would leave the engine behind.
            with _signals_wait():
                self._process = subprocess.Popen(
                    self.launch.command,
                    env=environment(self.launch.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
                self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
                self._reader.start()
            self._wait_until_ready()
        except BaseException:
            if self._reader is None:
                log.close()  # else the reader does
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the whole process group: politely, then not."""
        process = self._process
        if process is None:
            return
        # Only its leader is asked: workers that end first would be reported as crashed.
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_group(process.pid)
            process.wait()
        if self._reader is not None:
            self._reader.join(timeout=GRACE)

    @property
    def url(self) -> str:
        host = HOST if self.launch.host in ("0.0.0.0", "::") else self.launch.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.launch.port}"

    @property
    def pid(self) -> int:
        """Of the server, which leads its process group."""
        return self._running.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._running.poll()

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        return self._running.wait()

    def get(self, path: str, *, timeout: float = 60.0) -> Any:
        """GET; what comes back, parsed. Raises EngineError as `post`."""
        return self._ask(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 600.0) -> Any:
        """POST JSON; what comes back, parsed. Raises EngineError for a refusal or a dead engine."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, data, headers), timeout)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        timeout: float = 600.0,
        sampling: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Greedy answers to prompts of token ids, sent as one batch; in their order.

        `sampling` adds to the request's sampling parameters, `options` to the request.
        """
        asked = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **(sampling or {})}
        body = {"input_ids": [list(ids) for ids in prompts], "sampling_params": asked, **options}
        answers = self.post("/generate", body, timeout=timeout)
        if not isinstance(answers, list) or len(answers) != len(prompts):
            raise EngineError(f"{len(prompts)} prompts asked, the engine answered {answers!r:.200}")
        return [_answer(each) for each in answers]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, as soon as the last request has left the batch."""
        self.post("/flush_cache?timeout=60", {})

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the engine runs inside its `with` block only"
        return self._process

    def _ask(self, request: urllib.request.Request, timeout: float) -> Any:
        # No proxy of the environment stands between us and our own process.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        key = self._admin_key if request.selector.startswith(ADMINISTERED) else self._key
        if key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with opener.open(request, timeout=timeout) as response:
                body = response.read().decode()
                # Some of its paths answer with a sentence.
                return json.loads(body) if "json" in response.headers.get_content_type() else body
        except urllib.error.HTTPError as error:
            words = " ".join(error.read().decode(errors="replace").split())[:300]
            raise EngineError(f"the engine refused {request.selector}: {words}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            ended = self.returncode is not None
            state = f"it has ended: {self.last_words()}" if ended else "it still runs"
            raise EngineError(
                f"no answer from the engine to {request.selector} ({error!r}); {state}; its log is "
                f"{self.log}"
            ) from None

    def _read(self, log: TextIO) -> None:
        """Take every line: an engine whose output nobody takes stops when the pipe is full."""
        stream = self._running.stdout
        assert stream is not None
        with suppress(OSError), log:
            for line in stream:
                if READY in line:
                    self._ready.set()
                with suppress(OSError):  # the disk is full
                    log.write(line)
                    log.flush()
                if self._echo is not None:
                    with suppress(OSError, UnicodeError):  # our reader has gone, or cannot show it
                        self._echo(line.rstrip("\n"))

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self.timeout
        while not self._ready.wait(0.1):
            if self.returncode is not None:
                raise EngineError(
                    f"the engine ended with exit code {self.returncode} before it was ready: "
                    f"{self.last_words()}; its log is {self.log}"
                )
            if time.monotonic() > end:
                raise EngineError(
                    f"the engine was not ready after {self.timeout:g} seconds: {self.last_words()};"
                    f" its log is {self.log}"
                )

    def last_words(self) -> str:
        """The line of the log that says why it failed: its last error, else its last line."""
        if self._reader is not None and self.returncode is not None:
            self._reader.join(timeout=GRACE)  # what it said last may still be in the pipe
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if ERROR_LINE.match(line)]
        return (errors or said or ["it printed nothing"])[-1][:400]


def histogram_of(details: Mapping[str, Any]) -> list[int]:
    """Rounds by number of accepted drafts; empty where nothing was drafted.

    Raises EngineError for anything but counts.
    """
    counts = details.get("spec_correct_drafts_histogram") or []
    if not isinstance(counts, list) or any(type(n) is not int or n < 0 for n in counts):
        raise EngineError(
            f"expected a histogram of accepted drafts, the engine says {counts!r:.200}"
        )
    return counts


@contextmanager
def ends_in_order() -> Iterator[None]:
    """A signal leaves the block once; more of them do not interrupt what ends the engine."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    # What is ignored already (nohup) stays ignored.
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _key(launch: Launch, option: str) -> str | None:
    """The server's key under this option. Raises EngineError for one that no request can carry."""
    key = value_of(option, launch.arguments)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise EngineError(
            f"the value of {option} has a line break or a letter that is not ASCII, which no "
            "request's header can carry; give another key"
        )
    return key or None


def _answer(entry: Any) -> Answer:
    """One entry of `/generate`'s answer; EngineError for anything else."""
    ids, meta = (
        entry.get(k) if isinstance(entry, dict) else None for k in ("output_ids", "meta_info")
    )
    if not isinstance(ids, list) or not isinstance(meta, dict):
        raise EngineError(f"expected output_ids and meta_info, the engine answered {entry!r:.200}")
    histogram_of(meta)
    return Answer(ids, meta)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that end us are raised when the block has ended. Only the main thread gets them."""
    arrived: list[int] = []
    mine = threading.current_thread() is threading.main_thread()
    taken = [number for number in ENDING if mine and signal.getsignal(number) is not signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: arrived.append(number)) for n in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived[:1]:
            signal.raise_signal(number)


def _end_with_parent() -> None:
    """In the child: end when the thread that started it does, even where that was killed."""
    with suppress(OSError, AttributeError):  # not Linux: the `with` block alone ends it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all of them have gone
        os.killpg(pid, signal.SIGKILL)
