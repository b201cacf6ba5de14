"""Energy counters from Linux's powercap tree: the agent's own reader and the ``rapl`` plugin.

Every zone has a descriptor that stays open and is read in place; the tree is scanned again only
every few seconds, or at once after a descriptor became invalid. A failing zone costs only itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from wattspan.model import MILLISECOND, SECOND, Domain, Failure, Microjoules, Reading
from wattspan.model.settings import Table
from wattspan.ports import Batch, Clock, CounterSource, SourceContext, SourceError, SourcePlugin
from wattspan.sources.rapl.sysfs import (
    ENERGY_FILE,
    GONE_ERRNOS,
    INVALID_NAME,
    INVALID_VALUE,
    LOAD_DRIVER_REMEDY,
    MASKED,
    NO_ZONES,
    ORPHAN,
    POWERCAP_CLASS,
    RANGE_DENIED,
    RANGE_FILE,
    VANISHED,
    WITHOUT_CPUS,
    RaplSource,
    ZoneProblem,
    ZoneScan,
    access_failure,
    cpu_model,
    is_denied,
    read_range,
    read_zone,
    scan_zones,
)
from wattspan.sources.rapl.topology import Zone, ZoneTopology

_MIRROR_ROUNDS = 3  # of samples, to detect mirrored dies


_UNBOUNDED = 2**64


class CounterFile:
    """One registration of one zone.

    A zone that is registered anew has another inode, and is another counter that may start
    anywhere: ``same_registration`` detects it. A counter that cannot be opened keeps its place and
    is retried.
    """

    def __init__(self, path: Path, zone: Zone) -> None:
        """OSError if there is no such file."""
        self.path = path
        self.zone = zone
        self.fd: int | None = None
        self.domain_id = ""
        self.epoch = 0
        self.failure: Failure | None = None  # why it is closed
        self.readable_now = False  # it, or its range, could not be read before, and can now
        self._identity = _file_identity(path)
        self._limit = _UNBOUNDED

    def assign(self, domain: Domain, epoch: int) -> None:
        """Set the domain of this counter."""
        self.domain_id = domain.id
        self.epoch = epoch
        self._limit = _UNBOUNDED if domain.modulus is None else domain.modulus

    def same_registration(self) -> bool:
        """True if the path still leads to the file that this counter was made from."""
        try:
            if self.fd is not None and os.fstat(self.fd).st_nlink == 0:
                return False  # an ordinary file system may give its inode to the next one
            return _file_identity(self.path) == self._identity
        except OSError:
            return False

    def find_range(self) -> None:
        """Read an unknown range again: one read that failed decides nothing."""
        if self.zone.max_range is None and (found := read_range(self.path.parent)) is not None:
            self.zone, self.readable_now = replace(self.zone, max_range=found), True

    def open(self) -> OSError | None:
        """Open it if it is closed; the error if that cannot be."""
        if self.fd is None:
            try:
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                return error
            self.failure = None
            self.readable_now = True
        return None

    def close_with(self, failure: Failure) -> bool:
        """Close it because of ``failure``, which lasts until it is opened again. Always False."""
        self.close()
        self.failure = failure
        return False

    def parse(self, content: bytes) -> Microjoules | None:
        """The counter value in ``content``; None if it is not a possible value of this counter."""
        digits = content.strip()
        if not digits.isdigit():
            return None
        value = int(digits)
        return Microjoules(value) if value < self._limit else None

    def sample(self) -> int | None:
        """The value now; None if it cannot be read."""
        if self.fd is None:
            return None
        try:
            return self.parse(os.pread(self.fd, 64, 0))
        except OSError:
            return None

    def close(self) -> None:
        if self.fd is not None:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = None


def _file_identity(path: Path) -> tuple[int, ...]:
    """The file at ``path`` and, if that is a link, the file behind it as well."""
    status = path.lstat()
    try:
        behind = path.stat()
    except OSError:  # a link to nowhere, or in a circle
        return status.st_dev, status.st_ino
    return status.st_dev, status.st_ino, behind.st_dev, behind.st_ino


class PowercapSource(RaplSource):
    """The CounterSource of ``<sysfs>/class/powercap``.

    A reading is stamped right after its register was read, each by itself. Owned by one thread.
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
        self._counters: dict[str, CounterFile] = {}  # by directory
        self._counter_of: dict[str, CounterFile] = {}  # by domain id
        self.topology = ZoneTopology((), {})  # the zones and their domains at the last scan
        self._epochs: dict[str, int] = {}  # by domain id; outlives the zone
        self._vanished: dict[str, Failure] = {}  # by domain id
        self._standing: tuple[Failure, ...] = ()  # in force until the next discovery

    def read(self) -> Batch:
        if self.is_due():
            self._discover()
        batch, intact = self._sweep()
        if not intact:
            self._discover()
            batch, _ = self._sweep()
        return batch

    def close(self) -> None:
        for counter in self._counters.values():
            counter.close()
        self._counters.clear()
        self.topology = ZoneTopology((), {})
        self._due = 0

    # ------------------------------------------------------------------------- every tick

    def _sweep(self) -> tuple[Batch, bool]:
        """Read every open counter; False with the batch if a descriptor is no longer valid."""
        now, pread = self._clock.now, os.pread
        readings = []
        failed = list(self._standing)
        intact = True
        for counter in self._counters.values():
            if counter.fd is None:
                if counter.failure is not None:
                    failed.append(counter.failure)
                continue
            try:
                content = pread(counter.fd, 64, 0)
                at = now()
            except OSError as error:
                failed.append(access_failure(counter.path, error, counter.domain_id))
                if error.errno in GONE_ERRNOS:
                    intact = counter.close_with(failed[-1])
                continue
            value = counter.parse(content)
            if value is not None:
                readings.append(Reading(counter.domain_id, at, value, counter.epoch))
            elif content:
                shown = content[:32].decode(errors="replace").strip()
                failed.append(self._failure(INVALID_VALUE, counter, value=shown))
            else:  # sysfs never answers with nothing: the file was emptied under the descriptor
                failed.append(self._failure(VANISHED, counter))
                intact = counter.close_with(failed[-1])
        return Batch(self.topology.domains, tuple(readings), tuple(failed)), intact

    def _failure(self, problem: ZoneProblem, counter: CounterFile, **values: object) -> Failure:
        return problem.failure(counter.path, counter.domain_id, **values)

    # ------------------------------------------------------------------- every few seconds

    def _discover(self) -> None:
        """Scan for zones, open new ones, and record failures of the others."""
        self.postpone()
        found = scan_zones(self._sysfs)
        if found.error is not None:  # the zones that are known are read as before
            failure = access_failure(self._sysfs / POWERCAP_CLASS, found.error)
            self._standing = (failure, *self._vanished.values())
            return
        fresh, wrong = self._register(found)
        closed = {name: error for name, c in self._counters.items() if (error := c.open())}
        self._resolve(fresh, moved=self._cpus.refresh())
        for name, error in closed.items():
            counter = self._counters[name]
            counter.failure = access_failure(counter.path, error, counter.domain_id or None)
        for name in self.topology.orphans:
            self._counters[name].close_with(ORPHAN.failure(self._counters[name].path))
        if found.masked:
            names = ", ".join(found.masked[:4]) + (" and more" if len(found.masked) > 4 else "")
            wrong.append(MASKED.failure(self._sysfs / POWERCAP_CLASS, names=names))
        elif found.is_empty:
            wrong.append(NO_ZONES.failure(self._sysfs / POWERCAP_CLASS))
        wrong += (
            WITHOUT_CPUS.failure(self._counter_of[one].path, one)
            for one in sorted(self.topology.without_cpus)
            if one in self._counter_of
        )
        wrong += (
            RANGE_DENIED.failure(path)
            for counter in self._counters.values()
            if counter.fd is not None and counter.zone.max_range is None
            if is_denied(path := counter.path.with_name(RANGE_FILE))
        )
        self._standing = (*wrong, *self._vanished.values())

    def _register(self, found: ZoneScan) -> tuple[set[str], list[Failure]]:
        """Make the counters match the directories; which are new, and which cannot be named."""
        # A counter that is open is read on, although its directory cannot be searched any more.
        for directory in self._counters.keys() - found.zones.keys() - found.refused.keys():
            self._counters.pop(directory).close()
        fresh: set[str] = set()
        wrong = [
            access_failure(path, error)
            for directory, (path, error) in found.refused.items()
            if directory not in self._counters and directory.rpartition(":")[0] not in found.refused
        ]
        for directory, path in found.zones.items():
            known = self._counters.get(directory)
            if known is not None and known.same_registration():
                known.find_range()
                continue
            if known is not None:
                self._counters.pop(directory).close()
            try:
                self._counters[directory] = CounterFile(path / ENERGY_FILE, read_zone(path))
                fresh.add(directory)
            except OSError as error:
                wrong.append(access_failure(path / "name", error))
            except ValueError as error:
                wrong.append(INVALID_NAME.failure(path, error=error))
        return fresh, wrong

    def _resolve(self, fresh: set[str], *, moved: bool) -> None:
        """Derive the domains; a domain that was registered again gets the next epoch.

        ``moved``: CPUs were taken on- or offline, which may change the numbers of sockets.
        """
        before = self.topology
        known = before.domain_of.keys() | before.orphans
        changed = fresh or any(counter.readable_now for counter in self._counters.values())
        if known == self._counters.keys() and not changed and not moved:
            return
        after = self.resolve(self._sampled(), before.mirrors)
        domains = {domain.id: domain for domain in after.domains}
        for directory, domain_id in after.domain_of.items():
            counter = self._counters[directory]
            if directory in fresh or counter.domain_id != domain_id:
                self._epochs[domain_id] = self._epochs.get(domain_id, -1) + 1
            counter.assign(domains[domain_id], self._epochs[domain_id])
            self._counter_of[domain_id] = counter
        # Unchanged domains stay the same object: callers compare.
        same = before.domains == after.domains
        self.topology = replace(after, domains=before.domains) if same else after
        self._remember_vanished(before)

    def _sampled(self) -> list[Zone]:
        """The zones, with samples if names alone cannot show whether counters mirror."""
        counters = list(self._counters.values())
        for counter in counters:
            counter.readable_now = False
        if not any("-die-" in counter.zone.name for counter in counters):
            return [counter.zone for counter in counters]
        rounds = [[counter.sample() for counter in counters] for _ in range(_MIRROR_ROUNDS)]
        return [
            replace(counter.zone, samples=tuple(value for value in values if value is not None))
            for counter, values in zip(counters, zip(*rounds, strict=True), strict=True)
        ]

    def _remember_vanished(self, before: ZoneTopology) -> None:
        present = {domain.id for domain in self.topology.domains}
        gone = {
            domain.id: VANISHED.failure(self._counter_of[domain.id].path, domain.id)
            for domain in before.domains
        }
        self._vanished = {
            domain_id: failure
            for domain_id, failure in {**self._vanished, **gone}.items()
            if domain_id not in present
        }


