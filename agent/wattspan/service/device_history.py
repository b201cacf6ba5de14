"""The device history, which answers queries of device energy as soon as a reading is there.

The poller hands over each tick when it is sampled. Unlike the energy history it does not wait for
the usage of processes, and reaches back to the start of the agent. Its intervals are those of the
ledger, whichever of the two needs them first. Ticks wait until a query needs them, or until there
are many. One lock protects the state and is held for the duration of an answer.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from wattspan.attribution.energy_curve import RESOLVED_FRACTION, CurveEnergy, EnergyCurve
from wattspan.attribution.metering import MeteredPeriod
from wattspan.model import (
    SECOND,
    Attribution,
    Domain,
    GpuStatus,
    Interval,
    Microjoules,
    Tick,
)
from wattspan.ports import EnergyStep
from wattspan.service.poller import MeteredTick
from wattspan.sharing.fair_pool import SharePath, share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.values import IntervalEnergy

MIN_SILENCE = 2 * SECOND
"""A device without a reading for longer is not awaited."""

RAMP_WINDOWS = (SECOND, 10 * SECOND, 60 * SECOND)
RAMP_PERIOD = 60 * SECOND
"""Time over which the largest ramp is reported: a scrape every minute misses none."""
_POWER_SCALE = 1_000_000
"""Microjoules per nanosecond in milliwatts."""

_MOST_APART = 0.6
"""The part of a ramp's window that may lie between two ticks: half, and the delay of a tick."""

MAX_TEMPERATURES = 3600
MAX_WAITING_TICKS = 64

CURVES_A_STEP = 8
"""Devices for which each tick has one step of thinning: their edges of windows are all kept so."""


PART_SILENCE = 10 * SECOND
"""The same of a part, whose energy is known once that of its device is attributed."""


TOLD_WITHIN = 30 * SECOND
"""The edge of a window is told within this time, also to a restarted agent.

Later ones would show which old readings are kept for the windows of others.
"""


class WindowEdges:
    """The edges of windows that living processes may still read. Thread-safe.

    Beyond the limit of their pool, the process with the most, of the user with the most, loses its
    oldest.
    """

    def __init__(self, pools: Pools | None = None, limit: int | None = None) -> None:
        self._pool = (pools or Pools()).make(PoolName.WINDOW_EDGES, limit)
        self._lock = threading.Lock()
        self._of: dict[SharePath, deque[int]] = {}

    def update(
        self, pid: int, owner: Hashable, times: Iterable[int], now: int = 0, *, ended: bool = False
    ) -> None:
        """Add edges of a process, monotonic times in any order; forget all once it ``ended``."""
        path = *share_path(owner), pid
        for time in (one for one in times if one > now - TOLD_WITHIN):
            with self._lock:  # for one at a time: there may be thousands
                admission = self._pool.acquire(path)
                if admission:
                    self._of.setdefault(path, deque()).append(time)
                for loser in admission.displaced:
                    self._of[loser].popleft()
        if ended:
            with self._lock:
                self._pool.release(path, len(self._of.pop(path, ())))

    def of(self, pid: int | None = None) -> Sequence[int]:
        """The edges of one process, or of all, sorted."""
        found = list[int]()
        with self._lock:
            for path, own in self._of.items():
                if pid in {None, path[-1]}:
                    found.extend(own)
        found.sort()  # without the lock: there may be thousands
        return found


class _DeviceTick(NamedTuple):
    """A tick, and the newest statuses of GPUs."""

    metered: MeteredTick
    gpus: Sequence[GpuStatus]


class _Temperatures:
    """The newest temperatures, in arrays: eight GPUs have 29,000 of them."""

    def __init__(self) -> None:
        self._times, self._degrees = array("q"), array("h")

    def append(self, time: int, degrees: int) -> None:
        self._times.append(time)
        self._degrees.append(degrees)
        if len(self._times) >= 2 * MAX_TEMPERATURES:
            del self._times[:-MAX_TEMPERATURES], self._degrees[:-MAX_TEMPERATURES]

    def between(self, start: int, end: int) -> list[tuple[int, int]]:
        part = slice(bisect_left(self._times, start), bisect_right(self._times, end))
        return list(zip(self._times[part], self._degrees[part], strict=True))


@dataclass(slots=True)
class _Device:
    """One device of the cover; ``since`` is the time at which its source listed it."""

    domain: Domain
    curve: EnergyCurve
    since: int
    present: bool = True
    absent: bool = False  # a part without energy for longer than the patience
    status: GpuStatus | None = None
    temperatures: _Temperatures = field(default_factory=_Temperatures)

    @property
    def is_part(self) -> bool:
        return self.domain.is_division

    def add(self, metered: MeteredPeriod) -> None:
        """Add a period of the device's counter; energy from outside the cover counts elsewhere.

        So does the time before the start of the agent, of which only the mean power is known.
        """
        period, reading = metered.period, metered.reading
        if metered.counts and isinstance(period, Interval) and not metered.resumes:
            self.curve.add(period.start.mono, period.end.mono, period.energy, period.stale)
        elif reading is None:
            if self.domain.in_cover and period is not None:
                self.curve.skip(period.end.mono)
        elif metered.counts_from is not None and reading.at.mono >= metered.counts_from:
            self.curve.begin(reading.at.mono)
            self.curve.skip(reading.at.mono)


