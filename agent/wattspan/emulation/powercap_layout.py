"""Named powercap trees, as the kernel shows them on real hosts.

A layout is a declaration: zones with the kernel's directory ids, and for each the meter whose
energy it shows. Zones that mirror one hardware counter share a meter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

FINE = 15_258  # nanojoules a step: 2**-16 J, AMD
COARSE = 61_035  # 2**-14 J, most Intel packages
SERVER_DRAM = 15_300  # fixed for the memory of Intel's servers, Haswell-X to Ice Lake-X


@dataclass(frozen=True, slots=True)
class Meter:
    """What a counter counts on the emulated host.

    ``kind`` is package, core, lead-core, uncore, dram or psys; ``die`` of ``dies`` equal parts
    of the socket, where a socket has counters by die.
    """

    kind: str
    socket: int = 0
    die: int = 0
    dies: int = 1


@dataclass(frozen=True, slots=True)
class EmulatedZone:
    """One zone: its directory id, its name, and how its counter behaves.

    The counter counts ``step`` nanojoules at a time and wraps after ``turn`` steps; ``start``
    is where it stands when the host starts, in steps. ``spec_watts`` is PL1's thermal
    specification; 0 for a zone without constraints. ``locked``: firmware keeps its constraints.
    """

    directory: str
    name: str
    meter: Meter
    step: int = COARSE
    turn: int = 2**32
    start: int = 0
    spec_watts: int = 0
    locked: bool = False  # firmware has locked the limits: writes do not stick

    @property
    def max_range(self) -> int:
        """``max_energy_range_uj``, computed as the kernel does."""
        return self.step * (self.turn - 1) // 1000


@dataclass(frozen=True, slots=True)
class PowercapLayout:
    """A host's zones and what it says of its processors."""

    name: str
    summary: str
    sockets: int
    zones: tuple[EmulatedZone, ...]
    vendor: str = "intel"


def zone_at(layout: PowercapLayout, directory: str) -> EmulatedZone:
    """The zone with this directory id; KeyError names those there are."""
    for zone in layout.zones:
        if zone.directory == directory:
            return zone
    raise KeyError(f"{directory}: {layout.name} has {[zone.directory for zone in layout.zones]}")


def _package(socket: int, directory: str, *, dram: int | None = SERVER_DRAM) -> list[EmulatedZone]:
    """An Intel server's package with its memory; no memory for ``dram=None``."""
    zones = [EmulatedZone(directory, f"package-{socket}", Meter("package", socket), spec_watts=270)]
    if dram is not None:
        zones.append(EmulatedZone(f"{directory}:0", "dram", Meter("dram", socket), step=dram))
    return zones


def _client() -> list[EmulatedZone]:
    return [
        EmulatedZone("intel-rapl:0", "package-0", Meter("package"), spec_watts=65),
        EmulatedZone("intel-rapl:0:0", "core", Meter("core")),
        EmulatedZone("intel-rapl:0:1", "uncore", Meter("uncore")),
        EmulatedZone("intel-rapl:1", "psys", Meter("psys")),
    ]


def _dies(mirrored: bool, dies: int, sockets: int, *, dram: bool) -> list[EmulatedZone]:
    zones = []
    for number in range(sockets * dies):
        socket, die = divmod(number, dies)
        part = (0, 1) if mirrored else (die, dies)
        directory, name = f"intel-rapl:{number:x}", f"package-{socket}-die-{die}"
        # Twins stand where their one counter stands; others came from anywhere.
        start = 400_000_000 * (socket if mirrored else number) + 1_000_000
        meter = Meter("package", socket, *part)
        zones.append(EmulatedZone(directory, name, meter, start=start, spec_watts=180))
        if dram:
            memory = Meter("dram", socket, *part)
            zones.append(
                EmulatedZone(f"{directory}:0", "dram", memory, step=SERVER_DRAM, start=start)
            )
    return zones


def _build() -> Mapping[str, PowercapLayout]:
    epyc = [
        zone
        for socket in range(2)
        for zone in (
            EmulatedZone(
                f"intel-rapl:{socket}", f"package-{socket}", Meter("package", socket), step=FINE
            ),
            EmulatedZone(f"intel-rapl:{socket}:0", "core", Meter("lead-core", socket), step=FINE),
        )
    ]
    tpmi = [
        # On these hosts psys registers between the packages, and counts whole joules.
        *_package(0, "intel-rapl:0", dram=COARSE),
        EmulatedZone("intel-rapl:1", "psys", Meter("psys"), step=10**9),
        *_package(1, "intel-rapl:2", dram=COARSE),
    ]
    mmio = EmulatedZone("intel-rapl-mmio:0", "package-0", Meter("package"), spec_watts=65)
    many = [zone for socket in range(12) for zone in _package(socket, f"intel-rapl:{socket:x}")]
    layouts = (
        PowercapLayout(
            "xeon-2s",
            "two-socket Xeon, memory with counters of its own",
            2,
            (*_package(0, "intel-rapl:0"), *_package(1, "intel-rapl:1")),
        ),
        PowercapLayout(
            "xeon-1s",
            "one-socket Xeon, memory with a counter of its own",
            1,
            tuple(_package(0, "intel-rapl:0")),
        ),
        PowercapLayout(
            "xeon-1s-locked",
            "one-socket Xeon whose power limits the firmware has locked",
            1,
            tuple(
                replace(zone, locked=True) if zone.spec_watts else zone
                for zone in _package(0, "intel-rapl:0")
            ),
        ),
        PowercapLayout(
            "wrapping",
            "two-socket Xeon whose counters wrap every minute or so, as none does",
            2,
            tuple(
                replace(zone, turn=2**26 if zone.name != "dram" else 2**25)
                for socket in range(2)
                for zone in _package(socket, f"intel-rapl:{socket}")
            ),
        ),
        PowercapLayout(
            "multi-die",
            "two sockets of two dies, each die with its own counters",
            2,
            tuple(_dies(mirrored=False, dies=2, sockets=2, dram=True)),
        ),
        PowercapLayout(
            "mirrored-dies",
            "one socket of four dies that all show the package's one counter",
            1,
            tuple(_dies(mirrored=True, dies=4, sockets=1, dram=False)),
            vendor="amd",
        ),
        PowercapLayout(
            "client-mmio",
            "client whose package the MMIO interface shows a second time",
            1,
            (*_client(), mmio),
        ),
        PowercapLayout(
            "tpmi-2s",
            "two-socket Xeon with TPMI: package, dram, and one psys in joules",
            2,
            tuple(tpmi),
        ),
        PowercapLayout(
            "epyc-2s", "two-socket EPYC: package and one core's counter", 2, tuple(epyc), "amd"
        ),
        PowercapLayout("client", "client with psys, core and uncore", 1, tuple(_client())),
        PowercapLayout("many-sockets", "twelve sockets: directory ids reach b", 12, tuple(many)),
        PowercapLayout(
            "psys-only",
            "a platform counter and nothing else",
            1,
            (EmulatedZone("intel-rapl:0", "psys", Meter("psys")),),
        ),
    )
    return MappingProxyType({layout.name: layout for layout in layouts})


LAYOUTS: Mapping[str, PowercapLayout] = _build()
