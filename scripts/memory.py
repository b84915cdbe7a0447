"""Memory of a process that trains."""

from __future__ import annotations

import ctypes
import sys

import torch


try:
    import resource
except ImportError:  # not on Windows
    resource = None


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


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that this process has held: of tensors on a GPU, or of anything."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return None
    # In kilobytes, but bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
