"""Meaning of hwmon sensors: which part of the hardware each measures, and which may be summed.

The labels are those of the drivers' sources and documents:

- ``power_meter`` with the labels of NVIDIA Grace: ``CPU Power Socket N`` and ``SysIO Power Socket
  N`` are rails within ``Grace Power Socket N``, which is within ``Module Power Socket N``. The GPU
  of a Grace Hopper module has its own counter in NVML.
- ``power_meter`` with another label or none: the whole machine with its GPUs, so it is not summed.
- ``ina3221``: the supply rails of a Jetson module, named by their loads. NVIDIA's kernels before
  JetPack 5 have a driver of their own, ``ina3221x``, which shows the same rails to IIO.
- ``i915``, ``xe``: energy counters of discrete Intel GPUs. ``energy1`` is the card; the package,
  the memory (``xe``) and the tiles (``i915_gtN``) are within it.
- ``apm_xgene`` (X-Gene, Ampere Altra): ``CPU power`` and ``IO power`` of the processor.
- ``altra_hwmon`` (Ampere): ``Core Energy NNN``, one counter for each core, read as their sum.
- ``amd_energy``, ``zenergy``: ``EsocketN``, the counter of a socket; its cores are within it.
- ``amd_hsmp_hwmon``, ``fam15h_power``: the power of an AMD package.
- ``zenpower``: ``RAPL_P_Package``, the power of a package from its counter. Its currents
  (``SVI2_P_Core``) have factors found by experiment, so they have no known meaning.
- ``ibmpowernv`` (POWER9): ``Chip N``, the processor with that id; ``Chip N Vdd`` and ``Vdn`` are
  rails within it; ``System`` is the machine.

The meaning of any other sensor comes from the configuration.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from wattspan.model import (
    CPU_TIME_PROXY,
    MILLISECOND,
    Domain,
    Failure,
    HwType,
    Milliwatts,
    ModelEnum,
    Nanoseconds,
    Provenance,
    Thing,
    ThingKind,
    Trouble,
)

NAME = "hwmon"
READ_INTERVAL = 100 * MILLISECOND
"""Interval of the reads of a chip with counters of energy only."""

POWER_READ_INTERVAL = 55 * MILLISECOND
"""Interval of the reads of a chip with a sensor of power, which shows nothing between two reads.

The kernel's acpi_power_meter keeps a value for the ``sampling_time`` of the firmware, in whole
jiffies, and shows it again until then; the file system does not tell this time. It is 50 ms for
NVIDIA Grace, as is the interval of its averages. So each read shows a new average of Grace, over
50 of 55 ms; faster reads would show every other average twice.

A sensor that counts is read so often at rest, too: 18 times a second, as long as no other measures
the same part. Others are read with the samples.

The interval has no simple ratio to the ticks of the agent: a sensor that is read at every tick
shows the work of the agent itself always or never.
"""


class SensorQuantity(ModelEnum):
    """The quantity that a sensor's files show."""

    ENERGY = "energy"  # microjoules since some time
    AVERAGE_POWER = "average power"  # microwatts, over an interval that ends now
    POWER = "power"  # microwatts now
    CURRENT = "voltage and current"  # millivolts and milliamperes now


RAIL_OFFSET = 100
"""Milliamperes below 0 that a rail at rest may show: 80 uV, the offset of an INA3221, at 1 mohm."""


@dataclass(frozen=True, slots=True)
class Sensor:
    """One sensor of a hwmon chip.

    ``device`` is the directory name of the chip's device, such as a PCI address, which survives
    renumbering. ``channel`` is the prefix of the sensor's files, such as ``power1``. ``interval``
    is that of an average. ``processor`` is that around a GPU (an APU), if its power is that of
    both.
    """

    chip: str
    device: str
    channel: str
    label: str
    quantity: SensorQuantity
    interval: int = 0  # nanoseconds
    processor: Thing | None = None

    @property
    def title(self) -> str:
        """The label, or the channel of a sensor without one."""
        return self.label or self.channel

    @property
    def least(self) -> int:
        """The least value of its files; one below 0 is a rail at rest, and no power."""
        return -RAIL_OFFSET if self.quantity is SensorQuantity.CURRENT else 0

    @property
    def key(self) -> str:
        """``CHIP/LABEL``, by which the configuration names the sensor."""
        return f"{self.chip}/{self.title}"

    @property
    def names(self) -> tuple[str, ...]:
        """All names that the configuration may use, those of one device first.

        ``CHIP@DEVICE/LABEL``, ``CHIP@DEVICE/CHANNEL``, ``CHIP/LABEL`` and ``CHIP/CHANNEL``.
        """
        chips, titles = (f"{self.chip}@{self.device}", self.chip), (self.title, self.channel)
        return tuple(f"{chip}/{title}" for chip in chips for title in titles)


