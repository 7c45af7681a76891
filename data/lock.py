"""One writer at a time: a lock that the system takes back when its holder is gone, even by kill -9.

The lock is on an open file, which child processes can be given: it lasts until the last of them has
ended. The file holds the process id of the holder, for messages.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDING_SECONDS = 15.0  # for the children of a holder that is gone: they end by themselves
POLL_SECONDS = 0.1


@contextmanager
def exclusive(path: Path, what: Path) -> Iterator[int]:
    """Hold the lock file `path`, made before and removed after; yields its descriptor.

    `what` is named in the ValueError that says that another process holds the lock. Where its
    holder is gone and only children of it are left, their end is waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire(path, what)
    try:
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, what: Path) -> int:
    give_up = time.monotonic() + ENDING_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode()
            os.close(descriptor)
            if _lives(holder) or time.monotonic() > give_up:
                raise ValueError(
                    f"another run is writing to {what} (process {holder or 'unknown'}); let it end "
                    "first, or choose another place"
                ) from None
            time.sleep(POLL_SECONDS)
            continue
        if _still_there(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            return descriptor
        os.close(descriptor)


def _still_there(path: Path, descriptor: int) -> bool:
    """Whether the file is the one in place: its last holder removes it when done."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lives(process: str) -> bool:
    if not process:  # taken a moment ago: not yet said by whom
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