class RaplSettings(Table, frozen=True):
    """Energy counters of CPU packages and memory (RAPL).

    Keys:
        enabled: `auto`: read them if there are any; `true`: the agent does not start without them.
        reader: `powercap`: the agent's own reader; `pyrapl`: the pyRAPL library, with fewer
            domains.
        sysfs: Mount point of sysfs; in a container, that of the host's sysfs.
    """

    enabled: bool | Literal["auto"] = "auto"
    reader: Literal["powercap", "pyrapl"] = "powercap"
    sysfs: str = "/sys"


def open_rapl(settings: RaplSettings, context: SourceContext) -> CounterSource | None:
    """The source, also if its counters are denied or masked: its health then reports that.

    None if there is no zone and ``enabled`` is "auto". SourceError if ``enabled`` is true and there
    is no zone, or pyRAPL refuses the host.
    """
    if settings.enabled is False:
        return None
    sysfs = context.sysfs or Path(settings.sysfs)
    found = scan_zones(sysfs)
    if found.is_empty:
        if settings.enabled is True:
            raise SourceError(
                "Cannot read CPU energy counters: no zone counts energy under "
                f"{sysfs / POWERCAP_CLASS}. {LOAD_DRIVER_REMEDY} "
                'With enabled = "auto" the agent does without.'
            )
        return None
    resolution = context.resolution or MILLISECOND
    model = "" if context.emulated else cpu_model(Path("/proc/cpuinfo"))
    if settings.reader == "powercap":
        return PowercapSource(
            sysfs, context.clock, emulated=context.emulated, resolution=resolution, model=model
        )
    # Imported only when chosen: an agent that does not use the library does not carry it.
    from wattspan.sources.rapl.pyrapl import PyRaplError, PyRaplSource

    source = PyRaplSource(
        sysfs, context.clock, emulated=context.emulated, resolution=resolution, model=model
    )
    if settings.enabled is True:
        try:
            source.open()
        except PyRaplError as error:
            raise SourceError(
                f"Cannot read CPU energy counters through pyRAPL: {error}. "
                'Set reader = "powercap" in [sources.rapl].'
            ) from None
    return source


