"""CPU packages' long-term power limits (RAPL's PL1), through Linux's powercap tree.

The kernel numbers zones in hexadecimal in the order of their registration, psys among the packages,
and a constraint's number does not identify its limit. So both are found by name. Zones of parts of
a package and of memory have limits of their own on some processors, and psys is the limit of the
whole board: they are not written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.actuators import PowerActuator, actuator_error, load_identity
from wattspan.model import CapKey, DevicePresence, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock
from wattspan.sources.rapl.sysfs import POWERCAP_CLASS

LONG_TERM = "long_term"
_PACKAGE = re.compile(r"package-\d+(-die-\d+)?")
_DIRECTORY = re.compile(r"intel-rapl(-mmio)?:[0-9a-f]+")
_CONSTRAINT = re.compile(r"constraint_(\d+)_name")
_LOCK_ERRORS = frozenset({errno.ENODATA, errno.EIO})
"""Error of a write to a locked register: the kernel turns its own EACCES into ENODATA."""


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
    the processor obeys the lowest. They are read and never written.
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
        """True if its files are still its own: directories are numbered anew on hot-plug."""
        return (
            read_line(self.limit.directory / "name") == self.name
            and read_line(self.limit.path("name")) == LONG_TERM
        )


def find_packages(sysfs: Path) -> tuple[CpuPackage, ...]:
    """Every package that has a long-term limit, in the order of numbers.

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
        for name, limits in sorted(found.items(), key=lambda entry: (len(entry[0]), entry[0]))
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
    return sorted(entries, key=lambda entry: (len(entry.name), entry.name))  # 9, a, f, 10


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


class CpuPower(PowerActuator):
    """The Actuator of CPU_POWER.

    The kernel reports no default. It is the part's thermal specification (``max_power_uw``), with
    which processors start; where that is 0 or missing, the limit that this process read first.
    """

    knob = Knob.CPU_POWER

    def __init__(
        self,
        sysfs: Path,
        clock: Clock,
        *,
        put: Callable[[Path, int], None] | None = None,
        answers_after: int = 0,
    ) -> None:
        """``put`` writes a number into a file; OSError if the kernel refuses it.

        A kernel rounds or refuses within the write. An emulated host has ordinary files, and
        applies them within ``answers_after`` nanoseconds.
        """
        super().__init__(clock)
        self._sysfs = sysfs
        self._answers_after = answers_after
        self._put_number = put or write_number
        self._first: dict[str, int] = {}
        self._in_force: dict[str, str] = {}  # the load of each zone that had its limits on
        self._packages: dict[str, CpuPackage] = {}

    def slots(self) -> int:
        return len(self._find())

    def id_at(self, slot: int) -> str | None:
        packages = tuple(self._packages)
        return packages[slot] if slot < len(packages) else None

    def close(self) -> None:
        """Nothing is held open."""

    def write(self, device: str, value: int | None) -> KnobState:
        """Set the limit and read it back.

        A locked register is reported as ``locked`` if the kernel refuses the write.
        """
        before = self._before(device)
        if value is None:
            raise self._always_limited(before)
        package, thing = self._package(device), f"set the power limit of {before.name}"
        if value <= 0:
            raise actuator_error(
                thing,
                f"{value / 1000:g} W is not above 0 W",
                "Ask for more.",
                Trouble.MALFORMED,
            )
        if before.requested is None:
            raise actuator_error(
                thing,
                "it shows a limit of 0 W, as a register that was never set, which could not be"
                " restored",
                "Write the wanted limit into its power_limit_uw once, as root.",
                Trouble.ABSENT,
            )
        if value <= before.requested and self._switched_off_by_reload(before):
            self._switch_on(package, thing)
        elif value < before.requested and not _enabled(package.limit):
            # The kernel reports limits that are switched off and locked ones alike. A write of
            # the present value distinguishes them and changes nothing.
            if present := _microwatts(package.limit.power):
                self._put_microwatts(package, thing, present)
            raise actuator_error(
                thing,
                "its limits are switched off, so a lower one would change nothing",
                f"Switch them on with `echo 1 > {package.limit.enabled}`, if they are to hold.",
                Trouble.ABSENT,
            )
        self._put_microwatts(package, thing, value * 1000)
        self._clock.sleep_until(self._clock.monotonic() + self._answers_after)
        return self._confirmed(before, value)

    def _switched_off_by_reload(self, state: KnobState) -> bool:
        """True if the limits were in force before the present load of the driver.

        Linux switches the limits of a zone off when it removes it, and keeps their values.
        """
        seen, package = self._in_force.get(state.key.device), self._packages[state.key.device]
        return not _enabled(package.limit) and seen not in (None, state.presence.load)

    def _switch_on(self, package: CpuPackage, thing: str) -> None:
        try:
            self._put_number(package.limit.enabled, 1)
        except OSError as error:
            raise _powercap_error(thing, error) from None

    def _not_honoured(self, before: KnobState, wanted: int, shown: int | None) -> ActuatorError:
        """A locked register may also take a value and keep the old one."""
        if shown == before.requested:
            thing = f"set the power limit of {before.name}"
            return _locked_error(thing, "it took a value and kept the old one")
        return super()._not_honoured(before, wanted, shown)

    def _find(self) -> tuple[CpuPackage, ...]:
        packages = find_packages(self._sysfs)
        self._packages = {package.id: package for package in packages}
        return packages

    def _package(self, device: str) -> CpuPackage:
        known = self._packages.get(device)
        if known is not None and known.is_there:
            return known
        self._find()
        if device in self._packages:
            return self._packages[device]
        seen = device in self._first
        raise actuator_error(
            f"find {device}",
            "its zone has vanished" if seen else "no such package has a long-term power limit",
            _GONE_REMEDY if seen else f"See {self._sysfs / POWERCAP_CLASS}.",
            Trouble.RETRY if seen else Trouble.ABSENT,
        )

    def _state(self, device: str) -> KnobState:
        package = self._package(device)
        requested = _power(package.limit, package.name)
        first = self._first.get(device) or requested
        if first is not None:
            self._first[device] = first
        load = load_identity(package.limit.directory, ".")
        if _enabled(package.limit):
            self._in_force[device] = load
        specified = _milliwatts(_microwatts(package.limit.path("max_power_uw")))
        return KnobState(
            CapKey(self.knob, device),
            package.name,
            minimum=_milliwatts(_microwatts(package.limit.path("min_power_uw"))),
            default=specified or first,
            maximum=max(specified or 0, first or 0) or None,
            requested=requested,
            enforced=_enforced(package, requested),
            aliases=(package.limit.directory.name, package.name),
            presence=DevicePresence(load),
        )

    def _put_microwatts(self, package: CpuPackage, thing: str, microwatts: int) -> None:
        try:
            self._put_number(package.limit.power, microwatts)
        except OSError as error:
            if error.errno in _LOCK_ERRORS and _microwatts(package.limit.power) is not None:
                how = f"the driver refuses every value ({errno.errorcode[error.errno]})"
                raise _locked_error(thing, how) from None
            raise _powercap_error(thing, error) from None


