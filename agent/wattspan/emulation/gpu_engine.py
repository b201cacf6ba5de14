"""One emulated GPU as an immutable value, advanced by ``step(gpu, now, ...) -> gpu``.

Pure: the caller passes the time. Between two steps power is constant and equal to the published
power; a step first accounts for that period, then derives the next power from controls and
demands. The energy is therefore the exact integral of the power that clients read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from wattspan.emulation.boards import (
    PICOJOULES,
    Allocation,
    Demand,
    EmulatedBoard,
    EmulatedInstance,
    OperatingPoint,
    PowerHistory,
    PowerSegment,
    extended,
    last_edge,
    mean_power,
    operate,
)
from wattspan.emulation.workloads import GpuWork

SAMPLES = 72  # the driver's ring of per-process utilisation samples
_NO_GRANT = Allocation(0, 0, 1.0)


class ProcessKind(StrEnum):
    """NVML's process list that holds a process."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


class Throttle(StrEnum):
    """The reason of a clock reduction other than the power cap."""

    SW_THERMAL = "sw_thermal"
    HW_THERMAL = "hw_thermal"
    POWER_BRAKE = "power_brake"


@dataclass(frozen=True, slots=True)
class GpuTenant:
    """A process on the GPU, with the truth about it. Energy in picojoules."""

    pid: int
    work: GpuWork
    memory: int
    kind: ProcessKind = ProcessKind.COMPUTE
    socket: int = 0  # with the CPUs that do the host's part of its work
    instance: int | None = None  # the id of its MIG instance
    grant: Allocation = _NO_GRANT
    energy: int = 0
    used: int = 0  # since the last utilisation sample, in millionths times nanoseconds
    busy: int = 0  # since it is there, likewise


class UtilisationSample(NamedTuple):
    """A sample of NVML's GetProcessUtilization: percent, stamped in Unix microseconds."""

    stamp: int
    pid: int
    sm: int
    memory: int


@dataclass(frozen=True, slots=True)
class Controls:
    """Requests of clients and of the outside world. Power in milliwatts, clocks in MHz.

    ``ceiling`` is a limit that no client sees or sets (a BMC's): the enforced limit is the lower.
    """

    limit: int
    lock_mhz: int | None = None  # highest locked clock
    ceiling: int | None = None
    throttle: Throttle | None = None
    throttle_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class GpuState:
    """The whole state of one emulated GPU at the time ``at``. Energy in picojoules."""

    board: EmulatedBoard
    born: int
    at: int
    point: OperatingPoint
    controls: Controls  # in force
    requested: Controls  # the latest request, which takes effect at ``due``
    due: int
    tenants: tuple[GpuTenant, ...] = ()
    departed: tuple[tuple[int, int], ...] = ()  # pid and energy of detached processes
    energy: int = 0
    origin: int = 0  # the energy at which the counter was last zero
    latched: int = 0  # the energy at the counter's latest edge
    history: PowerHistory = ()
    power_instant: int = 0
    power_average: int | None = None
    utilisation: int = 0
    memory_utilisation: int = 0
    used: int = 0
    sampled: int = 0  # time of the last utilisation sample
    samples: tuple[UtilisationSample, ...] = ()
    capped_ns: int = 0
    throttled_ns: tuple[tuple[Throttle, int], ...] = ()
    temperature: float = 30.0
    instances: tuple[EmulatedInstance, ...] = ()  # without any, MIG is off
    active: tuple[int, ...] = ()  # of each instance, in millionths of it times nanoseconds

    @property
    def enforced(self) -> int:
        """The limit in force, in milliwatts."""
        controls = self.controls
        return controls.limit if controls.ceiling is None else min(controls.limit, controls.ceiling)

    @property
    def memory_used(self) -> int:
        return self.board.reserved_memory + sum(tenant.memory for tenant in self.tenants)


@dataclass(frozen=True, slots=True)
class EnergySplit:
    """The division of the energy of one GPU, in microjoules.

    A process's energy is the dynamic energy that it caused, kept after its exit; ``idle`` is the
    rest and takes the roundings, less than a microjoule a process.
    """

    energy: int
    processes: dict[int, int]

    @property
    def idle(self) -> int:
        return self.energy - sum(self.processes.values())


def new_gpu(board: EmulatedBoard, now: int) -> GpuState:
    """An idle GPU after the load of its driver."""
    controls = Controls(limit=board.limits[1])
    point = operate(board.silicon, (), controls.limit)
    average = None if board.sensor.average_window is None else point.power
    return GpuState(
        board=board,
        born=now - board.phase,
        at=now,
        point=point,
        controls=controls,
        requested=controls,
        due=now,
        power_instant=point.power,
        power_average=average,
        sampled=now,
    )


def step(
    gpu: GpuState,
    now: int,
    wall: int,
    requested: Controls | None = None,
    hosts: Sequence[float] = (),
) -> GpuState:
    """The GPU at ``now``; ``wall`` is Unix time in nanoseconds, for the samples' stamps.

    ``requested`` is the present request of clients; a change takes effect a cap latency later.
    ``hosts`` is the speed of the CPUs of each socket since the last step; 1.0 if it is unknown.
    """
    if now < gpu.at:
        raise ValueError(f"time decreased from {gpu.at} to {now}")
    return _operating_point(_control_applied(_accounted(gpu, now, wall, hosts), requested))


