"""Dividing what processes did among the sockets they did it on.

What each process did is known, and what each socket did in all is known; who did what where is
only sampled: the CPU a process's main thread last ran on, and the CPUs it may run on at all. A
round of proportional fitting brings the guesses in line with both sums. Exact with one socket
and for processes bound to one; otherwise a process that moves between sockets within a tick, or
whose threads are spread over them, is divided like the sockets' own remaining load. Nothing is
lost: the parts of a process add up to what it did.

Where the active processes run, sampled at a bounded cost.

From what each process did to the usages of the host and of its sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from wattspan.model import MILLISECOND, SECOND, Instant, Payer, Usage
from wattspan.processes.cpus import BusyClock, CpuTopology, UnattributedTime
from wattspan.processes.procfs import ProcessReader
from wattspan.processes.table import TrackedProcess

OTHER_SOCKET_WEIGHT = 1 / 16
"""Weight of a socket where a process may run but was not seen, against where it was."""

_ROUNDS = 6
_FIT_TOLERANCE = 0.01  # loads this near to what they should be are left alone

Weights = Mapping[int, float]


def weights_of(
    seen: int | None, allowed: Iterable[int], cpus: Mapping[int, int], threads: int
) -> dict[int, float]:
    """How likely a process ran on each socket.

    ``seen`` is where its main thread was, ``allowed`` where it may run, ``cpus`` the number of
    CPUs of each. The place of one thread says little about many.
    """
    open_to = [socket for socket in allowed if cpus.get(socket)] or list(cpus)
    if threads > 1 or seen not in open_to:
        return {socket: float(cpus.get(socket, 1) or 1) for socket in open_to}
    return {socket: 1.0 if socket == seen else OTHER_SOCKET_WEIGHT for socket in open_to}


def apportion(
    spent: Sequence[int], weights: Sequence[Weights], room: Mapping[int, int]
) -> list[dict[int, int]]:
    """Divide each of ``spent`` over the sockets, by weight and so as to fill their ``room`` evenly.

    A socket's room is its busy time that nobody was charged with yet.
    """
    bound = dict.fromkeys(room, 0.0)
    free: list[tuple[int, Weights]] = []
    for amount, weight in zip(spent, weights, strict=True):
        if len(weight) == 1:
            for s in weight:
                bound[s] += amount
        else:
            free.append((amount, weight))
    factor = _fitted(free, bound, room) if free else {}
    return [
        _divide(amount, weight if len(weight) == 1 else _scaled(weight, factor))
        for amount, weight in zip(spent, weights, strict=True)
    ]


def _fitted(
    free: Sequence[tuple[int, Weights]], bound: Mapping[int, float], room: Mapping[int, int]
) -> dict[int, float]:
    """By how much each socket's weights must grow for the loads to fill the rooms evenly."""
    factor = dict.fromkeys(room, 1.0)
    open_room = sum(max(0, r) for r in room.values())
    for _ in range(_ROUNDS):
        load = dict(bound)
        for amount, weight in free:
            scaled = _scaled(weight, factor)
            whole = sum(scaled.values())
            if whole > 0:
                for s, w in scaled.items():
                    load[s] += amount * w / whole
        total = sum(load.values())
        if total <= 0 or open_room <= 0:
            break
        worst = 0.0
        for s in factor:
            if load[s] > 0:
                # A socket with no room left keeps a little weight: a bound process still ran.
                want = max(0, room[s]) * total / open_room
                worst = max(worst, abs(want / load[s] - 1))
                factor[s] = max(1e-6, factor[s] * want / load[s])
        if worst < _FIT_TOLERANCE:
            break
    return factor


def _scaled(weight: Weights, factor: Mapping[int, float]) -> dict[int, float]:
    return {s: w * factor.get(s, 0.0) for s, w in weight.items()}


def _divide(amount: int, weight: Mapping[int, float]) -> dict[int, int]:
    """Whole parts that add up: the heaviest socket takes what rounding leaves."""
    if len(weight) == 1:
        return dict.fromkeys(weight, amount) if amount else {}
    whole = sum(weight.values())
    heaviest = max(weight, key=weight.__getitem__)
    parts = {s: int(amount * (w / whole)) if whole else 0 for s, w in weight.items()}
    parts[heaviest] += amount - sum(parts.values())
    return {s: part for s, part in parts.items() if part > 0}


MAX_SAMPLES = 24
"""Processes looked at a poll, those that did most first: some ten microseconds each."""

FAST_INTERVAL, SLOW_INTERVAL = 300 * MILLISECOND, SECOND
"""Schedulers move a process between sockets reluctantly, and never one that is bound to its own:
who is bound, or did little since the last poll, is looked at seldom."""

MIN_CPU_TIME = 2 * MILLISECOND


