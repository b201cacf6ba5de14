"""A sysfs tree of powercap zones and power meters in a directory, and layouts of real hosts.

A layout is a declaration: zones with the kernel's directory ids, and for each the meter whose
energy it shows. Zones that mirror one hardware counter share a meter.

The tree is built like the kernel's: ``class/powercap`` links into ``devices/virtual/powercap``,
every zone links back to its subsystem, and the CPU topology is there as well, so that programs
with hard-coded paths run on it unchanged once it is mounted over ``/sys`` in a namespace of
theirs. Counters are written in place, in a fixed width, because readers hold descriptors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from wattspan.model import MILLISECOND

COARSE_UNIT = 61_035  # nanojoules a step: 2**-14 J, most Intel packages
SERVER_DRAM_UNIT = 15_300  # fixed for the memory of Intel's servers, Haswell-X to Ice Lake-X


@dataclass(frozen=True, slots=True)
class CounterScope:
    """The scope of a counter on the emulated host.

    ``kind`` is package, core, lead-core, uncore, dram or psys; ``die`` of ``dies`` equal parts
    of the socket, where a socket has counters by die.
    """

    kind: str
    socket: int = 0
    die: int = 0
    dies: int = 1


@dataclass(frozen=True, slots=True)
class EmulatedZone:
    """One zone: its directory id, its name, and the properties of its counter.

    The counter counts ``step`` nanojoules at a time and wraps after ``turn`` steps; ``start`` is
    its first value, in steps. ``spec_watts`` is PL1's thermal specification; 0 for a zone without
    constraints. ``locked``: firmware keeps its constraints.
    """

    directory: str
    name: str
    meter: CounterScope
    step: int = COARSE_UNIT
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
    """A host's zones and processors."""

    name: str
    sockets: int
    zones: tuple[EmulatedZone, ...]
    vendor: str = "intel"


def zone_at(layout: PowercapLayout, directory: str) -> EmulatedZone:
    """The zone with this directory id; KeyError names those there are."""
    for zone in layout.zones:
        if zone.directory == directory:
            return zone
    raise KeyError(f"{directory}: {layout.name} has {[zone.directory for zone in layout.zones]}")


def package_zones(
    socket: int, directory: str, *, dram: int | None = SERVER_DRAM_UNIT
) -> list[EmulatedZone]:
    """An Intel server's package with its memory; no memory for ``dram=None``."""
    zones = [
        EmulatedZone(
            directory, f"package-{socket}", CounterScope("package", socket), spec_watts=270
        )
    ]
    if dram is not None:
        zones.append(
            EmulatedZone(f"{directory}:0", "dram", CounterScope("dram", socket), step=dram)
        )
    return zones


_XEON = (*package_zones(0, "intel-rapl:0"), *package_zones(1, "intel-rapl:1"))
CLIENT_ZONES = (
    EmulatedZone("intel-rapl:0", "package-0", CounterScope("package"), spec_watts=65),
    EmulatedZone("intel-rapl:0:0", "core", CounterScope("core")),
    EmulatedZone("intel-rapl:0:1", "uncore", CounterScope("uncore")),
    EmulatedZone("intel-rapl:1", "psys", CounterScope("psys")),
)
LAYOUTS: Mapping[str, PowercapLayout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            PowercapLayout("xeon-2s", 2, _XEON),
            PowercapLayout("xeon-1s", 1, tuple(package_zones(0, "intel-rapl:0"))),
            PowercapLayout("client", 1, CLIENT_ZONES),
        )
    }
)

NO_COUNTERS = PowercapLayout("none", 1, ())
"""One socket of a processor without powercap, such as an ARM server's."""

_DEVICES = "devices/virtual/powercap"
_CLASS = "class/powercap"
_CPUS = "devices/system/cpu"
_WIDTH = 24  # of a counter file: more than any value, so that no write changes its length
_MODALIAS = {"intel": "ven0000fam0006mod008F", "amd": "ven0002fam0019mod0001"}


class TreeError(ValueError):
    """The directory cannot become an emulated sysfs."""


