"""Memory of a process that trains on CPU."""

from __future__ import annotations

import ctypes
import sys


# Of malloc.h: from how many bytes on a block is one of the system's, and how many free bytes glibc keeps.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> None:
    """Let glibc keep large blocks that are freed.

    By default the system takes them back, and gives them, zeroed page by page, again in the next step: on CPU a fifth
    of the time that a small model takes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(option, 2**31 - 1)
