"""Division of the CPU time of processes among the sockets of a host.

The CPU time of each process is known, and the busy time of each socket. If the scheduler counts the
time of each process on each socket (:mod:`wattspan.processes.cpu_socket_times`), the CPU time is
divided in proportion to it. Otherwise the socket of a process is only sampled: the CPU of its main
thread at its last run, and the CPUs that it may run on. Proportional fitting reconciles these
estimates with both sums. That division is exact with one socket and for processes bound to one;
a process that moves between sockets within a tick, or has threads on several, is divided like the
sockets' own remaining load. Nothing is lost: the parts of a process add up to its CPU time.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol

from wattspan.attribution.division import split
from wattspan.model import MILLISECOND, SECOND, Consumer, Instant, Payer, Usage
from wattspan.processes.cpus import BusyClock
from wattspan.processes.procfs import ProcFs
from wattspan.processes.table import TrackedProcess
from wattspan.util.cpu_topology import CpuTopology


class UnattributedTime:
    """Busy time that cannot be charged to a process: never negative, not biased by steps.

    ``settle`` returns the growth of the running maximum of ``busy - spent``. A step that makes the
    difference too large is returned once and is then the new maximum, so noise of amplitude ``a``
    adds at most ``a`` in all, where clipping each difference at zero would add a part of it every
    time. The cost: after a period in which ``spent`` ran ahead, as much unattributed time is
    hidden.
    """

    def __init__(self) -> None:
        self._emitted = 0

    def settle(self, busy: int, spent: int) -> int:
        """The new unclaimed nanoseconds, from both totals since the beginning."""
        new = max(0, busy - spent - self._emitted)
        self._emitted += new
        return new

    @property
    def total(self) -> int:
        return self._emitted


OTHER_SOCKET_WEIGHT = 1 / 16
"""Weight of a socket that a process may use, relative to the socket of its last sample."""

_ROUNDS = 16
_FIT_TOLERANCE = 0.001
"""Relative error of loads that ends the fitting: it becomes unclaimed time of a socket."""

Weights = Mapping[int, float]


def weights_of(
    seen: int | None, allowed: Iterable[int], cpus: Mapping[int, int], threads: int
) -> dict[int, float]:
    """The likelihood of each socket for a process.

    ``seen`` is the socket of its main thread, ``allowed`` the permitted sockets, ``cpus`` the
    number of CPUs of each. The place of one thread is weak evidence for many.
    """
    open_to = [socket for socket in allowed if cpus.get(socket)] or list(cpus)
    if threads > 1 or seen not in open_to:
        return {socket: float(cpus.get(socket, 1) or 1) for socket in open_to}
    return {socket: 1.0 if socket == seen else OTHER_SOCKET_WEIGHT for socket in open_to}


def apportion(
    spent: Sequence[int], weights: Sequence[Weights], room: Mapping[int, int]
) -> list[dict[int, int]]:
    """Divide each of ``spent`` over the sockets, by weight and so as to fill their ``room`` evenly.

    A socket's room is its busy time that is not charged to any process yet.
    """
    # Few different weights occur; a sampler gives processes alike the same object.
    likelihoods = {id(weight): weight for weight in weights}
    sums = dict.fromkeys(likelihoods, 0)
    for amount, weight in zip(spent, weights, strict=True):
        sums[id(weight)] += amount
    bound = dict.fromkeys(room, 0.0)
    free: list[tuple[int, Weights]] = []
    for key, weight in likelihoods.items():
        if len(weight) == 1:
            bound[next(iter(weight))] += sums[key]
        else:
            free.append((sums[key], weight))
    factor = _fitted(free, bound, room) if free else {}
    fractions = {
        key: _fractions(weight if len(weight) == 1 else _scaled(weight, factor))
        for key, weight in likelihoods.items()
    }
    return [
        _divide(amount, *fractions[id(weight)])
        for amount, weight in zip(spent, weights, strict=True)
    ]


def _fitted(
    free: Sequence[tuple[int, Weights]], bound: Mapping[int, float], room: Mapping[int, int]
) -> dict[int, float]:
    """The factor of the weights of each socket with which all loads fill the rooms evenly."""
    factor = dict.fromkeys(room, 1.0)
    whole = sum(amount for amount, _ in free)
    even = (whole + sum(bound.values())) / (sum(max(0, r) for r in room.values()) or 1)
    left = {s: max(0.0, r * even - bound[s]) for s, r in room.items()}
    rest = sum(left.values())
    for _ in range(_ROUNDS if rest > 0 else 0):
        load = dict.fromkeys(room, 0.0)
        for amount, weight in free:
            scaled = _scaled(weight, factor)
            total = sum(scaled.values())
            if total > 0:
                for s, w in scaled.items():
                    load[s] += amount * w / total
        worst = 0.0
        for s in factor:
            if load[s] > 0:
                want = left[s] * whole / rest
                worst = max(worst, abs(want - load[s]) / (bound[s] + load[s]))
                # A full socket keeps a little weight, because its processes ran there.
                factor[s] = max(1e-6, factor[s] * want / load[s])
        if worst < _FIT_TOLERANCE:
            break
    return factor


def _scaled(weight: Weights, factor: Mapping[int, float]) -> dict[int, float]:
    return {s: w * factor.get(s, 0.0) for s, w in weight.items()}


def share(amount: int, times: Mapping[int, int]) -> Mapping[int, int]:
    """The positive parts of ``amount`` in proportion to the times on the sockets."""
    if len(times) == 1:
        return dict.fromkeys(times, amount)
    parts = zip(times, split(amount, list(times.values())), strict=True)
    return {socket: part for socket, part in parts if part}


def _fractions(weight: Weights) -> tuple[int, tuple[tuple[int, float], ...]]:
    """The socket with the largest weight, and the fractions of the others."""
    whole = sum(weight.values())
    heaviest = max(weight, key=weight.__getitem__)
    others = ((s, w / whole) for s, w in weight.items() if s != heaviest and whole)
    return heaviest, tuple(others)


def _divide(amount: int, heaviest: int, others: tuple[tuple[int, float], ...]) -> dict[int, int]:
    """Whole parts of ``amount``; the heaviest socket gets the rounding error."""
    parts = {s: part for s, fraction in others if (part := int(amount * fraction)) > 0}
    rest = amount - sum(parts.values())
    if rest > 0:
        parts[heaviest] = rest
    return parts


SAMPLES_PER_SECOND = 240
"""Limit of samples in each second of the polled time: some ten microseconds each."""

FAST_INTERVAL, SLOW_INTERVAL = 300 * MILLISECOND, SECOND
"""Sampling intervals: the slow one for processes that are bound to a socket or did little work."""

MIN_CPU_TIME = 2 * MILLISECOND

MAX_BOUND_THREADS = 8
"""Threads of a process whose main thread is bound to a socket that a sample reads."""

_MAX_SHARED = 256
_Sockets = dict[frozenset[int] | None, Sequence[int]]


class PlacementSampler:
    """Samples the sockets of active processes.

    If more are due than the limit permits, half of the samples are of the busiest ones, whose error
    would be the largest, the others of those that have waited longest: each has its turn.
    """

    def __init__(self, processes: ProcFs, topology: CpuTopology) -> None:
        self._processes = processes
        self._topology = topology
        self._shared: dict[tuple[tuple[int, float], ...], Weights] = {}

    def weights(
        self, active: Sequence[tuple[TrackedProcess | None, int]], start: int, now: int
    ) -> list[Weights]:
        """The weights of each of ``active`` (with its CPU time since the monotonic time ``start``).

        None is an unknown process.
        """
        cpus = dict(self._topology.capacity())
        anywhere = {socket: float(count or 1) for socket, count in cpus.items()}
        due = [
            (amount, row)
            for row, amount in active
            if row is not None and row.clock_list is not None and now >= row.next_placement
        ]
        limit = -(-SAMPLES_PER_SECOND * (now - start) // SECOND)  # rounded up
        if len(due) > limit:
            due.sort(key=operator.itemgetter(0), reverse=True)
            half = limit // 2
            due[half:] = sorted(due[half:], key=lambda one: one[1].next_placement)
        sockets: _Sockets = {None: list(cpus)}  # of unknown CPUs: all
        for amount, row in due[:limit]:
            row.weights = self._sample(row.consumer.pid, cpus, sockets) or row.weights
            roams = row.weights is not None and len(row.weights) > 1 and amount > MIN_CPU_TIME
            interval = FAST_INTERVAL if roams else SLOW_INTERVAL
            row.next_placement = now + interval - interval // 20  # polls have some jitter
        return [(row.weights if row is not None else None) or anywhere for row, _ in active]

    def _sample(self, pid: int, cpus: dict[int, int], sockets: _Sockets) -> Weights | None:
        """The present weights; ``sockets`` are those of the CPUs that earlier ones may run on."""
        places = self._places(self._processes.affinity(pid), sockets)
        if len(places) > 1:
            stat = self._processes.stat(pid)
            if stat is None:
                return None
            seen = self._topology.socket_of(stat.processor) if stat.processor >= 0 else None
            weights = weights_of(seen, places, cpus, stat.threads)
        else:  # its main thread is bound, wherever it was seen
            weights = self._bound_threads(pid, cpus, sockets) or weights_of(None, places, cpus, 1)
        if len(self._shared) > _MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(tuple(weights.items()), weights)

    def _bound_threads(self, pid: int, cpus: dict[int, int], sockets: _Sockets) -> dict[int, float]:
        """The number of threads that may run on each socket, of some; empty without a second one.

        OpenMP and hypervisors bind each thread: the main one does not tell where the others run.
        """
        threads = self._processes.threads(pid)
        if len(threads) < 2:
            return {}
        # An odd step: by the numbers of CPUs, or scattered, threads alternate between the sockets.
        some = threads[:: -(-len(threads) // MAX_BOUND_THREADS) | 1]
        masks = filter(None, map(self._processes.affinity, some))
        count = Counter(place for one in masks for place in self._places(one, sockets))
        return {place: float(count[place]) for place in sorted(count) if cpus.get(place)}

    def _places(self, allowed: frozenset[int] | None, sockets: _Sockets) -> Sequence[int]:
        """The sockets of the CPUs that a thread may run on."""
        if allowed not in sockets:
            sockets[allowed] = sorted(set(map(self._topology.socket_of, allowed or ())))
        return sockets[allowed]


HOST_RESOURCE = "cpu"


SocketTimesByPid = Mapping[int, Mapping[int, int]]
"""Nanoseconds of processes by pid and socket."""

SOCKET_MASK = 0xFFFFFFFF


class SocketTimesSample(NamedTuple):
    """Nanoseconds of ``pairs`` of a process and a socket, each ``pid << 32 | socket``."""

    pairs: Sequence[int] = ()
    times: Sequence[int] = ()

    def by_process(self, accounts: Mapping[int, int] = MappingProxyType({})) -> SocketTimesByPid:
        """The times by process; those of the pids in ``accounts`` count with another process."""
        found: dict[int, dict[int, int]] = {}
        for pair, time in zip(self.pairs, self.times, strict=True):
            if time:
                pid = pair >> 32
                pid = accounts.get(pid, pid)
                times = found.get(pid)
                if times is None:
                    times = found[pid] = {}
                socket = pair & SOCKET_MASK
                times[socket] = times.get(socket, 0) + time
        return found


class ClockSample(NamedTuple):
    """The clocks at one tick.

    Busy time as read, the values of the active processes, and the times of processes on sockets;
    or the values of the watched processes, and the kernel's sum of CPU time.
    """

    now: Instant
    busy: bytes | None
    values: list[int]
    times: SocketTimesSample = SocketTimesSample()
    total: int = 0


def cut(
    usages: list[Usage], samples: list[ClockSample], watched: Mapping[Payer, bool], total: int
) -> list[Usage]:
    """Cut the ``usages`` of one period at its ``samples``; the first is of its begin.

    A ``watched`` process, in the order of the samples' values, has the time that its clock shows;
    True if the kernel's sum, which is ``total`` at the end, has its work. Others and unclaimed time
    are divided in proportion to the rest of the sum. Nothing is added or lost.
    """
    edges = [*(one.now for one in samples), usages[0].end]
    lengths = [end.mono - start.mono for start, end in pairwise(edges)]
    sums = [*(one.total for one in samples), total]
    flows = rest = [max(0, end - start) for start, end in pairwise(sums)]
    clocks = zip(*(one.values for one in samples), strict=True)
    parts: dict[Payer, list[int]] = {}
    for (payer, in_sum), values in zip(watched.items(), clocks, strict=True):
        mine = parts[payer] = _by_clock(usages[0].spent.get(payer, 0), values)
        if in_sum:
            rest = [max(0, whole - part) for whole, part in zip(rest, mine, strict=True)]
    weights, flows = (one if any(one) else lengths for one in (rest, flows))
    periods: list[list[Usage]] = [[] for _ in lengths]
    spent: list[dict[Payer, int]] = []
    for one in usages:
        if not spent or one.spent is not usages[0].spent:
            spent = [{} for _ in lengths]
            for payer, amount in one.spent.items():
                for at, part in enumerate(split(amount, parts.get(payer, weights))):
                    if part:
                        spent[at][payer] = part
        unclaimed, capacity = split(one.unclaimed, weights), split(one.capacity or 0, lengths)
        metered: list[int] | list[None] = [None] * len(lengths)
        if one.metered is not None:
            metered = split(one.metered, flows)
        figures = zip(edges, edges[1:], spent, unclaimed, capacity, metered, strict=False)
        for period, (start, end, work, free, most, meter) in zip(periods, figures, strict=True):
            period.append(Usage(one.resource, start, end, work, free, most, metered=meter))
    return [usage for period in periods for usage in period]


def _by_clock(amount: int, values: Sequence[int]) -> list[int]:
    """The parts of the CPU time of a process between values of its clock, and after the last one.

    A clock that shows more than ``amount``, as after its pid was used again, gives proportions.
    """
    moved = [end - start for start, end in pairwise(values)]
    rest = amount - sum(moved)
    return [*moved, rest] if rest >= 0 else [*split(amount, moved), 0]


class ProcessSocketTimes(Protocol):
    """Counts the CPU time of each process on each socket."""

    def sample(self) -> SocketTimesSample:
        """The times since the last sample; some processes may be missing."""

    def refresh(self) -> None:
        """The sockets of CPUs have changed."""

    def close(self) -> None: ...


class SocketAccounting:
    """CPU time of each socket: total, charged to processes, and unclaimed."""

    def __init__(
        self,
        topology: CpuTopology,
        placement: PlacementSampler,
        busy: BusyClock | None,
        times: ProcessSocketTimes | None = None,
    ) -> None:
        self._topology = topology
        self._placement = placement
        self._times = times
        self._clock = busy
        self._busy: dict[int, int] | None = None
        self._metered: dict[int, int] = {}  # busy time at the last usage
        self._spent: dict[int, int] = {}
        self._unclaimed: dict[int, UnattributedTime] = {}

    def sample_busy(self) -> bytes | None:
        """Sample busy time; to be called before the clocks of processes are read."""
        return self._clock.sample() if self._clock is not None else None

    def sample_times(self) -> SocketTimesSample:
        """Sample the times on sockets; to be called after the clocks of processes are read."""
        return self._times.sample() if self._times is not None else SocketTimesSample()

    def update_busy(self, sample: bytes | None, mono: int) -> None:
        """Continue with the sample of the next poll."""
        by_cpu = self._clock.values(sample, mono) if self._clock is not None else None
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
        times: SocketTimesByPid,
        complete: bool,
        sees_all: bool = True,
    ) -> tuple[Usage, ...]:
        """One usage for the host and one for each socket, divided by the ``times``.

        If the process table is not ``complete``, a process may yet be found for the remaining time,
        so no time is unclaimed; it will be at the next complete poll. Without ``sees_all``,
        processes are hidden: none will be found for it, and if the busy time is unknown, all time
        of all CPUs that no visible process used may be theirs.
        """
        spent_by_payer = _sum_by_payer(active)
        rows = {payer: row for payer, _, row in active if row is not None}
        divided = self._divide(spent_by_payer, rows, times, start.mono, end.mono)
        metered = self._metered_time()
        cpus = self._topology.capacity()
        duration = end.mono - start.mono
        hidden = self._busy is None and not sees_all
        everything = self._topology.capacity(offline=True) if hidden else {}
        usages = []
        for socket, spent in divided.items():
            self._spent[socket] = self._spent.get(socket, 0) + sum(spent.values())
            available = cpus.get(socket, 0) * duration
            if hidden:
                rest = max(0, everything.get(socket, 0) * duration - sum(spent.values()))
            else:
                rest = self._unclaimed_time(socket) if complete or not sees_all else 0
            usages.append(
                Usage(
                    f"{HOST_RESOURCE}:{socket}",
                    start,
                    end,
                    spent,
                    rest,
                    available,
                    metered=metered.get(socket),
                )
            )
        unclaimed = sum(usage.unclaimed for usage in usages)
        capacity = sum(cpus.values()) * duration
        total = sum(metered.values()) if metered else None
        whole = Usage(HOST_RESOURCE, start, end, spent_by_payer, unclaimed, capacity, metered=total)
        return (whole, *usages)

    def _metered_time(self) -> dict[int, int]:
        """The busy time of each socket since the last call, if it is known precisely."""
        if self._busy is None or self._clock is None or self._clock.step >= MILLISECOND:
            self._metered = {}
            return {}
        before, self._metered = self._metered, self._busy
        return {s: busy - before[s] for s, busy in self._busy.items() if s in before}

    def _divide(
        self,
        spent: dict[Payer, int],
        rows: Mapping[Payer, TrackedProcess],
        times: SocketTimesByPid,
        start: int,
        now: int,
    ) -> dict[int, dict[Payer, int]]:
        sockets = self._topology.sockets
        if len(sockets) == 1:
            return {sockets[0]: spent}
        divided: dict[int, dict[Payer, int]] = {socket: {} for socket in sockets}
        sampled = _divide_measured(spent, rows, times, divided, now)
        weights = self._placement.weights(
            [(rows.get(payer), amount) for payer, amount in sampled], start, now
        )
        room = self._room(sockets)
        for socket, measured in divided.items():
            room[socket] -= sum(measured.values())
        parts = apportion([amount for _, amount in sampled], weights, room)
        for (payer, _), by_socket in zip(sampled, parts, strict=True):
            for socket, part in by_socket.items():
                divided[socket][payer] = part
        return divided

    def _room(self, sockets: Sequence[int]) -> dict[int, int]:
        """The busy time of each socket that is not charged to a process yet."""
        if self._busy is None:
            return dict.fromkeys(sockets, 0)
        return {
            socket: self._busy[socket]
            - self._spent.get(socket, 0)
            - (self._unclaimed[socket].total if socket in self._unclaimed else 0)
            for socket in sockets
        }

    @property
    def uncharged(self) -> int | None:
        """The busy time that is neither charged nor unclaimed yet; None if it is unknown."""
        return None if self._busy is None else sum(self._room(self._topology.sockets).values())

    def _unclaimed_time(self, socket: int) -> int:
        if self._busy is None:
            return 0
        account = self._unclaimed.setdefault(socket, UnattributedTime())
        return account.settle(self._busy[socket], self._spent[socket])


def _sum_by_payer(active: Sequence[tuple[Payer, int, TrackedProcess | None]]) -> dict[Payer, int]:
    spent: dict[Payer, int] = {}
    for payer, amount, _ in active:
        spent[payer] = spent.get(payer, 0) + amount
    return spent


def _divide_measured(
    spent: Mapping[Payer, int],
    rows: Mapping[Payer, TrackedProcess],
    times: SocketTimesByPid,
    divided: Mapping[int, dict[Payer, int]],
    now: int,
) -> Sequence[tuple[Payer, int]]:
    """Divide the work of processes whose sockets are measured; returns the others."""
    others = []
    for payer, amount in spent.items():
        mine = times.get(payer.pid) if isinstance(payer, Consumer) else None
        if mine is None or not mine.keys() <= divided.keys():  # of an earlier topology
            others.append((payer, amount))
            continue
        row = rows.get(payer)
        if row is not None:  # for work that is charged late
            row.weights, row.next_placement = mine, now + SLOW_INTERVAL
        for socket, part in share(amount, mine).items():
            divided[socket][payer] = part
    return others
