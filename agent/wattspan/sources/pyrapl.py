"""The pyRAPL library as a reader: ``[sources.rapl] reader = "pyrapl"``.

It sees packages and memory only, one package a socket. Zones are found and explained by the
agent's own topology, so that domains keep their ids whichever reader is chosen.
"""

from __future__ import annotations

from pathlib import Path

from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    Failure,
    Microjoules,
    Provenance,
    Reading,
    Trouble,
)
from wattspan.ports import Batch, Clock
from wattspan.sources.powercap_failures import GRANT
from wattspan.sources.powercap_scan import CLASS, describe, scan, vendor
from wattspan.sources.pyrapl_library import PyRaplError, PyRaplSensor
from wattspan.sources.topology import resolve
from wattspan.sources.zones import Zone

_OTHER_READER = 'Set reader = "powercap" in [sources.rapl].'


class PyRaplSource:
    """The CounterSource that reads what pyRAPL reads.

    pyRAPL reads all counters in one call, so all readings of a batch carry one stamp, taken
    when the call returned. When it fails nothing is read, and it is opened anew after a while;
    whatever happened in between, the epoch then moves on.
    """

    def __init__(
        self,
        sysfs: Path,
        clock: Clock,
        *,
        emulated: bool = False,
        retry: int = 5 * SECOND,
        name: str = "rapl",
        resolution: int = MILLISECOND,
    ) -> None:
        self._sysfs = sysfs
        self._clock = clock
        self._provenance = Provenance.EMULATED if emulated else Provenance.MEASURED
        self._retry = retry
        self._name = name
        self._resolution = resolution
        self._due = 0
        self._epoch = -1
        self._sensor: PyRaplSensor | None = None
        self._columns: tuple[tuple[int, Domain], ...] = ()  # place in pyRAPL's list, domain
        self._domains: tuple[Domain, ...] = ()
        self._failure: Failure | None = None

    @property
    def name(self) -> str:
        return self._name

    def open(self) -> None:
        """Start the library; PyRaplError if it refuses. ``read`` does it by itself otherwise."""
        self._due = self._clock.monotonic() + self._retry
        packages, memories, domains = self._find()
        sensor = PyRaplSensor(self._sysfs, packages, memories)
        try:
            values = sensor.read()
        except PyRaplError:
            sensor.close()
            raise
        self._sensor = sensor
        self._epoch += 1
        self._failure = None
        self._columns = tuple(
            (place, domains[place])
            for place, value in enumerate(values)
            if value is not None and place in domains
        )
        now = tuple(domain for _, domain in self._columns)
        self._domains = self._domains if self._domains == now else now

    def read(self) -> Batch:
        if self._sensor is None:
            if self._clock.monotonic() < self._due:
                return self._nothing()
            try:
                self.open()
            except PyRaplError as error:
                return self._nothing(error)
        assert self._sensor is not None  # noqa: S101 - opened just above
        try:
            values = self._sensor.read()
        except PyRaplError as error:
            self._drop()
            return self._nothing(error)
        at = self._clock.now()
        readings, failures = [], []
        for place, domain in self._columns:
            value = values[place] if place < len(values) else None
            if value is None or (domain.modulus is not None and value >= domain.modulus):
                failures.append(self._misread(domain, value))
            else:
                readings.append(Reading(domain.id, at, Microjoules(value), self._epoch))
        return Batch(self._domains, tuple(readings), tuple(failures))

    def close(self) -> None:
        self._drop()
        self._due = 0

    def _drop(self) -> None:
        if self._sensor is not None:
            self._sensor.close()
            self._sensor = None
            self._due = self._clock.monotonic() + self._retry

    def _nothing(self, error: PyRaplError | None = None) -> Batch:
        if error is not None:
            denied = "permission denied" in str(error)
            self._failure = Failure(
                self._name,
                f"the counters under {self._sysfs / CLASS} through pyRAPL",
                Trouble.DENIED if denied else Trouble.RETRY,
                str(error),
                GRANT if denied else _OTHER_READER,
            )
        return Batch(self._domains, failures=(self._failure,) if self._failure else ())

    def _misread(self, domain: Domain, value: int | None) -> Failure:
        cause = "pyRAPL has no value for it" if value is None else f"{value} uJ exceeds its range"
        trouble = Trouble.ABSENT if value is None else Trouble.MALFORMED
        return Failure(self._name, domain.name, trouble, cause, _OTHER_READER, domain.id)

    def _find(self) -> tuple[dict[int, Path], dict[int, Path], dict[int, Domain]]:
        """Directories of packages and of memories by socket, and domains by pyRAPL's places."""
        zones: dict[str, Zone] = {}
        paths = scan(self._sysfs).zones
        for directory, path in paths.items():
            try:
                zones[directory] = describe(path)
            except (OSError, ValueError):
                continue  # the other reader says what is wrong; pyRAPL cannot see it either
        topology = resolve(
            zones.values(),
            source=self._name,
            provenance=self._provenance,
            vendor=vendor(self._sysfs),
            resolution=self._resolution,
        )
        directory_of = {identity: name for name, identity in topology.domain_of.items()}
        packages: dict[int, Path] = {}
        memories: dict[int, Path] = {}
        domains: dict[int, Domain] = {}
        for domain in topology.domains:
            package, _, below = domain.id.removeprefix("rapl:").partition("/")
            number = package.removeprefix("package-")
            if domain.id.startswith("rapl:package-") and number.isdigit() and below in ("", "dram"):
                into, offset = (memories, 1) if below else (packages, 0)
                into[int(number)] = paths[directory_of[domain.id]]
                domains[2 * int(number) + offset] = domain
            elif "-die-" in number:
                raise PyRaplError(f"pyRAPL cannot tell the dies of {domain.id} apart")
        return packages, memories, domains
