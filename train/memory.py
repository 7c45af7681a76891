"""Keep freed memory in the process.

A training step frees and asks for the same large tensors again and again. glibc hands blocks above
32 MB straight back to the system, so each step would fault every page in anew; told to keep them,
the step runs on warm pages.
"""

import ctypes
import sys

# glibc's <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Ask glibc to serve large blocks from its heap and never to trim it.

    False where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
