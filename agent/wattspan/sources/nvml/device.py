"""NVIDIA GPUs by NVML's functions: the vendor, its boards, and their limits and clocks.

Handles are void once a GPU fell off the bus or the driver was reloaded, and indices change when a
GPU goes. So a board is known by its UUID, and gets a new handle whenever the old one is void.

Power limits, in milliwatts, are set by NVML's first setter: nvidia-ml-py's binding of the second
one drops the return code and reports success for a refusal.

A locked SM clock, in megahertz, is an upper bound that cannot be read back: NVML locks and unlocks
clocks, and does not report whether they are locked. So the original is "not locked", and a reset is
all that can restore it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from wattspan.model import (
    SECOND,
    Failure,
    GpuStatus,
    Instant,
    Microjoules,
    Milliwatts,
    PowerLimits,
    Trouble,
)
from wattspan.model.settings import Duration, quoted
from wattspan.ports import Clock, SourceContext
from wattspan.sources.driver_thread import CallInterval
from wattspan.sources.gpu.calls import FIELD_ERRORS, NOT_SUPPORTED, DriverError, GpuCalls
from wattspan.sources.gpu.port import (
    BoardPlace,
    GpuBoard,
    GpuClockReading,
    GpuControls,
    GpuDevice,
    GpuGauges,
    GpuIdentity,
    GpuSettings,
    GpuVendor,
    driver_text,
)
from wattspan.sources.gpu.session import SYSFS
from wattspan.sources.nvml import calls as nvml
from wattspan.sources.nvml.dcgm import DcgmExporter
from wattspan.sources.nvml.mig import MigDivision, NvmlUsage
from wattspan.sources.nvml.processes import GpuProcesses
from wattspan.util.cpu_topology import CpuTopology
from wattspan.util.files import file_text

EMULATED_UUID = "GPU-e0e0e0e0-0000-4000-8000-"
"""Prefix of the UUIDs of emulated boards, which no real board has: the emulated library can replace
the real one, and its figures must then be labelled as emulated.
"""
MAX_GPUS = 256
"""No host has as many. A driver that counts four billion GPUs would otherwise be asked for each."""

WINDOW_DUTY = 0.25
"""The part of the time that sensors see on boards without a mean power, and on ``WINDOWED``."""
WINDOWED = re.compile(r"\b(A100|A30|A800|H\d{2,3}|GH\d{3}|G?B[123]00)\b")
"""Boards whose sensor sees a quarter of the time (arXiv 2312.02741), or may: the energy counter has
the same sensor, so that a load which is locked to its window can separate it from a mean power.
"""

_VGPU_GUEST, _VGPU_HOST = 2, 3  # NVML_GPU_VIRTUALIZATION_MODE_VGPU, _HOST_VGPU
_TURING = 6  # NVML_DEVICE_ARCH_TURING; the numbers ascend with the generations
_UNKNOWN_ARCHITECTURE = 0xFFFFFFFF
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_HERTZ_PER_MHZ = 1_000_000
_MAX_CELSIUS = 200  # more is no temperature: 82505 C for a moment (NVIDIA/dcgm-exporter#312)
_IMPLAUSIBLE_POWER = 100_000_000  # mW; 4294967 W is a blank, not a measurement
_LEAST_MINIMUM, _LEAST_LIMIT, _LARGEST_LIMIT = 1_000, 3_000, 5_000_000  # mW

_POWERS = (nvml.POWER_AVERAGE, nvml.POWER_INSTANT)
UNUSED_INTERVAL = 5 * SECOND
"""The interval of calls that tell little of a board without work, processes and a change."""

_ENERGY_CALL = "nvmlDeviceGetTotalEnergyConsumption"
_THROTTLE_REASONS = "throttle reasons"
_REASON_BITS = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


_SECOND = Duration.parse("1s")
_MAX_STATIC_WATTS = 2000


class NvmlSettings(GpuSettings, frozen=True):
    """NVIDIA GPUs: intervals of the calls, and the longest duration of a call.

    Keys:
        process_interval: Interval of process lists, which are slow on some drivers; at least 1s.
            An unused board is asked for them, clocks and throttling every 5s.
        static_watts: Power of a board that is blocked on communication, which splits the energy of
            spans into a static and a dynamic part. `"auto"`: learned from spans in
            `[spans] waiting`; or watts by model, as `{A100 = 85, "H100 80GB" = 115}`: a part of the
            board's name.
        dcgm: Address of dcgm-exporter's metrics, as `http://127.0.0.1:9400/metrics`: the activity
            of MIG instances on boards whose driver does not report it (Ampere). The server at this
            address decides their division: use a port below 1024, which ordinary users cannot bind.
            `""`: such boards are divided equally among the slices in use.
    """

    process_interval: Duration = _SECOND
    static_watts: Literal["auto"] | dict[str, float] = "auto"
    dcgm: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dcgm and not self.dcgm.startswith(("http://", "https://")):
            raise ValueError(
                f"dcgm: {quoted(self.dcgm)} is no address; write one as "
                '"http://127.0.0.1:9400/metrics"'
            )
        for model, watts in self.static_powers.items():
            if not model or not 0 < watts <= _MAX_STATIC_WATTS:
                raise ValueError(
                    f"static_watts: {watts:g} W of {quoted(model)} is not the power of a board; "
                    f"write {{MODEL = WATTS}} with more than 0 and at most {_MAX_STATIC_WATTS} W, "
                    'or "auto"'
                )
        if self.process_interval < _SECOND:
            raise ValueError(
                'process_interval: process lists delay all users of the driver; write "1s" or more'
            )

    @property
    def static_powers(self) -> Mapping[str, float]:
        """The configured static powers in watts, by model."""
        return {} if isinstance(self.static_watts, str) else self.static_watts

    def static_power(self, model: str) -> Milliwatts | None:
        """The configured static power of a model, by the longest name that is a part of it."""
        named = [one for one in self.static_powers if one.casefold() in model.casefold()]
        if not named:
            return None
        return Milliwatts(round(self.static_powers[max(named, key=len)] * 1000))


class NvmlVendor(GpuVendor):
    """NVIDIA's boards. ``nested``: pids are those of a pid namespace."""

    messages = nvml.MESSAGES
    kernel_driver = "nvidia"
    opens_single = resets_settings = is_thread_safe = True

    def __init__(
        self,
        binding: Any,
        clock: Clock,
        *,
        nested: bool = False,
        dcgm: DcgmExporter | None = None,
        driver_files: Path = Path("/proc/driver/nvidia/gpus"),
    ) -> None:
        super().__init__(nvml.open_library(binding, clock), clock)
        self.nested, self.dcgm, self._driver_files = nested, dcgm, driver_files
        self._driver = ""

    def begin(self) -> None:
        self.library.call("nvmlInit")
        self._driver = driver_text(self.library.optional("nvmlSystemGetDriverVersion") or "")

    def end(self) -> None:
        self.library.call("nvmlShutdown")

    def place_at(self, address: str) -> BoardPlace:
        return BoardPlace(f"GPU {address}", address)

    def places(self) -> list[BoardPlace]:
        count = min(int(self.library.call("nvmlDeviceGetCount")), MAX_GPUS)
        return [BoardPlace(f"GPU {index}", index) for index in range(count)]

    def can_suspend(self, address: str) -> bool:
        """True if the driver's power management of idle boards (RTD3) is on for the board."""
        lines = file_text(self._driver_files / address / "power").splitlines()
        return any(one.startswith("Runtime D3 status:") and "Enabled" in one for one in lines)

    def open(self, place: BoardPlace) -> GpuBoard:
        if isinstance(place.key, int):
            handle = self.library.call("nvmlDeviceGetHandleByIndex", place.key)
            return self._board(handle, place.key)
        handle = self.library.call("nvmlDeviceGetHandleByPciBusId", place.key.encode())
        return self._board(handle, int(self.library.call("nvmlDeviceGetIndex", handle)))

    def find(self, domain_id: str) -> GpuBoard:
        uuid = domain_id.removeprefix("gpu:")
        handle = self.library.call("nvmlDeviceGetHandleByUUID", uuid)
        return self._board(handle, int(self.library.call("nvmlDeviceGetIndex", handle)))

    def _board(self, handle: Any, index: int) -> GpuBoard:
        uuid = self._text("nvmlDeviceGetUUID", handle)
        identity = GpuIdentity(
            f"gpu:{uuid}",
            index,
            self._text("nvmlDeviceGetName", handle),
            (uuid, str(index)),
            driver=self._driver,
            pci=nvml.pci_address(self.library.optional("nvmlDeviceGetPciInfo", handle)),
            emulated=uuid.startswith(EMULATED_UUID),
        )
        return GpuBoard(identity, [handle])

    def _text(self, name: str, handle: Any) -> str:
        """A text of the driver. Some versions tell bytes that the binding cannot decode."""
        try:
            return driver_text(self.library.call(name, handle))
        except UnicodeDecodeError as error:
            return driver_text(error.object)

    def device(self, board: GpuBoard, settings: NvmlSettings, context: SourceContext) -> NvmlDevice:
        return NvmlDevice(self, board, settings, context)

    def controls(self, board: GpuBoard) -> NvmlControls:
        return NvmlControls(self.library, board.handles[0])

    def unmatched(self, models: Iterable[str], settings: NvmlSettings) -> Iterable[Failure]:
        """The configured static powers that are of no board."""
        if not settings.static_powers:
            return
        present = [model.casefold() for model in models]
        for name in settings.static_powers:
            if not any(name.casefold() in model for model in present):
                yield Failure(
                    self.messages.source,
                    f"static_watts of {quoted(name)}",
                    Trouble.ABSENT,
                    "no GPU here has a model with this name",
                    "Write a part of the name that `nvidia-smi -L` shows.",
                )

    def close(self) -> None:
        if self.dcgm is not None:
            self.dcgm.close()


