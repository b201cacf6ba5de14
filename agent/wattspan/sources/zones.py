"""A powercap zone, and the place in the hardware that its names give it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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


class Kind(StrEnum):
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
class Place:
    """Where a zone stands: ``path`` is its names from the top, ``package-0/dram``.

    Zones of different control types that show the same thing have equal places.
    """

    path: str
    kind: Kind
    socket: int | None = None
    die: int | None = None

    @classmethod
    def of(cls, directory: str, zones: Mapping[str, Zone]) -> Place | None:
        """The place of ``directory``; None if a zone above it is not among ``zones``."""
        names: list[str] = []
        above: str | None = directory
        while above is not None:
            zone = zones.get(above)
            if zone is None:
                return None
            names.insert(0, zone.name)
            above = zone.parent
        kind, socket, die = _top(names[0])
        if len(names) > 1:
            kind = _BELOW.get(names[-1], Kind.OTHER)
        return cls("/".join(names), kind, socket, die)

    @property
    def above(self) -> str:
        """The path of the zone above; empty at the top."""
        return self.path.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """The stream of usage by which its energy is charged."""
        charged_by_socket = self.kind in {Kind.PACKAGE, Kind.DIE, Kind.DRAM}
        return f"cpu:{self.socket}" if charged_by_socket and self.socket is not None else "cpu"


_BELOW = {"core": Kind.CORE, "uncore": Kind.UNCORE, "dram": Kind.DRAM}


def _top(name: str) -> tuple[Kind, int | None, int | None]:
    """Kind, socket and die of a zone directly under its control type."""
    if match := _DIE.fullmatch(name):
        return Kind.DIE, int(match[1]), int(match[2])
    if match := _PACKAGE.fullmatch(name):
        return Kind.PACKAGE, int(match[1]), None
    if match := _PLATFORM.fullmatch(name):
        # The kernel numbers the platform counter of every package but the first.
        return Kind.PLATFORM, int(match[1] or 0), None
    return _BELOW.get(name, Kind.OTHER), None, None


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts ``package-2`` before ``package-10``."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)
    )
