"""Usage of a GPU by its processes, where the driver lists them with their activity.

A list has two figures of a process: the cumulative nanoseconds on an engine, and the units that it
occupies at the moment of the call. AMD SMI reports the time on the graphics engine, which the
kernel counts for graphics and for compute through it, and the compute units that its waves occupy,
which the compute driver (KFD) counts for its own processes. The figure of the device is the part of
the time in which it was busy; AMD's is that of its graphics and compute pipes.

The time on the engine is a process's own. The rest of the device's busy time is divided in
proportion to the occupied units, as the mean of those at the beginning and at the end of
the period. They are samples of moments: if no process occupied any then, those of the last
samples count. A process that has ended in the period is charged by what it did before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from wattspan.model import SECOND, Domain, Failure, Instant, Payer, Trouble, Usage
from wattspan.sources.driver_thread import CallInterval
from wattspan.sources.gpu.calls import NO_PERMISSION
from wattspan.sources.gpu.port import MAX_USAGE_INTERVAL, FailureOf, GpuDevice, GpuSettings

PROCESSES = "processes"
_BUSY, _UNLISTED_RECORDS = 20, 5
"""Percent of a device that is in use by a process, and records in which none was listed."""

REMEMBERED_SAMPLES = 8
"""Occupancy samples that may divide a period whose own samples show no process: four seconds."""

_MAX_SHORTAGE = SECOND
"""The figure of the device trails the processes' by less."""


class ProcessActivity(NamedTuple):
    """One process at one moment: ``engine`` nanoseconds so far, ``units`` occupied now.

    ``payer`` is None for a process that is not known. ``units`` is None if the driver does not
    report them.
    """

    pid: int
    payer: Payer | None
    engine: int
    units: int | None


ProcessList = Callable[[], list[ProcessActivity] | None]
"""Returns the processes on a board now; None if the driver does not list them."""