class NvmlDevice(GpuDevice):
    """One board, or the GPU of a superchip."""

    has_steps = True

    def __init__(
        self, vendor: NvmlVendor, board: GpuBoard, settings: NvmlSettings, context: SourceContext
    ) -> None:
        super().__init__(vendor, board)
        architecture = self.library.optional("nvmlDeviceGetArchitecture", self.calls.handle)
        self._usage_is_instant = usage_is_instant(architecture, self.identity.model)
        self._windowed = WINDOWED.search(self.identity.model) is not None
        self._sysfs = context.sysfs or SYSFS
        self.static_power = settings.static_power(self.identity.model)
        self._virtualisation: int | None = None  # not asked yet
        self._values: Mapping[int, int] = {}  # of the fields that were read last
        self._busy: int | None = None
        self._memory_used: int | None = None
        self._details = GpuStatus(self.identity.domain_id, self.clock.now())  # seldom read
        self._details_pace = CallInterval(UNUSED_INTERVAL, self.clock)
        processes = GpuProcesses(self.calls, self.clock, context.directory, nested=vendor.nested)
        self.usage: NvmlUsage = NvmlUsage(
            self.identity.domain_id,
            processes,
            MigDivision(self.calls, processes, self.identity.aliases[0], vendor.dcgm),
            settings,
            settings.process_interval,
            self.clock,
        )

    @property
    def keeps_settings(self) -> bool:
        """True in persistence mode, in which the driver stays loaded for the board."""
        mode = self.library.optional("nvmlDeviceGetPersistenceMode", self.calls.handle)
        return bool(mode == 1)

    def energy(self, max_power: Milliwatts) -> tuple[Microjoules | None, Instant]:
        del max_power
        millijoules, at = self.calls.stamped(self.messages.counter, _ENERGY_CALL)
        return None if millijoules is None else Microjoules(int(millijoules) * 1000), at

    def gauges(self) -> GpuGauges:
        return self._read_gauges(_POWERS)

    def gauges_before_status(self) -> GpuGauges:
        return self._read_gauges(tuple(nvml.FIELDS))

    def _read_gauges(self, asked: tuple[int, ...]) -> GpuGauges:
        self._values = values = nvml.read_fields(self.calls, asked)
        average, instant, draw = read_power(self.calls, values, self._usage_is_instant)
        rates = self.calls.ask("utilisation", "nvmlDeviceGetUtilizationRates")
        busy = memory = None
        if rates is not None and 0 <= rates.gpu <= 100 and 0 <= rates.memory <= 100:
            busy, memory = int(rates.gpu), int(rates.memory)
        self._busy = busy
        return GpuGauges(average, instant, draw, busy, memory, read_module_power(self.calls))

    def socket(self) -> int | None:
        device = self._sysfs / "bus/pci/devices" / self.identity.pci
        return CpuTopology(self._sysfs).socket_near(device)

    def sensor_duty(self, gauges: GpuGauges) -> float:
        return WINDOW_DUTY if self._windowed or gauges.average is None else 1.0

    @property
    def virtual(self) -> tuple[str, str] | None:
        if self._virtualisation != _VGPU_GUEST:
            return None
        return (
            "it is a virtual GPU, and the host of this virtual machine has the board",
            "Run wattspan on that host to measure and to cap it.",
        )

    def status(self, at: Instant) -> GpuStatus:
        """The field values that the gauges have just read, and few calls on an unused board.

        A process with a context takes memory, and a board that turns MIG on has no utilisation.
        """
        calls, values = self.calls, self._values
        memory = calls.ask("memory", "nvmlDeviceGetMemoryInfo")
        before, self._memory_used = self._memory_used, None if memory is None else int(memory.used)
        same = before is not None and before == self._memory_used
        unused = same and self._busy == 0 and not self.usage.held
        if due := self._details_pace.begin(at.mono, forced=not unused):
            with self._details_pace:
                self._details = self._read_details(at)
        virtual = self._virtualisation == _VGPU_HOST
        self.usage.see_status(mig=bool(self._details.mig), vgpu_host=virtual, unused=not due)
        celsius = calls.ask("temperature", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
        throttled = {
            one: values[field] for field, one in nvml.THROTTLE_FIELDS.items() if field in values
        }
        return replace(
            self._details,
            at=at,
            limits=read_limits(calls, values),
            temperature_celsius=None if celsius is None or celsius > _MAX_CELSIUS else int(celsius),
            memory_used=self._memory_used,
            memory_total=None if memory is None else int(memory.total),
            throttled=throttled,
        )

    def _read_details(self, at: Instant) -> GpuStatus:
        """The part of a status that is read less often of an unused board."""
        calls = self.calls
        mig = calls.ask("MIG mode", "nvmlDeviceGetMigMode")
        if self._virtualisation is None:
            mode = calls.ask("virtualisation", "nvmlDeviceGetVirtualizationMode")
            self._virtualisation = int(mode or 0)
        return GpuStatus(
            self.identity.domain_id,
            at,
            sm_clock_hz=_clock_hertz(calls, "SM clock", _CLOCK_SM),
            memory_clock_hz=_clock_hertz(calls, "memory clock", _CLOCK_MEMORY),
            throttling=_throttle_reasons(calls),
            mig=None if mig is None else bool(mig[0]),
        )


def read_power(
    calls: GpuCalls, values: Mapping[int, int], usage_is_instant: bool | None
) -> tuple[Milliwatts | None, Milliwatts | None, Milliwatts | None]:
    """Average and instant power, and the one to integrate, by the best means of the driver.

    For integration the average is better than the instant: the sensors of A100 and H100 measure a
    quarter of the time only, while the average covers all of it.
    """
    average = _drawn_power(values.get(nvml.POWER_AVERAGE))
    instant = _drawn_power(values.get(nvml.POWER_INSTANT))
    if average is not None:
        return average, instant, average
    usage = _drawn_power(calls.ask("power", "nvmlDeviceGetPowerUsage"))
    if usage is None:
        return None, instant, instant
    if usage_is_instant is True:
        return None, usage if instant is None else instant, usage
    return None if usage_is_instant is None else usage, instant, usage


def read_module_power(calls: GpuCalls) -> Milliwatts | None:
    """Power of the superchip around a GPU; None of another GPU."""
    try:
        values = nvml.read_fields(calls, _POWERS, nvml.MODULE_SCOPE)
    except TypeError:  # an old binding, or an imitation of one, has no scopes
        return None
    average, instant = (_plausible_power(values.get(field)) for field in _POWERS)
    # A scope that the board lacks is refused, or it is 0.
    return (instant if average is None else average) or None


def usage_is_instant(architecture: int | None, model: str) -> bool | None:
    """True if nvmlDeviceGetPowerUsage is instantaneous; False if it is the mean of a second."""
    if architecture is None or architecture == _UNKNOWN_ARCHITECTURE:
        return None
    return architecture <= _TURING or any(name in model for name in ("A100", "A30", "A800"))


def _drawn_power(value: Any) -> Milliwatts | None:
    """None also for 0: a board that answers draws power."""
    return _plausible_power(value) or None


def _plausible_power(value: Any) -> Milliwatts | None:
    if value is None or not 0 <= value < _IMPLAUSIBLE_POWER:
        return None
    return Milliwatts(int(value))


def _plausible_limit(value: Any, least: int = _LEAST_LIMIT) -> Milliwatts | None:
    """None also for 0 and for another unit, such as watts: 2300 mW is the limit of no board."""
    power = _plausible_power(value)
    return power if power is not None and least <= power <= _LARGEST_LIMIT else None


def read_limits(calls: GpuCalls, values: Mapping[int, int]) -> PowerLimits:
    """All limits, from the field values if the driver supports them, else one by one."""
    minimum = _plausible_limit(values.get(nvml.LIMIT_MINIMUM), _LEAST_MINIMUM)
    maximum = _plausible_limit(values.get(nvml.LIMIT_MAXIMUM))
    if minimum is None or maximum is None:
        span = calls.ask("power limit range", "nvmlDeviceGetPowerManagementLimitConstraints")
        if span is not None:
            minimum = _plausible_limit(span[0], _LEAST_MINIMUM)
            maximum = _plausible_limit(span[1])

    def limit(number: int, name: str) -> Milliwatts | None:
        value = _plausible_limit(values.get(number))
        if value is None:
            value = _plausible_limit(calls.ask(f"{nvml.FIELDS[number]} (own call)", name))
        return value

    return PowerLimits(
        minimum=minimum,
        maximum=maximum,
        default=limit(nvml.LIMIT_DEFAULT, "nvmlDeviceGetPowerManagementDefaultLimit"),
        requested=limit(nvml.LIMIT_REQUESTED, "nvmlDeviceGetPowerManagementLimit"),
        enforced=limit(nvml.LIMIT_ENFORCED, "nvmlDeviceGetEnforcedPowerLimit"),
    )


def _clock_hertz(calls: GpuCalls, what: str, kind: int) -> int | None:
    megahertz = calls.ask(what, "nvmlDeviceGetClockInfo", kind)
    return None if megahertz is None else int(megahertz) * _HERTZ_PER_MHZ


def _throttle_reasons(calls: GpuCalls) -> tuple[str, ...] | None:
    """The present reasons of throttling. Older drivers know the call by its older name only."""
    mask = calls.ask(_THROTTLE_REASONS, "nvmlDeviceGetCurrentClocksEventReasons")
    if mask is None:
        mask = calls.ask(f"{_THROTTLE_REASONS} (old)", "nvmlDeviceGetCurrentClocksThrottleReasons")
    if mask is None:
        return None
    return tuple(name for bit, name in _REASON_BITS.items() if mask & bit)


class NvmlControls(GpuControls):
    """The knobs of one board."""

    def _call_maybe(self, name: str, *arguments: Any) -> Any:
        """The same, or None if this board does not support or permit the call."""
        try:
            return self.call(name, *arguments)
        except DriverError as error:
            if error.code in FIELD_ERRORS:
                return None
            raise

    def power_limits(self) -> PowerLimits:
        requested = _plausible_limit(self.call("nvmlDeviceGetPowerManagementLimit"))
        if requested is None:
            raise DriverError(NOT_SUPPORTED)
        enforced = self._call_maybe("nvmlDeviceGetEnforcedPowerLimit")
        default = self._call_maybe("nvmlDeviceGetPowerManagementDefaultLimit")
        limits = self._call_maybe("nvmlDeviceGetPowerManagementLimitConstraints")
        minimum, maximum = limits or (None, None)
        return PowerLimits(
            minimum=_plausible_limit(minimum, _LEAST_MINIMUM),
            default=_plausible_limit(default),
            maximum=_plausible_limit(maximum),
            requested=requested,
            enforced=_plausible_limit(enforced),
        )

    def set_power_limit(self, milliwatts: int) -> None:
        self.call("nvmlDeviceSetPowerManagementLimit", milliwatts)

    def clock_range(self) -> tuple[int | None, int]:
        highest = self.call("nvmlDeviceGetMaxClockInfo", _CLOCK_SM)
        memory = self._call_maybe("nvmlDeviceGetSupportedMemoryClocks")
        clocks = memory and self._call_maybe("nvmlDeviceGetSupportedGraphicsClocks", max(memory))
        return (min(clocks) if clocks else None), int(highest)

    def clock(self) -> GpuClockReading:
        clock = self._call_maybe("nvmlDeviceGetClockInfo", _CLOCK_SM)
        return GpuClockReading(None if clock is None else int(clock))

    def limit_clock(self, lowest: int, highest: int) -> None:
        self.call("nvmlDeviceSetGpuLockedClocks", lowest, highest)

    def reset_clock(self) -> None:
        self.call("nvmlDeviceResetGpuLockedClocks")

    def odometer(self) -> int | None:
        energy: int | None = self._call_maybe(_ENERGY_CALL)
        return energy

    def mode(self) -> str:
        """The MIG mode: its change is a reset."""
        mig = self._call_maybe("nvmlDeviceGetMigMode")
        return "mig" if mig and mig[0] else ""