def rapl_advice(settings: RaplSettings) -> Iterator[str]:
    """A sentence for a root that this host does not have."""
    if settings.enabled is not False and not Path(settings.sysfs).is_dir():
        yield f"sources.rapl.sysfs: there is no directory {settings.sysfs}"


class ReaderComparison(NamedTuple):
    """The energy of one domain over the same period, as each reader measured it."""

    domain_id: str
    powercap: Microjoules
    pyrapl: Microjoules

    @property
    def difference(self) -> int:
        """Microjoules by which pyRAPL measured more."""
        return self.pyrapl - self.powercap

    @property
    def agrees(self) -> bool:
        """True if both are within 2 % or 0.1 J: they cannot read at the same instant."""
        return abs(self.difference) <= max(self.powercap // 50, 100_000)


class CrossCheck(NamedTuple):
    """The comparisons of the domains that both readers have, and the failures of either."""

    comparisons: tuple[ReaderComparison, ...]
    failures: tuple[Failure, ...]


def cross_check(
    sysfs: Path, clock: Clock, *, duration: int = SECOND, emulated: bool = False
) -> CrossCheck:
    """Read all counters with both readers, twice, ``duration`` nanoseconds apart."""
    from wattspan.sources.rapl.pyrapl import PyRaplSource

    readers = (
        PowercapSource(sysfs, clock, emulated=emulated),
        PyRaplSource(sysfs, clock, emulated=emulated),
    )
    try:
        for reader in readers:
            reader.read()  # the first turn finds and opens; it takes longer
        before = [reader.read() for reader in readers]
        clock.sleep_until(clock.monotonic() + duration)
        after = [reader.read() for reader in readers]
    finally:
        for reader in readers:
            reader.close()
    powercap, pyrapl = map(_energy_between, before, after)
    return CrossCheck(
        tuple(
            ReaderComparison(identity, energy, pyrapl[identity])
            for identity, energy in powercap.items()
            if identity in pyrapl
        ),
        tuple(dict.fromkeys(failure for batch in after for failure in batch.failures)),
    )


def _energy_between(before: Batch, after: Batch) -> dict[str, Microjoules]:
    """The energy of each domain between two batches of one reader, corrected for wraps.

    Implausible energy is included, since the readers are compared: one of them may be wrong.
    """
    moduli = {domain.id: domain.modulus for domain in after.domains}
    start = {reading.domain_id: reading for reading in before.readings}
    spent: dict[str, Microjoules] = {}
    for end in after.readings:
        begin = start.get(end.domain_id)
        if begin is not None and begin.epoch == end.epoch:
            energy = end.counter - begin.counter
            wrapped = (moduli[end.domain_id] or 0) if energy < 0 else 0
            spent[end.domain_id] = Microjoules(energy + wrapped)
    return spent


plugin = SourcePlugin(settings=RaplSettings, open=open_rapl, advice=rapl_advice)
