"""A powercap zone, and the place in the hardware that its names give it.

Telling whether two zones show one and the same hardware counter.

Some processors have one energy counter for the package and let every die read it; the kernel
then shows a zone a die, and summing them counts everything twice or four times. Names do not
tell these from dies that have counters of their own. Values do: read in turns, a, b, a, b, a,
one counter gives one non-decreasing sequence, within the joule it can gain meanwhile. Two
counters of 262 kJ do so by chance about once in a hundred thousand hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from wattspan.model import Milliwatts


@dataclass(frozen=True, slots=True)
class Zone:
    """One zone as the kernel shows it.

    ``directory`` is the kernel's name for it (``intel-rapl:0:1``), ``name`` what its ``name``
    file says (``dram``). ``max_range`` is ``max_energy_range_uj``; None where it is missing or
    nonsense. ``max_power`` is the largest power its constraints specify. ``samples`` are
    counter values taken in rounds over all zones, so that twins can be told.
    """

    directory: str
    name: str
    max_range: int | None = None
    max_power: Milliwatts | None = None
    samples: tuple[int, ...] = ()

    @property
    def control_type(self) -> str:
        return self.directory.partition(":")[0]

    @property
    def parent(self) -> str | None:
        """The directory of the zone above; None for a zone directly under its control type."""
        above = self.directory.rpartition(":")[0]
        return above if ":" in above else None


class ZoneKind(StrEnum):
    """What a zone measures, as far as its name tells."""

    PACKAGE = "package"
    DIE = "die"
    CORE = "core"
    UNCORE = "uncore"
    DRAM = "dram"
    PLATFORM = "psys"
    OTHER = "other"


_PACKAGE = re.compile(r"package-(\d+)")
_DIE = re.compile(r"package-(\d+)-die-(\d+)")
_PLATFORM = re.compile(r"psys(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class ZoneLocation:
    """Where a zone stands: ``path`` is its names from the top, ``package-0/dram``.

    Zones of different control types that show the same thing have equal places.
    """

    path: str
    kind: ZoneKind
    socket: int | None = None
    die: int | None = None

    @classmethod
    def of(cls, directory: str, zones: Mapping[str, Zone]) -> ZoneLocation | None:
        """The place of ``directory``; None if a zone above it is not among ``zones``."""
        names: list[str] = []
        above: str | None = directory
        while above is not None:
            zone = zones.get(above)
            if zone is None:
                return None
            names.insert(0, zone.name)
            above = zone.parent
        kind, socket, die = _parse_top_level(names[0])
        if len(names) > 1:
            kind = _SUBZONE_KINDS.get(names[-1], ZoneKind.OTHER)
        return cls("/".join(names), kind, socket, die)

    @property
    def above(self) -> str:
        """The path of the zone above; empty at the top."""
        return self.path.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """The stream of usage by which its energy is charged."""
        charged_by_socket = self.kind in {ZoneKind.PACKAGE, ZoneKind.DIE, ZoneKind.DRAM}
        return f"cpu:{self.socket}" if charged_by_socket and self.socket is not None else "cpu"


_SUBZONE_KINDS = {"core": ZoneKind.CORE, "uncore": ZoneKind.UNCORE, "dram": ZoneKind.DRAM}


def _parse_top_level(name: str) -> tuple[ZoneKind, int | None, int | None]:
    """Kind, socket and die of a zone directly under its control type."""
    if match := _DIE.fullmatch(name):
        return ZoneKind.DIE, int(match[1]), int(match[2])
    if match := _PACKAGE.fullmatch(name):
        return ZoneKind.PACKAGE, int(match[1]), None
    if match := _PLATFORM.fullmatch(name):
        # The kernel numbers the platform counter of every package but the first.
        return ZoneKind.PLATFORM, int(match[1] or 0), None
    return _SUBZONE_KINDS.get(name, ZoneKind.OTHER), None, None


def natural_key(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts ``package-2`` before ``package-10``."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)
    )


MirrorPair = tuple[str, str]  # ids of two domains; the first stands for both

_TOLERANCE = 1_000_000  # microjoules: some 3 ms at 350 W, far longer than the rounds take


def is_same_counter(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether samples taken in turns (first, second, first, second, ...) are of one counter.

    One undisturbed stretch a <= b <= a' is enough: a writer that is not atomic over both zones
    (an emulated host) may spoil one. A counter that still stands at zero proves nothing.
    """
    turns = [value for pair in zip(first, second, strict=False) for value in pair]
    return any(
        0 < low <= between <= high <= low + _TOLERANCE
        for low, between, high in zip(turns, turns[1:], turns[2:], strict=False)
    )


def find_mirrors(zones: Iterable[tuple[str, ZoneLocation, Zone]]) -> frozenset[MirrorPair]:
    """The pairs among ``zones`` (domain id, place, zone) whose counters are one.

    Only what stands in different dies of one socket under the same name is compared: nothing
    else is ever built that way, and every comparison is a chance to be wrong.
    """
    ordered = sorted(
        (entry for entry in zones if entry[1].die is not None),
        key=lambda entry: (entry[1].socket, entry[1].die, entry[1].path),
    )
    return frozenset(
        (identity, other_identity)
        for (identity, place, zone), (other_identity, other_place, other) in combinations(
            ordered, 2
        )
        if _comparable(place, other_place) and is_same_counter(zone.samples, other.samples)
    )


def _comparable(one: ZoneLocation, other: ZoneLocation) -> bool:
    return (
        one.socket == other.socket
        and one.die != other.die
        and one.kind is other.kind
        and one.kind in {ZoneKind.DIE, ZoneKind.DRAM}
    )