def write_number(path: Path, number: int) -> None:
    """Write ``number`` into the file at ``path``, in one piece, as ``echo`` would."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, b"%d\n" % number)
    finally:
        os.close(fd)


def _power(limit: PowerConstraint, name: str) -> int | None:
    """The limit in milliwatts; None for 0, which a register shows that was never set."""
    thing = f"read the power limit of {name}"
    try:
        content = limit.power.read_bytes()
    except OSError as error:
        raise _powercap_error(thing, error) from None
    text = content.strip()
    if not text.isdigit():
        raise actuator_error(
            thing,
            f"{text[:32].decode(errors='replace')!r} is no number of microwatts",
            "It is read again.",
            Trouble.MALFORMED,
        )
    return _milliwatts(int(text))


def _enforced(package: CpuPackage, requested: int | None) -> int | None:
    """The lowest of the package's limits that are in force; None if none is known to be."""
    limits = [requested] if _enabled(package.limit) else []
    for mirror in package.mirrors:
        with contextlib.suppress(ActuatorError):
            limits.append(_power(mirror, package.name) if _enabled(mirror) else None)
    return min((limit for limit in limits if limit is not None), default=None)


def _enabled(limit: PowerConstraint) -> bool:
    """True if the zone's limits are in force; a zone without that file has no switch."""
    return read_line(limit.enabled) != "0"


def _microwatts(path: Path) -> int | None:
    text = read_line(path)
    return int(text) if text is not None and text.isdigit() else None


def _milliwatts(microwatts: int | None) -> int | None:
    """None for 0 too, which parts without a specification report.

    Rounded up, since the hardware rounds down: a value that was read can be written back exactly.
    """
    return -(-microwatts // 1000) if microwatts else None


_ROOT_REMEDY = "Limits may be written by root only; run `wattspan capper` as root."
_GONE_REMEDY = "A package taken offline, or an unloaded driver, takes its zones with it."
_DENIED_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_REMEDIES = {
    errno.EACCES: _ROOT_REMEDY,
    errno.EPERM: _ROOT_REMEDY,
    errno.EROFS: "Run `wattspan capper` outside the container, or without ProtectKernelTunables=.",
    errno.EIO: "It is tried again; if it stays so, look at the kernel's log for MSR errors.",
    errno.EBUSY: "It is tried again; firmware or another driver holds the interface.",
    errno.EINVAL: "Ask for a value in the range that `wattspan caps status` shows.",
    errno.ENODEV: _GONE_REMEDY,
    errno.ENOENT: _GONE_REMEDY,
}


def _powercap_error(thing: str, error: OSError) -> ActuatorError:
    """The failure of ``thing``, as in "set the power limit of package-0", by ``error``."""
    number = error.errno or 0
    trouble = Trouble.DENIED if number in _DENIED_ERRORS else Trouble.RETRY
    if number == errno.EINVAL:
        trouble = Trouble.MALFORMED
    cause = f"{os.strerror(number).lower()} ({errno.errorcode.get(number, number)})"
    return actuator_error(thing, cause, _REMEDIES.get(number, "It is tried again."), trouble)


def _locked_error(thing: str, how: str) -> ActuatorError:
    """Firmware has locked the register; ``how`` is the evidence."""
    return actuator_error(
        thing,
        f"{how}: firmware has locked the register until the next boot",
        "Look for a power limit lock (package power limit lock, RAPL lock) in the firmware's "
        "setup, and reboot.",
        Trouble.DENIED,
        locked=True,
    )
