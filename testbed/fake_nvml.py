"""A scripted NVML: GPUs whose energy is the exact integral of their power, and errors on demand.

It has the functions of ``pynvml`` that the source uses and raises the binding's own errors. It
tells the time by the clock it is given. ``errors`` maps a function's name (or a function's name
and a GPU's UUID, or a field's number) to the code it answers with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from wattspan.ports import Clock

ULL = 3  # NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
UI = 1


@dataclass
class FakeGpu:
    """One GPU. ``watts`` is its power from now on; set it through ``FakeNvml.draw``."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    watts: float = 100.0
    architecture: int = 9
    utilisation: tuple[int, int] = (0, 0)
    running: list[int] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)  # of an MPS server
    samples: list[tuple[int, int, int]] = field(default_factory=list)  # wall us, pid, percent
    limits: dict[int, int] = field(
        default_factory=lambda: {
            187: 200_000, 188: 700_000, 189: 700_000, 190: 500_000, 192: 700_000,
        }
    )  # fmt: skip
    throttled: dict[int, int] = field(default_factory=lambda: {74: 0, 269: 0, 270: 0, 271: 0})
    reasons: int = 0
    mig: int = 0
    virtualisation: int = 0
    step_ns: int = 1  # the counter moves this often
    joules: float = 1000.0
    since: int = 0
    frozen_at: int | None = None
    module_watts: float = 0.0  # of a superchip's CPU and memory; 0: no superchip
    counts_module: bool = True  # a superchip's energy counter is the module's
    address: str = ""  # on the PCI bus; "" is not told
    latency: int = 0  # of each call, nanoseconds


