"""CPU packages' long-term power limits (RAPL's PL1), through Linux's powercap tree."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from wattspan.capper.actuators import powercap
from wattspan.capper.actuators.common import (
    actuator_error,
    is_enforced,
    is_honoured,
    not_honoured_error,
    not_removable_error,
    wait_for_state,
)
from wattspan.capper.actuators.powercap import (
    POWERCAP_CLASS,
    CpuPackage,
    PowerConstraint,
    find_packages,
    read_line,
)
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock

_LOCK_ERRORS = frozenset({errno.ENODATA, errno.EIO})
"""What writing to a locked register ends in: the kernel makes ENODATA of its own EACCES."""


class CpuPower:
    """The Actuator of CPU_POWER.

    The kernel does not tell a default. It is taken from the part's thermal specification
    (``max_power_uw``), which is what processors start with; where that is 0 or missing, it is
    the limit that this process saw first.
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
        """``put`` writes a number into a file, as the kernel wants it; OSError if it refuses.

        A kernel rounds or refuses within the write; the files of an emulated host are ordinary
        ones, and are looked at only ``answers_after`` nanoseconds after it.
        """
        self._sysfs = sysfs
        self._answers_after = answers_after
        self._put_number = put or write_number
        self._clock = clock
        self._first: dict[str, int] = {}
        self._packages: dict[str, CpuPackage] = {}

    def devices(self) -> tuple[KnobState, ...]:
        states = []
        for package in self._find():
            with contextlib.suppress(ActuatorError):
                states.append(self._state(package))
        return tuple(states)

    def slots(self) -> int:
        return len(self._find())

    def id_at(self, slot: int) -> str | None:
        packages = tuple(self._packages)
        return packages[slot] if slot < len(packages) else None

    def read(self, device: str) -> KnobState:
        return self._state(self._package(device))

    def write(self, device: str, value: int | None) -> KnobState:
        """Set it, and read back what the hardware made of it: it rounds down to its unit.

        A locked register is told by an error, by ``locked``, whether the kernel refuses or the
        value just stays.
        """
        package = self._package(device)
        if value is None:
            raise not_removable_error(self.knob, package.name)
        if value <= 0:
            raise actuator_error(
                f"set {package.name} to {value / 1000:g} W", "no package runs on that",
                "Ask for more than 0 W.", Trouble.MALFORMED,
            )  # fmt: skip
        before = self._state(package)
        thing = f"set the power limit of {package.name}"
        if before.requested is None:
            raise powercap.unset_limit_error(thing)
        if value < before.requested and not _enabled(package.limit):
            self._refuse_without_force(package, thing)
        self._put(package, thing, value * 1000)
        self._clock.sleep_until(self._clock.monotonic() + self._answers_after)
        state = wait_for_state(
            self._clock, lambda: self._state(package), lambda now: is_enforced(before, now, value)
        )
        if is_honoured(value, state.requested):
            return state
        if state.requested == before.requested:
            raise powercap.locked_error(thing, "it took a value and kept the old one")
        raise not_honoured_error(self.knob, package.name, value, state.requested)

    def close(self) -> None:
        """Nothing is held open."""

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
            "A package taken offline, or an unloaded driver, takes its zones with it."
            if seen
            else f"See {self._sysfs / POWERCAP_CLASS}.",
            Trouble.RETRY if seen else Trouble.ABSENT,
        )

    def _state(self, package: CpuPackage) -> KnobState:
        requested = _power(package.limit, package.name)
        first = self._first.get(package.id) or requested
        if first is not None:
            self._first[package.id] = first
        specified = _milliwatts(_microwatts(package.limit.path("max_power_uw")))
        minimum = _milliwatts(_microwatts(package.limit.path("min_power_uw")))
        return KnobState(
            CapKey(self.knob, package.id),
            package.name,
            minimum=minimum,
            default=specified or first,
            maximum=max(specified or 0, first or 0) or None,
            requested=requested,
            enforced=_enforced(package, requested),
            aliases=(package.limit.directory.name, package.name),
        )

    def _refuse_without_force(self, package: CpuPackage, thing: str) -> None:
        """Say whether the limits are switched off, or locked, of which the kernel makes the same.

        Writing what is there already tells, and changes nothing.
        """
        present = _microwatts(package.limit.power)
        if present:
            self._put(package, thing, present)
        raise powercap.disabled_error(thing, str(package.limit.directory))

    def _put(self, package: CpuPackage, thing: str, microwatts: int) -> None:
        try:
            self._put_number(package.limit.power, microwatts)
        except OSError as error:
            if error.errno in _LOCK_ERRORS and _microwatts(package.limit.power) is not None:
                how = f"the driver refuses every value ({errno.errorcode[error.errno]})"
                raise powercap.locked_error(thing, how) from None
            raise powercap.powercap_error(thing, error) from None


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
        raise powercap.powercap_error(thing, error) from None
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
    """Whether the zone's limits are in force; a zone that does not tell has no switch."""
    return read_line(limit.enabled) != "0"


def _microwatts(path: Path) -> int | None:
    text = read_line(path)
    return int(text) if text is not None and text.isdigit() else None


def _milliwatts(microwatts: int | None) -> int | None:
    """None for 0 too: parts that specify nothing say 0.

    Rounded up, for the hardware rounds down: what was read can be written back exactly.
    """
    return -(-microwatts // 1000) if microwatts else None
