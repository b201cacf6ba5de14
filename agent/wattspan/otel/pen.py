"""Writing records into a ring, from any thread, without a lock."""

from __future__ import annotations

import itertools
import mmap
from threading import get_native_id, local
from time import thread_time_ns  # noqa: TID251 - there is no Clock in applications

from wattspan.otel.wire import RECORD_SIZE, RECORDS, WRITTEN

FRESH = 100_000
"""Nanoseconds for which a thread's CPU time is trusted: asking is the dearest part of a record."""

_write = WRITTEN.pack_into


class Pen:
    """Writes records into one ring; shared by all threads of one process."""

    __slots__ = ("_here", "_memory", "_take", "_threads")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._take = itertools.count(1).__next__  # one step, as far as other threads can see
        self._threads = [0]
        self._here = _Here(self._threads)

    def note(self, span: int, parent: int, kind: int, at: int) -> None:
        me = self._here.me
        if self._threads[0] == 1:
            cpu = 0  # there is no other thread to be told apart from
        elif (since := at - me.asked) < FRESH:
            cpu = me.cpu + since  # as if it had run ever since
        else:
            me.asked, me.cpu = at, (cpu := thread_time_ns())
        take = self._take
        number = take()
        place = number % RECORDS * RECORD_SIZE
        _write(self._memory, place, span, parent, at, cpu, me.id, kind, number)


class _Thread:
    """A thread: its native id, and its CPU time when it was last asked for."""

    __slots__ = ("asked", "cpu", "id")

    def __init__(self) -> None:
        self.id = get_native_id()
        self.asked = self.cpu = 0


class _Here(local):
    """The thread that looks at it: ``__init__`` runs once in each, with the same ``threads``."""

    def __init__(self, threads: list[int]) -> None:
        self.me = _Thread()
        threads[0] += 1
