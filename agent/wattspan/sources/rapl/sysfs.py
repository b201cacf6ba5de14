"""Powercap zones under a sysfs root: discovery, counter files, and failures with remedies."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from wattspan.model import (
    MILLISECOND,
    SECOND,
    Failure,
    Milliwatts,
    Provenance,
    Trouble,
)
from wattspan.ports import Clock
from wattspan.sources.rapl.topology import NAME, MirrorPair, Zone, ZoneTopology, resolve_topology
from wattspan.util.cpu_topology import CpuTopology
from wattspan.util.files import file_text, shortage_remedy

GRANT_REMEDY = (
    "Run the agent in the group wattspan, or as a user who is a member, and let that group read "
    "energy_uj: by `systemd-tmpfiles --create wattspan.conf` where the service is installed, "
    "elsewhere by a udev rule."
)
LOAD_DRIVER_REMEDY = (
    "Load the driver (modprobe intel_rapl_msr); a virtual machine has no such counter unless its "
    "host passes one through."
)

GONE_ERRNOS = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.EBADF, errno.ESTALE})
"""Errors after which a descriptor is invalid and the zone has to be found again."""


DISCOVERY_INTERVAL = 5 * SECOND
POWERCAP_CLASS = "class/powercap"
ENERGY_FILE, RANGE_FILE = "energy_uj", "max_energy_range_uj"


class ZoneProblem(NamedTuple):
    """A kind of failure of a zone. ``cause`` is a format string."""

    trouble: Trouble
    cause: str
    remedy: str
    verb: str = "read"

    def failure(self, path: Path, domain_id: str | None = None, **values: object) -> Failure:
        """The failure of ``path``, with ``values`` for the cause."""
        cause = self.cause.format(**values)
        return Failure(NAME, str(path), self.trouble, cause, self.remedy, domain_id, self.verb)


INVALID_VALUE = ZoneProblem(
    Trouble.MALFORMED,
    "{value!r} is not a possible value of this counter",
    "It is read again; if the failure persists, report it to the kernel driver's maintainers.",
)
VANISHED = ZoneProblem(
    Trouble.ABSENT,
    "the zone has vanished",
    "The agent looks for it every few seconds; a package taken offline or an unloaded driver "
    "takes its zones with it.",
)
MASKED = ZoneProblem(
    Trouble.DENIED,
    "the links of {names} have no target",
    "The container runtime masks them: mount the host's /sys/devices/virtual/powercap into the "
    "container, or run the agent outside.",
)
NO_ZONES = ZoneProblem(Trouble.ABSENT, "no zone counts energy there", LOAD_DRIVER_REMEDY)
INVALID_NAME = ZoneProblem(
    Trouble.MALFORMED, "{error}", "Its counter is omitted, and those of the zones below it."
)
WITHOUT_CPUS = ZoneProblem(
    Trouble.ABSENT,
    "no CPU of this host belongs to its package, so its energy is charged to no process",
    "Its energy is counted. Look at physical_package_id in /sys/devices/system/cpu/cpu*/topology; "
    "the agent looks for its CPUs every few seconds.",
    verb="attribute",
)
RANGE_DENIED = ZoneProblem(
    Trouble.DENIED,
    "permission denied",
    "Let the group wattspan read it, by `systemd-tmpfiles` or a udev rule: without it the energy "
    "of a period in which the counter wraps is unknown.",
)
ORPHAN = ZoneProblem(
    Trouble.MALFORMED,
    "the zone above it cannot be read, so its place is unknown",
    "The agent reads it again every few seconds.",
)

_DENIED = ZoneProblem(Trouble.DENIED, "{reason}", GRANT_REMEDY)
_UNREADABLE = ZoneProblem(
    Trouble.RETRY,
    "the driver could not read the register: {reason}",
    "It is read again; a package that is offline or asleep, and locked firmware, cause this.",
)
_ABSENT = ZoneProblem(
    Trouble.ABSENT,
    "{reason}",
    "The agent looks for it every few seconds; a package taken offline causes this.",
)
_NOT_A_COUNTER = ZoneProblem(
    Trouble.MALFORMED, "it is no counter: {reason}", "Check that the sysfs root is the right one."
)
_TOO_MANY_FILES = ZoneProblem(
    Trouble.RETRY,
    "the agent has too many files open",
    "Raise its limit of open files (LimitNOFILE=).",
)
_OTHER = ZoneProblem(Trouble.RETRY, "{reason}", "It is read again.")
_BY_ERRNO = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), _DENIED),
    **dict.fromkeys((errno.EINVAL, errno.EIO, errno.ENODATA), _UNREADABLE),
    **dict.fromkeys((errno.ENODEV, errno.ENOENT), _ABSENT),
    **dict.fromkeys((errno.EISDIR, errno.ELOOP), _NOT_A_COUNTER),
    errno.EMFILE: _TOO_MANY_FILES,
}


def access_failure(path: Path, error: OSError, domain_id: str | None = None) -> Failure:
    """The failure of ``path`` after an ``error`` of opening or reading it."""
    problem = _BY_ERRNO.get(error.errno or 0, _OTHER)
    reason = os.strerror(error.errno or 0).lower()
    return problem.failure(path, domain_id, reason=reason)


@dataclass(frozen=True, slots=True)
class ZoneScan:
    """The entries of the powercap class: zones by directory name, and links without a target.

    ``masked`` holds zones that are listed but whose directories are not there: a container runtime
    has covered ``/sys/devices/virtual/powercap``. ``refused`` are directories that cannot be
    searched, by name. A scan with an ``error`` is incomplete.
    """

    zones: dict[str, Path] = field(default_factory=dict)
    masked: tuple[str, ...] = ()
    error: OSError | None = None
    refused: dict[str, tuple[Path, OSError]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if there is no zone, as far as directories can be searched."""
        return not (self.zones or self.masked or self.refused or self.error)


