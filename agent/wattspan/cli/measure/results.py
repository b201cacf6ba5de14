"""What runs of a command spent: stretches put together, runs put beside each other.

The table of ``wattspan measure``: what the command spent, and what the devices did meanwhile.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

from wattspan.cli import formatting
from wattspan.cli.tables import table_lines
from wattspan.sdk.measurement import Energy, Measurement
from wattspan.util.text import printable

TOTAL = "total"


@dataclass(slots=True)
class EnergySum:
    """Joules of several stretches that follow each other, by some key.

    What lies on the wrong side of an edge between two of them is in the other, so that only the
    outer edges leave doubt: the uncertainty is that of the most uncertain stretch.
    """

    joules: dict[str, float] = field(default_factory=dict)
    uncertainty: dict[str, float] = field(default_factory=dict)
    covered: float = 0.0  # seconds

    def add(self, key: str, joules: float | None, uncertainty: float | None) -> None:
        if joules is not None:
            self.joules[key] = self.joules.get(key, 0.0) + joules
            self.uncertainty[key] = max(self.uncertainty.get(key, 0.0), uncertainty or 0.0)

    def include(self, energy: Energy, seconds: float) -> None:
        for kind, joules in energy.items():
            self.add(kind, joules, energy.uncertainty.get(kind))
        self.covered += energy.coverage * seconds

    def coverage(self, seconds: float) -> float:
        return min(1.0, self.covered / seconds) if seconds else 1.0


class MeasuredDevice(NamedTuple):
    """A device, as it is told of."""

    kind: str
    name: str
    provenance: str


@dataclass(slots=True)
class CommandRun:
    """One run of the command: what its processes spent, and what the host's devices did."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    code: int = 0
    interrupted: bool = False
    complete: bool = True
    measured: float = 0.0  # seconds that were to be measured
    command: EnergySum = field(default_factory=EnergySum)
    host: EnergySum = field(default_factory=EnergySum)
    devices: EnergySum = field(default_factory=EnergySum)
    idle: EnergySum = field(default_factory=EnergySum)
    idle_unknown: set[str] = field(default_factory=set)  # devices
    parts: dict[str, MeasuredDevice] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    host_name: str = ""
    emulated: bool = False
    trouble: str = ""  # why its last stretch is not known

    def miss(self, nanoseconds: int, why: str) -> None:
        """A stretch of which nothing will be known."""
        self.measured += nanoseconds / 1e9
        self.complete, self.trouble = False, why

    def add(self, told: Measurement) -> None:
        """The next stretch of it."""
        self.measured += told.seconds
        self.command.include(told.joules, told.seconds)
        self.host.include(told.host, told.seconds)
        for device in told.devices:
            self.devices.add(device.id, device.joules, device.uncertainty)
            self.idle.add(device.id, device.idle, None)
            if device.joules and device.idle is None:
                self.idle_unknown.add(device.id)
            self.parts[device.id] = MeasuredDevice(device.kind, device.name, device.provenance)
        self.provenance |= told.provenance
        self.host_name, self.emulated = told.host_name, told.emulated
        self.complete = told.complete

    @property
    def coverage(self) -> float:
        """The part of its time in which everything was measured."""
        return min(self.command.coverage(self.measured), self.host.coverage(self.measured))


class MeanAndDeviation(NamedTuple):
    """The mean of some runs, None if it is not known of all; ``stdev`` needs two of them."""

    mean: float | None
    stdev: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> MeanAndDeviation:
        known = list(values)
        sure = [value for value in known if value is not None]
        if not sure or len(sure) < len(known):
            return cls(None)
        return cls(fmean(sure), stdev(sure) if len(sure) > 1 else None)


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
    def coverage(self) -> float:
        return min(run.coverage for run in self.runs)

    @property
    def kinds(self) -> list[str]:
        """The kinds of devices that the host has, in the order it tells them."""
        return list(dict.fromkeys(kind for run in self.runs for kind in run.provenance))

    @property
    def parts(self) -> dict[str, MeasuredDevice]:
        return {key: part for run in self.runs for key, part in run.parts.items()}

    @property
    def idle(self) -> MeanAndDeviation:
        """What of the devices' joules was idle; None if it was not known of each, all the time."""
        return MeanAndDeviation.of(
            None if run.idle_unknown or not run.idle.joules else sum(run.idle.joules.values())
            for run in self.runs
        )

    @property
    def idle_unknown(self) -> list[str]:
        """The devices whose idle power was not known."""
        unknown = {device for run in self.runs for device in run.idle_unknown}
        return [part.name for key, part in self.parts.items() if key in unknown]

    def joules(self, of: Callable[[CommandRun], EnergySum], key: str) -> MeanAndDeviation:
        """One key's joules, or everything's, over the runs."""
        return MeanAndDeviation.of(self._one(of(run).joules, key) for run in self.runs)

    def doubt(self, of: Callable[[CommandRun], EnergySum], key: str) -> float | None:
        """How far off one run's figure may be, on average."""
        return MeanAndDeviation.of(self._one(of(run).uncertainty, key) for run in self.runs).mean

    def _one(self, table: Mapping[str, float], key: str) -> float | None:
        """A sum of all kinds is only known if each of them is."""
        if key != TOTAL:
            return table.get(key)
        return sum(table.values()) if table and set(self.kinds) <= table.keys() else None

    def plain(self) -> dict[str, Any]:
        """Plain facts for JSON."""
        last = self.last
        return {
            "argv": [os.fsencode(word).decode("utf-8", "replace") for word in self.command],
            "host_name": last.host_name,
            "emulated": last.emulated,
            "provenance": last.provenance,
            "measured_by": self.about,
            "notes": list(self.notes),
            "runs": [_run_facts(run) for run in self.runs],
            "mean": self._statistic(lambda figure: figure.mean),
            "stdev": self._statistic(lambda figure: figure.stdev) if len(self.runs) > 1 else None,
        }

    def _statistic(self, which: Callable[[MeanAndDeviation], float | None]) -> dict[str, Any]:
        def table(
            of: Callable[[CommandRun], EnergySum], keys: Iterable[str]
        ) -> dict[str, float | None]:
            return {key: which(self.joules(of, key)) for key in (*keys, TOTAL)}

        return {
            "seconds": which(self.seconds),
            "cpu_seconds": which(self.cpu_seconds),
            "command_joules": table(command_energy, self.kinds),
            "host_joules": table(host_energy, self.kinds),
            "device_joules": {key: which(self.joules(device_energy, key)) for key in self.parts},
        }


