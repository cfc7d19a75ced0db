"""Keeps the C allocator from giving memory back between steps, which costs page faults at every step on a CPU."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TRIM_BYTES, _PAD_BYTES = 2**31 - 1, 256 * 2**20


def keep_memory() -> bool:
    """Tell glibc to serve large blocks from its heap and to keep them. Returns whether it was done.

    The same as setting MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ before the start; a no-op where
    the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _TRIM_BYTES), (_M_TOP_PAD, _PAD_BYTES))
    return all(mallopt(which, value) == 1 for which, value in settings)
