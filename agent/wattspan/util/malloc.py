"""Settings of glibc's malloc: one heap for all threads.

glibc creates a heap for each thread, up to eight per CPU, so that threads do not wait for each
other. Python's threads run one at a time, and many mostly empty heaps waste memory: two soaks of
four minutes used 94 and 96 MB with separate heaps and 77 MB with one, under different load.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h>

_LARGE = 1 << 20
"""Size from which on a block has a mapping of its own, which is unmapped when freed.

glibc raises this bound to the largest block that was freed, up to 32 MiB. Bodies of
requests would then lie in the heap, between small blocks that keep it from shrinking. A usual
batch of spans is smaller, so its blocks are reused without a call of the kernel.
"""

_TRIM = 4 << 20
"""Free bytes at the top of the heap that are not returned to the kernel."""


def share_heap() -> None:
    """Call this before the first thread starts. No effect with other C libraries."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM)