class ActivityMeter:
    """The usage of one GPU as a row of records, each beginning where the one before it ended."""

    def __init__(self, resource: str, start: Instant) -> None:
        self._resource = resource
        self._end = start
        self._observed = start.mono
        self._busy: int | None = 0  # percent of the device times nanoseconds since the last record
        self._engines: dict[int, int] = {}
        self._samples: deque[Mapping[Payer | None, int]] = deque(maxlen=REMEMBERED_SAMPLES)
        self._shortage = 0
        self._last: Mapping[Payer | None, int] = {}  # use in the last record

    def observe_device(self, mono: int, percent: int | None) -> None:
        """The device was ``percent`` busy since the last observation; None if that is unknown."""
        elapsed, self._observed = max(0, mono - self._observed), max(mono, self._observed)
        if percent is None or self._busy is None:
            self._busy = None
        else:
            self._busy += percent * elapsed

    def usage(self, end: Instant, processes: Iterable[ProcessActivity] | None) -> Usage | None:
        """The record up to ``end``; None if that is not after the record before.

        ``processes`` are those at ``end``; None if the driver does not list them: then all busy
        time is unclaimed.
        """
        duration = end.mono - self._end.mono
        listed = () if processes is None else tuple(processes)
        spent: dict[Payer | None, int] = {}
        for process in listed:
            own = self._engine_time(process, duration)
            spent[process.payer] = spent.get(process.payer, 0) + own
        self._engines = {process.pid: process.engine for process in listed}
        self._samples.append(_occupied(listed))
        if duration <= 0:
            return None  # the beginning: later times are differences to these
        rest = self._rest(sum(spent.values()), duration)
        weights = self._weights(spent)
        for payer, share in _divided(rest, _UNKNOWN if processes is None else weights).items():
            spent[payer] = spent.get(payer, 0) + share
        listed_payers = frozenset(process.payer for process in listed if process.payer is not None)
        unclaimed = spent.pop(None, 0)
        self._last = {payer: own for payer, own in spent.items() if payer in listed_payers}
        usage = Usage(
            resource=self._resource,
            start=self._end,
            end=end,
            spent={payer: own for payer, own in spent.items() if payer is not None and own},
            unclaimed=unclaimed,
            capacity=duration,
            present=listed_payers,
        )
        self._end, self._busy = end, 0
        return usage

    def _engine_time(self, process: ProcessActivity, duration: int) -> int:
        """The engine time in the period; of a process that is new, its whole time if it fits."""
        before = self._engines.get(process.pid)
        if before is None:
            return process.engine if process.engine <= duration else 0
        # The library returns the time of one of the process's clients: another one may have less.
        return max(0, min(process.engine - before, duration))

    def _rest(self, claimed: int, duration: int) -> int:
        """The busy time of the device that is not the engine time of processes."""
        if self._busy is None:
            return max(0, duration - claimed)
        excess = min(self._busy // 100, duration) - claimed - self._shortage
        self._shortage = min(max(0, -excess), _MAX_SHORTAGE)
        return max(0, excess)

    def _weights(self, present: Mapping[Payer | None, int]) -> Mapping[Payer | None, int]:
        """Weights of payers in the rest of the busy time.

        Occupied units at both ends of the period; if there are none, the last use of
        processes that have ended in it, or else the units of earlier samples.
        """
        newest = list(self._samples)[-2:]
        ended = {payer: used for payer, used in self._last.items() if used and payer not in present}
        earlier = {
            payer: units for payer, units in _total(self._samples).items() if payer in present
        }
        return _total(newest) or ended or earlier or _UNKNOWN


_UNKNOWN: Mapping[Payer | None, int] = {None: 1}


def _total(samples: Iterable[Mapping[Payer | None, int]]) -> Counter[Payer | None]:
    total: Counter[Payer | None] = Counter()
    for sample in samples:
        total.update(sample)
    return total


def _occupied(processes: Iterable[ProcessActivity]) -> dict[Payer | None, int]:
    units: dict[Payer | None, int] = {}
    for process in processes:
        if process.units:
            units[process.payer] = units.get(process.payer, 0) + process.units
    return units


def _divided(amount: int, weights: Mapping[Payer | None, int]) -> dict[Payer | None, int]:
    """``amount`` in proportion to ``weights``; the last payer takes the remainder of roundings."""
    total = sum(weights.values())
    shares: dict[Payer | None, int] = {}
    left, weight_left = amount, total
    for payer, weight in weights.items():
        shares[payer] = left * weight // weight_left
        left, weight_left = left - shares[payer], weight_left - weight
    return shares


class ProcessListUsage:
    """The GpuUsage of a board whose driver lists its processes with their activity."""

    step = 0
    division: object = ()

    def __init__(
        self, device: GpuDevice, settings: GpuSettings, method: str, processes: ProcessList
    ) -> None:
        """``processes`` calls the driver; ``method`` is that of attribution by their activity."""
        self.pace = CallInterval(settings.usage_interval, device.clock, MAX_USAGE_INTERVAL)
        self._device, self._method, self._processes = device, method, processes
        self._meter: ActivityMeter | None = None
        self.held = False
        self._unlisted = 0  # records in a row with a busy device and no process

    @property
    def refusal(self) -> int | None:
        """The code with which the driver refused to list processes; None if it did not."""
        return self._device.calls.refused(PROCESSES)

    @property
    def method(self) -> str:
        return self._method if self.refusal is None else "none"

    def measure(
        self, at: Instant, busy: int | None, *, looked: bool, settle: bool
    ) -> Iterable[Usage]:
        if not looked:
            return ()
        if self._meter is None:
            self._meter = ActivityMeter(self._device.identity.domain_id, at)
        self._meter.observe_device(at.mono, busy)
        if not settle:
            return ()
        with self.pace:
            processes = self._processes()
        self.held = bool(processes)
        unlisted = processes == [] and (busy or 0) >= _BUSY
        self._unlisted = self._unlisted + 1 if unlisted else 0
        usage = self._meter.usage(at, processes)
        return () if usage is None else (usage,)

    def follow(self, at: Instant) -> Iterable[Usage]:
        del at
        return ()

    def flush(self, at: Instant) -> Iterable[Usage]:
        usage = None if self._meter is None else self._meter.usage(at, None)
        return () if usage is None else (usage,)

    def resume(self, at: Instant) -> None:
        del at
        self._meter = None

    def parts(self, board: Domain) -> tuple[Domain, ...]:
        del board
        return ()

    def failures(self, failure: FailureOf) -> Iterable[Failure]:
        if self.refusal not in {None, NO_PERMISSION}:
            cause = self._device.messages.cause_of(self.refusal or 0)
            remedy = "All of its energy stays unattributed."
            yield failure(PROCESSES, Trouble.ABSENT, cause, remedy)
        if self._unlisted >= _UNLISTED_RECORDS:
            yield failure(
                PROCESSES,
                Trouble.DENIED,
                "the GPU is busy, and the library lists no process",
                self._device.messages.unlisted,
            )

    def close(self) -> None:
        """Nothing is kept."""
