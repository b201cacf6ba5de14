"""CPU packages with a long-term power limit, found in sysfs by their names.

The kernel numbers zones in the order in which they register, psys among the packages, in
hexadecimal; and a constraint's number says nothing of which limit it is. So both are found by
name. Zones of a package's parts and of memory have limits of their own on some processors, and
psys is the whole board's: they are left alone.

What a powercap error means to somebody who wants to set a limit.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.actuators.common import actuator_error
from wattspan.model import Trouble
from wattspan.ports import ActuatorError

POWERCAP_CLASS = "class/powercap"
LONG_TERM = "long_term"
_PACKAGE = re.compile(r"package-\d+(-die-\d+)?")
_DIRECTORY = re.compile(r"intel-rapl(-mmio)?:[0-9a-f]+")
_CONSTRAINT = re.compile(r"constraint_(\d+)_name")


@dataclass(frozen=True, slots=True)
class PowerConstraint:
    """One zone's long-term constraint."""

    directory: Path
    number: int

    def path(self, what: str) -> Path:
        return self.directory / f"constraint_{self.number}_{what}"

    @property
    def power(self) -> Path:
        return self.path("power_limit_uw")

    @property
    def enabled(self) -> Path:
        return self.directory / "enabled"


@dataclass(frozen=True, slots=True)
class CpuPackage:
    """A package, or a die with a zone of its own.

    ``mirrors`` are the same package's limits in other interfaces: separate registers, of which
    the processor obeys the lowest. They are looked at and never written.
    """

    name: str
    limit: PowerConstraint
    mirrors: tuple[PowerConstraint, ...] = ()

    @property
    def id(self) -> str:
        """The id of its energy's domain."""
        return f"rapl:{self.name}"

    @property
    def is_there(self) -> bool:
        """Whether its files are still its own: directories are numbered anew on hot-plug."""
        return (
            read_line(self.limit.directory / "name") == self.name
            and read_line(self.limit.path("name")) == LONG_TERM
        )


def find_packages(sysfs: Path) -> tuple[CpuPackage, ...]:
    """Every package that has a long-term limit, in the order of names.

    Two drivers (of MSR and of TPMI) may both register a package. Either limit holds, so the
    first is taken and the other counts as a mirror.
    """
    found: dict[str, list[PowerConstraint]] = {}
    for directory in _zones(sysfs):
        name = read_line(directory / "name") or ""
        number = _long_term(directory) if _PACKAGE.fullmatch(name) else None
        if number is not None:
            found.setdefault(name, []).append(PowerConstraint(directory, number))
    return tuple(
        CpuPackage(name, limits[0], tuple(limits[1:]))
        for name, limits in sorted(found.items(), key=lambda entry: _natural_sort_key(entry[0]))
        if not limits[0].directory.name.startswith("intel-rapl-mmio")
    )


def read_line(path: Path) -> str | None:
    """The one line in ``path``; None if it cannot be read."""
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except OSError:
        return None


def _zones(sysfs: Path) -> list[Path]:
    """Directories of zones at the top of their control type; those of MMIO come last."""
    entries = [
        entry for entry in _entries(sysfs / POWERCAP_CLASS) if _DIRECTORY.fullmatch(entry.name)
    ]
    return sorted(entries, key=lambda entry: ("mmio" in entry.name, _natural_sort_key(entry.name)))


def _long_term(directory: Path) -> int | None:
    for entry in _entries(directory):
        match = _CONSTRAINT.fullmatch(entry.name)
        if match and read_line(entry) == LONG_TERM:
            return int(match[1])
    return None


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _natural_sort_key(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts package-2 before package-10, and intel-rapl:9 before intel-rapl:a."""
    parts = re.split(r"(?<=[-:])([0-9a-f]+)(?![0-9a-z])", text)
    return tuple(
        (int(part, 16), "") if place % 2 else (-1, part) for place, part in enumerate(parts)
    )


DEVICE_GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ESTALE})

_ROOT_REMEDY = "Limits may be written by root only; run `wattspan capper` as root."
_CAUSES: dict[int, tuple[Trouble, str, str]] = {
    errno.EACCES: (Trouble.DENIED, "permission denied (EACCES)", _ROOT_REMEDY),
    errno.EPERM: (Trouble.DENIED, "operation not permitted (EPERM)", _ROOT_REMEDY),
    errno.EROFS: (
        Trouble.DENIED,
        "sysfs is mounted read-only (EROFS)",
        "Run `wattspan capper` outside the container, or without ProtectKernelTunables=.",
    ),
    errno.ENODATA: (
        Trouble.RETRY,
        "the driver could not read or write the register (ENODATA)",
        "It is tried again; a package that is offline answers so.",
    ),
    errno.EIO: (
        Trouble.RETRY,
        "the register could not be reached (EIO)",
        "It is tried again; if it stays so, look at the kernel's log for MSR errors.",
    ),
    errno.EBUSY: (
        Trouble.RETRY,
        "the device is busy (EBUSY)",
        "It is tried again; firmware or another driver holds the interface.",
    ),
    errno.EINVAL: (
        Trouble.MALFORMED,
        "the driver says that this is no value of it (EINVAL)",
        "Ask for something within the range that `wattspan caps status` shows.",
    ),
    errno.ENODEV: (
        Trouble.RETRY,
        "the package is gone (ENODEV)",
        "A package taken offline answers so; it is looked for again.",
    ),
    errno.ENOENT: (
        Trouble.RETRY,
        "the zone has vanished",
        "A package taken offline, or an unloaded driver, takes its zones with it.",
    ),
}


def powercap_error(thing: str, error: OSError) -> ActuatorError:
    """Why ``thing``, as in "set the power limit of package-0", ended in ``error``."""
    number = error.errno or 0
    trouble, cause, remedy = _CAUSES.get(
        number, (Trouble.RETRY, os.strerror(number).lower(), "It is tried again.")
    )
    return actuator_error(thing, cause, remedy, trouble)


def locked_error(thing: str, how: str) -> ActuatorError:
    """Firmware has locked the register; ``how`` it showed."""
    return actuator_error(
        thing,
        f"{how}: firmware has locked the register until the next boot",
        "Look for a power limit lock (package power limit lock, RAPL lock) in the firmware's "
        "setup, and reboot.",
        Trouble.DENIED,
        locked=True,
    )


def disabled_error(thing: str, directory: str) -> ActuatorError:
    """The zone's limits are there and not in force."""
    return actuator_error(
        thing,
        "its limits are switched off, so a lower one would change nothing",
        f"Switch them on with `echo 1 > {directory}/enabled`, if they are to hold.",
        Trouble.ABSENT,
    )


def unset_limit_error(thing: str) -> ActuatorError:
    """The zone shows a limit of 0, which could not be given back."""
    return actuator_error(
        thing,
        "it shows a limit of 0 W, as registers do that were never set, so nothing could be "
        "given back",
        "Write the limit that should stand there into its power_limit_uw once, as root.",
        Trouble.ABSENT,
    )
