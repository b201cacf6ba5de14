"""The pyRAPL library as a reader (``[sources.rapl] reader = "pyrapl"``).

pyRAPL sees packages and memory only, one package for each socket. The agent's own topology finds
and explains the zones, so that domains keep their ids with either reader.

Faults of the library, and how this module contains them:

- its import logs through the root logger, which installs a handler as a side effect, and its
  patterns are errors under ``-W error``: imported late, handlers kept, warnings silenced;
- its paths are fixed to ``/sys``: for another root its ``DeviceAPI`` is given other files;
- a refusal or a failed read may be an OSError, ValueError, IndexError or an exception of its
  own: all become :class:`PyRaplError`;
- its descriptors, offsets included, are shared between threads: one thread reads;
- differences that it computes become negative when a counter wraps: only absolute values are used.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wattspan.model import MILLISECOND, Domain, Failure, Microjoules, Reading, Trouble
from wattspan.ports import Batch, Clock
from wattspan.sources.rapl.sysfs import (
    GRANT_REMEDY,
    POWERCAP_CLASS,
    RaplSource,
    read_zone,
    scan_zones,
)
from wattspan.sources.rapl.topology import NAME, Zone

_REAL_SYSFS = Path("/sys")


class PyRaplError(Exception):
    """pyRAPL cannot start or cannot read; the message is the cause, as a clause."""


class PyRaplSensor:
    """The absolute counters that pyRAPL's ``Sensor`` reports, in microjoules.

    ``packages`` and ``memories`` are the zones' directories by socket, used where ``sysfs`` is
    not the real one; there the library's own search for zones cannot work.
    """

    def __init__(self, sysfs: Path, packages: dict[int, Path], memories: dict[int, Path]) -> None:
        """PyRaplError if pyRAPL is not there or refuses this host."""
        self._library = _import_pyrapl()
        with warnings.catch_warnings(), self._translated():
            warnings.simplefilter("ignore")  # it leaves files for the collector to close
            self._sensor: Any = (
                self._library.Sensor()
                if sysfs == _REAL_SYSFS
                else _rooted_sensor(self._library, packages, memories)
            )

    def read(self) -> list[int | None]:
        """Package and memory of socket 0, of socket 1, ...; None where a counter is absent.

        PyRaplError if any of them cannot be read: pyRAPL reads all or nothing.
        """
        with self._translated():
            return [None if value < 0 else round(value) for value in self._sensor.energy()]

    def close(self) -> None:
        for api in self._sensor._device_api.values():  # noqa: SLF001 - it has no close
            for file in api._sys_files:  # noqa: SLF001
                file.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._library.PyRAPLException, OSError, ValueError, IndexError) as error:
            traceback.clear_frames(error.__traceback__)  # otherwise they keep its open files alive
            raise PyRaplError(_cause(self._library, error)) from None


def _cause(library: Any, error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error, library.PyRAPLException):
        return f"pyRAPL refuses this host ({name}); it knows one package a socket and decimal ids"
    if isinstance(error, PermissionError):
        return f"permission denied on {error.filename or 'a counter'}"
    return f"{name}: {error}"


def _import_pyrapl() -> Any:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    quiet = logging.NullHandler()
    root.addHandler(quiet)  # with a handler in place, none is installed
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # its warnings say that its optional outputs are missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pyRAPL
    except ImportError as error:
        raise PyRaplError(f"the pyRAPL library cannot be imported ({error})") from error
    finally:
        logging.disable(before)
        root.handlers[:] = handlers
        root.setLevel(level)
    return pyRAPL


def _rooted_sensor(library: Any, packages: dict[int, Path], memories: dict[int, Path]) -> Any:
    """pyRAPL's own Sensor and DeviceAPI, reading files that were found for them."""

    class RootedAPI(library.DeviceAPI):  # type: ignore[misc]
        def __init__(self, zones: dict[int, Path]) -> None:
            self._socket_ids = sorted(zones)
            self._sys_files = [
                (zones[socket] / "energy_uj").open("r") for socket in self._socket_ids
            ]

    class RootedSensor(library.Sensor):  # type: ignore[misc]
        def __init__(self) -> None:
            if not packages:
                raise library.PyRAPLCantRecordEnergyConsumption(library.Device.PKG)
            self._device_api = {library.Device.PKG: RootedAPI(packages)}
            if memories.keys() == packages.keys():  # as the original: of all sockets or of none
                self._device_api[library.Device.DRAM] = RootedAPI(memories)
            self._available_devices: Sequence[Any] = list(self._device_api)
            self._socket_ids = sorted(packages)

    return RootedSensor()


_POWERCAP_REMEDY = 'Set reader = "powercap" in [sources.rapl].'


class PyRaplSource(RaplSource):
    """The CounterSource that reads through pyRAPL.

    pyRAPL reads all counters in one call, so all readings of a batch carry one stamp, taken
    when the call returned. After a failure it is opened again some seconds later, with a new epoch.
    """

    def __init__(
        self,
        sysfs: Path,
        clock: Clock,
        *,
        emulated: bool = False,
        resolution: int = MILLISECOND,
        model: str = "",
    ) -> None:
        super().__init__(sysfs, clock, emulated=emulated, resolution=resolution, model=model)
        self._epoch = -1
        self._sensor: PyRaplSensor | None = None
        self._columns: tuple[tuple[int, Domain], ...] = ()  # place in pyRAPL's list, domain
        self._domains: tuple[Domain, ...] = ()
        self._failure: Failure | None = None

    def open(self) -> None:
        """Start the library; PyRaplError if it refuses. ``read`` does it by itself otherwise."""
        self.postpone()
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
            if not self.is_due():
                return self._empty_batch()
            try:
                self.open()
            except PyRaplError as error:
                return self._empty_batch(error)
        assert self._sensor is not None  # noqa: S101 - opened just above
        try:
            values = self._sensor.read()
        except PyRaplError as error:
            self._drop()
            return self._empty_batch(error)
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
            self.postpone()

    def _empty_batch(self, error: PyRaplError | None = None) -> Batch:
        if error is not None:
            denied = "permission denied" in str(error)
            self._failure = Failure(
                NAME,
                f"the counters under {self._sysfs / POWERCAP_CLASS} through pyRAPL",
                Trouble.DENIED if denied else Trouble.RETRY,
                str(error),
                GRANT_REMEDY if denied else _POWERCAP_REMEDY,
            )
        return Batch(self._domains, failures=(self._failure,) if self._failure else ())

    def _misread(self, domain: Domain, value: int | None) -> Failure:
        cause = "pyRAPL has no value for it" if value is None else f"{value} uJ is beyond its range"
        trouble = Trouble.ABSENT if value is None else Trouble.MALFORMED
        return Failure(NAME, domain.name, trouble, cause, _POWERCAP_REMEDY, domain.id)

    def _find(self) -> tuple[dict[int, Path], dict[int, Path], dict[int, Domain]]:
        """Directories of packages and of memories by socket, and domains by pyRAPL's places."""
        zones: dict[str, Zone] = {}
        paths = scan_zones(self._sysfs).zones
        for directory, path in paths.items():
            try:
                zones[directory] = read_zone(path)
            except (OSError, ValueError):
                continue  # the powercap reader reports it; pyRAPL cannot read it either
        self._cpus.refresh()
        topology = self.resolve(zones.values())
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
                raise PyRaplError(f"pyRAPL cannot distinguish the dies of {domain.id}")
        return packages, memories, domains
