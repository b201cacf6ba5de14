"""Tests of energy counters: idle power while they are closed and open, steps, and sensors.

The counters are read twice, a minute apart, while no library and no file of a counter is open,
and then with all sources open as the agent opens them. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from wattspan.cli.doctor import NO_COUNTER_ADVICE, Finding, failure, note, ok, warning
from wattspan.cli.doctor.acceptance.checks import (
    IDLE,
    SENSORS,
    SOURCES,
    STEPS,
    Check,
    Scalar,
    device_labels,
)
from wattspan.cli.doctor.sources import SourceProbe, failure_finding
from wattspan.cli.formatting import watts
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    GpuStatus,
    HwType,
    Provenance,
    Reading,
)
from wattspan.ports import Batch, Clock, CounterSource, PacedSource, SourceError
from wattspan.service.poller import MonitoredSource

_FINE = 10 * MILLISECOND  # between reads that look for the steps of a counter
_LOOK = MILLISECOND // 4  # between reads of a source whose files are read at once
_LONGEST_STEP = SECOND
_LEAST_RISE, _RELATIVE_RISE = 1.0, 0.01  # watts, and a part of the idle power, that count


class Periods(NamedTuple):
    """The lengths of the tests in nanoseconds."""

    idle: int = 60 * SECOND
    open: int = 45 * SECOND
    steps: int = 4 * SECOND
    loads: int = 20 * SECOND

    def total(self, sources: int) -> int:
        """The time that all tests take with ``sources``, without opening and settling."""
        return self.idle + self.open + sources * self.steps + self.loads


WHOLE = Periods()


@dataclass(slots=True)
class _Moves:
    """The changes of one counter: the last reading, the times of changes, and the smallest one."""

    last: Reading | None = None
    times: list[int] = field(default_factory=list)
    smallest: int | None = None

    def add(self, reading: Reading) -> None:
        before, self.last = self.last, reading
        if before is None or reading.counter == before.counter or reading.epoch != before.epoch:
            return
        self.times.append(reading.at.mono)
        change = reading.counter - before.counter
        if change > 0:  # it has not wrapped
            self.smallest = change if self.smallest is None else min(self.smallest, change)


class CounterTests:
    """The tests of all sources that can be opened. An exception of one is its failure.

    ``advance`` is told the nanoseconds that have passed since it was last told.
    """

    def __init__(
        self,
        opened: Callable[[str], CounterSource | Finding],
        names: Sequence[str],
        clock: Clock,
        advance: Callable[[int], object],
        periods: Periods = WHOLE,
    ) -> None:
        self._open, self._names, self._clock = opened, names, clock
        self._advance, self._periods = advance, periods
        self.gpus: dict[str, GpuStatus] = {}
        self.domains: dict[str, Domain] = {}
        self.labels: dict[str, str] = {}

    def run(self) -> list[Check]:
        """The checks, in the order of the tests. SourceError if no source can be opened."""
        closed = {name: probe for name in self._names if (probe := self._closed(name))}
        if not closed:
            raise SourceError(NO_COUNTER_ADVICE)
        self._wait(self._periods.idle)
        for name, probe in closed.items():
            self._closed(name, probe)
        unopened = []
        with ExitStack() as stack:
            sources = {}
            for name in self._names:
                source = self._open(name)
                if isinstance(source, Finding):
                    unopened.append(_source_check(name, source, {"opened": False}))
                    continue
                stack.callback(_close, source)
                sources[name] = source
            reads = {name: MonitoredSource(one, self._clock).read for name, one in sources.items()}
            probes = self._hold(sources, reads)
            costs, moves = self._follow(sources, reads, probes)
        for probe in probes.values():
            self.domains |= {one.id: one for one in probe.domains if _is_tested(one)}
            self.gpus |= probe.gpus
        self.labels = device_labels(self.domains.values())
        before = {key: one for probe in closed.values() for key, one in _powers(probe)}
        held = {key: one for probe in probes.values() for key, one in _powers(probe)}
        return [
            *unopened,
            *_failures(probes),
            *self._idle(before, held),
            *self._steps(moves, costs),
            *self._sensors(),
        ]

    def _wait(self, duration: int) -> None:
        end = self._clock.monotonic() + duration
        while (now := self._clock.monotonic()) < end:
            self._clock.sleep_until(min(end, now + SECOND))
            self._advance(self._clock.monotonic() - now)

    def _closed(self, name: str, probe: SourceProbe | None = None) -> SourceProbe | None:
        """Open a source, read it and close it: the first reading of a new probe, or the last."""
        source = self._open(name)
        if isinstance(source, Finding):
            return None
        found = SourceProbe() if probe is None else probe
        found.last.clear()
        found.failures.clear()
        read = MonitoredSource(source, self._clock).read
        try:
            found.read(read, self._clock, partial(_is_complete, found))
        finally:
            _close(source)
        if probe is None:
            found.first = dict(found.last)
        return found

    def _hold(
        self, sources: Mapping[str, CounterSource], reads: Mapping[str, Callable[[], Batch]]
    ) -> dict[str, SourceProbe]:
        """Read all sources each second, as the agent does at rest."""
        probes = {name: SourceProbe() for name in sources}
        for name, source in sources.items():
            _pace(source, SECOND)
            probe = probes[name]
            probe.read(reads[name], self._clock, partial(_is_complete, probe))
            probe.first = dict(probe.last)
            probe.failures.clear()  # those of the begin
        end = self._clock.monotonic() + self._periods.open
        while self._clock.monotonic() < end:
            self._wait(SECOND)
            for name, read in reads.items():
                probes[name].read(read, self._clock, lambda: True)
        return probes

    def _follow(
        self,
        sources: Mapping[str, CounterSource],
        reads: Mapping[str, Callable[[], Batch]],
        probes: Mapping[str, SourceProbe],
    ) -> tuple[dict[str, list[int]], dict[str, _Moves]]:
        """The durations of reads by source, and the moves of counters by domain."""
        costs: dict[str, list[int]] = {name: [] for name in sources}
        moves: dict[str, _Moves] = {}
        for name, source in sources.items():
            paced = isinstance(source, PacedSource)
            start = self._clock.monotonic()
            _pace(source, _FINE)
            while (began := self._clock.monotonic()) < start + self._periods.steps:
                batch = reads[name]()
                probes[name].failures |= dict.fromkeys(batch.failures)
                costs[name].append(self._clock.monotonic() - began)
                for reading in batch.readings:
                    if reading.at.mono >= start:  # those before are as far apart as the seconds
                        moves.setdefault(reading.domain_id, _Moves()).add(reading)
                self._clock.sleep_until(began + (MILLISECOND if paced else _LOOK))
            self._advance(self._clock.monotonic() - start)
        return costs, moves

    # -------------------------------------------------------------------------------- checks

    def _idle(self, closed: Mapping[str, float], held: Mapping[str, float]) -> Iterator[Check]:
        """The idle powers without and with open sources. A load of the host is in both."""
        for key, domain in self.domains.items():
            before, during = closed.get(key), held.get(key)
            derived = domain.provenance is Provenance.DERIVED
            gpu = self.gpus.get(key)
            busy = gpu is not None and bool(gpu.utilisation)
            figures: dict[str, Scalar] = {
                "closed_watts": _rounded(None if derived else before),
                "open_watts": _rounded(during),
                "busy": busy,
                "provenance": domain.provenance,
            }
            name = self.labels[key]
            if during is None:
                found = failure(name, "its counter cannot be compared: it gave no two readings")
            elif before is None or derived:
                unknown = "without a counter, its power while it is closed is unknown"
                found = note(name, f"{watts(during)} W; {unknown}")
            else:
                rise = during - before
                text = f"{watts(before)} W while closed, {watts(during)} W with the sources open"
                most = max(_LEAST_RISE, _RELATIVE_RISE * before)
                if domain.hw_type is not HwType.GPU or busy:
                    found = ok(name, f"{text}; the load of the host is in both")
                elif rise <= most:
                    found = ok(name, text)
                else:
                    found = warning(
                        name,
                        f"{text}: the agent raises it",
                        "Repeat the test on the idle board, and attach the report to an issue.",
                    )
            yield Check(IDLE, name, found, figures)

    def _steps(
        self, moves: Mapping[str, _Moves], costs: Mapping[str, Sequence[int]]
    ) -> Iterator[Check]:
        for key, domain in self.domains.items():
            times = moves[key].times if key in moves else []
            steps = sorted(after - before for before, after in pairwise(times))
            name, taken = self.labels[key], sorted(costs.get(domain.source, ())) or [0]
            figures: dict[str, Scalar] = {
                "read_us": round(median(taken) / 1000, 1),
                "read_us_worst": round(taken[-1] / 1000, 1),
            }
            if not steps:
                cause = f"it did not move twice in {_milliseconds(self._periods.steps)}"
                remedy = "See `wattspan doctor`: a counter that stands still is not used."
                yield Check(STEPS, name, failure(name, cause, remedy), figures)
                continue
            step = median(steps)
            figures |= {
                "steps": len(steps),
                "step_ms": round(step / MILLISECOND, 3),
                "step_ms_least": round(steps[0] / MILLISECOND, 3),
                "step_ms_most": round(steps[-1] / MILLISECOND, 3),
                "phase_ms": round(times[-1] % step / MILLISECOND, 3),
                "declared_ms": round(domain.resolution / MILLISECOND, 3),
                "least_microjoules": moves[key].smallest,
            }
            text = (
                f"it moves each {_milliseconds(step)}, at most {_milliseconds(steps[-1])} apart;"
                f" a read takes {_milliseconds(median(taken))}"
            )
            found = ok if step <= _LONGEST_STEP else warning
            yield Check(STEPS, name, found(name, text), figures)

    def _sensors(self) -> Iterator[Check]:
        """Energies of the counter and of the power sensor in one period, of each GPU."""
        for key, gpu in self.gpus.items():
            counted, integrated = gpu.counter_energy, gpu.integrated_energy
            if key not in self.labels or not counted or integrated is None:
                continue
            name, ratio = self.labels[key], integrated / counted
            figures: dict[str, Scalar] = {
                "sensor_by_counter": round(ratio, 4),
                "disagrees": gpu.energy_disagrees,
                "basis": gpu.energy_basis,
            }
            text = (
                f"the sensor gives {100 * ratio:.1f} % of the counter;"
                f" the agent uses the {gpu.energy_basis or 'counter'}"
            )
            found = warning if gpu.energy_disagrees else ok
            yield Check(SENSORS, name, found(name, text), figures)


def _pace(source: CounterSource, interval: int) -> None:
    with suppress(Exception):  # costs its resolution only
        if isinstance(source, PacedSource):
            source.pace(interval)


def _close(source: CounterSource) -> None:
    with suppress(Exception):  # the others are tested
        source.close()


def _is_tested(domain: Domain) -> bool:
    """True for a domain with a counter or a sensor of its own."""
    return not domain.is_division and domain.provenance is not Provenance.ESTIMATED


def _is_complete(probe: SourceProbe) -> bool:
    """True once all counters have a reading. Some threads find their boards one by one."""
    tested = {one.id for one in probe.domains if _is_tested(one)}
    return bool(probe.domains) and tested <= probe.last.keys()


def _failures(probes: Mapping[str, SourceProbe]) -> Iterator[Check]:
    """The failures of open sources, without which a report would not name what it lacks."""
    for name, probe in probes.items():
        for one in probe.failures:
            figures: dict[str, Scalar] = {"opened": True, "trouble": one.trouble}
            yield _source_check(name, failure_finding(one), figures)


def _source_check(name: str, found: Finding, figures: dict[str, Scalar]) -> Check:
    return Check(SOURCES, name, replace(found, what=f"{name}: {found.what}"), figures)


def _powers(probe: SourceProbe) -> Iterator[tuple[str, float]]:
    """The watts of each domain between the first and the last reading, where they are known."""
    for domain in probe.domains:
        power = probe.power(domain)
        if power is not None:
            yield domain.id, power / 1000


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / MILLISECOND:.3g} ms"


def _rounded(power: float | None) -> float | None:
    return None if power is None else round(power, 3)
