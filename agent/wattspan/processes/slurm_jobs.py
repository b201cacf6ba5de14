"""Numbers of Slurm jobs whose cgroup directories are SLUIDs, as Slurm 26.05 names them.

The daemon of each step, ``slurmstepd``, has the number in its title (``slurmstepd: [4711.batch]``).
It runs as root in a directory that jobs cannot enter. A job's environment names a number too, but
the job may write there what it likes: it is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from wattspan.processes.procfs import ProcFs

MAX_STEPS = 64
_MAX_JOBS = 4096
_DAEMON = "slurmstepd"
_TITLE = re.compile(rb"slurmstepd: \[(?P<job>[0-9]{1,10})(?![0-9])")


class SlurmJobs:
    """Finds numbers of jobs, each once. Thread-safe."""

    def __init__(self, processes: ProcFs) -> None:
        self._processes = processes
        self._numbers: dict[str, str] = {}
        self._misses: dict[str, int] = {}

    def number_of(self, sluid: str, directories: Iterable[str]) -> str | None:
        """The number of a job by one of its cgroup directories; None if no daemon names it.

        A job without one is searched at the first, second, fourth call and so on.
        """
        known = self._numbers.get(sluid)
        if known is not None:
            return known
        misses = self._misses.get(sluid, 0) + 1
        if misses & (misses - 1) == 0:
            found = (self._titled(pid) for path in directories for pid in _daemons(path))
            known = next(filter(None, found), None)
        if len(self._numbers) + len(self._misses) >= _MAX_JOBS:
            self._numbers.clear()
            self._misses.clear()
        if known is None:
            self._misses[sluid] = misses
        else:
            self._numbers[sluid] = known
            self._misses.pop(sluid, None)
        return known

    def _titled(self, pid: int) -> str | None:
        """The number in the title of a daemon; None for another process."""
        stat = self._processes.stat(pid)
        if stat is None or stat.comm != _DAEMON or self._processes.user_id(pid) != 0:
            return None
        line = self._processes.command_line(pid) or b""
        match = _TITLE.match(line)
        return match["job"].decode() if match is not None else None


def _daemons(job: str) -> Iterator[int]:
    """The processes that Slurm keeps apart from the tasks of each step."""
    try:
        with os.scandir(job) as entries:
            steps = [entry.name for entry in entries if entry.name.startswith("step_")]
    except OSError:
        return
    for step in islice(sorted(steps), MAX_STEPS):
        try:
            text = Path(job, step, "slurm", "cgroup.procs").read_text("ascii")
        except (OSError, ValueError):
            continue
        yield from (int(line) for line in text.split() if line.isdecimal())