def next_change(gpu: GpuState, hosts: Sequence[float] = ()) -> float:
    """Seconds until the GPU changes by itself, without further requests."""
    pending = (gpu.due - gpu.at) / 1e9 if gpu.requested != gpu.controls else math.inf
    works = (
        tenant.work.lasts(tenant.grant.speed, _host_of(tenant, hosts)) for tenant in gpu.tenants
    )
    return min(pending, *works, math.inf)


def attached(gpu: GpuState, tenant: GpuTenant) -> GpuState:
    """The GPU with one more process; ValueError if that pid is already there."""
    if any(present.pid == tenant.pid for present in gpu.tenants):
        raise ValueError(f"process {tenant.pid} is already on this GPU; detach it first")
    return _operating_point(replace(gpu, tenants=(*gpu.tenants, tenant)))


def detached(gpu: GpuState, pid: int) -> GpuState:
    """The GPU without that process, whose energy is kept; ValueError if it is not there."""
    leaving = [tenant for tenant in gpu.tenants if tenant.pid == pid]
    if not leaving:
        raise ValueError(f"process {pid} is not on this GPU")
    staying = tuple(tenant for tenant in gpu.tenants if tenant.pid != pid)
    departed = dict(gpu.departed)
    departed[pid] = departed.get(pid, 0) + leaving[0].energy
    return _operating_point(replace(gpu, tenants=staying, departed=tuple(departed.items())))


def changed(gpu: GpuState, pid: int, change: Callable[[GpuWork], GpuWork]) -> GpuState:
    """The GPU with other work for a process; ValueError if it is not there."""
    if all(tenant.pid != pid for tenant in gpu.tenants):
        raise ValueError(f"process {pid} is not on this GPU")
    tenants = tuple(
        replace(tenant, work=change(tenant.work)) if tenant.pid == pid else tenant
        for tenant in gpu.tenants
    )
    return _operating_point(replace(gpu, tenants=tenants))


def divided(gpu: GpuState, instances: tuple[EmulatedInstance, ...]) -> GpuState:
    """The GPU with other MIG instances; its processes are put into them in turn."""
    tenants = tuple(
        replace(tenant, instance=instances[place % len(instances)].id if instances else None)
        for place, tenant in enumerate(gpu.tenants)
    )
    active = (0,) * len(instances)
    return _operating_point(replace(gpu, instances=instances, active=active, tenants=tenants))


BOARD = 0
"""The key of the whole board's energy; the other keys are pids."""


def energies(gpu: GpuState) -> dict[int, int]:
    """The energies of the board and of each process until ``gpu.at``, in picojoules."""
    spent = {BOARD: gpu.energy, **dict(gpu.departed)}
    for tenant in gpu.tenants:
        spent[tenant.pid] = spent.get(tenant.pid, 0) + tenant.energy
    return spent


