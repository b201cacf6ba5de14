"""AMD GPUs by AMD SMI's functions: the vendor, its boards, and their limits and clocks.

A board may be divided into partitions (modes DPX, QPX and CPX; SPX is undivided), each with a
handle of its own. Energy, power, limits and clocks are of the whole board, and its first partition
answers for them; processes are listed by partition. The board is one domain, known by the PCI
address of its first function, as partitions share the UUID.

The library finds boards and their partitions when it is initialised, and never again. So it is
initialised anew, which keeps the settings and counters of all boards, to find a board that was
lost, and after a board was divided differently. Handles are void after that.

AMD SMI's status codes become those codes of NVML with the same meaning.

The driver keeps power limits in whole watts. A clock is limited by the performance level
"determinism", which shows that it is in force; the limit itself cannot be read back. The original
level is "auto". A board with any other level is managed by another program, and is left alone.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from wattspan.model import (
    GpuStatus,
    Instant,
    Microjoules,
    Milliwatts,
    PowerLimits,
)
from wattspan.model.settings import Duration, about
from wattspan.ports import Clock, SourceContext
from wattspan.sources.device_power import processor_around
from wattspan.sources.energy_meter import EnergyAccumulator
from wattspan.sources.gpu import calls
from wattspan.sources.gpu.calls import (
    DriverError,
    DriverLibrary,
    DriverMessages,
    GpuCalls,
    GpuLostError,
)
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
from wattspan.sources.gpu.usage import PROCESSES, ProcessActivity, ProcessListUsage
from wattspan.util.cpu_topology import CpuTopology

AMD = "0x1002"
"""AMD's number as a vendor of PCI devices, as the kernel writes it."""
ENERGY, POWER, LIMITS = "energy accumulator", "power", "power limits"
METHOD = "gpu-cu-occupancy"
EMULATED_UUID = "e0e0e0e0-0000-1000-8000-"
"""Prefix of the UUIDs of emulated boards, which no real board has: the emulated library can replace
the real one, and its figures must then be labelled as emulated.
"""
UNDIVIDED = "SPX"
SAMPLE_DUTY = 0.72
"""The assumed part of the time that a power of the moment stands for: its window is not stated."""
MAX_HANDLES, MAX_PROCESSES = 512, 1024
PROCESS_LIST = "amdsmi_get_gpu_process_list"

_INVALID = 1
"""AMDSMI_STATUS_INVAL: also the answer to a handle of an earlier initialisation."""
_NVML_CODES = {
    _INVALID: calls.INVALID_ARGUMENT,
    2: calls.NOT_SUPPORTED,
    3: calls.NOT_SUPPORTED,  # not yet implemented
    5: calls.FUNCTION_NOT_FOUND,
    6: calls.GPU_NOT_FOUND,  # an error of libdrm: the device file is gone
    **dict.fromkeys((8, 9, 11, 30), calls.TIMED_OUT),  # timeout, retry, interrupt, busy
    10: calls.NO_PERMISSION,
    17: calls.INVALID_ARGUMENT,  # out of bounds
    18: calls.UNINITIALIZED,
    31: calls.GPU_NOT_FOUND,
    32: calls.UNINITIALIZED,
    34: calls.DRIVER_NOT_LOADED,
    40: calls.NOT_SUPPORTED,  # no data
    52: calls.NOT_SUPPORTED,  # no file of the driver for it
}
"""Codes of NVML, by AMDSMI_STATUS_*. Any other is an unknown error."""