def scan_zones(sysfs: Path) -> ZoneScan:
    """Every zone that counts energy, of every control type. A missing root has none."""
    found = ZoneScan()
    masked: list[str] = []
    try:
        entries = sorted((sysfs / POWERCAP_CLASS).iterdir())
        masked += (entry.name for entry in entries if not _collect(entry, found))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return replace(found, error=error)
    return replace(found, masked=tuple(name for name in masked if name not in found.zones))


def _collect(entry: Path, into: ZoneScan) -> bool:
    """Collect a zone, or a control type, and those below; False if it is no directory.

    OSError without resources.
    """
    if entry.name in into.zones:
        return True
    try:
        if not entry.is_dir():
            return False
        # Zones that only limit power (dtpm, idle injection) have no energy to read.
        with contextlib.suppress(FileNotFoundError):
            (entry / ENERGY_FILE).lstat()
            into.zones[entry.name] = entry
        children = sorted(entry.iterdir())
    except OSError as error:
        if shortage_remedy(error):
            raise
        if entry.name not in into.zones:
            into.refused[entry.name] = entry, error
        return True
    # Of a control type; only a copied tree has no links.
    for child in children:
        if child.name.startswith(f"{entry.name}:"):
            _collect(child, into)
    return True


def read_zone(directory: Path) -> Zone:
    """The zone in ``directory``, without samples.

    OSError if its name cannot be read, ValueError if it is no name. Everything else may be
    missing: constraints often are, and a zone without a range still counts.
    """
    name = (directory / "name").read_bytes().strip()
    if not name or not name.isascii() or not name.decode().isprintable() or b"/" in name:
        raise ValueError(f"its name is {name[:40]!r}")
    limits = [
        _read_number(path)
        for pattern in ("constraint_*_max_power_uw", "constraint_*_power_limit_uw")
        for path in directory.glob(pattern)
    ]
    return Zone(
        directory=directory.name,
        name=name.decode(),
        max_range=read_range(directory),
        max_power=Milliwatts(max((limit // 1000 for limit in limits if limit), default=0)) or None,
    )


def read_range(directory: Path) -> int | None:
    """The largest value of the zone's counter in microjoules; None if it cannot be read."""
    return _read_number(directory / RANGE_FILE)


def is_denied(path: Path) -> bool:
    """True if this process lacks the permission to read ``path``."""
    try:
        path.open("rb").close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _read_number(path: Path) -> int | None:
    """The non-negative number in ``path``; None if it cannot be read or is none."""
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        if shortage_remedy(error):
            raise
        return None
    return int(text) if text.isdigit() else None


def cpu_vendor(sysfs: Path) -> str | None:
    """The maker of the processor, from its modalias; None if unknown."""
    modalias = file_text(sysfs / "devices/system/cpu/modalias")
    for number, name in (("ven0000", "intel"), ("ven0002", "amd"), ("ven0009", "amd")):
        if number in modalias:  # 9 is Hygon, with the registers of AMD
            return name
    return None


def cpu_model(cpuinfo: Path) -> str:
    """The name of the processor in ``/proc/cpuinfo``; "" if unknown, as on most ARM kernels."""
    named = re.search(r"^model name[ \t]*:[ \t]*(.*\S)", file_text(cpuinfo), re.MULTILINE)
    return "" if named is None else named[1]


class RaplSource:
    """The base of both readers: their root, the domains behind zones, and the next discovery."""

    name = NAME

    def __init__(
        self,
        sysfs: Path,
        clock: Clock,
        *,
        emulated: bool = False,
        resolution: int = MILLISECOND,
        model: str = "",
    ) -> None:
        self._sysfs = sysfs
        self._cpus = CpuTopology(sysfs)
        self._model = model
        self._clock = clock
        self._provenance = Provenance.EMULATED if emulated else Provenance.MEASURED
        self._resolution = resolution
        self._due = 0  # of the next discovery

    def is_due(self) -> bool:
        return self._clock.monotonic() >= self._due

    def postpone(self) -> None:
        """Discover again after some seconds."""
        self._due = self._clock.monotonic() + DISCOVERY_INTERVAL

    def resolve(
        self, zones: Iterable[Zone], mirrors: frozenset[MirrorPair] = frozenset()
    ) -> ZoneTopology:
        """The domains behind ``zones``."""
        return resolve_topology(
            zones,
            provenance=self._provenance,
            vendor=cpu_vendor(self._sysfs),
            mirrors=mirrors,
            resolution=self._resolution,
            model=self._model,
            sockets_of=self._cpus.sockets_of_packages,
        )
