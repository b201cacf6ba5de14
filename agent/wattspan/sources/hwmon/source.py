"""The ``hwmon`` source plugin: discovery of sensors, reads, and integration of power.

Sensors are looked for again every few seconds, or at once after a file became invalid. A failing
sensor costs only itself. A chip whose reads are slow, such as firmware behind ACPI, is read less
often (``CallInterval``).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from wattspan.attribution.frozen_counters import frozen_failure
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    Failure,
    HwType,
    Instant,
    Microjoules,
    Nanoseconds,
    Reading,
    Trouble,
    mean_power,
)
from wattspan.model.settings import Table
from wattspan.ports import Batch, Clock, CounterSource, SourceContext, SourceError, SourcePlugin
from wattspan.sources.device_power import DevicePower, processor_around
from wattspan.sources.driver_thread import CallInterval, DriverThreadSource
from wattspan.sources.energy_meter import MAX_GAP, PowerIntegral
from wattspan.sources.hwmon.sensors import (
    AGAIN,
    ALTRA_CORES,
    CORE_ENERGY,
    GONE,
    IIO_CHIP,
    NAME,
    POWER_READ_INTERVAL,
    READ_INTERVAL,
    Sensor,
    SensorQuantity,
    access_failure,
    denied_name,
    meaning_of,
    misnamed,
    name_faults,
    resolve_sensors,
    role_fault,
    without_cpus,
)
from wattspan.util.cpu_topology import CpuTopology
from wattspan.util.text import natural_key, printable

HWMON_CLASS, IIO_DEVICES = "class/hwmon", "bus/iio/devices"
DISCOVERY_INTERVAL = 5 * SECOND
MAX_SENSORS = 10_000
"""No host has as many: 2 sockets of 192 cores have 386 counters."""
AWAKE_UNMOVED = 5 * SECOND
"""The counter of a card that is awake and stands still for longer is frozen."""
IDLE_FACTOR, IDLE_MARGIN = 1.25, 1000
"""A card is idle up to this times its least power, and so many milliwatts more."""
LONGEST_WINDOW = 3 * SECOND
"""The power of a longer time tells nothing of the present."""

MAX_INTERVAL = 60 * SECOND  # of an average; a longer one is no value of a driver
MAX_AGE = 2 * SECOND  # of a reading: usage of an older time is not awaited any more
_MAX_LABEL = 64

_CHANNEL = re.compile(r"(energy|power|curr)([1-9]\d{0,8})_(input|average)", re.ASCII)


@dataclass(frozen=True, slots=True)
class SensorFiles:
    """A sensor with its file, those of voltage and current, or those of counters that are added."""

    sensor: Sensor
    files: tuple[Path, ...]


_Paths = Container[Path]


def scan_sensors(
    sysfs: Path,
    refused: _Paths = (),
    cpus: CpuTopology | None = None,
    denied: list[Path] | None = None,
) -> list[SensorFiles]:
    """All sensors of energy, power, or voltage and current, by chip. An unreadable root has none.

    Where a sensor shows an average and the present power, the average counts unless it is among the
    ``refused`` files: nothing between two reads is missed, unless they are further apart than its
    interval. The files of the ACPI power meter are in the directory of its device on older kernels.
    Directories, names and labels that may not be read are appended to ``denied``.
    """
    found: list[SensorFiles] = []
    denied = [] if denied is None else denied
    chips: Counter[tuple[str, str]] = Counter()
    for chip in _entries(sysfs / HWMON_CLASS, denied):
        if not (name := _name(chip / "name", denied)):
            continue
        bus = chip / "device"
        device = bus.resolve().name if os.path.exists(bus) else chip.name  # noqa: PTH110
        chips[name, device] += 1
        if (number := chips[name, device]) > 1:  # one device of a driver may have a chip a socket
            device = f"{device}#{number}"
        folders = (chip, chip / "device") if name == "power_meter" else (chip,)
        graphics = [chip] if name == "amdgpu" else []
        processor = processor_around(graphics, lambda: cpus or CpuTopology(sysfs))
        seen: set[str] = set()
        for folder in folders:
            for files in _channels(name, device, folder, refused, denied):
                if files.sensor.channel not in seen and len(found) < MAX_SENSORS:
                    seen.add(files.sensor.channel)
                    found.append(replace(files, sensor=replace(files.sensor, processor=processor)))
    return [*found, *_iio_rails(sysfs, denied)]


def _iio_rails(sysfs: Path, denied: list[Path]) -> Iterator[SensorFiles]:
    """The rails of a Jetson in the kernels before JetPack 5, which show them to IIO."""
    for chip in _entries(sysfs / IIO_DEVICES, denied):
        if (name := _name(chip / "name", denied)) != IIO_CHIP:
            continue
        device = chip.resolve().parent.name  # such as 6-0040: its address on a bus
        for entry in _entries(chip, denied):
            number = entry.name.removeprefix("rail_name_")
            if number.isdecimal() and (label := _name(entry, denied)):
                sensor = Sensor(name, device, f"in{number}", label, SensorQuantity.CURRENT)
                values = (f"in_{kind}{number}_input" for kind in ("voltage", "current"))
                yield SensorFiles(sensor, tuple(chip / value for value in values))


def _channels(
    chip: str, device: str, folder: Path, refused: _Paths, denied: list[Path]
) -> Iterable[SensorFiles]:
    """The sensors of one directory; the counters of Ampere's cores are one sensor."""
    found = list(_single_channels(chip, device, folder, refused, denied))
    cores = [one for one in found if CORE_ENERGY.fullmatch(one.sensor.label)]
    if chip != "altra_hwmon" or not cores:
        return found
    sensor = replace(cores[0].sensor, label=ALTRA_CORES)
    every = SensorFiles(sensor, tuple(file for one in cores for file in one.files))
    return (every, *(one for one in found if one not in cores))


