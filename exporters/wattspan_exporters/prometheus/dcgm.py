"""GPU metrics under the names of dcgm-exporter, for existing dashboards.

One series for each physical GPU, none for MIG instances, which would repeat the figures of the
whole board. Unknown figures have no series. Names, types and units are those of the default
counters of dcgm-exporter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wattspan.model import DomainAccount, GpuStatus, HwType, Snapshot
from wattspan_exporters.catalogue.definition import Draw, Instrument, Labels, Metric, Sample

DCGM_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname", "hostname", "provenance")
"""Both names of the host: dcgm-exporter wrote ``Hostname``, since May 2026 ``hostname``."""

MIB, MEGAHERTZ = 1 << 20, 1_000_000


def dcgm_gauge(field: Callable[[GpuStatus], int | float | None]) -> Draw:
    """The samples of one field, of every present GPU that reports it."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for account, gpu in _boards(snapshot):
            if account.present and (value := field(gpu)) is not None:
                yield _labels(snapshot, account, gpu), value

    return draw


def power(gpu: GpuStatus) -> float | None:
    """Power of the sensor in watts: the average where there is one, as DCGM reports it."""
    milliwatts = gpu.power_average if gpu.power_average is not None else gpu.power_instant
    return None if milliwatts is None else milliwatts / 1000


def memory_free(gpu: GpuStatus) -> int | None:
    """Free memory in MiB: the total less the used memory, which includes the driver's."""
    if gpu.memory_total is None or gpu.memory_used is None:
        return None
    return (gpu.memory_total - gpu.memory_used) // MIB


def energy(snapshot: Snapshot) -> Iterator[Sample]:
    """``hw.energy`` in whole millijoules."""
    for account, gpu in _boards(snapshot):
        yield _labels(snapshot, account, gpu), account.energy // 1000


def _boards(snapshot: Snapshot) -> Iterator[tuple[DomainAccount, GpuStatus]]:
    """Every GPU of the cover with a known state."""
    told = {gpu.domain_id: gpu for gpu in snapshot.gpus}
    for account in snapshot.cover:
        if account.domain.hw_type is HwType.GPU and account.domain.id in told:
            yield account, told[account.domain.id]


def _labels(snapshot: Snapshot, account: DomainAccount, gpu: GpuStatus) -> Labels:
    index = "" if gpu.index is None else str(gpu.index)
    device = f"nvidia{index}" if index else ""
    uuid = gpu.domain_id.removeprefix("gpu:")
    host = snapshot.host
    return index, uuid, device, gpu.model, host, host, account.domain.provenance


def _whole(value: int | None, unit: int) -> int | None:
    """``value`` in whole ``unit``, rounded down as by DCGM."""
    return None if value is None else value // unit


def _percent(fraction: float | None) -> int | None:
    return None if fraction is None else round(fraction * 100)


def _gauge(name: str, meaning: str, field: Callable[[GpuStatus], int | float | None]) -> Metric:
    # OpenMetrics requires units in names, so none is declared.
    return Metric(name, Instrument.GAUGE, "", meaning, DCGM_LABELS, dcgm_gauge(field), series=name)


DCGM = (
    _gauge("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", power),
    Metric(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", Instrument.COUNTER, "",
        "Energy consumption since the agent first saw the GPU (in mJ).",
        DCGM_LABELS, energy, series="DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
    ),
    _gauge(
        "DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", lambda gpu: gpu.temperature_celsius
    ),
    _gauge(
        "DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", lambda gpu: _percent(gpu.utilisation)
    ),
    _gauge(
        "DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).",
        lambda gpu: _percent(gpu.memory_utilisation),
    ),
    _gauge(
        "DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).",
        lambda gpu: _whole(gpu.memory_used, MIB),
    ),
    _gauge("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", memory_free),
    _gauge(
        "DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).",
        lambda gpu: _whole(gpu.sm_clock_hz, MEGAHERTZ),
    ),
    _gauge(
        "DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).",
        lambda gpu: _whole(gpu.memory_clock_hz, MEGAHERTZ),
    ),
)  # fmt: skip
