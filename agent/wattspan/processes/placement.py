"""Where the active processes run, sampled at a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from wattspan.model import MILLISECOND, SECOND
from wattspan.processes.procfs import Processes
from wattspan.processes.sockets import Weights, weights_of
from wattspan.processes.table import Tracked
from wattspan.processes.topology import CpuTopology

SAMPLES = 24
"""Processes looked at a poll, those that did most first: some ten microseconds each."""

OFTEN, SELDOM = 300 * MILLISECOND, SECOND
"""Schedulers move a process between sockets reluctantly, and never one that is bound to its own:
who is bound, or did little since the last poll, is looked at seldom."""

NOTICEABLE = 2 * MILLISECOND


class Placement:
    """Gives each active process its weights by socket."""

    def __init__(self, processes: Processes, topology: CpuTopology) -> None:
        self._processes = processes
        self._topology = topology

    def weights(self, active: Sequence[tuple[Tracked | None, int]], now: int) -> list[Weights]:
        """The weights of each of ``active`` (with what it did); None is nobody in particular."""
        cpus = self._topology.capacity()
        anywhere = {socket: float(count or 1) for socket, count in cpus.items()}
        due = [
            (amount, row)
            for row, amount in active
            if row is not None and row.rank is not None and now >= row.look
        ]
        if len(due) > SAMPLES:
            due.sort(key=itemgetter(0), reverse=True)
        for amount, row in due[:SAMPLES]:
            row.weights = self._sample(row.consumer.pid, dict(cpus)) or row.weights
            roams = row.weights is not None and len(row.weights) > 1 and amount > NOTICEABLE
            row.look = now + (OFTEN if roams else SELDOM)
        return [(row.weights if row is not None else None) or anywhere for row, _ in active]

    def _sample(self, pid: int, cpus: dict[int, int]) -> dict[int, float] | None:
        stat, allowed = self._processes.stat(pid), self._processes.affinity(pid)
        if stat is None:
            return None
        socket_of = self._topology.socket_of
        sockets = {socket_of(cpu) for cpu in allowed} if allowed else set(cpus)
        seen = socket_of(stat.processor) if stat.processor >= 0 else None
        return weights_of(seen, sorted(sockets), cpus, stat.threads)