class PlacementSampler:
    """Gives each active process its weights by socket."""

    def __init__(self, processes: ProcessReader, topology: CpuTopology) -> None:
        self._processes = processes
        self._topology = topology

    def weights(
        self, active: Sequence[tuple[TrackedProcess | None, int]], now: int
    ) -> list[Weights]:
        """The weights of each of ``active`` (with what it did); None is nobody in particular."""
        cpus = self._topology.capacity()
        anywhere = {socket: float(count or 1) for socket, count in cpus.items()}
        due = [
            (amount, row)
            for row, amount in active
            if row is not None and row.rank is not None and now >= row.look
        ]
        if len(due) > MAX_SAMPLES:
            due.sort(key=itemgetter(0), reverse=True)
        for amount, row in due[:MAX_SAMPLES]:
            row.weights = self._sample(row.consumer.pid, dict(cpus)) or row.weights
            roams = row.weights is not None and len(row.weights) > 1 and amount > MIN_CPU_TIME
            row.look = now + (FAST_INTERVAL if roams else SLOW_INTERVAL)
        return [(row.weights if row is not None else None) or anywhere for row, _ in active]

    def _sample(self, pid: int, cpus: dict[int, int]) -> dict[int, float] | None:
        stat, allowed = self._processes.stat(pid), self._processes.affinity(pid)
        if stat is None:
            return None
        socket_of = self._topology.socket_of
        sockets = {socket_of(cpu) for cpu in allowed} if allowed else set(cpus)
        seen = socket_of(stat.processor) if stat.processor >= 0 else None
        return weights_of(seen, sorted(sockets), cpus, stat.threads)


HOST_RESOURCE = "cpu"


class SocketAccounting:
    """Keeps, for each socket, what it did in all, who was charged, and what nobody claims."""

    def __init__(
        self, topology: CpuTopology, placement: PlacementSampler, busy: BusyClock | None
    ) -> None:
        self._topology = topology
        self._placement = placement
        self._clock = busy
        self._busy: dict[int, int] | None = None
        self._spent: dict[int, int] = {}
        self._unclaimed: dict[int, UnattributedTime] = {}

    def read_busy(self, mono: int) -> None:
        """To be called before the processes' clocks are read."""
        by_cpu = self._clock.read(mono) if self._clock is not None else None
        self._busy = None
        if by_cpu is not None:
            self._busy = dict.fromkeys(self._topology.sockets, 0)
            for cpu, busy in by_cpu.items():
                self._busy[self._topology.socket_of(cpu)] += busy

    def usages(
        self,
        start: Instant,
        end: Instant,
        active: Sequence[tuple[Payer, int, TrackedProcess | None]],
        complete: bool,
    ) -> tuple[Usage, ...]:
        """One usage for the host and one for each socket.

        Where the picture is not ``complete`` (somebody may yet turn up whose work this is),
        nothing is called unclaimed; it will be, if so, with the next complete one.
        """
        divided = self._divide(active, end.mono)
        cpus = self._topology.capacity()
        duration = end.mono - start.mono
        usages = []
        for socket, spent in divided.items():
            self._spent[socket] = self._spent.get(socket, 0) + sum(spent.values())
            usages.append(
                Usage(
                    f"{HOST_RESOURCE}:{socket}",
                    start,
                    end,
                    spent,
                    self._nobodys(socket) if complete else 0,
                    cpus.get(socket, 0) * duration,
                )
            )
        unclaimed = sum(usage.unclaimed for usage in usages)
        host = usages[0].spent if len(usages) == 1 else _sum_by_payer(active)
        whole = Usage(HOST_RESOURCE, start, end, host, unclaimed, sum(cpus.values()) * duration)
        return (whole, *usages)

    def _divide(
        self, active: Sequence[tuple[Payer, int, TrackedProcess | None]], now: int
    ) -> dict[int, dict[Payer, int]]:
        sockets = self._topology.sockets
        if len(sockets) == 1:
            return {sockets[0]: _sum_by_payer(active)}
        weights = self._placement.weights([(row, amount) for _, amount, row in active], now)
        parts = apportion([amount for _, amount, _ in active], weights, self._room(sockets))
        divided: dict[int, dict[Payer, int]] = {socket: {} for socket in sockets}
        for (payer, _, _), by_socket in zip(active, parts, strict=True):
            for socket, part in by_socket.items():
                mine = divided[socket]
                mine[payer] = mine.get(payer, 0) + part
        return divided

    def _room(self, sockets: Sequence[int]) -> Mapping[int, int]:
        """Each socket's busy time that nobody was charged with yet."""
        if self._busy is None:
            return dict.fromkeys(sockets, 0)
        return {
            socket: self._busy[socket]
            - self._spent.get(socket, 0)
            - (self._unclaimed[socket].total if socket in self._unclaimed else 0)
            for socket in sockets
        }

    def _nobodys(self, socket: int) -> int:
        if self._busy is None:
            return 0
        account = self._unclaimed.setdefault(socket, UnattributedTime())
        return account.settle(self._busy[socket], self._spent[socket])


def _sum_by_payer(active: Sequence[tuple[Payer, int, TrackedProcess | None]]) -> dict[Payer, int]:
    spent: dict[Payer, int] = {}
    for payer, amount, _ in active:
        spent[payer] = spent.get(payer, 0) + amount
    return spent
