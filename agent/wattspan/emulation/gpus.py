"""The emulated GPUs of a host, as their owner sees them: work, time and the truth.

One object owns a file; any number of clients of NVML, or of AMD SMI, in any process, see the same
boards through it. Time comes from the given clock. Call ``step`` often (10 ms is good), or
``start`` a thread.

A client's request is noticed at the next step, so within 20 ms on a running host, and takes effect
the board's ``cap_latency`` later (50 ms, a parameter): power, speed, enforced limit and the
counters of throttling all change at that moment.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from wattspan.emulation.boards import PICOJOULES, EmulatedBoard, EnergyLog
from wattspan.emulation.control import Closeable
from wattspan.emulation.gpu_engine import (
    Controls,
    EnergySplit,
    GpuState,
    GpuTenant,
    ProcessKind,
    Throttle,
    attached,
    changed,
    detached,
    divided,
    energies,
    energy_split,
    new_gpu,
    next_change,
    step,
)
from wattspan.emulation.gpu_file import (
    AMD_GPUS,
    KINDS,
    MAX_GPUS,
    MAX_PROCESSES,
    NO_INSTANCE,
    NVIDIA_GPUS,
    EmulationError,
    GpuFile,
    GpuRecord,
    HostRecord,
    Live,
)
from wattspan.emulation.workloads import (
    GpuWork,
    SteadyLoad,
    WorkLog,
)
from wattspan.ports import Clock
from wattspan.processes.procfs import ProcFs

AMD_DRIVER_VERSION = "6.14.14"
DRIVER_VERSION = "580.95.05"
NVML_VERSION = "13.580.95.05"
CUDA_VERSION = 13000
_GIB = 1 << 30


MAX_LOG_ENTRIES = 15_000  # states; five minutes at 50 a second


class EmulatedGpus(Closeable):
    """Emulated boards in a file that clients of NVML or of AMD SMI read.

    Safe to use from several threads.
    """

    def __init__(
        self,
        path: Path,
        boards: Sequence[EmulatedBoard],
        clock: Clock,
        hosts: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """Create ``path``.

        ``hosts`` returns the present speed of the CPUs of each socket, 1.0 being full speed.
        """
        if not 0 < len(boards) <= MAX_GPUS:
            raise EmulationError(f"A host has 1 to {MAX_GPUS} emulated GPUs, not {len(boards)}.")
        if len({board.is_amd for board in boards}) > 1:
            raise EmulationError("A file of emulated GPUs has those of one vendor: use two files.")
        self._clock = clock
        self._hosts = hosts
        self._work_logs: dict[tuple[int, int], WorkLog] = {}
        self._lock = threading.RLock()
        self._until_exit: set[tuple[int, int]] = set()
        # Requests of the world outside NVML; limit and clock are those of clients.
        self.outside = [Controls(limit=board.limits[1]) for board in boards]
        born = clock.monotonic()
        self._gpus = [new_gpu(board, born) for board in boards]
        self._logs = [EnergyLog[int](MAX_LOG_ENTRIES) for _ in boards]
        for log, gpu in zip(self._logs, self._gpus, strict=True):
            log.record(gpu.at, energies(gpu))

        def fill(host: HostRecord) -> None:
            host.header.gpus = len(boards)
            amd = any(board.is_amd for board in boards)
            host.header.driver_version = (AMD_DRIVER_VERSION if amd else DRIVER_VERSION).encode()
            host.header.nvml_version = NVML_VERSION.encode()
            host.header.cuda_version = CUDA_VERSION
            for index, gpu in enumerate(self._gpus):
                write_identity(host.gpu[index], gpu, index)
                publish(host.gpu[index].live, gpu)

        self.file = GpuFile.create(path, fill)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------- facts

    @property
    def path(self) -> Path:
        return self.file.path

    def __len__(self) -> int:
        return len(self._gpus)

    def uuid(self, gpu: int) -> str:
        text: bytes = self.file.identity(gpu).uuid
        return text.decode()

    def state(self, gpu: int) -> GpuState:
        """The whole state at the last step."""
        with self._lock:
            return self._gpus[gpu]

    def truth(self, gpu: int) -> EnergySplit:
        """The division of the GPU's energy until now."""
        return self.spent_at(gpu, (self._clock.monotonic(),))[0]

    def spent_at(self, gpu: int, times: Sequence[int]) -> list[EnergySplit]:
        """The division of the GPU's energy at each of some monotonic times, exactly.

        LookupError for a future time, or one before the recorded times.
        """
        with self._lock:
            self._advance(gpu)
            return [energy_split(self._logs[gpu].at(time)) for time in times]

    # --------------------------------------------------------------------------- processes

    def attach(
        self,
        gpu: int,
        pid: int,
        work: GpuWork,
        *,
        memory: int = _GIB,
        kind: ProcessKind = ProcessKind.COMPUTE,
        until_exit: bool = False,
        socket: int = 0,
        instance: int | None = None,
    ) -> None:
        """Put a process on a GPU; ``until_exit`` takes it off when that process is gone.

        ``instance`` is the id of a MIG instance, by default the one with the fewest processes.
        ValueError if the process is already there, if memory runs out, if the list is full, or if
        there is no such instance.
        """
        with self._lock:
            present = self._gpus[gpu]
            if len(present.tenants) >= MAX_PROCESSES:
                raise ValueError(f"GPU {gpu} already has {MAX_PROCESSES} processes")
            if present.memory_used + memory > present.board.memory:
                raise ValueError(f"GPU {gpu} has too little memory left for process {pid}")
            ids = [one.id for one in present.instances]
            if instance is None and ids:
                taken = [tenant.instance for tenant in present.tenants]
                instance = min(ids, key=taken.count)
            if instance is not None and instance not in ids:
                raise ValueError(f"GPU {gpu} has no MIG instance {instance}")
            tenant = GpuTenant(pid, work, memory, kind, socket, instance)
            self._advance(gpu, lambda state: attached(state, tenant))
            if until_exit:
                self._until_exit.add((gpu, pid))

    def divide(self, gpu: int, slices: Sequence[int]) -> None:
        """Divide a GPU into MIG instances of so many compute slices; () ends the MIG mode.

        Its processes are put into the instances in turn. ValueError if the sizes do not fit.
        """
        with self._lock:
            instances = self._gpus[gpu].board.instances(slices)
            self.file.record(gpu).mig = bool(instances)
            self._advance(gpu, lambda state: divided(state, instances))

    def set_load(self, gpu: int, pid: int, demand: float) -> None:
        """Change the demand of a process with steady work.

        ValueError if it is not there, or if its work is not steady.
        """

        def driven(work: GpuWork) -> GpuWork:
            if not isinstance(work, SteadyLoad):
                raise ValueError(  # noqa: TRY004 - a wrong request, not a wrong type
                    f"process {pid} has no steady work on this GPU"
                )
            return replace(work, demand=demand)

        self.change_work(gpu, pid, driven)

    def change_work(self, gpu: int, pid: int, change: Callable[[GpuWork], GpuWork]) -> None:
        """Change the work of a process; ValueError if it is not there."""
        with self._lock:
            self._advance(gpu, lambda state: changed(state, pid, change))

    def work_log(self, gpu: int, pid: int) -> WorkLog:
        """The finished units of work of a process on a GPU, also after its exit."""
        with self._lock:
            if any(tenant.pid == pid for tenant in self._gpus[gpu].tenants):
                self._advance(gpu)
            return self._work_logs.get((gpu, pid)) or WorkLog()

    def detach(self, gpu: int, pid: int) -> None:
        """Take a process off a GPU; its energy is kept."""
        with self._lock:
            self._advance(gpu, lambda state: detached(state, pid))
            self._until_exit.discard((gpu, pid))

    # -------------------------------------------------------------------------------- time

    def step(self) -> None:
        """Bring every GPU to the present."""
        with self._lock:
            for index in range(len(self._gpus)):
                self._advance(index)

    def run(self, seconds: float, every: float = 0.01) -> None:
        """Let ``seconds`` of the clock pass, stepping; with a manual clock, at once."""
        start = self._clock.monotonic()
        end, period = start + round(seconds * 1e9), round(every * 1e9)
        while (now := self._clock.monotonic()) < end:
            self._clock.sleep_until(min(end, now + period))
            self.step()

    def start(self, every: float = 0.01) -> None:
        """Step in a thread of its own until ``close``, and notice exits of followed processes."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._keep_stepping, args=(every,), name="emulated-gpus", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop. The file stays, and clients continue to read the last state."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.file.close()

    def _keep_stepping(self, every: float) -> None:
        # A step follows each start and stop of work, so that power changes when the work does.
        period, least, follow = round(every * 1e9), round(every * 1e9 / 20), 0
        while not self._stop.is_set():
            self.step()
            now = self._clock.monotonic()
            if now >= follow:
                self._detach_exited()
                follow = now + 10 * period
            with self._lock:
                hosts = self._hosts()
                change = min(next_change(gpu, hosts) for gpu in self._gpus)
            self._clock.sleep_until(now + max(least, min(period, math.ceil(min(1, change) * 1e9))))

    def _detach_exited(self) -> None:
        for gpu, pid in tuple(self._until_exit):
            if not _alive(pid):
                self.detach(gpu, pid)

    def _advance(self, index: int, change: Callable[[GpuState], GpuState] | None = None) -> None:
        """Bring a GPU to the present and then change its state; the lock is held."""
        with self.file.writing(index) as live:
            now = self._clock.now()
            asked = self._requested(index)
            before = self._gpus[index]
            gpu = step(before, max(now.mono, before.at), now.wall, asked, self._hosts())
            self._gpus[index] = gpu = gpu if change is None else change(gpu)
            self._record_finished(index)
            self._logs[index].record(gpu.at, energies(gpu))
            publish(live, gpu, before)

    def _record_finished(self, index: int) -> None:
        gpu = self._gpus[index]
        for tenant in gpu.tenants:
            if tenant.work.finished:
                log = self._work_logs.setdefault((index, tenant.pid), WorkLog())
                log.record(gpu.at, tenant.work.finished)

    def _requested(self, index: int) -> Controls:
        record = self.file.record(index)
        lock = int(record.clock_request) & 0xFF_FFFF
        return replace(
            self.outside[index],
            limit=int(record.limit_request) & 0xFFFF_FFFF,
            lock_mhz=lock or None,
        )


class HostGpus(Closeable):
    """The boards of a host in ``directory``: a file for each vendor, as each has its own driver.

    ``places`` has the boards of each GPU's vendor, and its index among them.
    """

    def __init__(
        self,
        directory: Path,
        boards: Sequence[EmulatedBoard],
        clock: Clock,
        hosts: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self.files: list[EmulatedGpus] = []
        self.places: dict[int, tuple[EmulatedGpus, int]] = {}
        for amd, name in ((False, NVIDIA_GPUS), (True, AMD_GPUS)):
            own = [number for number, board in enumerate(boards) if board.is_amd is amd]
            if own:
                file = EmulatedGpus(directory / name, [boards[one] for one in own], clock, hosts)
                self.files.append(file)
                self.places |= {number: (file, index) for index, number in enumerate(own)}

    def of(self, gpu: int) -> tuple[EmulatedGpus, int]:
        """The boards of a GPU's vendor, and its index among them; ValueError without such a GPU."""
        if gpu not in self.places:
            raise ValueError(f"this host has no GPU {gpu}")
        return self.places[gpu]

    def start(self, every: float = 0.01) -> None:
        for boards in self.files:
            boards.start(every)

    def close(self) -> None:
        for boards in self.files:
            boards.close()


