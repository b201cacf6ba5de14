"""Energy of one or several runs of a command: sums over periods, statistics, JSON and table."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from statistics import fmean, stdev
from typing import Any, NamedTuple

from wattspan.cli import formatting
from wattspan.cli.formatting import TableColumn, table_lines
from wattspan.model import Certainty
from wattspan.sdk.client import Device, Energy, Measurement
from wattspan.util.text import printable

TOTAL = "total"


@dataclass(slots=True)
class EnergySum:
    """Joules of consecutive periods, by key.

    Energy on the wrong side of an edge between two periods is in the other one, so only the outer
    edges are uncertain: the uncertainty is that of the most uncertain period.
    """

    joules: dict[str, float] = field(default_factory=dict)
    uncertainty: dict[str, float] = field(default_factory=dict)
    covered: float = 0.0  # seconds
    lower_bound: set[str] = field(default_factory=set)  # keys

    def add(self, key: str, joules: float | None, uncertainty: float | None) -> None:
        if joules is not None:
            self.joules[key] = self.joules.get(key, 0.0) + joules
            self.uncertainty[key] = max(self.uncertainty.get(key, 0.0), uncertainty or 0.0)

    def include(self, energy: Energy, seconds: float) -> None:
        for kind, joules in energy.items():
            self.add(kind, joules, energy.uncertainty.get(kind))
        self.covered += energy.coverage * seconds
        self.lower_bound |= {*energy.lower_bound, *energy.unknown}

    def coverage(self, seconds: float) -> float:
        return min(1.0, self.covered / seconds) if seconds else 1.0

    def certainty(self, key: str) -> Certainty:
        if key not in self.joules:
            return Certainty.UNKNOWN
        return Certainty.LOWER_BOUND if key in self.lower_bound else Certainty.KNOWN

    def plain(self) -> dict[str, Any]:
        keys = dict.fromkeys((*self.joules, *sorted(self.lower_bound)))
        return {
            "joules": self.joules,
            "uncertainty_joules": self.uncertainty,
            "certainty": {key: self.certainty(key) for key in keys},
        }


@dataclass(slots=True)
class CommandRun:
    """One run of the command: the energy of its processes and of the host's devices."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    code: int = 0
    interrupted: bool = False
    complete: bool = True
    measured: float = 0.0  # seconds that were requested
    command: EnergySum = field(default_factory=EnergySum)
    host: EnergySum = field(default_factory=EnergySum)
    devices: EnergySum = field(default_factory=EnergySum)
    idle: EnergySum = field(default_factory=EnergySum)
    idle_unknown: set[str] = field(default_factory=set)  # device ids
    parts: dict[str, Device] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    host_name: str = ""
    emulated: bool = False
    trouble: str = ""  # the reason why its last period is unknown

    def miss(self, nanoseconds: int, reason: str) -> None:
        """Add a period whose energy stays unknown."""
        self.measured += nanoseconds / 1e9
        self.complete, self.trouble = False, reason
        for one in (self.command, self.host, self.devices):
            one.lower_bound |= one.joules.keys()

    def add(self, period: Measurement) -> None:
        """Add the next period."""
        if self.measured:
            # An agent that was restarted may not have found every device again.
            absent = self.provenance.keys() ^ period.provenance.keys()
            self.command.lower_bound |= absent
            self.host.lower_bound |= absent
            self.devices.lower_bound |= self.parts.keys() ^ {one.id for one in period.devices}
        self.measured += period.seconds
        self.command.include(period.joules, period.seconds)
        self.host.include(period.host, period.seconds)
        for device in period.devices:
            self.devices.add(device.id, device.joules, device.uncertainty)
            if device.coverage < 1.0:
                self.devices.lower_bound.add(device.id)
            self.idle.add(device.id, device.idle, None)
            if device.joules and device.idle is None:
                self.idle_unknown.add(device.id)
            self.parts[device.id] = device
        self.provenance |= period.provenance
        self.host_name, self.emulated = period.host_name, period.emulated
        self.complete = period.complete

    @property
    def coverage(self) -> float:
        """The fraction of its time in which every kind was measured."""
        return min(self.command.coverage(self.measured), self.host.coverage(self.measured))

    def plain(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "exit_code": self.code,
            "coverage": self.coverage,
            "complete": self.complete,
            "command": self.command.plain(),
            "host": self.host.plain(),
            "devices": [
                {
                    "hw_id": key,
                    "hw_type": device.kind,
                    "hw_name": device.name,
                    "provenance": device.provenance,
                    "joules": self.devices.joules.get(key),
                    "uncertainty_joules": self.devices.uncertainty.get(key),
                    "certainty": self.devices.certainty(key),
                }
                for key, device in self.parts.items()
            ],
        }