class HardwarePart(ModelEnum):
    """The part of the hardware that a sensor measures."""

    CPU = "cpu"
    MEMORY = "memory"
    GPU = "gpu"
    SUPPLY = "supply"  # a rail with other loads than these
    MACHINE = "machine"  # all of the others


@dataclass(frozen=True, slots=True)
class Meaning:
    """A rule's result: the part, its socket, the sensors of the same device that contain it.

    ``package``: ``socket`` is a package id of the kernel, not a number. ``machine``: the meaning of
    a meter of the machine to which the configuration gives another part. It measures as much as
    before, so it is summed only where nothing that it contains is.
    """

    part: HardwarePart
    why: str
    socket: int | None = None
    within: tuple[str, ...] = ()  # titles, or a chip for the first sensor of another chip
    summed: bool = True
    whole: bool = False  # all of the socket or the card, not a rail of it
    memory: bool = False  # the memory of the socket is within it
    package: bool = False
    machine: Meaning | None = None


_ROLE = re.compile(r"(?:cpu(?::\d{1,9})?|memory|gpu|machine|ignore)", re.ASCII)


def role_fault(role: str) -> str:
    """The reason why ``role`` is invalid in the configuration; "" if it is valid."""
    if _ROLE.fullmatch(role):
        return ""
    return f"{role!r} is none of cpu, cpu:SOCKET, memory, gpu, machine and ignore"


def _configured(role: str, known: Meaning | None) -> Meaning:
    part, _, socket = role.partition(":")
    machine = known if known is not None and known.part is HardwarePart.MACHINE else None
    return Meaning(
        HardwarePart(part),
        "by sources.hwmon.sensors",
        socket=int(socket) if socket else None,
        summed=part != "machine",
        whole=machine is not None,
        machine=None if socket else machine,
    )


_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_GRACE = re.compile(r"(Module|Grace|CPU|SysIO) Power Socket (\d{1,9})", re.ASCII)
_MACHINE = Meaning(HardwarePart.MACHINE, "the whole machine, GPUs included", summed=False)


def _power_meter(sensor: Sensor) -> Meaning:
    match = _GRACE.fullmatch(sensor.label)
    if match is None:
        return _MACHINE
    socket = int(match[2])
    grace, module = f"Grace Power Socket {socket}", f"Module Power Socket {socket}"
    if match[1] == "Module":
        return Meaning(HardwarePart.MACHINE, "the module, its GPU included", socket, summed=False)
    if match[1] == "Grace":
        why = f"socket {socket}'s processor with its memory and regulators"
        return Meaning(HardwarePart.CPU, why, socket, within=(module,), whole=True, memory=True)
    what = "cores" if match[1] == "CPU" else "input and output"
    return Meaning(HardwarePart.CPU, f"socket {socket}'s {what}", socket, within=(grace, module))


IIO_CHIP = "ina3221x"
_TOTAL_RAILS = ("VDD_IN", "VIN", "VDD_SYS_IN", "POM_5V_IN")
_MEMORY_LOADS = ("DDR", "DRAM", "VDDQ", "VDDRQ")