class FakeNvml:
    """Stands in for the ``pynvml`` module."""

    NVMLError = pynvml.NVMLError

    def __init__(self, clock: Clock, *gpus: FakeGpu) -> None:
        self.clock = clock
        self.gpus = list(gpus)
        self.errors: dict[Any, int] = {}
        self.calls: list[str] = []
        self.seen: list[int] = []  # the time stamps that utilisation was asked from
        self.fields_asked: list[int] = []
        self.kinds: dict[int, int] = {}  # fields that answer with another value type
        self.answers: dict[str, Callable[..., Any]] = {}  # of a test, instead of the usual ones
        self.initialised = 0
        self.generation = 0
        self.before: Callable[[str], None] = lambda _name: None
        self.before_call: dict[str, Callable[[FakeGpu], None]] = {}
        for gpu in gpus:
            gpu.since = clock.monotonic()

    # -------------------------------------------------------------- the script

    def draw(self, gpu: FakeGpu, watts: float) -> None:
        gpu.joules, gpu.since = self._joules(gpu), self.clock.monotonic()
        gpu.watts = watts

    def sample(self, gpu: FakeGpu, pid: int, percent: int) -> None:
        """The driver takes a utilisation sample now."""
        gpu.samples.append((self.clock.now().wall // 1000, pid, percent))

    def _joules(self, gpu: FakeGpu) -> float:
        elapsed = self.clock.monotonic() - gpu.since
        watts = gpu.watts + (gpu.module_watts if gpu.counts_module else 0.0)
        return gpu.joules + watts * (elapsed // gpu.step_ns * gpu.step_ns) / 1e9

    def _handle(self, name: str, gpu: FakeGpu) -> tuple[FakeGpu, int]:
        code = self.errors.get((name, gpu.uuid), 0) or self.errors.get(gpu.uuid, 0)
        if code:
            raise pynvml.NVMLError(code)
        return gpu, self.generation

    def _enter(self, name: str, handle: Any = None) -> FakeGpu:
        self.calls.append(name)
        self.before(name)
        code = self.errors.get(name, 0)
        if not self.initialised and name != "nvmlInit":
            code = code or pynvml.NVML_ERROR_UNINITIALIZED
        gpu = FakeGpu("none")
        if handle is not None:
            gpu, generation = handle
            if gpu.latency:
                self.clock.sleep_until(self.clock.monotonic() + gpu.latency)
            code = code or self.errors.get((name, gpu.uuid), 0) or self.errors.get(gpu.uuid, 0)
            if generation != self.generation or gpu not in self.gpus:
                code = code or pynvml.NVML_ERROR_INVALID_ARGUMENT
        if code:
            raise pynvml.NVMLError(code)
        return gpu

    # ------------------------------------------------------------- the library

    def nvmlInit(self) -> None:  # noqa: N802
        self._enter("nvmlInit")
        self.initialised += 1
        self.generation += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._enter("nvmlShutdown")
        self.initialised -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._enter("nvmlSystemGetDriverVersion")
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        self._enter("nvmlDeviceGetHandleByIndex")
        return self._handle("nvmlDeviceGetHandleByIndex", self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
        self._enter("nvmlDeviceGetHandleByUUID")
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return self._handle("nvmlDeviceGetHandleByUUID", gpu)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> Any:  # noqa: N802
        self._enter("nvmlDeviceGetHandleByPciBusId")
        for gpu in self.gpus:
            if gpu.address == bus.decode():
                return self._handle("nvmlDeviceGetHandleByPciBusId", gpu)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def pci_info(self, gpu: FakeGpu) -> SimpleNamespace:
        if not gpu.address:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(busId=f"0000{gpu.address}")

    def __getattr__(self, name: str) -> Any:
        answer = self.answers.get(name) or _ANSWERS.get(name)
        if answer is None:
            raise AttributeError(name)

        def call(handle: Any, *arguments: Any) -> Any:
            gpu = self._enter(name, handle)
            self.before_call.get(name, lambda _gpu: None)(gpu)
            return answer(self, gpu, *arguments)

        return call

    def fields(self, gpu: FakeGpu, asked: list[Any]) -> list[SimpleNamespace]:
        scopes = {scope for one in asked if isinstance(one, tuple) for scope in one[1:]}
        numbers = [one[0] if isinstance(one, tuple) else one for one in asked]
        milliwatts = round(1000 * (gpu.watts + (gpu.module_watts if scopes else 0.0)))
        known = {185: milliwatts, 186: milliwatts, **gpu.limits, **gpu.throttled}
        if scopes and not gpu.module_watts:
            known = {}
        self.fields_asked += [] if scopes else numbers
        entries = []
        for number in numbers:
            code = self.errors.get(number, 0) or (0 if number in known else 3)
            kind = self.kinds.get(number, ULL if number in gpu.throttled else UI)
            value = SimpleNamespace(uiVal=known.get(number, 0), ullVal=known.get(number, 0))
            entries.append(
                SimpleNamespace(fieldId=number, nvmlReturn=code, valueType=kind, value=value)
            )
        return entries

    def process_utilisation(self, gpu: FakeGpu, last_seen: int) -> list[SimpleNamespace]:
        self.seen.append(last_seen)
        fresh = [sample for sample in gpu.samples if sample[0] > last_seen]
        if not fresh:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [SimpleNamespace(timeStamp=at, pid=pid, smUtil=sm) for at, pid, sm in fresh]

    def energy(self, gpu: FakeGpu) -> int:
        joules = self._joules(gpu) if gpu.frozen_at is None else gpu.frozen_at
        return int(joules * 1000)


def _entries(pids: list[int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]


_ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetIndex": lambda n, g: n.gpus.index(g),
    "nvmlDeviceGetUUID": lambda _n, g: g.uuid,
    "nvmlDeviceGetName": lambda _n, g: g.name,
    "nvmlDeviceGetPciInfo": FakeNvml.pci_info,
    "nvmlDeviceGetArchitecture": lambda _n, g: g.architecture,
    "nvmlDeviceGetTotalEnergyConsumption": FakeNvml.energy,
    "nvmlDeviceGetPowerUsage": lambda _n, g: round(g.watts * 1000),
    "nvmlDeviceGetFieldValues": FakeNvml.fields,
    "nvmlDeviceGetUtilizationRates": lambda _n, g: SimpleNamespace(
        gpu=g.utilisation[0], memory=g.utilisation[1]
    ),
    "nvmlDeviceGetProcessUtilization": FakeNvml.process_utilisation,
    "nvmlDeviceGetComputeRunningProcesses": lambda _n, g: _entries(g.running),
    "nvmlDeviceGetGraphicsRunningProcesses": lambda _n, _g: [],
    "nvmlDeviceGetMPSComputeRunningProcesses": lambda _n, g: _entries(g.clients),
    "nvmlDeviceGetPowerManagementLimitConstraints": lambda _n, g: [g.limits[187], g.limits[188]],
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda _n, g: g.limits[189],
    "nvmlDeviceGetPowerManagementLimit": lambda _n, g: g.limits[192],
    "nvmlDeviceGetEnforcedPowerLimit": lambda _n, g: g.limits[190],
    "nvmlDeviceGetMemoryInfo": lambda _n, g: SimpleNamespace(
        total=80 << 30, used=(5 + len(g.running) + len(g.clients)) << 30, free=0
    ),
    "nvmlDeviceGetVirtualizationMode": lambda _n, g: g.virtualisation,
    "nvmlDeviceGetMigMode": lambda _n, g: [g.mig, g.mig],
    "nvmlDeviceGetClockInfo": lambda _n, _g, kind: {1: 1980, 2: 2619}[kind],
    "nvmlDeviceGetTemperature": lambda _n, _g, _sensor: 41,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda _n, g: g.reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _n, g: g.reasons,
}
