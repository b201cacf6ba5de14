"""Powercap layouts of further hosts, whose zones a source must tell apart."""

from __future__ import annotations

from dataclasses import replace

from wattspan.emulation import powercap_tree
from wattspan.emulation.powercap_tree import (
    CLIENT_ZONES,
    COARSE_UNIT,
    SERVER_DRAM_UNIT,
    CounterScope,
    EmulatedZone,
    PowercapLayout,
    package_zones,
)

FINE_UNIT = 15_258  # nanojoules a step: 2**-16 J, AMD


def _epyc_zones(socket: int) -> list[EmulatedZone]:
    package, core = CounterScope("package", socket), CounterScope("lead-core", socket)
    directory = f"intel-rapl:{socket}"
    return [
        EmulatedZone(directory, f"package-{socket}", package, step=FINE_UNIT),
        EmulatedZone(f"{directory}:0", "core", core, step=FINE_UNIT),
    ]


def _dies(mirrored: bool, dies: int, sockets: int, *, dram: bool) -> tuple[EmulatedZone, ...]:
    zones = []
    for number in range(sockets * dies):
        socket, die = divmod(number, dies)
        part = (0, 1) if mirrored else (die, dies)
        directory, name = f"intel-rapl:{number:x}", f"package-{socket}-die-{die}"
        # Mirrored dies start where their one counter is; others start anywhere.
        start = 400_000_000 * (socket if mirrored else number) + 1_000_000
        meter = CounterScope("package", socket, *part)
        zones.append(EmulatedZone(directory, name, meter, start=start, spec_watts=180))
        if dram:
            memory = CounterScope("dram", socket, *part)
            zones.append(
                EmulatedZone(f"{directory}:0", "dram", memory, step=SERVER_DRAM_UNIT, start=start)
            )
    return tuple(zones)


_MMIO = EmulatedZone("intel-rapl-mmio:0", "package-0", CounterScope("package"), spec_watts=65)
_LOCKED = tuple(
    replace(zone, locked=bool(zone.spec_watts)) for zone in package_zones(0, "intel-rapl:0")
)
_TPMI = (
    # On these hosts psys registers between the packages, and counts whole joules.
    *package_zones(0, "intel-rapl:0", dram=COARSE_UNIT),
    EmulatedZone("intel-rapl:1", "psys", CounterScope("psys"), step=10**9),
    *package_zones(1, "intel-rapl:2", dram=COARSE_UNIT),
)
_MANY = tuple(
    zone for socket in range(12) for zone in package_zones(socket, f"intel-rapl:{socket:x}")
)
_PSYS = EmulatedZone("intel-rapl:0", "psys", CounterScope("psys"))

LAYOUTS = dict(powercap_tree.LAYOUTS) | {
    layout.name: layout
    for layout in (
        PowercapLayout("epyc-2s", 2, (*_epyc_zones(0), *_epyc_zones(1)), "amd"),
        PowercapLayout("xeon-1s-locked", 1, _LOCKED),  # firmware has locked the limits
        PowercapLayout("multi-die", 2, _dies(mirrored=False, dies=2, sockets=2, dram=True)),
        # All dies show the package's one counter.
        PowercapLayout("mirrored-dies", 1, _dies(True, 4, 1, dram=False), "amd"),
        # The MMIO interface shows the package a second time.
        PowercapLayout("client-mmio", 1, (*CLIENT_ZONES, _MMIO)),
        PowercapLayout("tpmi-2s", 2, _TPMI),
        PowercapLayout("many-sockets", 12, _MANY),  # directory ids reach b
        PowercapLayout("psys-only", 1, (_PSYS,)),
    )
}
