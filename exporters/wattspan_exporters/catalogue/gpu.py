"""Samples of GPU metrics other than energy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wattspan.model import Domain, GpuStatus, Provenance, Snapshot
from wattspan_exporters.catalogue.definition import Draw, Sample


def gpu_gauge(field: Callable[[GpuStatus], int | float | None]) -> Draw:
    """Return samples of one known field of every GPU, labelled ``hw_id hw_name``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for gpu, domain in _gpus(snapshot):
            if (value := field(gpu)) is not None:
                yield (gpu.domain_id, domain.name if domain else ""), value

    return draw


def power_sensor(field: Callable[[GpuStatus], int | None]) -> Draw:
    """Return samples of a power sensor, labelled ``hw_id hw_name provenance``.

    The sensor is `measured` even on a board whose energy is `derived` from it.
    """

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for gpu, domain in _gpus(snapshot):
            if (value := field(gpu)) is not None:
                yield (gpu.domain_id, domain.name if domain else "", _sensed(domain)), value

    return draw


def _sensed(domain: Domain | None) -> str:
    if domain is None:
        return ""
    emulated = domain.provenance is Provenance.EMULATED
    return Provenance.EMULATED if emulated else Provenance.MEASURED


def _gpus(snapshot: Snapshot) -> Iterator[tuple[GpuStatus, Domain | None]]:
    domains = {account.domain.id: account.domain for account in snapshot.domains}
    for gpu in snapshot.gpus:
        yield gpu, domains.get(gpu.domain_id)


def temperature(snapshot: Snapshot) -> Iterator[Sample]:
    for gpu, domain in _gpus(snapshot):
        if gpu.temperature_celsius is not None:
            name = domain.name if domain else ""
            yield (gpu.domain_id, "gpu", name), gpu.temperature_celsius


def clocks(snapshot: Snapshot) -> Iterator[Sample]:
    for gpu, domain in _gpus(snapshot):
        name = domain.name if domain else ""
        for clock, hertz in (("sm", gpu.sm_clock_hz), ("memory", gpu.memory_clock_hz)):
            if hertz is not None:
                yield (gpu.domain_id, name, clock), hertz


def power_limits(snapshot: Snapshot) -> Iterator[Sample]:
    for gpu in snapshot.gpus:
        limits = gpu.limits
        for limit, milliwatts in (
            ("minimum", limits.minimum),
            ("default", limits.default),
            ("maximum", limits.maximum),
            ("requested", limits.requested),
            ("enforced", limits.enforced),
        ):
            if milliwatts is not None:
                yield (gpu.domain_id, limit), milliwatts


def throttled_time(snapshot: Snapshot) -> Iterator[Sample]:
    for gpu in snapshot.gpus:
        for reason, nanoseconds in gpu.throttled.items():
            yield (gpu.domain_id, reason), nanoseconds


def throttling(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield 1 for active reasons and 0 for earlier ones."""
    for gpu in snapshot.gpus:
        if gpu.throttling is None:
            continue
        for reason in sorted({*gpu.throttling, *gpu.throttled}):
            yield (gpu.domain_id, reason), int(reason in gpu.throttling)


def compared_energy(snapshot: Snapshot) -> Iterator[Sample]:
    for gpu, domain in _gpus(snapshot):
        if gpu.counter_energy is not None:
            yield (gpu.domain_id, "counter", _sensed(domain)), gpu.counter_energy
        if gpu.integrated_energy is not None:
            emulated = domain is not None and domain.provenance is Provenance.EMULATED
            provenance = Provenance.EMULATED if emulated else Provenance.DERIVED
            yield (gpu.domain_id, "integrated", provenance), gpu.integrated_energy


def divergence(gpu: GpuStatus) -> float | None:
    """Return the excess of integrated power over the counter, as a fraction of the counter."""
    counted, integrated = gpu.counter_energy, gpu.integrated_energy
    if not counted or integrated is None:
        return None
    return (integrated - counted) / counted


def gpu_info(snapshot: Snapshot) -> Iterator[Sample]:
    for gpu, domain in _gpus(snapshot):
        mig = "" if gpu.mig is None else str(gpu.mig).lower()
        yield (gpu.domain_id, domain.name if domain else "", gpu.model, gpu.driver, mig), 1