_Of = Callable[[CommandRun], EnergySum]
_COMMAND: _Of = attrgetter("command")
_HOST: _Of = attrgetter("host")
_DEVICES: _Of = attrgetter("devices")


class MeanAndDeviation(NamedTuple):
    """The mean of several runs, None unless all are known; ``stdev`` needs two of them."""

    mean: float | None
    stdev: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> MeanAndDeviation:
        every = list(values)
        known = [value for value in every if value is not None]
        if not known or len(known) < len(every):
            return cls(None)
        return cls(fmean(known), stdev(known) if len(known) > 1 else None)


@dataclass(frozen=True, slots=True)
class MeasurementResult:
    """All runs of a command."""

    command: Sequence[str]
    runs: Sequence[CommandRun]
    about: str
    notes: Sequence[str] = ()

    @property
    def last(self) -> CommandRun:
        return self.runs[-1]

    @property
    def seconds(self) -> MeanAndDeviation:
        return MeanAndDeviation.of(run.seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> MeanAndDeviation:
        return MeanAndDeviation.of(run.cpu_seconds for run in self.runs)

    @property
    def kinds(self) -> list[str]:
        """The kinds of devices that the host has."""
        return list(dict.fromkeys(kind for run in self.runs for kind in run.provenance))

    @property
    def parts(self) -> dict[str, Device]:
        return {key: part for run in self.runs for key, part in run.parts.items()}

    @property
    def idle(self) -> float | None:
        """The mean idle energy of the devices; None unless it was always known of each."""
        return MeanAndDeviation.of(
            None if run.idle_unknown or not run.idle.joules else sum(run.idle.joules.values())
            for run in self.runs
        ).mean

    def joules(self, of: _Of, key: str) -> MeanAndDeviation:
        """The joules of a key, or of all kinds (TOTAL)."""
        return MeanAndDeviation.of(self._value(of(run).joules, key) for run in self.runs)

    def uncertainty(self, of: _Of, key: str) -> float | None:
        """The mean uncertainty of a run's figure."""
        return MeanAndDeviation.of(self._value(of(run).uncertainty, key) for run in self.runs).mean

    def bounded(self, of: _Of, key: str) -> bool:
        """True if the figure of a run is a lower bound."""
        bounds = {one for run in self.runs for one in of(run).lower_bound}
        return bool(bounds) if key == TOTAL else key in bounds

    def _value(self, table: Mapping[str, float], key: str) -> float | None:
        """The total is known if the energy of each kind is."""
        if key != TOTAL:
            return table.get(key)
        return sum(table.values()) if table and set(self.kinds) <= table.keys() else None

    def plain(self) -> dict[str, Any]:
        """The JSON output."""
        last = self.last
        return {
            "argv": [os.fsencode(word).decode("utf-8", "replace") for word in self.command],
            "host_name": last.host_name,
            "emulated": last.emulated,
            "provenance": last.provenance,
            "measured_by": self.about,
            "notes": list(self.notes),
            "runs": [run.plain() for run in self.runs],
            "mean": self._statistics("mean"),
            "stdev": self._statistics("stdev") if len(self.runs) > 1 else None,
        }

    def _statistics(self, name: str) -> dict[str, Any]:
        value = attrgetter(name)
        kinds = (*self.kinds, TOTAL)
        return {
            "seconds": value(self.seconds),
            "cpu_seconds": value(self.cpu_seconds),
            "command_joules": {key: value(self.joules(_COMMAND, key)) for key in kinds},
            "host_joules": {key: value(self.joules(_HOST, key)) for key in kinds},
            "device_joules": {key: value(self.joules(_DEVICES, key)) for key in self.parts},
        }


# ---------------------------------------------------------------------------------- the table

_MAX_COMMAND = 60  # characters of the command that are shown
_MAX_NAME = 40  # characters of a device's name
_Row = tuple[str, str, str, str, str, str]


def result_lines(result: MeasurementResult) -> Iterator[str]:
    """The figures for people, line by line."""
    last = result.last
    command = printable(shlex.join(result.command))
    if len(command) > _MAX_COMMAND:
        command = f"{command[: _MAX_COMMAND - 3]}..."
    yield ""
    if not result.kinds:
        yield f" The energy of `{command}` is not known."
        yield from (f"  {note}" for note in result.notes)
        return
    yield f" Energy of `{command}` on {printable(last.host_name)}:"
    if last.emulated:
        yield " EMULATED HOST: no figure is of real hardware"
    yield ""
    titles = ("", "energy", "stdev" if len(result.runs) > 1 else "", "off by", "power", "how")
    columns = [
        TableColumn(title, itemgetter(place), left=place in (0, 5))
        for place, title in enumerate(titles)
    ]
    yield from table_lines(columns, _rows(result), max_width=_MAX_NAME)
    yield ""
    yield from (f"  {line}" for line in _notes(result))
    yield ""


def _rows(result: MeasurementResult) -> Iterator[_Row]:
    yield " the command's processes", "", "", "", "", ""
    for kind in result.kinds:
        yield _row(result, kind, _COMMAND, kind, result.last.provenance.get(kind, ""))
    yield _row(result, "together", _COMMAND, TOTAL)
    yield " the host's devices, whoever used them", "", "", "", "", ""
    for key, part in result.parts.items():
        yield _row(result, f"{part.kind} {part.name}", _DEVICES, key, part.provenance)
    yield _row(result, "together", _HOST, TOTAL)
    if result.idle is not None:
        bounded = result.bounded(_DEVICES, TOTAL)
        idle = formatting.at_least(formatting.joules_text(result.idle), bounded=bounded)
        yield "  of these idle", idle, "", "", "", ""


def _row(result: MeasurementResult, name: str, of: _Of, key: str, how: str = "") -> _Row:
    energy, seconds = result.joules(of, key), result.seconds.mean
    power = energy.mean / seconds if energy.mean is not None and seconds else None
    bounded = result.bounded(of, key)
    return (
        f"  {name}",
        formatting.at_least(formatting.joules_text(energy.mean), bounded=bounded),
        _deviation(energy),
        formatting.joules_text(result.uncertainty(of, key)),
        f"{formatting.at_least(formatting.watts(power), bounded=bounded)} W",
        how,
    )


def _notes(result: MeasurementResult) -> Iterator[str]:
    runs = result.runs
    times = f"{_seconds(result.seconds)} elapsed, {_seconds(result.cpu_seconds)} of CPU time"
    yield times + (f"; means of {len(runs)} runs" if len(runs) > 1 else "")
    coverage = min(run.coverage for run in runs)
    if coverage < 0.9995:
        yield (
            f"Only {coverage:.1%} of the time was measured in every kind: "
            "figures may lack the rest."
        )
    if not all(run.complete or run.trouble for run in runs):
        yield "Some figures had not settled when they were read, and lack their last part."
    unknown = {device for run in runs for device in run.idle_unknown}
    if names := ", ".join(part.name for key, part in result.parts.items() if key in unknown):
        yield f"Idle power of {printable(names)} is unknown (baseline_unknown):"
        yield "processes have a lower bound of CPU and memory energy, and all GPU energy."
    failed = sorted({run.code for run in runs if run.code})
    if failed and len(runs) > 1:
        yield f"Some runs ended with exit code {', '.join(map(str, failed))}."
    yield from result.notes


def _seconds(figure: MeanAndDeviation) -> str:
    deviation = _deviation(figure)
    return f"{figure.mean:.3f} s" + (f" ({deviation})" if deviation else "")


def _deviation(figure: MeanAndDeviation) -> str:
    """The standard deviation over the runs, relative to the mean."""
    if figure.mean is None or figure.stdev is None:
        return ""
    return f"±{figure.stdev / figure.mean:.1%}" if figure.mean else formatting.UNKNOWN