def command_energy(run: CommandRun) -> EnergySum:
    return run.command


def host_energy(run: CommandRun) -> EnergySum:
    return run.host


def device_energy(run: CommandRun) -> EnergySum:
    return run.devices


def _run_facts(run: CommandRun) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "exit_code": run.code,
        "coverage": run.coverage,
        "complete": run.complete,
        "command": _sum_facts(run.command),
        "host": _sum_facts(run.host),
        "devices": [_device_facts(key, part, run.devices) for key, part in run.parts.items()],
    }


def _sum_facts(told: EnergySum) -> dict[str, Mapping[str, float]]:
    return {"joules": told.joules, "uncertainty_joules": told.uncertainty}


def _device_facts(key: str, part: MeasuredDevice, told: EnergySum) -> dict[str, Any]:
    return {
        "hw_id": key,
        "hw_type": part.kind,
        "hw_name": part.name,
        "provenance": part.provenance,
        "joules": told.joules.get(key),
        "uncertainty_joules": told.uncertainty.get(key),
    }


_LONGEST = 60  # letters of the command that are repeated
_WIDEST = 40  # letters of a device's name
_Row = tuple[str, str, str, str, str, str]


def result_lines(result: MeasurementResult) -> Iterator[str]:
    """The figures for people, line by line."""
    last = result.last
    yield ""
    if not result.kinds:
        yield f" The energy of `{_command(result)}` is not known."
        yield from (f"  {note}" for note in result.notes)
        return
    yield f" Energy of `{_command(result)}` on {printable(last.host_name)}:"
    if last.emulated:
        yield " EMULATED HOST: no figure is of real hardware"
    yield ""
    yield from table_lines(_rows(result), left=(0, 5), max_width=_WIDEST)
    yield ""
    yield from _foot(result)
    yield ""


def _rows(result: MeasurementResult) -> Iterator[_Row]:
    yield "", "energy", "stdev" if len(result.runs) > 1 else "", "off by", "power", "how"
    yield " the command's processes", *_BLANK
    for kind in result.kinds:
        how = result.last.provenance.get(kind, "")
        yield _row(result, f"  {kind}", command_energy, kind, how)
    yield _row(result, "  together", command_energy, TOTAL)
    yield " the host's devices, whoever used them", *_BLANK
    for key, part in result.parts.items():
        yield _row(result, f"  {part.kind} {part.name}", device_energy, key, part.provenance)
    yield _row(result, "  together", host_energy, TOTAL)
    if result.idle.mean is not None:
        yield "  of these idle", formatting.joules_text(result.idle.mean), "", "", "", ""


_BLANK = ("", "", "", "", "")


def _row(
    result: MeasurementResult,
    name: str,
    of: Callable[[CommandRun], EnergySum],
    key: str,
    how: str = "",
) -> _Row:
    energy, seconds = result.joules(of, key), result.seconds.mean
    power = energy.mean / seconds if energy.mean is not None and seconds else None
    return (
        name,
        formatting.joules_text(energy.mean),
        _spread(energy),
        formatting.joules_text(result.doubt(of, key)),
        f"{formatting.watts(power)} W",
        how,
    )


def _foot(result: MeasurementResult) -> Iterator[str]:
    runs = len(result.runs)
    seconds, cpu = result.seconds, result.cpu_seconds
    yield f"  {_seconds(seconds)} elapsed, {_seconds(cpu)} of CPU time" + (
        f"; means of {runs} runs" if runs > 1 else ""
    )
    if result.coverage < 0.9995:
        yield (
            f"  Only {result.coverage:.1%} of the time was measured in every kind: "
            "the figures are of that part."
        )
    if not all(run.complete or run.trouble for run in result.runs):
        yield "  Some figures had not settled when they were read, and lack their last part."
    if result.idle_unknown:
        names = printable(", ".join(result.idle_unknown))
        yield f"  Idle power is not told apart on {names}: processes are charged with it too."
    failed = sorted({run.code for run in result.runs if run.code})
    if failed and runs > 1:
        yield f"  Some runs ended with exit code {', '.join(map(str, failed))}."
    for note in result.notes:
        yield f"  {note}"


def _command(result: MeasurementResult) -> str:
    text = printable(shlex.join(result.command))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _seconds(figure: MeanAndDeviation) -> str:
    spread = _spread(figure)
    return f"{figure.mean:.3f} s" + (f" ({spread})" if spread else "")


def _spread(figure: MeanAndDeviation) -> str:
    """The standard deviation over the runs, as a part of the mean."""
    if figure.mean is None or figure.stdev is None:
        return ""
    return f"±{figure.stdev / figure.mean:.1%}" if figure.mean else formatting.UNKNOWN