def _single_channels(
    chip: str, device: str, folder: Path, refused: _Paths, denied: list[Path]
) -> Iterator[SensorFiles]:
    values: dict[str, str] = {}
    for entry in _entries(folder, denied):
        match = _CHANNEL.fullmatch(entry.name)
        if match is not None and entry not in refused:
            channel = f"{match[1]}{match[2]}"
            if values.get(channel) != "average":
                values[channel] = match[3]
    for channel, value in values.items():
        file = folder / f"{channel}_{value}"
        if channel.startswith("curr"):
            place = f"in{channel.removeprefix('curr')}"
            label = _name(folder / f"{place}_label", denied)
            if not label or not os.path.exists(folder / f"{place}_input"):  # noqa: PTH110
                continue  # a rail without a name, or a sum of channels
            sensor = Sensor(chip, device, place, label, SensorQuantity.CURRENT)
            yield SensorFiles(sensor, (folder / f"{place}_input", file))
            continue
        labels = (folder / f"{channel}_{kind}" for kind in ("label", "oem_info"))
        label = next(filter(None, (_name(one, denied) for one in labels)), "")
        if channel.startswith("energy"):
            yield SensorFiles(Sensor(chip, device, channel, label, SensorQuantity.ENERGY), (file,))
        elif value == "average":
            milliseconds = _number(folder / f"{channel}_average_interval")
            interval = milliseconds * MILLISECOND
            interval = interval if interval <= MAX_INTERVAL else 0
            sensor = Sensor(chip, device, channel, label, SensorQuantity.AVERAGE_POWER, interval)
            yield SensorFiles(sensor, (file,))
        else:
            yield SensorFiles(Sensor(chip, device, channel, label, SensorQuantity.POWER), (file,))


def _entries(directory: Path, denied: list[Path]) -> list[Path]:
    try:
        return sorted(directory.iterdir(), key=lambda entry: natural_key(entry.name))
    except OSError as error:
        if isinstance(error, PermissionError):
            denied.append(directory)
        return []


def _name(path: Path, denied: list[Path] | None = None) -> str:
    """The text of ``path``; one that may not be read is appended to ``denied``."""
    try:
        return printable(path.read_text(errors="replace").strip()[:_MAX_LABEL])
    except OSError as error:
        if isinstance(error, PermissionError) and denied is not None:
            denied.append(path)
        return ""


def _number(path: Path) -> int:
    text = _name(path)
    return int(text) if text.isascii() and text.isdigit() else 0