def _jetson_rail(sensor: Sensor) -> Meaning | None:
    label = sensor.label.upper()
    loads = label.split("_")
    if label in _TOTAL_RAILS:
        return Meaning(HardwarePart.MACHINE, "the module's input", summed=False)
    if "CPU" in loads:
        shared = " and GPU" if "GPU" in loads else ""
        return Meaning(HardwarePart.CPU, f"the rail of CPU{shared}", within=_TOTAL_RAILS)
    if "GPU" in loads:
        return Meaning(HardwarePart.GPU, "the rail of the GPU", within=_TOTAL_RAILS)
    if any(load.startswith(_MEMORY_LOADS) for load in loads):
        return Meaning(HardwarePart.MEMORY, "the rail of the memory", within=_TOTAL_RAILS)
    if "SOC" in loads or "CV" in loads:
        return Meaning(HardwarePart.SUPPLY, "a rail of the system on a chip", within=_TOTAL_RAILS)
    return None


def _intel_gpu(sensor: Sensor) -> Meaning | None:
    if sensor.quantity is not SensorQuantity.ENERGY:
        return None  # the power of the same parts, or a limit
    if sensor.channel == "energy1" and sensor.chip in ("i915", "xe"):
        return Meaning(HardwarePart.GPU, "the card's own counter", whole=True)
    whole = "i915" if sensor.chip.startswith("i915_gt") else "xe"
    return Meaning(HardwarePart.GPU, f"the card's {sensor.title}", within=(whole,))


CORE_ENERGY = re.compile(r"Core Energy \d+", re.ASCII)
"""Labels of Ampere's counters of single cores: a part of the processor each."""

ALTRA_CORES = "Core Energy"
"""The label of the sensor that stands for all of them."""

_CPU_POWER = "CPU power"
_ESOCKET = re.compile(r"Esocket(\d+)", re.ASCII)
_ZEN_PACKAGE = re.compile(r"(?:cpu(\d+) )?RAPL_P_Package", re.ASCII)
_POWER_CHIP = re.compile(r"(Chip (\d+))(?: (Vdd|Vdn))?", re.ASCII)


def _xgene(sensor: Sensor) -> Meaning | None:
    if sensor.label == _CPU_POWER:
        return Meaning(HardwarePart.CPU, "the processor's cores with their caches")
    if sensor.label == "IO power":
        return Meaning(HardwarePart.SUPPLY, "the processor's input and output")
    return None


def _altra(sensor: Sensor) -> Meaning | None:
    if sensor.label != ALTRA_CORES:
        return None
    return Meaning(HardwarePart.CPU, "the counters of all cores", within=("apm_xgene",))


def _amd_energy(sensor: Sensor) -> Meaning | None:
    match = _ESOCKET.fullmatch(sensor.label)
    if match is None:
        return None
    why = f"socket {match[1]}'s counter, its cores included"
    return Meaning(HardwarePart.CPU, why, int(match[1]), whole=True)


def _amd_package(sensor: Sensor) -> Meaning | None:
    # The device is a node of the PCI bus or one for all packages: neither names a socket.
    return Meaning(HardwarePart.CPU, "the power of a package")


def _zenpower(sensor: Sensor) -> Meaning | None:
    match = _ZEN_PACKAGE.fullmatch(sensor.label)
    if match is None:
        return None
    socket = None if match[1] is None else int(match[1])
    whole = socket is not None
    return Meaning(HardwarePart.CPU, "the power of a package", socket, whole=whole)


def _powernv(sensor: Sensor) -> Meaning | None:
    if sensor.label == "System":
        return _MACHINE
    match = _POWER_CHIP.fullmatch(sensor.label)
    if match is None:
        return None
    if match[3] is None:
        why = f"processor {match[2]} with its rails"
        return Meaning(HardwarePart.CPU, why, int(match[2]), package=True, whole=True)
    why = f"rail {match[3]} of processor {match[2]}"
    return Meaning(HardwarePart.CPU, why, int(match[2]), within=(match[1],), package=True)


_RULES: Mapping[str, Callable[[Sensor], Meaning | None]] = {
    "power_meter": _power_meter,
    "ina3221": _jetson_rail,
    IIO_CHIP: _jetson_rail,
    "i915": _intel_gpu,
    "xe": _intel_gpu,
    "apm_xgene": _xgene,
    "altra_hwmon": _altra,
    "amd_energy": _amd_energy,
    "zenergy": _amd_energy,
    "amd_hsmp_hwmon": _amd_package,
    "fam15h_power": _amd_package,
    "zenpower": _zenpower,
    "ibmpowernv": _powernv,
}


