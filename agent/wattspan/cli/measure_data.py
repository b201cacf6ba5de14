"""What runs of a command spent: stretches put together, runs put beside each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

from wattspan.client.measurement import Energy, Measurement

EVERYTHING = "total"


@dataclass(slots=True)
class Sum:
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


class Part(NamedTuple):
    """A device, as it is told of."""

    kind: str
    name: str
    provenance: str


@dataclass(slots=True)
class Run:
    """One run of the command: what its processes spent, and what the host's devices did."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    code: int = 0
    interrupted: bool = False
    complete: bool = True
    measured: float = 0.0  # seconds that were to be measured
    command: Sum = field(default_factory=Sum)
    host: Sum = field(default_factory=Sum)
    devices: Sum = field(default_factory=Sum)
    idle: Sum = field(default_factory=Sum)
    idle_unknown: set[str] = field(default_factory=set)  # devices
    parts: dict[str, Part] = field(default_factory=dict)
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
            self.parts[device.id] = Part(device.kind, device.name, device.provenance)
        self.provenance |= told.provenance
        self.host_name, self.emulated = told.host_name, told.emulated
        self.complete = told.complete

    @property
    def coverage(self) -> float:
        """The part of its time in which everything was measured."""
        return min(self.command.coverage(self.measured), self.host.coverage(self.measured))


class Figure(NamedTuple):
    """The mean of some runs, None if it is not known of all; ``stdev`` needs two of them."""

    mean: float | None
    stdev: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figure:
        known = list(values)
        sure = [value for value in known if value is not None]
        if not sure or len(sure) < len(known):
            return cls(None)
        return cls(fmean(sure), stdev(sure) if len(sure) > 1 else None)


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of a command."""

    command: Sequence[str]
    runs: Sequence[Run]
    about: str
    notes: Sequence[str] = ()

    @property
    def last(self) -> Run:
        return self.runs[-1]

    @property
    def seconds(self) -> Figure:
        return Figure.of(run.seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> Figure:
        return Figure.of(run.cpu_seconds for run in self.runs)

    @property
    def coverage(self) -> float:
        return min(run.coverage for run in self.runs)

    @property
    def kinds(self) -> list[str]:
        """The kinds of devices that the host has, in the order it tells them."""
        return list(dict.fromkeys(kind for run in self.runs for kind in run.provenance))

    @property
    def parts(self) -> dict[str, Part]:
        return {key: part for run in self.runs for key, part in run.parts.items()}

    @property
    def idle(self) -> Figure:
        """What of the devices' joules was idle; None if it was not known of each, all the time."""
        return Figure.of(
            None if run.idle_unknown or not run.idle.joules else sum(run.idle.joules.values())
            for run in self.runs
        )

    @property
    def idle_unknown(self) -> list[str]:
        """The devices whose idle power was not known."""
        unknown = {device for run in self.runs for device in run.idle_unknown}
        return [part.name for key, part in self.parts.items() if key in unknown]

    def joules(self, of: Callable[[Run], Sum], key: str) -> Figure:
        """One key's joules, or everything's, over the runs."""
        return Figure.of(self._one(of(run).joules, key) for run in self.runs)

    def doubt(self, of: Callable[[Run], Sum], key: str) -> float | None:
        """How far off one run's figure may be, on average."""
        return Figure.of(self._one(of(run).uncertainty, key) for run in self.runs).mean

    def _one(self, table: Mapping[str, float], key: str) -> float | None:
        """A sum of all kinds is only known if each of them is."""
        if key != EVERYTHING:
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
            "runs": [_run(run) for run in self.runs],
            "mean": self._statistic(lambda figure: figure.mean),
            "stdev": self._statistic(lambda figure: figure.stdev) if len(self.runs) > 1 else None,
        }

    def _statistic(self, which: Callable[[Figure], float | None]) -> dict[str, Any]:
        def table(of: Callable[[Run], Sum], keys: Iterable[str]) -> dict[str, float | None]:
            return {key: which(self.joules(of, key)) for key in (*keys, EVERYTHING)}

        return {
            "seconds": which(self.seconds),
            "cpu_seconds": which(self.cpu_seconds),
            "command_joules": table(of_command, self.kinds),
            "host_joules": table(of_host, self.kinds),
            "device_joules": {key: which(self.joules(of_devices, key)) for key in self.parts},
        }


def of_command(run: Run) -> Sum:
    return run.command


def of_host(run: Run) -> Sum:
    return run.host


def of_devices(run: Run) -> Sum:
    return run.devices


def _run(run: Run) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "exit_code": run.code,
        "coverage": run.coverage,
        "complete": run.complete,
        "command": _sum(run.command),
        "host": _sum(run.host),
        "devices": [_device(key, part, run.devices) for key, part in run.parts.items()],
    }


def _sum(told: Sum) -> dict[str, Mapping[str, float]]:
    return {"joules": told.joules, "uncertainty_joules": told.uncertainty}


def _device(key: str, part: Part, told: Sum) -> dict[str, Any]:
    return {
        "hw_id": key,
        "hw_type": part.kind,
        "hw_name": part.name,
        "provenance": part.provenance,
        "joules": told.joules.get(key),
        "uncertainty_joules": told.uncertainty.get(key),
    }