class SensorMeter:
    """One sensor: its files, its domain, and the energy from its values."""

    def __init__(self, files: SensorFiles, domain: Domain, epoch: int) -> None:
        self.files = files
        self.domain = domain
        self.epoch = epoch
        self._integral = PowerIntegral()
        self._last: int | None = None  # a counter's last value
        self._moved = 0  # when it moved last
        self._window: tuple[int, int] | None = None  # begin of the present window, and energy then
        self._least: int | None = None  # milliwatts, of a counter
        self._gaps = 0  # before the last values, in a row
        self.frozen = False
        self.idle = False  # a counter shows hardly more than the least power
        self._battery = _name(self.device / "type") == "Battery"

    @property
    def device(self) -> Path:
        """The directory of the device."""
        return self.files.files[0].parent / "device"

    def pause(self, power: DevicePower) -> None:
        """The device is not read now; one that was suspended may have restarted its counter."""
        self.domain = replace(self.domain, rest=power.rest)
        if power.is_suspended() and not self.domain.suspended:
            self.epoch += 1
            self._integral.pause()
            self.domain = replace(self.domain, suspended=True)
            self._last, self._window, self.frozen = None, None, False

    def redefine(self, domain: Domain) -> None:
        """Use other properties of the domain."""
        self.domain = replace(domain, suspended=self.domain.suspended, rest=self.domain.rest)

    def reading(self, clock: Clock) -> Reading | None:
        """The present energy; None while the counter has not moved.

        OSError if a file cannot be read, ValueError if it shows no possible value, or if no two
        values of power are near enough to measure energy.
        """
        if self._battery and (state := _name(self.device / "status")) != "Discharging":
            raise ValueError(f"the battery gives no power now: {state or 'unknown'}")
        if self.domain.suspended or self.domain.rest:
            self.domain = replace(self.domain, suspended=False, rest=Nanoseconds(0))
        least, sign = self.files.sensor.least, b"-" if self._battery else b""
        values = [max(0, _value(path, least, sign)) for path in self.files.files]
        at = clock.now()
        sensor = self.files.sensor
        if sensor.quantity is SensorQuantity.ENERGY:
            energy = Microjoules(sum(values))
            if energy != self._last or self.domain.moves_with:
                self._follow_power(at, energy)
                self._last, self._moved, self.frozen = energy, at.mono, False
                return self._at(at, energy)
            # The next value that differs covers the time. An awake card always uses energy.
            awake = DevicePower(self.device).status == "active"
            self.frozen = awake and at.mono - self._moved >= AWAKE_UNMOVED
            return None
        if sensor.quantity is SensorQuantity.CURRENT:
            power = values[0] * values[1] // 1000  # millivolts times milliamperes: microwatts
        else:
            power = values[0] // 1000
        if power > self.domain.max_power:  # 0xFFFFFFFF mW: the firmware's meter does not answer
            shown = " and ".join(map(str, values))
            raise ValueError(f"{shown} is no possible value")
        # An average describes the middle of its interval.
        middle = at.before(min(sensor.interval // 2, MAX_AGE))
        self._gaps = 0 if self._integral.feed(middle, power, None) else self._gaps + 1
        self.epoch += self._gaps > 0
        if self._gaps > 1:
            raise ValueError(f"values more than {MAX_GAP // SECOND} s apart measure no energy")
        return self._at(middle, self._integral.energy)

    def _follow_power(self, at: Instant, energy: Microjoules) -> None:
        """Compare the power of a second or more with the least so far."""
        elapsed = 0 if self._window is None else at.mono - self._window[0]
        if self._window is not None and elapsed < SECOND:
            return
        before, self._window = self._window, (at.mono, energy)
        if before is None or elapsed > LONGEST_WINDOW:
            self.idle = False
            return
        power = mean_power(max(0, energy - before[1]), elapsed)
        self._least = power if self._least is None else min(self._least, power)
        self.idle = power <= self._least * IDLE_FACTOR + IDLE_MARGIN

    def _at(self, at: Instant, energy: Microjoules) -> Reading:
        return Reading(self.domain.id, at, energy, self.epoch)


def _value(path: Path, least: int = 0, sign: bytes = b"") -> int:
    """The number in a file, without a ``sign``: discharge is negative on some laptops of ARM."""
    text = path.read_bytes()[:32].strip().removeprefix(sign)
    if not text.removeprefix(b"-").isdigit() or int(text) < least:
        raise ValueError(f"{text.decode(errors='replace')!r} is no possible value")
    return int(text)


class HwmonSource:
    """The CounterSource of ``<sysfs>/class/hwmon``. One thread owns it as its DriverSession.

    Summed sensors are read first: the firmware of NVIDIA Grace renews only one meter of a socket in
    50 ms, the one that is read first.
    """

    name = NAME

    def __init__(
        self, sysfs: Path, clock: Clock, roles: Mapping[str, str], *, emulated: bool = False
    ) -> None:
        self._sysfs = sysfs
        self._clock = clock
        self._roles = roles
        self._emulated = emulated
        self._cpus = CpuTopology(sysfs)
        self._misconfigured: tuple[Failure, ...] = ()
        self._meters: dict[str, SensorMeter] = {}  # by domain id
        self._chips: dict[str, CallInterval] = {}  # by device
        self._powers: dict[str, DevicePower] = {}  # by device, if the kernel may suspend it
        self._members: frozenset[str] | None = None  # of the cover; None while it is unknown
        self._apart: dict[str, int] = {}  # the least time between reads, by device with a power
        self._refused: set[Path] = set()  # averages that cannot be read, unlike the present power
        self._newest: dict[str, Reading] = {}  # by domain id, since the last sample
        self._failing: dict[str, Failure] = {}  # by domain id, of the last reads
        self._epochs: dict[str, int] = {}  # by domain id; outlives the sensor
        self._domains: tuple[Domain, ...] = ()
        self._vanished: dict[str, Failure] = {}  # by CHIP@DEVICE/CHANNEL
        self._due = 0
        self.current_call: tuple[str, int] | None = None

    def sample(self, interval: int = 0) -> Batch:
        del interval
        self.current_call = ("the read of the sensors", self._clock.monotonic())
        try:
            return self.read()
        finally:
            self.current_call = None

    def follow_cover(self, members: frozenset[str]) -> None:
        """Read other sensors of power than ``members`` with the samples. Safe from any thread."""
        self._members = members

    def next_read(self, now: int) -> int | None:
        """The time of the next read of a chip with a power to integrate."""
        del now
        return min(map(self._due_between, self._apart), default=None)

    def read_between(self, now: int) -> tuple[Reading, ...]:
        """Read the chips with a power to integrate; the next sample has their newest energy."""
        self.current_call = ("the read of the sensors", now)
        try:
            self._read_chips(now, {one for one in self._apart if self._due_between(one) <= now})
            return ()
        finally:
            self.current_call = None

    def read(self) -> Batch:
        now = self._clock.monotonic()
        if now >= self._due:
            self._discover(now)
        self._read_chips(now, self._chips)
        self._follow_domains()
        failures = [*self._vanished.values(), *self._misconfigured, *self._failing.values()]
        failures += (frozen_failure(one.domain) for one in self._meters.values() if one.frozen)
        readings, self._newest = tuple(self._newest.values()), {}
        return Batch(self._domains, readings, tuple(failures))

    def close(self) -> None:
        """Forget the sensors: the next read looks for them again."""
        self._meters.clear()
        self._chips.clear()
        self._apart.clear()
        self._domains = ()
        self._due = 0

    def _read_chips(self, now: int, devices: Container[str]) -> None:
        """Read the sensors of those ``devices`` that are due."""
        for device, interval in self._chips.items():
            if device not in devices or not interval.begin(now):
                continue
            with interval:
                meters = [m for m in self._meters.values() if m.files.sensor.device == device]
                power = self._powers.get(device)
                quiet = power is not None and power.is_quiet(now)
                for meter in meters:
                    if power is not None and quiet:
                        meter.pause(power)
                    else:
                        self._read(meter)
                if power is not None and not quiet:
                    power.observe(now, idle=any(one.idle for one in meters))

    def _follow_domains(self) -> None:
        after = tuple(meter.domain for meter in self._meters.values())
        if after != self._domains:  # callers compare by identity
            self._domains = after
        self._apart = {}
        for meter in self._meters.values():
            sensor = meter.files.sensor
            if sensor.quantity is not SensorQuantity.ENERGY:
                least = 0 if self._integrates(meter.domain) else MAX_GAP // 2
                self._apart[sensor.device] = min(least, self._apart.get(sensor.device, least))

    def _integrates(self, domain: Domain) -> bool:
        """True if the power between two samples counts, and can be read."""
        counted = self._members is None or domain.id in self._members
        return counted and not (domain.suspended or domain.rest or domain.id in self._failing)

    def _due_between(self, device: str) -> int:
        return self._chips[device].due_after(self._apart[device])

    def _read(self, meter: SensorMeter) -> None:
        path, domain_id = str(meter.files.files[0]), meter.domain.id
        self._failing.pop(domain_id, None)
        try:
            reading = meter.reading(self._clock)
        except ValueError as error:
            failure = Failure(NAME, path, Trouble.MALFORMED, str(error), AGAIN, domain_id)
            self._failing[domain_id] = failure
            return
        except OSError as error:
            self._failing[domain_id] = access_failure(path, error, domain_id)
            if error.errno in GONE or self._replaces(meter.files.files[0]):
                self._due = 0
            return
        if reading is not None:
            self._newest[domain_id] = reading

    def _replaces(self, file: Path) -> bool:
        """True if the sensor's other file, an average or the present power, is to be read."""
        average = file.with_name(file.name.replace("_input", "_average"))
        power = file.with_name(file.name.replace("_average", "_input"))
        other = average if average in self._refused else power
        try:
            readable = other != file and _value(other) >= 0
        except (OSError, ValueError):
            return False
        self._refused ^= {average} if readable else set()
        return readable

    def _is_part(self, domain: Domain) -> bool:
        """True if another sensor contains this one and may be summed instead."""
        above = self._meters.get(domain.parent or "")
        return above is not None and above.domain.in_cover

    def _discover(self, now: int) -> None:
        """Look for sensors; a sensor that returns has the next epoch."""
        self._due = now + DISCOVERY_INTERVAL
        self._cpus.refresh()
        denied: list[Path] = []
        scanned = scan_sensors(self._sysfs, self._refused, self._cpus, denied)
        found = {files.sensor: files for files in scanned}
        domains = resolve_sensors(found, self._roles, emulated=self._emulated, cpus=self._cpus)
        self._misconfigured = (
            *map(denied_name, map(str, denied)),
            *(misnamed(name, cause) for name, cause in name_faults(found, self._roles)),
            *(
                without_cpus(str(found[sensor].files[0]), domain)
                for sensor, domain in domains.items()
                if domain.in_cover and domain.resource is None and domain.hw_type in _CHARGED
            ),
        )
        before = self._meters
        self._meters = {}
        for sensor, domain in domains.items():
            meter = before.get(domain.id)
            if meter is not None and meter.files == found[sensor]:
                meter.redefine(domain)
            else:
                self._epochs[domain.id] = self._epochs.get(domain.id, -1) + 1
                meter = SensorMeter(found[sensor], domain, self._epochs[domain.id])
            self._meters[domain.id] = meter
        for gone in before.keys() - self._meters.keys():
            files, remedy = before[gone].files, "The agent looks for it every few seconds."
            self._vanished[files.sensor.names[1]] = Failure(
                NAME, str(files.files[0]), Trouble.ABSENT, "the sensor has vanished", remedy, gone
            )
        present = {sensor.names[1] for sensor in domains}  # some ids depend on other sensors
        for name, failure in [*self._vanished.items()]:
            if name in present or failure.domain_id in self._meters:
                del self._vanished[name]
        self._failing = {key: one for key, one in self._failing.items() if key in self._meters}
        sensors = [meter.files.sensor for meter in self._meters.values()]
        of_power = {one.device for one in sensors if one.quantity is not SensorQuantity.ENERGY}
        uncounted = {one.device: True for one in sensors}
        uncounted |= {
            meter.files.sensor.device: False
            for meter in self._meters.values()
            if meter.domain.in_cover and not self._is_part(meter.domain)
        }
        self._chips = {
            device: self._chips.get(device)
            or (
                CallInterval(POWER_READ_INTERVAL, self._clock, MAX_GAP // 2)
                if device in of_power
                else CallInterval(READ_INTERVAL, self._clock)
            )
            for device in sorted(uncounted, key=lambda device: (uncounted[device], device))
        }
        folders = {meter.files.sensor.device: meter.device for meter in self._meters.values()}
        self._powers = {
            device: self._powers.get(device) or DevicePower(path)
            for device, path in folders.items()
            if DevicePower(path).status not in {"", "unsupported"}
        }


_CHARGED = (HwType.CPU, HwType.MEMORY)


class HwmonSettings(Table, frozen=True):
    """Power and energy sensors of hwmon: NVIDIA Grace, Jetson, ACPI meters, Intel GPUs.

    Keys:
        enabled: `auto`: read them if there are any; `true`: the agent does not start without them.
        sensors: The part that a sensor measures, as `{"CHIP/LABEL" = PART}`: `cpu` (charged by CPU
            time), `cpu:SOCKET`, `memory`, `gpu`, `machine` (not summed) or `ignore`. CHIP is the
            chip's file `name`, CHIP@DEVICE one of several; without a label, LABEL is the channel,
            such as `power1`.
        sysfs: Mount point of sysfs; in a container, that of the host's sysfs.
    """

    enabled: bool | Literal["auto"] = "auto"
    sensors: dict[str, str] = msgspec.field(default_factory=dict)
    sysfs: str = "/sys"

    interval: ClassVar = POWER_READ_INTERVAL
    longest: ClassVar = 10 * SECOND
    status_interval: ClassVar = SECOND  # without effect: no sensor has a status
    deadline: ClassVar = 5 * SECOND

    def __post_init__(self) -> None:
        for key, role in self.sensors.items():
            chip, _, label = key.partition("/")
            if not chip or not label:
                raise ValueError(f"sensors: {key!r} is not CHIP/LABEL, such as ina260/power1")
            if fault := role_fault(role):
                raise ValueError(f"sensors: {key}: {fault}")


def open_hwmon(settings: HwmonSettings, context: SourceContext) -> CounterSource | None:
    """The source; None if no sensor is known, no name is denied and ``enabled`` is "auto".

    SourceError if ``enabled`` is true and there is none.
    """
    if settings.enabled is False:
        return None
    sysfs = context.sysfs or Path(settings.sysfs)
    denied: list[Path] = []
    found = scan_sensors(sysfs, denied=denied)
    # A source without a sensor reports the names that match none, and files that are denied.
    if not settings.sensors and not any(meaning_of(files.sensor, {}) for files in found):
        if settings.enabled is True:
            others = ", ".join(sorted({files.sensor.key for files in found})[:8]) or "none at all"
            hidden = f"; permission denied: {denied[0]}" if denied else ""
            raise SourceError(
                f"Cannot read power sensors: no sensor under {sysfs / HWMON_CLASS} is of a known "
                f"kind (found: {others}{hidden}). Name the part that one measures in "
                'sources.hwmon.sensors. With enabled = "auto" the agent does without.'
            )
        if not denied:
            return None
    sensors = HwmonSource(sysfs, context.clock, settings.sensors, emulated=context.emulated)
    advice = "Look for messages of the sensors in dmesg"
    source = DriverThreadSource(
        NAME, sensors, context.clock, settings, "hwmon", advice, follow_cover=sensors.follow_cover
    )
    source.start()
    return source


def hwmon_advice(settings: HwmonSettings) -> Iterator[str]:
    """A sentence for each root and name of a sensor that this host does not have."""
    if settings.enabled is False:
        return
    root = Path(settings.sysfs)
    if not root.is_dir():
        yield f"sources.hwmon.sysfs: there is no directory {root}"
    sensors = [files.sensor for files in scan_sensors(root)]
    for name, cause in name_faults(sensors, settings.sensors):
        yield f'sources.hwmon.sensors: "{name}": {cause}'


plugin = SourcePlugin(settings=HwmonSettings, open=open_hwmon, advice=hwmon_advice)
