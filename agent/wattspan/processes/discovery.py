"""Who has been born since we last looked.

Three ways that complete each other. The kernel's events name every newborn. Without them, the
pid given out last tells, in one read a poll, in which range of pids to look. A scan of the whole
table, now and then, finds what both may miss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wattspan.model import SECOND
from wattspan.processes.events import News
from wattspan.processes.procfs import Processes
from wattspan.processes.table import ProcessTable

FIRST_PID = 300  # where pids start over: those below are for the system's beginning
WIDEST = 4096  # a larger range of pids is dearer to try than to scan the table


@dataclass(slots=True)
class Found:
    """The outcome of one look.

    ``born`` were certainly born since the look before; ``found`` were come upon, and may be
    older; ``suspects`` are under watch, but their pids may have been given to others. ``churn``
    says that pids were given out, ``complete`` that nobody visible is missing.
    """

    born: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    churn: bool = False
    complete: bool = True
    scanned: bool = False


class Discovery:
    """Looks for newcomers to the table; ``every`` is the pace of the scans, in nanoseconds."""

    def __init__(self, processes: Processes, table: ProcessTable, every: int = SECOND) -> None:
        self._processes = processes
        self._table = table
        self._every = every
        self._last: int | None = None
        self._pid_max = processes.pid_max()
        self._next_scan = 0
        self._too_wide = False

    def look(self, mono: int, news: News, heard: bool) -> Found:
        """``heard``: the kernel reports births, so ``news`` is complete unless it was lost."""
        result = Found(born=set(news.born), churn=news.churn)
        if not heard:
            self._try_new_pids(result)
        if mono >= self._next_scan or news.lost or self._too_wide:
            self._too_wide = False
            self._next_scan = mono + self._every
            shown = self._processes.pids()
            result.found = {pid for pid in shown if pid not in self._table} - result.born
            result.complete = result.scanned = True
            if news.lost:
                result.suspects.update(self._table)
        return result

    def _try_new_pids(self, result: Found) -> None:
        last, before = self._processes.last_pid(), self._last
        self._last = last
        if last is None:
            result.complete, result.churn = False, True
            return
        if last == before:
            return
        result.churn = True
        if before is None:
            return
        new = [range(before + 1, last + 1)]
        if last < before:
            self._pid_max = self._processes.pid_max()
            new = [range(before + 1, self._pid_max + 1), range(min(FIRST_PID, last), last + 1)]
        if sum(map(len, new)) > WIDEST:
            self._too_wide = True
            result.suspects.update(pid for pid in self._table if any(pid in r for r in new))
            return
        for pids in new:
            # Threads take pids as well; they have no process clock, so they drop out here.
            result.born.update(pid for pid in pids if self._table.clock(pid) is not None)
