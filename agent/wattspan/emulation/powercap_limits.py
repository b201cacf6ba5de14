"""Power limits of packages: the constraint files of the tree, and what the physics makes of them.

The files are ordinary ones, so what is written to them is looked at when the counters are next
stepped, and only then rounded, refused or obeyed: within one period of the counters (10 ms unless
another was asked for). A kernel rounds and refuses inside the write; a value that is a whole
number of hardware units, as whole watts are, reads back the same on both.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from wattspan.emulation.cpus import CpuLaw
from wattspan.emulation.powercap_tree import EmulatedZone, PowercapTree

UNIT = 125_000  # microwatts: the power unit of nearly every processor
_LARGEST = 0x7FFF * UNIT  # fifteen bits
_SMOOTHING = 100_000_000  # ns over which the draw is averaged that a limit is held against
MIN_SPEED = 0.15
"""The part of its active power that a package spends at its lowest clock. A limit below what that
draws, the idle power included, is not obeyed."""
CLOCK_EXPONENT = 2.4
"""Active power goes with this power of the clock: declared, not measured."""


@dataclass(slots=True)
class _Constraint:
    """One limit of one zone, with its file held open."""

    fd: int
    value: int  # microwatts, as it was last accepted
    text: bytes  # what the file says when it says that


@dataclass(slots=True)
class _Zone:
    zone: EmulatedZone
    enabled_fd: int
    constraints: list[_Constraint] = field(default_factory=list)


class PackageLimits:
    """Reads the limits of every package, and says how much slower they make it."""

    def __init__(self, tree: PowercapTree, law: CpuLaw) -> None:
        self._tree, self._law = tree, law
        self.locked = {zone.directory for zone in tree.layout.zones if zone.locked}
        self._zones: list[_Zone] = []
        self._generation = -1
        self._active = [0.0] * tree.layout.sockets  # mean milliwatts above idle that are wanted
        self._speeds = tuple(1.0 for _ in range(tree.layout.sockets))

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast each socket's CPUs are, 1.0 being full speed."""
        return self._speeds

    def parts(self, elapsed: int, busy: Sequence[int]) -> tuple[float, ...]:
        """The part of its active power that each socket spends, after ``elapsed`` more ns.

        ``busy`` is the CPU time of each socket in them.
        """
        limits = self._limits()
        weight = min(1.0, elapsed / _SMOOTHING)
        parts = []
        for socket, worked in enumerate(busy):
            wanted = self._law.package_active * worked / elapsed
            self._active[socket] += weight * (wanted - self._active[socket])
            parts.append(self._part(self._active[socket], limits[socket]))
        self._speeds = tuple(part ** (1.0 / CLOCK_EXPONENT) for part in parts)
        return tuple(parts)

    def _part(self, active: float, limit: float | None) -> float:
        room = None if limit is None else limit - self._law.package_idle
        if room is None or active <= max(room, 0):
            return 1.0
        return max(MIN_SPEED, room / active)

    def _limits(self) -> list[float | None]:
        """The milliwatts each socket may draw; None where nothing limits it."""
        if self._generation != self._tree.generation:
            self._open()
        by_die: list[dict[int, float]] = [{} for _ in self._active]
        for zone in self._zones:
            limit = self._limit(zone)
            if limit is not None:
                dies, meter = by_die[zone.zone.meter.socket], zone.zone.meter
                dies[meter.die] = min(limit, dies.get(meter.die, limit))
        # A die without a limit leaves its socket without one.
        count = {z.zone.meter.socket: z.zone.meter.dies for z in self._zones}
        return [
            sum(dies.values()) if dies and len(dies) == count.get(socket) else None
            for socket, dies in enumerate(by_die)
        ]

    def _limit(self, zone: _Zone) -> float | None:
        for constraint in zone.constraints:
            self._settle(constraint, zone.zone.directory in self.locked)
        if os.pread(zone.enabled_fd, 8, 0).strip() == b"0":
            return None
        return min(constraint.value for constraint in zone.constraints) / 1000

    def _settle(self, constraint: _Constraint, locked: bool) -> None:
        """Take over what was written, rounded as hardware would; or put back what stood there."""
        text = os.pread(constraint.fd, 32, 0)
        if text == constraint.text or not text:  # nothing new; or somebody is about to write
            return
        written = text.strip()
        if written.isdigit() and not locked:
            value = min(int(written), _LARGEST) // UNIT * UNIT
            constraint.value = value or constraint.value
        constraint.text = b"%d\n" % constraint.value
        if text != constraint.text:
            os.ftruncate(constraint.fd, len(constraint.text))
            os.pwrite(constraint.fd, constraint.text, 0)

    def _open(self) -> None:
        """Open the files of every package that is registered now."""
        self.close()
        self._generation = self._tree.generation
        for zone in self._tree.layout.zones:
            path = self._tree.path(zone.directory)
            if zone.meter.kind != "package" or not (path / "enabled").exists():
                continue
            opened = _Zone(zone, os.open(path / "enabled", os.O_RDONLY | os.O_CLOEXEC))
            for file in sorted(path.glob("constraint_*_power_limit_uw")):
                fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
                text = os.pread(fd, 32, 0)
                opened.constraints.append(_Constraint(fd, int(text), text))
            if opened.constraints:
                self._zones.append(opened)
            else:
                os.close(opened.enabled_fd)

    def close(self) -> None:
        """Let go of the files."""
        for zone in self._zones:
            for fd in (zone.enabled_fd, *(one.fd for one in zone.constraints)):
                os.close(fd)
        self._zones = []
