"""One heap for all threads: what one gives back, another can have.

The C library gives each thread a heap of its own, up to eight for each CPU, so that threads do not
wait for each other. Ours take turns anyway, and a score of heaps that are each mostly empty is
memory that nobody has: two soaks of four minutes came to 94 and 96 MB with them and to 77 MB
without, though under different load.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h>

_LARGE = 1 << 20
"""Bytes from which on a block is mapped by itself and unmapped when it is freed.

The C library raises this bound to the largest block that was freed, up to 32 MiB. Bodies of
requests would then lie in the heap, between small blocks that keep it from shrinking. A usual
batch of spans is smaller, so its blocks are reused without a call of the kernel.
"""

_TRIM = 4 << 20
"""Bytes at the top of the heap that are kept for the next request."""


def share_heap() -> None:
    """To be called before there are threads. Where the C library is not GNU's: nothing."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM)