class DeviceHistory:
    """Implements ports.DeviceQueries.

    ``interval`` is the longest one of ticks, and ``absence`` the time without energy of a part of a
    device that is a gap. ``cell`` is the resolution for users who may not read the counters.
    Energies up to ``edges`` stay as they are.
    """

    def __init__(
        self, interval: int, absence: int, cell: int = 0, edges: WindowEdges | None = None
    ) -> None:
        self._silence = max(MIN_SILENCE, 3 * interval)
        self._absence, self._cell = absence, cell
        self._edges = edges or WindowEdges()
        self._lock = threading.Lock()
        self._devices: dict[str, _Device] = {}
        self._now = 0
        self._waiting: deque[_DeviceTick | tuple[Attribution, ...]] = deque()
        self._ramps: dict[int, deque[tuple[int, int]]] = {one: deque() for one in RAMP_WINDOWS}
        self._examined = self._thinned = 0
        self._sparse = dict.fromkeys(RAMP_WINDOWS, -RAMP_PERIOD)  # times of too distant ticks

    def record(self, tick: MeteredTick, gpus: Sequence[GpuStatus]) -> None:
        """Add the readings of a tick, and the newest statuses of GPUs."""
        self._waiting.append(_DeviceTick(tick, gpus))
        if len(self._waiting) > MAX_WAITING_TICKS:
            with self._current():
                pass
        self._thin()

    def _thin(self) -> None:
        """Thin one curve in turn a little, or of many devices some: ticks must not wait long."""
        curves = [one.curve for one in tuple(self._devices.values())]
        for _ in range(1 + len(curves) // CURVES_A_STEP):
            if not (crowded := [i for i, one in enumerate(curves) if one.crowded]):
                return
            self._thinned = next((i for i in crowded if i > self._thinned), crowded[0])
            edges = self._edges.of()
            with self._lock:
                curves[self._thinned].thin(edges)

    def settle(self, tick: Tick, settled: Sequence[Attribution]) -> None:
        """Add the energies of parts of devices, such as MIG instances, which have no readings."""
        del tick  # its devices are recorded
        if divided := tuple(one for one in settled if one.parts):
            self._waiting.append(divided)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Hold the lock, with all ticks added to the counters."""
        with self._lock:
            while self._waiting:
                self._add(self._waiting.popleft())
            yield

    def _add(self, tick: _DeviceTick | tuple[Attribution, ...]) -> None:
        if not isinstance(tick, _DeviceTick):
            for attribution in tick:
                start, end = attribution.interval.start.mono, attribution.interval.end.mono
                for part in attribution.parts:
                    if (device := self._devices.get(part.domain_id)) is not None:
                        device.curve.add(start, end, part.energy)
                        device.absent = False
            return
        at, domains = tick.metered.tick.at, tick.metered.tick.domains
        for window in RAMP_WINDOWS if self._now else ():
            if at.mono - self._now > window * _MOST_APART:
                self._sparse[window] = at.mono
        self._now = at.mono
        # A device that leaves the cover counts up to its reading of this tick.
        counting = {key for key, device in self._devices.items() if device.present}
        for source, listed in domains.items():
            self._register(source, listed)
        counting.update(key for key, device in self._devices.items() if device.present)
        for metered in tick.metered.periods():
            device = self._devices.get(metered.domain.id)
            if device is not None and (metered.reading is None or metered.domain.id in counting):
                device.add(metered)
        for device in self._devices.values():
            known = device.curve.known
            if device.is_part and known is not None:
                device.absent |= at.mono - known > self._absence
                if device.absent:
                    device.curve.skip(at.mono)
        for status in tick.gpus:
            self._add_status(status)

    def _register(self, source: str, domains: Sequence[Domain]) -> None:
        """Replace the list of domains of ``source``; vanished ones remain in the history."""
        for device in self._devices.values():
            if device.domain.source == source:
                device.present = False
        for domain in domains:
            known = self._devices.get(domain.id)
            if not domain.in_cover and not domain.is_division:
                if known is not None:  # it has left the cover
                    known.domain = domain
            elif known is None:
                curve = EnergyCurve(domain, self._cell)
                self._devices[domain.id] = _Device(domain, curve, self._now)
            else:
                known.domain, known.present = domain, True
                known.curve.domain = domain

    def _add_status(self, status: GpuStatus) -> None:
        device = self._devices.get(status.domain_id)
        if device is None or device.status is status:
            return
        device.status = status
        celsius = status.temperature_celsius
        if isinstance(celsius, int) and abs(celsius) < 1 << 15:  # a plugin may tell any number
            device.temperatures.append(status.at.mono, celsius)

    # -------------------------------------------------------------------------- for snapshots

    def ramps(self) -> dict[int, int]:
        """The largest ramp of the host's power in the last minute, by the length of its window.

        Every second since the last call is examined, of a minute at most.

        A ramp is the difference of the mean powers of two neighbouring windows, divided by the
        length of one, in milliwatts per second. The windows end at the newest reading that all
        present devices have. A window that some energy of a device is unknown for, or with fewer
        than two readings of each, has no ramp, and no length is listed without one.
        """
        with self._current():
            present = [one for one in self._devices.values() if one.present and not one.is_part]
            ends = [one.curve.known for one in present]
            end = min((one for one in ends if one is not None), default=None)
            if end is not None and None not in ends:
                self._examine(present, end)
            for found in self._ramps.values():
                while found and found[0][0] <= self._now - RAMP_PERIOD:
                    found.popleft()
            return {
                window: max(ramp for _, ramp in found)
                for window, found in self._ramps.items()
                if found
            }

    def _examine(self, devices: Sequence[_Device], end: int) -> None:
        """Note the ramps of all seconds up to ``end`` that were not examined yet."""
        first = max(self._examined, end - RAMP_PERIOD) + SECOND
        for at in (*range(first, end - SECOND // 2, SECOND), end):
            for window, found in self._ramps.items():
                if at > self._examined and (ramp := self._ramp(devices, at, window)) is not None:
                    found.append((at, ramp))
        self._examined = end

    def _ramp(self, devices: Sequence[_Device], end: int, window: int) -> int | None:
        difference = 0
        for device in devices:
            if window < 2 * device.domain.resolution or end - 2 * window < self._sparse[window]:
                return None
            edges = [device.curve.up_to(end - n * window) for n in (2, 1, 0)]
            energies = [edge[0] for edge in edges if edge is not None]
            covered = [edge[1] for edge in edges if edge is not None]
            if len(edges) > len(energies) or covered[2] - covered[0] < 2 * window:
                return None
            difference += energies[2] - 2 * energies[1] + energies[0]
        return abs(difference) * _POWER_SCALE * SECOND // window**2

    # ---------------------------------------------------------------------------- for queries

    def domains(self) -> Mapping[str, Domain]:
        """The devices of the cover and the parts of them, by id; also those that have vanished."""
        with self._current():
            return {key: device.domain for key, device in self._devices.items()}

    def known(self, domain_id: str) -> int | None:
        """The time of the newest reading; None before the first."""
        with self._current():
            return self._devices[domain_id].curve.known

    def silent(self, domain_id: str) -> bool:
        """True if the device is gone, or has given no reading for so long that none is due."""
        with self._current():
            device = self._devices[domain_id]
            last = device.curve.known
            since = device.since if last is None else last
            silence = PART_SILENCE if device.is_part else self._silence
            return not device.present or self._now - since > silence

    def device(
        self, domain_id: str, start: int, end: int, own: Sequence[int] | None = None
    ) -> IntervalEnergy:
        """The energy of one device; time after ``known`` is not covered."""
        with self._current():
            device = self._devices[domain_id]
            return self._found(device.domain, device.curve.between(start, end, own), start, end)

    def cells(
        self, domain_id: str, start: int, end: int, own: Sequence[int] | None = None
    ) -> IntervalEnergy:
        """The energy of whole cells of one device, with the uncertainty of thinned ones alone."""
        with self._current():
            device = self._devices[domain_id]
            spent = device.curve.cells_between(start, end, own)
            return self._found(device.domain, spent, start, end)

    def _found(self, domain: Domain, spent: CurveEnergy, start: int, end: int) -> IntervalEnergy:
        """Nothing, if the energy may be off by half and the period is too short for its age."""
        if 2 * spent.blur > spent.energy and self._now - start > RESOLVED_FRACTION * (end - start):
            return IntervalEnergy({}, {}, 0)
        kind = domain.hw_type
        # From a known edge to one that is not, the energy may be less than none within the blur.
        energy = max(Microjoules(0), spent.energy)
        return IntervalEnergy({kind: energy}, {kind: spent.uncertainty}, spent.covered)

    def timeline(
        self, domain_id: str, start: int, end: int, *, common: bool = False
    ) -> list[EnergyStep]:
        """The energy between neighbouring readings that overlap a period, oldest first."""
        with self._current():
            knots = self._devices[domain_id].curve.knots(start, end, common=common)
        return [
            EnergyStep(began, ended, Microjoules(after - before) if measured > already else None)
            for (began, before, already), (ended, after, measured) in pairwise(knots)
        ]

    def gpu(self, domain_id: str) -> GpuStatus | None:
        """The newest status of a GPU; None of other devices and before the first status."""
        with self._current():
            return self._devices[domain_id].status

    def temperatures(self, domain_id: str, start: int, end: int) -> list[tuple[int, int]]:
        """Time and degrees Celsius of a GPU in a period, oldest first."""
        with self._current():
            return self._devices[domain_id].temperatures.between(start, end)