def meaning_of(sensor: Sensor, roles: Mapping[str, str]) -> Meaning | None:
    """The meaning of a sensor by ``roles``, which maps names to roles, else by its chip.

    None if it is unknown, or ignored by configuration.
    """
    rule = _intel_gpu if sensor.chip.startswith("i915_gt") else _RULES.get(sensor.chip)
    known = None if rule is None else rule(sensor)
    role = next((roles[name] for name in sensor.names if name in roles), None)
    if role is None:
        return known
    return None if role == "ignore" else _configured(role, known)


def name_faults(sensors: Collection[Sensor], roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The configured names that no sensor has, or CPUs or memory of several devices; and why."""
    present = dict.fromkeys(sensor.key for sensor in sensors)
    known = {name for sensor in sensors for name in sensor.names}
    named: dict[str, dict[str, str]] = {}  # sensors by name and device
    for sensor in sensors:
        if used := next((name for name in sensor.names if name in roles), ""):
            named.setdefault(used, {})[sensor.device] = sensor.names[0]
    for name, role in roles.items():
        same = [*named.get(name, {}).values()]
        if name not in known:
            nearest = difflib.get_close_matches(name, present, MAX_NAMED, 0.5)
            found = ", ".join(nearest or [*present][:MAX_NAMED]) or "none at all"
            yield name, f"no sensor has this name (found: {found})"
        elif len(same) > 1 and role.startswith(("cpu", "memory")):
            yield name, f"{len(same)} sensors have this name ({', '.join(same[:MAX_NAMED])})"


MAX_NAMED = 4  # sensors in a message


_HW_TYPES = {
    HardwarePart.CPU: HwType.CPU,
    HardwarePart.MEMORY: HwType.MEMORY,
    HardwarePart.GPU: HwType.GPU,
    HardwarePart.SUPPLY: HwType.ENCLOSURE,
    HardwarePart.MACHINE: HwType.ENCLOSURE,
}
_MAX_POWER = Milliwatts(20_000_000)
"""No plausible sensor shows more: the largest host has eight boards of 1.4 kW."""


class Sockets(Protocol):
    """The sockets of the host, as ``CpuTopology`` has them."""

    sockets: tuple[int, ...]

    @property
    def known(self) -> bool: ...

    @property
    def nameless(self) -> bool: ...

    def sockets_of_packages(self, packages: Collection[int]) -> Mapping[int, int | None]: ...


def resolve_sensors(
    sensors: Iterable[Sensor],
    roles: Mapping[str, str],
    *,
    emulated: bool = False,
    cpus: Sockets | None = None,
) -> dict[Sensor, Domain]:
    """The domain of each sensor with a known meaning, in the order of the ids.

    A sensor may be summed unless its meaning forbids it. A sensor of a GPU has the PCI address of
    its card, by which a library that reads it too is noticed. The provenance is ``measured`` of
    counters and ``derived`` of integrated power. A sensor of a socket that is not among ``cpus`` is
    charged to no process.
    """
    known = {
        sensor: meaning for sensor in sensors if (meaning := meaning_of(sensor, roles)) is not None
    }
    sockets = _resources(known.values(), cpus)
    ids = _ids(known)
    chips = Counter(key for key, _ in {(sensor.key, sensor.device) for sensor in known})

    def container(sensor: Sensor) -> Sensor | None:
        return next(
            (
                other
                for name in known[sensor].within
                for other in known
                if other is not sensor and _contains(name, other, sensor)
            ),
            None,
        )

    def thing(sensor: Sensor) -> Thing:
        meaning, above = known[sensor], container(sensor)
        inside = above is not None and known[above].part is not HardwarePart.MACHINE
        outer = thing(above) if above is not None and inside else Thing(ThingKind.NODE)
        resource = sockets[meaning.socket, meaning.package]
        own = _thing(sensor, meaning, resource, outer.part or (NAME,))
        # The configuration may give a card another part of the hardware than its own tiles.
        own_kind = not inside or meaning.whole or own.kind is outer.kind
        return own if own_kind else outer._replace(part=own.part)

    domains = {}
    for sensor in sorted(known, key=ids.__getitem__):
        meaning = known[sensor]
        above = container(sensor)
        parent = None if above is None else ids[above]
        summed = meaning.summed
        charged = summed and meaning.part in (HardwarePart.CPU, HardwarePart.MEMORY)
        resource = sockets[meaning.socket, meaning.package] if charged else None
        measured = sensor.quantity is SensorQuantity.ENERGY
        is_gpu = meaning.part is HardwarePart.GPU
        domains[sensor] = Domain(
            id=ids[sensor],
            hw_type=_HW_TYPES[meaning.part],
            name=sensor.title,
            source=NAME,
            provenance=Provenance.EMULATED
            if emulated
            else (Provenance.MEASURED if measured else Provenance.DERIVED),
            in_cover=summed,
            parent=parent,
            resource=resource,
            method=CPU_TIME_PROXY if resource else "none",
            max_power=_MAX_POWER,
            resolution=Nanoseconds(
                MILLISECOND if measured else max(sensor.interval, POWER_READ_INTERVAL)
            ),
            why=_reason(sensor, meaning, alone=chips[sensor.key] == 1),
            moves_with=_moves_with(meaning, sockets),
            pci=sensor.device if is_gpu and _PCI.fullmatch(sensor.device) else "",
            measures=thing(sensor),
        )
    return domains


def _moves_with(meaning: Meaning, sockets: Mapping[tuple[int | None, bool], str | None]) -> str:
    """The usage that must show in the sensor; a GPU and another rail may be off."""
    if meaning.part in (HardwarePart.GPU, HardwarePart.SUPPLY):
        return ""
    return sockets[meaning.socket, meaning.package] or "cpu"


def _contains(name: str, other: Sensor, sensor: Sensor) -> bool:
    """True if ``other`` is the sensor called ``name`` that contains ``sensor``."""
    if other.chip == name == "apm_xgene":
        return other.label == _CPU_POWER
    if other.chip == name:  # a card with its tiles or parts
        return other.device == sensor.device and other.channel == "energy1"
    return other.chip == sensor.chip and other.title == name


def _resources(
    meanings: Iterable[Meaning], cpus: Sockets | None
) -> dict[tuple[int | None, bool], str | None]:
    """The resource of each socket or package that sensors name; None of one without CPUs."""
    named = {(one.socket, one.package) for one in meanings}
    found: dict[tuple[int | None, bool], str | None] = {}
    packages = {socket for socket, package in named if package and socket is not None}
    by_id = cpus.sockets_of_packages(packages) if cpus is not None else {}
    for socket, package in named:
        number = by_id.get(socket, socket) if package and socket is not None else socket
        if socket is None or (cpus is not None and cpus.nameless):
            found[socket, package] = "cpu"  # the CPUs of the socket are unknown: all CPUs
        elif number is None or (cpus is not None and cpus.known and number not in cpus.sockets):
            found[socket, package] = None
        else:
            found[socket, package] = f"cpu:{number}"
    return found


_THINGS = {
    HardwarePart.CPU: ThingKind.SOCKET,
    HardwarePart.MEMORY: ThingKind.MEMORY,
    HardwarePart.SUPPLY: ThingKind.SUPPLY,
    HardwarePart.GPU: ThingKind.SUPPLY,  # a rail; a card is a board
}


def _thing(
    sensor: Sensor, meaning: Meaning, resource: str | None, around: tuple[str, ...]
) -> Thing:
    """The thing that a sensor measures. Its channels of power and energy measure the same.

    Sensors with one role are different parts, such as the rails of a socket, unless one is in the
    part ``around``. The socket has the number of its CPUs' ``resource``, as in other sources.
    """
    seen = meaning.machine or meaning
    number = (resource or "").removeprefix("cpu:")
    socket = int(number) if number.isdecimal() else seen.socket
    if seen.part is HardwarePart.MACHINE:
        return Thing(ThingKind.NODE if socket is None else ThingKind.MODULE, socket)
    place = sensor.title if sensor.label else re.sub(r"\D", "", sensor.channel)
    part = (*around, f"{sensor.chip}@{sensor.device}", place)
    if meaning.part is HardwarePart.GPU and sensor.processor is not None:
        return sensor.processor
    if meaning.part is HardwarePart.GPU:
        # A rail or a meter on another bus does not tell its card.
        named = bool(meaning.whole or _PCI.fullmatch(sensor.device))
        address, whole = sensor.device if named else "", named and not meaning.within
        return Thing(ThingKind.BOARD, pci=address, part=() if whole else part)
    return Thing(
        _THINGS[meaning.part], socket, part=() if meaning.whole else part, memory=meaning.memory
    )


def _reason(sensor: Sensor, meaning: Meaning, *, alone: bool) -> str:
    if sensor.quantity is SensorQuantity.ENERGY:
        reason = meaning.why
    else:
        reason = f"{meaning.why}, integrated from its {sensor.quantity}"
    if meaning.summed:
        return reason
    name = sensor.key if alone else sensor.names[0]
    hint = f'sources.hwmon.sensors = {{"{name}" = "cpu"}} would sum it as CPU energy'
    return f"{reason}; {hint} where no part of it is counted"


def _ids(sensors: Iterable[Sensor]) -> dict[Sensor, str]:
    """Unique ids: chip and title; with the device where several chips have it."""
    ordered = sorted(sensors, key=lambda sensor: (sensor.key, sensor.device, sensor.channel))
    names = {sensor: f"{NAME}:{sensor.chip}/{_slug(sensor.title)}" for sensor in ordered}
    everywhere = Counter(names.values())
    of_device = Counter((name, sensor.device) for sensor, name in names.items())
    return {
        sensor: name
        + (f"@{sensor.device}" if everywhere[name] > 1 else "")
        + (f":{sensor.channel}" if of_device[name, sensor.device] > 1 else "")
        for sensor, name in names.items()
    }


def _slug(title: str) -> str:
    """``title`` without spaces, for command lines and labels."""
    return re.sub(r"[^a-z0-9_.+-]+", "-", title.lower()).strip("-") or "sensor"


GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ESTALE})
AGAIN = "It is read again."
_GRANT = "Let the group wattspan read the file, by `systemd-tmpfiles` or a udev rule."
_GRANT_NAME = (
    "Let the group wattspan read it, by `systemd-tmpfiles` or a udev rule: without it sensors are "
    "missing, or have no name."
)


def access_failure(path: str, error: OSError, domain_id: str) -> Failure:
    """The failure of a sensor with the file ``path`` after an ``error`` of reading its files."""
    reason = os.strerror(error.errno or 0).lower()
    path = str(error.filename or path)  # one of several
    if error.errno in (errno.EACCES, errno.EPERM):
        return Failure(NAME, path, Trouble.DENIED, reason, _GRANT, domain_id)
    if error.errno in GONE:
        return Failure(NAME, path, Trouble.ABSENT, reason, AGAIN, domain_id)
    return Failure(NAME, path, Trouble.RETRY, reason, AGAIN, domain_id)


def denied_name(path: str) -> Failure:
    """The failure of a directory, name or label that may not be read."""
    return Failure(NAME, path, Trouble.DENIED, "permission denied", _GRANT_NAME)


def misnamed(name: str, cause: str) -> Failure:
    """The failure of a configured name."""
    return Failure(
        NAME,
        f'"{name}" of [sources.hwmon.sensors]',
        Trouble.ABSENT,
        cause,
        "Correct the name or remove it. The agent looks for it every few seconds.",
        verb="match",
    )


def without_cpus(path: str, domain: Domain) -> Failure:
    """The failure of the sensor ``domain`` at ``path``, to whose socket no CPU belongs."""
    return Failure(
        NAME,
        path,
        Trouble.ABSENT,
        f"no CPU of this host belongs to the socket of {domain.name}, so its energy is charged to "
        "no process",
        "Its energy is counted. Look at physical_package_id in "
        "/sys/devices/system/cpu/cpu*/topology; sources.hwmon.sensors names another socket.",
        domain.id,
        "attribute",
    )
