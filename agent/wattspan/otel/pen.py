"""What it takes to write records into a ring, from any thread, without a lock."""

from __future__ import annotations

import itertools
import mmap
from threading import get_native_id, local

FRESH = 100_000
"""Nanoseconds for which a thread's CPU time is trusted: asking is the dearest part of a record."""


class Pen:
    """One ring's memory and the numbers of its records; shared by all threads of a process.

    ``take`` gives the next number, in one step as far as other threads can see. ``threads[0]``
    counts the threads that have looked at ``here``, each to find its own ``me``.
    """

    __slots__ = ("here", "memory", "take", "threads")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.take = itertools.count(1).__next__
        self.threads = [0]
        self.here = Here(self.threads)


class Thread:
    """A thread: its native id, and its CPU time when it was last asked for."""

    __slots__ = ("asked", "cpu", "id")

    def __init__(self) -> None:
        self.id = get_native_id()
        self.asked = self.cpu = 0


class Here(local):
    """The thread that looks at it: ``__init__`` runs once in each, with the same ``threads``."""

    def __init__(self, threads: list[int]) -> None:
        self.me = Thread()
        threads[0] += 1