def _alive(pid: int) -> bool:
    """True if the process runs: a zombie holds no GPU context."""
    stat = ProcFs().stat(pid)
    return stat is not None and not stat.exiting


_IDLE, _LOCKED, _POWER_CAP, _HW_SLOWDOWN = 0x1, 0x2, 0x4, 0x8
_REASONS = {
    Throttle.SW_THERMAL: 0x20,
    Throttle.HW_THERMAL: 0x40 | _HW_SLOWDOWN,
    Throttle.POWER_BRAKE: 0x80 | _HW_SLOWDOWN,
}


def write_identity(record: GpuRecord, gpu: GpuState, index: int) -> None:
    """Write the constant properties, and the requests as after the load of a driver."""
    board, identity = gpu.board, record.identity
    bus = (0x60 if board.is_amd else 0x10) + index
    identity.name = board.name.encode()
    # A valid UUID that no real board has.
    uuid = f"e0e0e0e0-0000-1000-8000-{index:012x}"
    identity.uuid = (uuid if board.is_amd else f"GPU-e0e0e0e0-0000-4000-8000-{index:012x}").encode()
    identity.serial = f"{1_650_000_000_000 + index}".encode()
    identity.bus_id = f"00000000:{bus:02X}:00.0".encode()
    identity.bus_id_legacy = f"0000:{bus:02X}:00.0".encode()
    identity.bus = bus
    identity.pci_device = board.pci_device
    identity.architecture, identity.brand = board.architecture, board.brand
    identity.compute_major, identity.compute_minor = board.compute
    identity.multiprocessors = board.multiprocessors
    identity.limit_min, identity.limit_default, identity.limit_max = board.limits
    silicon = board.silicon
    identity.clock_min, identity.clock_max = silicon.min_mhz, silicon.max_mhz
    identity.clock_step, identity.memory_clock = silicon.step_mhz, board.memory_mhz
    identity.usage_is_average = board.sensor.usage_is_average
    identity.has_average = board.sensor.average_window is not None
    identity.memory_total, identity.memory_reserved = board.memory, board.reserved_memory
    identity.counter_step, identity.born = board.counter_step or 0, gpu.born
    record.limit_request = board.limits[1]
    record.persistence_request = 1