MESSAGES = DriverMessages(
    source="amdsmi",
    label="AMD SMI",
    causes={
        calls.TIMED_OUT: "the driver is busy or timed out",
        calls.UNINITIALIZED: "AMD SMI is not initialised",
        calls.INVALID_ARGUMENT: "AMD SMI rejects the call",
        calls.NOT_SUPPORTED: "this GPU or its driver does not support it",
        calls.NO_PERMISSION: "permission denied",
        calls.DRIVER_NOT_LOADED: "the amdgpu driver is not loaded",
        calls.FUNCTION_NOT_FOUND: "the installed package or library is too old for the call",
        calls.GPU_NOT_FOUND: "the driver no longer knows the GPU",
        calls.UNKNOWN: "the library reports an unknown error",
    },
    remedies={
        calls.NO_PERMISSION: (
            "Give the agent access to /dev/kfd and /dev/dri/renderD*: the groups render and video,"
            " in a container with --device, in a systemd unit with DeviceAllow=."
        ),
        calls.DRIVER_NOT_LOADED: "Load it (modprobe amdgpu); the agent keeps trying.",
        calls.GPU_NOT_FOUND: "Look at lspci and dmesg; the agent keeps trying.",
    },
    setter_remedies={
        calls.NOT_SUPPORTED: "In a virtual machine, cap the board on its host.",
        calls.NO_PERMISSION: "AMD's driver lets root alone set it: run `wattspan capper` as root.",
        calls.DRIVER_NOT_LOADED: "Load it (modprobe amdgpu); limits then have the defaults.",
        calls.FUNCTION_NOT_FOUND: "Install the version of amdsmi that belongs to this host's ROCm.",
        calls.GPU_NOT_FOUND: "Look at lspci and dmesg; it is tried again.",
        calls.UNKNOWN: "Look for messages of amdgpu in dmesg; it is tried again.",
    },
    counter=ENERGY,
    untrusted="Its power is integrated instead; another driver or ROCm may help.",
    motionless="On a board of two dies (MI250X), the first die reports for both.",
    no_gpu=(
        "the library finds no GPU",
        "Look at lspci and dmesg, and at the rights of /dev/kfd and /dev/dri/renderD*; the agent"
        " keeps trying.",
    ),
    list_command="See amd-smi list.",
    unlisted="It reads /proc/PID/fdinfo: run the agent as root, or with CAP_SYS_PTRACE, and in the"
    " host's pid namespace.",
    report="Please report it with the versions of ROCm and of the package amdsmi.",
    hang="Look for messages of amdgpu in dmesg",
)

_ADDRESS = re.compile(r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})\.([0-7])")
_MICROWATTS = 1000  # in a milliwatt
_MILLIWATTS = 1000  # in a watt
_MIN_POWER, _MAX_POWER = 1_000_000, 100_000_000_000  # uW; others are blanks, or in another unit
_MAX_WATTS, _MAX_PROCESSOR_WATTS = 5_000, 1_500  # more is a blank, or an APU's milliwatts
_MAX_MEMORY = 1 << 60
_MAX_CELSIUS = 1000
_HERTZ_PER_MHZ = 1_000_000


def _code_of(error: Exception) -> int:
    status = getattr(error, "err_code", None)
    return _NVML_CODES.get(status, calls.UNKNOWN) if isinstance(status, int) else calls.UNKNOWN


def number(value: Any, most: int = 0xFFFF_FFFE) -> int | None:
    """A figure of the package; None for "N/A", for a blank value and for one above ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        return None
    return int(value)


def board_address(text: Any) -> tuple[str, int]:
    """The address of a board's first PCI function, and the function or partition, of a BDF.

    ValueError for any other text.
    """
    found = _ADDRESS.fullmatch(str(text).lower())
    if found is None:
        raise ValueError(f"{text!r} is not the PCI address of a GPU")
    return f"{found[1]}.0", int(found[2])


class AmdSmiSettings(GpuSettings, frozen=True):
    """AMD GPUs: intervals of the calls, and the longest duration of a call.

    Keys:
        usage_interval: Interval of process lists with their activity; the library searches all of
            /proc for each.
    """

    usage_interval: Annotated[Duration, about(least="10ms")] = Duration.parse("500ms")


class AmdSmiVendor(GpuVendor):
    """AMD's boards."""

    messages = MESSAGES
    kernel_driver = "amdgpu"
    finds_again = False
    reinitialise_after = 1

    def __init__(self, amdsmi: Any, clock: Clock) -> None:
        super().__init__(DriverLibrary(amdsmi, clock, amdsmi.AmdSmiException, _code_of), clock)
        self._wide: set[str] = set()  # boards with an accumulator of more than 32 bits

    def begin(self) -> None:
        self.library.call("amdsmi_init")

    def end(self) -> None:
        self.library.call("amdsmi_shut_down")

    def places(self) -> list[BoardPlace]:
        """The boards with the handles of their partitions, in their order.

        A handle that does not tell its address is left out.
        """
        boards: dict[str, list[tuple[int, Any]]] = {}
        for handle in self.library.call("amdsmi_get_processor_handles")[:MAX_HANDLES]:
            try:
                address, function = board_address(
                    self.library.call("amdsmi_get_gpu_device_bdf", handle)
                )
            except (DriverError, ValueError) as error:
                if calls.code_of(error) in calls.SESSION_ERRORS:
                    raise
                continue
            boards.setdefault(address, []).append((function, handle))
        return [
            BoardPlace(
                f"AMD GPU {address}",
                (address, index, [handle for _, handle in sorted(found, key=lambda one: one[0])]),
                f"gpu:{address}",
            )
            for index, (address, found) in enumerate(boards.items())
        ]

    def open(self, place: BoardPlace) -> GpuBoard | None:
        address, index, handles = place.key
        asic = self._identity_field("amdsmi_get_gpu_asic_info", handles[0]) or {}
        if _is_foreign(asic.get("vendor_id")):
            return None
        uuid = _text(self._identity_field("amdsmi_get_gpu_device_uuid", handles[0]) or "")
        driver = self._identity_field("amdsmi_get_gpu_driver_info", handles[0]) or {}
        identity = GpuIdentity(
            f"gpu:{address}",
            index,
            _text(asic.get("market_name", "")),
            tuple(filter(None, (address, uuid, f"amd:{index}"))),
            kind="AMD GPU",
            driver=_text(driver.get("driver_version", "")),
            pci=address,
            emulated=uuid.startswith(EMULATED_UUID),
        )
        return GpuBoard(identity, handles)

    def _identity_field(self, name: str, handle: Any) -> Any:
        """The answer of a call; None if it fails.

        DriverError if the board or the session is lost.
        """
        try:
            return self.library.call(name, handle)
        except DriverError as error:
            if error.code in calls.GPU_ERRORS | calls.SESSION_ERRORS:
                raise
        except ValueError:  # the package cannot parse what the library tells
            pass
        return None

    def device(
        self, board: GpuBoard, settings: GpuSettings, context: SourceContext
    ) -> AmdSmiDevice:
        return AmdSmiDevice(self, board, settings, context)

    def controls(self, board: GpuBoard) -> AmdSmiControls:
        return AmdSmiControls(self.library, board, self._wide)


