"""Writing an emulated GPU into the file its clients read."""

from __future__ import annotations

from wattspan.emulation.gpu_engine import Gpu, Throttle
from wattspan.emulation.gpu_meter import PICOJOULES
from wattspan.emulation.nvml_layout import KINDS, NO_INSTANCE, GpuRecord, Live

_IDLE, _LOCKED, _POWER_CAP, _HW_SLOWDOWN = 0x1, 0x2, 0x4, 0x8
_REASONS = {
    Throttle.SW_THERMAL: 0x20,
    Throttle.HW_THERMAL: 0x40 | _HW_SLOWDOWN,
    Throttle.POWER_BRAKE: 0x80 | _HW_SLOWDOWN,
}


def describe(record: GpuRecord, gpu: Gpu, index: int) -> None:
    """What never changes, and the requests as a freshly loaded driver has them."""
    board, identity = gpu.board, record.identity
    bus = 0x10 + index
    identity.name = board.name.encode()
    # A valid UUID that no real board has.
    identity.uuid = f"GPU-e0e0e0e0-0000-4000-8000-{index:012x}".encode()
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


def publish(live: Live, gpu: Gpu, mig: bool, before: Gpu | None = None) -> None:
    """What the GPU is now; ``before`` is what was last published, if anything was."""
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
        entry.memory, entry.progress = tenant.memory, int(tenant.work.done * 1e6)
        entry.instance = place + 1 if mig else NO_INSTANCE
    if before is not None and before.samples is gpu.samples:
        return
    live.samples = len(gpu.samples)
    for place, sample in enumerate(gpu.samples):
        row = live.sample[place]
        row.stamp, row.pid, row.sm, row.memory = sample


def _reasons(gpu: Gpu) -> int:
    if all(not tenant.grant.share for tenant in gpu.tenants):
        return _IDLE
    reasons = _POWER_CAP if gpu.point.capped else 0
    if gpu.controls.lock_mhz is not None:
        reasons |= _LOCKED
    if gpu.controls.throttle is not None:
        reasons |= _REASONS[gpu.controls.throttle]
    return reasons