def publish(live: Live, gpu: GpuState, before: GpuState | None = None) -> None:
    """Write the present state; ``before`` is the state published last, if any."""
    live.at, live.power = gpu.at, gpu.point.power
    live.energy, live.energy_rest = divmod(gpu.energy, PICOJOULES)
    live.counter, live.counter_rest = divmod(gpu.energy - gpu.origin, PICOJOULES)
    live.latched = max(0, gpu.latched - gpu.origin) // PICOJOULES
    live.power_instant, live.power_average = gpu.power_instant, gpu.power_average or 0
    live.enforced, live.clock = gpu.enforced, gpu.point.mhz
    live.utilisation, live.memory_utilisation = gpu.utilisation, gpu.memory_utilisation
    live.temperature = round(gpu.temperature)
    live.reasons = _reasons(gpu)
    throttled = dict(gpu.throttled_ns)
    live.capped_ns = gpu.capped_ns
    live.sw_thermal_ns = throttled.get(Throttle.SW_THERMAL, 0)
    live.hw_thermal_ns = throttled.get(Throttle.HW_THERMAL, 0)
    live.power_brake_ns = throttled.get(Throttle.POWER_BRAKE, 0)
    live.memory_used = gpu.memory_used
    live.processes = len(gpu.tenants)
    for place, tenant in enumerate(gpu.tenants):
        entry = live.process[place]
        entry.pid, entry.kind = tenant.pid, KINDS.index(tenant.kind)
        entry.memory = tenant.memory
        entry.instance = NO_INSTANCE if tenant.instance is None else tenant.instance
        entry.share, entry.busy = tenant.grant.share, tenant.busy // 1_000_000
    live.instances = len(gpu.instances)
    for place, instance in enumerate(gpu.instances):
        part = live.instance[place]
        part.id, part.slices, part.multiprocessors = instance[:3]
        part.memory, part.active = instance.memory, gpu.active[place] // 1_000_000
    if before is not None and before.samples is gpu.samples:
        return
    live.samples = len(gpu.samples)
    for place, sample in enumerate(gpu.samples):
        row = live.sample[place]
        row.stamp, row.pid, row.sm, row.memory = sample


def _reasons(gpu: GpuState) -> int:
    if all(not tenant.grant.share for tenant in gpu.tenants):
        return _IDLE
    reasons = _POWER_CAP if gpu.point.capped else 0
    if gpu.controls.lock_mhz is not None:
        reasons |= _LOCKED
    if gpu.controls.throttle is not None:
        reasons |= _REASONS[gpu.controls.throttle]
    return reasons
