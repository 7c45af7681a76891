"""Nobody else has the port or writes the log: looked at before an engine starts.

A second server of the same recipe would empty the first one's log, and only then find its port
taken.
"""

import fcntl
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_taken_port(host: str, port: int) -> None:
    """Raises ValueError where an engine could not listen there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections that have ended do not keep a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"the engine could not listen at engine.host {host}, engine.port {port}: "
            f"{error.strerror}; end what holds it, or set another one"
        ) from None


@contextmanager
def own_log(log: Path) -> Iterator[None]:
    """Keep a log for us; an engine that loads its weights has no port yet, but a log.

    Raises ValueError where another process does so.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as held:
        if log.is_file():  # /dev/null is for everybody
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(
                    f"{log} is the log of a server that runs or starts; end it, or set another "
                    "engine.port or --log"
                ) from None
        yield