def energy_split(spent: Mapping[int, int]) -> EnergySplit:
    """The division of the ``energies`` of a GPU."""
    whole = {pid: energy // PICOJOULES for pid, energy in spent.items()}
    return EnergySplit(whole.pop(BOARD), whole)


def _accounted(gpu: GpuState, now: int, wall: int, hosts: Sequence[float]) -> GpuState:
    """The GPU at ``now``, after constant power since its last step."""
    elapsed, power = now - gpu.at, gpu.point.power
    energy = gpu.energy + power * elapsed
    sensor = gpu.board.sensor
    keep = max(sensor.average_window or 0, sensor.instant_window) + sensor.period
    share = sum(tenant.grant.share for tenant in gpu.tenants)
    throttle = gpu.controls.throttle
    throttled = dict(gpu.throttled_ns)
    if throttle is not None:
        throttled[throttle] = throttled.get(throttle, 0) + elapsed
    moved = replace(
        gpu,
        at=now,
        energy=energy,
        latched=_latched(gpu, now),
        history=extended(gpu.history, PowerSegment(gpu.at, now, power), keep),
        tenants=tuple(_work_advanced(tenant, elapsed, hosts) for tenant in gpu.tenants),
        used=gpu.used + share * elapsed,
        active=tuple(
            active + _activity(gpu, instance) * elapsed
            for active, instance in zip(gpu.active, gpu.instances, strict=True)
        ),
        capped_ns=gpu.capped_ns + elapsed * gpu.point.capped,
        throttled_ns=tuple(throttled.items()),
        temperature=_warmed(gpu, elapsed),
    )
    return _sampled(_sensed(moved, gpu.at), gpu, wall)


def _activity(gpu: GpuState, instance: EmulatedInstance) -> int:
    """The present activity of the multiprocessors of a MIG instance, in millionths."""
    share = sum(tenant.grant.share for tenant in gpu.tenants if tenant.instance == instance.id)
    return min(1_000_000, share * gpu.board.multiprocessors // instance.multiprocessors)


def _latched(gpu: GpuState, now: int) -> int:
    """The energy at the counter's latest edge up to ``now``."""
    if gpu.board.counter_step is None:
        return gpu.latched
    edge = last_edge(gpu.born, gpu.board.counter_step, now)
    return gpu.latched if edge < gpu.at else gpu.energy + gpu.point.power * (edge - gpu.at)


def _host_of(tenant: GpuTenant, hosts: Sequence[float]) -> float:
    return hosts[tenant.socket] if tenant.socket < len(hosts) else 1.0


def _work_advanced(tenant: GpuTenant, elapsed: int, hosts: Sequence[float]) -> GpuTenant:
    grant = tenant.grant
    return replace(
        tenant,
        work=tenant.work.after(elapsed, grant.speed, _host_of(tenant, hosts)),
        energy=tenant.energy + grant.power * elapsed,
        used=tenant.used + grant.share * elapsed,
        busy=tenant.busy + grant.share * elapsed,
    )


def _sensed(gpu: GpuState, before: int) -> GpuState:
    """The sensor's readings at its latest edge, if there was one after ``before``."""
    sensor = gpu.board.sensor
    edge = last_edge(gpu.born, sensor.period, gpu.at)
    if edge <= before:
        return gpu
    return replace(
        gpu,
        power_instant=_sensor_value(gpu, edge, sensor.instant_window) or 0,
        power_average=_sensor_value(gpu, edge, sensor.average_window),
    )


def _sensor_value(gpu: GpuState, edge: int, window: int | None) -> int | None:
    mean = None if window is None else mean_power(gpu.history, edge - window, edge)
    return None if mean is None else mean + mean * gpu.board.sensor.gain_ppm // 1_000_000


def _sampled(gpu: GpuState, before: GpuState, wall: int) -> GpuState:
    """Utilisation samples at the latest edge, if it is after the sample before: non-zero only."""
    edge = last_edge(gpu.born, gpu.board.sample_period, gpu.at)
    if edge <= gpu.sampled:
        return gpu
    duration, rest = edge - gpu.sampled, gpu.at - edge
    samples, device, device_memory = list(gpu.samples), before.used, 0
    for tenant in before.tenants:
        inside = tenant.grant.share * (edge - before.at)
        device += inside
        percent = _percent(tenant.used + inside, duration)
        traffic = round(percent * 0.6)
        device_memory += traffic
        if percent:
            stamp = (wall - rest) // 1000
            samples.append(UtilisationSample(stamp, tenant.pid, percent, traffic))
    return replace(
        gpu,
        samples=tuple(samples[-SAMPLES:]),
        sampled=edge,
        utilisation=_percent(device, duration),
        memory_utilisation=min(100, device_memory),
        used=sum(tenant.grant.share for tenant in before.tenants) * rest,
        tenants=tuple(replace(tenant, used=tenant.grant.share * rest) for tenant in gpu.tenants),
    )


def _percent(used: int, duration: int) -> int:
    return min(100, round(used / (duration * 10_000)))


def _warmed(gpu: GpuState, elapsed: int) -> float:
    """A board of one thermal mass: 30 degrees unpowered, 80 at the highest limit, in 30 s."""
    target = 30.0 + 50.0 * gpu.point.power / gpu.board.limits[2]
    part = min(1.0, elapsed / 30e9)
    return gpu.temperature + (target - gpu.temperature) * part


def _control_applied(gpu: GpuState, requested: Controls | None) -> GpuState:
    """A changed request takes effect a cap latency after it is noticed."""
    if requested is not None and requested != gpu.requested:
        gpu = replace(gpu, requested=requested, due=gpu.at + gpu.board.cap_latency)
    return replace(gpu, controls=gpu.requested) if gpu.at >= gpu.due else gpu


def _operating_point(gpu: GpuState) -> GpuState:
    """The operating point that demands and controls imply from now on."""
    controls = gpu.controls
    ceilings = [mhz for mhz in (controls.lock_mhz, controls.throttle_mhz) if mhz is not None]
    demands = [
        Demand(tenant.work.demand * _room(gpu, tenant), tenant.work.kernel)
        for tenant in gpu.tenants
    ]
    point = operate(gpu.board.silicon, demands, gpu.enforced, min(ceilings, default=None))
    tenants = tuple(
        replace(tenant, grant=grant)
        for tenant, grant in zip(gpu.tenants, point.grants, strict=True)
    )
    return replace(gpu, point=point, tenants=tenants)


def _room(gpu: GpuState, tenant: GpuTenant) -> float:
    """The part of the GPU that a whole demand of a process is: under MIG, of its instance.

    Processes of one instance share it in time slices.
    """
    if not gpu.instances:
        return 1.0
    (instance,) = (one for one in gpu.instances if one.id == tenant.instance)
    together = sum(one.work.demand for one in gpu.tenants if one.instance == instance.id)
    return instance.multiprocessors / gpu.board.multiprocessors / max(1.0, together)