def _text(value: Any) -> str:
    """Text of the driver, printable; "" for "N/A"."""
    text = driver_text(value)
    return "" if text == "N/A" else text


def power_limits(answer: Mapping[str, Any]) -> PowerLimits:
    """The limits in the library's answer, in which 0 is an unknown one.

    A limit below a watt is in another unit than the library documents, and unknown too.
    """

    def limit(key: str) -> Milliwatts | None:
        microwatts = number(answer.get(key), _MAX_POWER)
        if microwatts is None or microwatts < _MIN_POWER:
            return None
        return Milliwatts(microwatts // _MICROWATTS)

    requested = limit("power_cap")
    return PowerLimits(
        minimum=limit("min_power_cap"),
        maximum=limit("max_power_cap"),
        default=limit("default_power_cap"),
        requested=requested,
        enforced=requested,
    )


def _is_foreign(vendor: object) -> bool:
    """True if a PCI vendor is known and is not AMD.

    Versions of the package tell it as a number or as hexadecimal text, and an unknown one as "N/A".
    """
    try:
        known = vendor if isinstance(vendor, int) else int(str(vendor), 16)
    except ValueError:
        return False
    return known not in {0, int(AMD, 16)}


class AmdSmiDevice(GpuDevice):
    """One board, read by the handles of its partitions, the first one first."""

    overshoots = True

    def __init__(
        self,
        vendor: GpuVendor,
        board: GpuBoard,
        settings: GpuSettings,
        context: SourceContext,
    ) -> None:
        super().__init__(vendor, board)
        self._directory = context.directory
        sysfs = context.sysfs or SYSFS
        chips = (sysfs / "bus/pci/devices" / board.identity.pci).glob("hwmon/*")
        self.processor = processor_around(chips, lambda: CpuTopology(sysfs))
        self._partitions = self._bind(board.handles)
        self._accumulator = EnergyAccumulator()
        self._invalid_step = False
        self._answered = False  # energy or power was read
        self._mode: str | None = None
        self.usage = ProcessListUsage(self, settings, METHOD, self._list_processes)

    def rebind(self, board: GpuBoard) -> None:
        super().rebind(board)
        self._partitions = self._bind(board.handles)
        self.changed, self._mode = False, None

    def _bind(self, handles: Sequence[Any]) -> list[GpuCalls]:
        others = (GpuCalls(self.library, handle, self.clock) for handle in handles[1:])
        return [self.calls, *others]

    @property
    def epoch(self) -> int:
        return self._accumulator.epoch

    @property
    def counter_fault(self) -> str:
        fault = "the library returns no valid accumulator and resolution"
        return fault if self._invalid_step else ""

    @property
    def partitions(self) -> str:
        count = len(self._partitions)
        return f" in {count} partitions ({self._mode or UNDIVIDED})" if count > 1 else ""

    def sensor_duty(self, gauges: GpuGauges) -> float:
        return SAMPLE_DUTY if gauges.average is None else 1.0

    def energy(self, max_power: Milliwatts) -> tuple[Microjoules | None, Instant]:
        answer, at = self.calls.stamped(ENERGY, "amdsmi_get_energy_count")
        if answer is None:
            return None, at
        value, step = accumulated(answer), answer.get("counter_resolution")
        energy = None
        if isinstance(value, int) and isinstance(step, int | float):
            energy = self._accumulator.advance(at, value, step, max_power)
        self._invalid_step = energy is None
        return energy, at

    def gauges(self) -> GpuGauges:
        """Boards have either the power of the moment (MI300) or a mean (older ones, Radeon).

        Some releases of the library have neither, and one of them under a common name. The
        activity is that of the graphics and compute pipes, the mean of the partitions.
        """
        answer = self.calls.ask(POWER, "amdsmi_get_power_info") or {}
        most = _MAX_WATTS if self.processor is None else _MAX_PROCESSOR_WATTS

        def power(kind: str) -> Milliwatts | None:
            watts = number(answer.get(kind), most)
            return Milliwatts(watts * _MILLIWATTS) if watts else None  # no board draws nothing

        average, instant = power("average_socket_power"), power("current_socket_power")
        activities = self._ask_partitions("activity", "amdsmi_get_gpu_activity")
        busy = [
            percent
            for activity in activities
            if activity is not None
            and (percent := number(activity.get("gfx_activity"), 100)) is not None
        ]
        self._refuse_if_unplugged()
        return GpuGauges(
            average,
            instant,
            average or instant or power("socket_power"),
            sum(busy) // len(busy) if busy else None,
        )

    def _refuse_if_unplugged(self) -> None:
        """A board whose files have gone answers "not supported" to everything."""
        refused = (self.calls.refused(what) for what in (ENERGY, POWER))
        if not all(code == calls.NOT_SUPPORTED for code in refused):
            self._answered = True
        elif self._answered:
            raise GpuLostError(calls.GPU_NOT_FOUND)

    def _ask_partitions(self, what: str, name: str) -> list[Any]:
        """The answers of all partitions; None of one that does not answer, or is gone."""
        answers = []
        for partition in self._partitions:
            try:
                answers.append(partition.ask(what, name))
            except UnicodeDecodeError:  # the name of a process is no UTF-8
                answers.append(_unnamed_processes(self.library, partition.handle))
            except GpuLostError:
                if partition is self.calls:
                    raise
                self.changed = True
                answers.append(None)
        return answers

    def _list_processes(self) -> list[ProcessActivity] | None:
        """The processes on all partitions; None if the driver does not list them."""
        engines: dict[int, int] = {}
        units: dict[int, int] = {}
        lists = self._ask_partitions(PROCESSES, PROCESS_LIST)
        if None in lists:
            return None
        for entries in lists:
            for entry in entries:
                pid = int(entry["pid"])
                engines[pid] = engines.get(pid, 0) + int(entry["engine_usage"]["gfx"])
                occupied = number(entry.get("cu_occupancy"))
                if occupied is not None:
                    units[pid] = units.get(pid, 0) + occupied
        return [
            ProcessActivity(pid, self._directory.identify(pid), engine, units.get(pid))
            for pid, engine in engines.items()
        ]

    def status(self, at: Instant) -> GpuStatus:
        ask = self.calls.ask
        limits = power_limits(ask(LIMITS, "amdsmi_get_power_cap_info") or {})
        video = _constant(self.library, "AmdSmiMemoryType", "VRAM")
        hotspot = _constant(self.library, "AmdSmiTemperatureType", "HOTSPOT")
        now = _constant(self.library, "AmdSmiTemperatureMetric", "CURRENT")
        self._follow_partitions()
        return GpuStatus(
            self.identity.domain_id,
            at,
            limits=limits,
            sm_clock_hz=self._clock_hertz("GFX"),
            memory_clock_hz=self._clock_hertz("MEM"),
            temperature_celsius=number(
                ask("temperature", "amdsmi_get_temp_metric", hotspot, now), _MAX_CELSIUS
            ),
            memory_used=number(
                ask("used memory", "amdsmi_get_gpu_memory_usage", video), _MAX_MEMORY
            ),
            memory_total=number(ask("memory", "amdsmi_get_gpu_memory_total", video), _MAX_MEMORY),
            partition_mode=self._mode,
        )

    def _clock_hertz(self, kind: str) -> int | None:
        clock = _constant(self.library, "AmdSmiClkType", kind)
        answer = self.calls.ask(f"{kind} clock", "amdsmi_get_clock_info", clock) or {}
        megahertz = number(answer.get("clk"))
        return None if megahertz is None else megahertz * _HERTZ_PER_MHZ

    def _follow_partitions(self) -> None:
        """Notice another division of the board: the handles are then those of the former one."""
        mode = self.calls.ask("partition mode", "amdsmi_get_gpu_compute_partition")
        if mode is None:
            return
        self.changed = self.changed or self._mode not in {None, mode}
        self._mode = str(mode)


def _constant(library: DriverLibrary, enumeration: str, name: str) -> Any:
    """A member of one of the package's enumerations."""
    return getattr(getattr(library.binding, enumeration), name)


def _unnamed_processes(library: DriverLibrary, handle: Any) -> list[dict[str, Any]] | None:
    """The list of processes without names, which the package cannot decode; None if it fails.

    A name is the path of a program, and any user may choose it.
    """
    package, count = library.binding.amdsmi_wrapper, ctypes.c_uint32(MAX_PROCESSES)
    found = (package.amdsmi_proc_info_t * MAX_PROCESSES)()
    if library.call(PROCESS_LIST, handle, ctypes.byref(count), found, of=package):
        return None
    return [
        {
            "pid": one.pid,
            "engine_usage": {"gfx": one.engine_usage.gfx},
            "cu_occupancy": getattr(one, "cu_occupancy", None),
        }
        for one in found[: count.value]
    ]


def accumulated(answer: Mapping[str, Any]) -> Any:
    """The accumulator in the library's answer; releases before 6.2.1 call it "power"."""
    return answer.get("energy_accumulator", answer.get("power"))


_SENSOR = 0  # of the whole board
_AUTO, _DETERMINISM = "AUTO", "DETERMINISM"


class AmdSmiControls(GpuControls):
    """The knobs of one board, by the handle of its first partition."""

    def __init__(self, library: DriverLibrary, board: GpuBoard, wide: set[str]) -> None:
        """``wide``: the boards whose accumulator is known to have more than 32 bits."""
        super().__init__(library, board.handles[0])
        self._device, self._wide = board.identity.domain_id, wide

    def power_limits(self) -> PowerLimits:
        limits = power_limits(self.call("amdsmi_get_power_cap_info"))
        if limits.requested is None:
            raise DriverError(calls.NOT_SUPPORTED)
        return limits

    def set_power_limit(self, milliwatts: int) -> None:
        self.call("amdsmi_set_power_cap", _SENSOR, milliwatts * _MICROWATTS)

    def clock_range(self) -> tuple[int | None, int]:
        clocks = self._clocks()
        highest = number(clocks.get("max_clk"))
        if not highest:
            raise DriverError(calls.NOT_SUPPORTED)
        return number(clocks.get("min_clk")), highest

    def clock(self) -> GpuClockReading:
        """The limit is gone if another program, or a reset of the board, removed it."""
        limited = self._level() == _DETERMINISM
        return GpuClockReading(number(self._clocks().get("clk")), limited)

    def limit_clock(self, lowest: int, highest: int) -> None:
        del lowest  # the level has none: an idle board can sleep
        level = self._level()
        if level not in {_AUTO, _DETERMINISM}:
            raise DriverError(
                calls.NO_PERMISSION,
                cause=f"another program has set its performance level to {level}",
                remedy="Set it to auto: amd-smi set --perf-level auto.",
            )
        self.call("amdsmi_set_gpu_perf_determinism_mode", highest)

    def reset_clock(self) -> None:
        level = _constant(self._library, "AmdSmiDevPerfLevel", _AUTO)
        self.call("amdsmi_set_gpu_perf_level", level)

    def odometer(self) -> int | None:
        """The energy accumulator, once it is known not to be one of 32 bits, which wraps."""
        try:
            answer = self.call("amdsmi_get_energy_count")
        except DriverError as error:
            calls.raise_if_lost(error.code)
            return None
        value = number(accumulated(answer), 1 << 64) or 0
        if value >> 32:
            self._wide.add(self._device)
        return value if self._device in self._wide else None

    def _clocks(self) -> Mapping[str, Any]:
        kind = _constant(self._library, "AmdSmiClkType", "GFX")
        answer: Mapping[str, Any] = self.call("amdsmi_get_clock_info", kind)
        return answer

    def _level(self) -> str:
        """The performance level, as in "AUTO"."""
        level = self.call("amdsmi_get_gpu_perf_level")
        return str(level).removeprefix("AMDSMI_DEV_PERF_LEVEL_")