class PowercapTree:
    """The tree of one layout. ``root`` represents ``/sys``; it is created, and must be empty.

    ``cpus`` are spread over the sockets in consecutive blocks; each socket gets at least one.
    """

    def __init__(self, root: Path, layout: PowercapLayout, *, cpus: int | None = None) -> None:
        root = root.resolve()
        if root.is_relative_to("/sys") or root.is_relative_to("/proc"):
            raise TreeError(f"{root} belongs to the kernel; choose an empty directory.")
        if root.exists() and any(root.iterdir()):
            raise TreeError(f"{root} is not empty; choose an empty directory.")
        self.root = root
        self.layout = layout
        self.socket_of_cpu = _spread(max(cpus or os.cpu_count() or 1, layout.sockets), layout)
        self._directory_of = {zone.directory: zone.directory for zone in layout.zones}
        self.generation = 0  # moves when zones come or go
        self._counters: dict[str, int] = {}  # write descriptors, by the layout's directory id
        self._build()

    def path(self, zone: str) -> Path:
        """The real directory of ``zone``, by the layout's directory id, wherever it is now."""
        return self.root / _DEVICES / _below_control_type(self._directory_of[zone])

    def show(self, zone: str, microjoules: int) -> None:
        """Let the counter of ``zone`` read ``microjoules``. Nothing happens if it has vanished."""
        fd = self._counters.get(zone)
        if fd is not None:
            os.pwrite(fd, (b"%d" % microjoules).ljust(_WIDTH, b"\n"), 0)

    def add(self, zone: EmulatedZone) -> None:
        """Register ``zone``."""
        self.generation += 1
        path = self.path(zone.directory)
        path.mkdir(parents=True, exist_ok=True)
        _write(path / "name", zone.name)
        _write(path / "max_energy_range_uj", str(zone.max_range))
        _write(path / "enabled", "1")
        _write(path / "uevent", "")
        if zone.spec_watts:
            for number, name, watts in ((0, "long_term", 1.0), (1, "short_term", 1.2)):
                _write(path / f"constraint_{number}_name", name)
                # In eighths of a watt, as hardware keeps it.
                limit = int(zone.spec_watts * watts * 8) * 125_000
                _write(path / f"constraint_{number}_power_limit_uw", str(limit))
                _write(path / f"constraint_{number}_time_window_us", "999424")
            _write(path / "constraint_0_max_power_uw", str(zone.spec_watts * 1_000_000))
        self._link(path)
        self.open_counter(zone.directory)

    def open_counter(self, zone: str) -> None:
        """A fresh counter file for ``zone``, a new inode, showing 0."""
        self.close_counter(zone)
        path = self.path(zone) / "energy_uj"
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._counters[zone] = os.open(path, flags, 0o400)
        self.show(zone, 0)

    def close_counter(self, zone: str) -> None:
        fd = self._counters.pop(zone, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close the files; the tree stays."""
        for zone in list(self._counters):
            self.close_counter(zone)

    # ---------------------------------------------------------------------------- building

    def _build(self) -> None:
        (self.root / _CLASS).mkdir(parents=True)
        for control_type in dict.fromkeys(z.directory.split(":")[0] for z in self.layout.zones):
            path = self.root / _DEVICES / control_type
            path.mkdir(parents=True)
            _write(path / "enabled", "1")
            _write(path / "uevent", "")
            self._link(path)
        for zone in self.layout.zones:
            self.add(zone)
        cpus = self.root / _CPUS
        cpus.mkdir(parents=True)
        last = len(self.socket_of_cpu) - 1
        for name in ("present", "online", "possible"):
            _write(cpus / name, f"0-{last}" if last else "0")
        _write(cpus / "modalias", f"cpu:type:x86,{_MODALIAS[self.layout.vendor]}:feature:,0000")
        for cpu, socket in enumerate(self.socket_of_cpu):
            topology = cpus / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            _write(topology / "physical_package_id", str(socket))
            _write(topology / "core_id", str(cpu))
            _write(topology / "die_id", "0")

    def _link(self, path: Path) -> None:
        """The links between a device and its class, as relative as the kernel's."""
        by_class = self.root / _CLASS
        _symlink(path / "subsystem", os.path.relpath(by_class, path))
        _symlink(by_class / path.name, os.path.relpath(path, by_class))


def _below_control_type(directory: str) -> Path:
    """``intel-rapl:0:1`` is ``intel-rapl/intel-rapl:0/intel-rapl:0:1``."""
    parts = directory.split(":")
    return Path(*(":".join(parts[: depth + 1]) for depth in range(len(parts))))


def _spread(cpus: int, layout: PowercapLayout) -> tuple[int, ...]:
    return tuple(cpu * layout.sockets // cpus for cpu in range(cpus))


def _write(path: Path, line: str) -> None:
    path.write_text(f"{line}\n" if line else "")


def _symlink(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


_METER_CLASS = "class/hwmon"
_METER_DEVICES = "devices/LNXSYSTM:00"


@dataclass(frozen=True, slots=True)
class EmulatedMeter:
    """A power meter: its label, the energy that it measures, and its interval in nanoseconds."""

    label: str
    scope: CounterScope
    interval: int = 50 * MILLISECOND


class PowerMeters:
    """ACPI power meters below ``root``, which represents ``/sys``, as the kernel shows them.

    A meter shows the mean power of its last whole interval. Its files are in the directory of its
    device, where older kernels have them. Not thread-safe.
    """

    def __init__(self, root: Path, meters: Sequence[EmulatedMeter]) -> None:
        self._meters = meters
        self._files: list[int] = []
        self._last: list[tuple[int, int] | None] = [None] * len(meters)  # time, picojoules
        for number, meter in enumerate(meters):
            device = root / _METER_DEVICES / f"ACPI000D:{number:02x}"
            hwmon = device / f"hwmon/hwmon{number}"
            hwmon.mkdir(parents=True)
            (hwmon / "device").symlink_to("../..")
            for folder in (hwmon, device):
                (folder / "name").write_text("power_meter\n")
            (device / "power1_oem_info").write_text(f"{meter.label}\n")
            (device / "power1_average_interval").write_text(f"{meter.interval // MILLISECOND}\n")
            by_class = root / _METER_CLASS
            by_class.mkdir(parents=True, exist_ok=True)
            (by_class / hwmon.name).symlink_to(os.path.relpath(hwmon, by_class))
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._files.append(os.open(device / "power1_average", flags, 0o444))
            self._show(number, 0)

    def step(self, at: int, picojoules: Callable[[CounterScope], int]) -> None:
        """Time has come to ``at``; a meter whose interval has passed shows its mean power."""
        for number, meter in enumerate(self._meters):
            last, energy = self._last[number], picojoules(meter.scope)
            if last is None:
                self._last[number] = (at, energy)
            elif at - last[0] >= meter.interval:
                # Picojoules over nanoseconds are milliwatts.
                self._show(number, 1000 * (energy - last[1]) // (at - last[0]))
                self._last[number] = (at, energy)

    def _show(self, number: int, microwatts: int) -> None:
        os.pwrite(self._files[number], (b"%d" % microwatts).ljust(_WIDTH, b"\n"), 0)

    def close(self) -> None:
        """Close the files; the tree stays."""
        for fd in self._files:
            os.close(fd)
        self._files = []
