"""Metrics of GPUs other than energy, and of the power and clock limits of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from wattspan.model import (
    CapRow,
    Certainty,
    Domain,
    DomainAccount,
    GpuStatus,
    HwType,
    Provenance,
    Snapshot,
)
from wattspan_exporters.catalogue.definition import (
    Draw,
    Instrument,
    Labels,
    Metric,
    Sample,
    declared,
    each,
    each_item,
)
from wattspan_exporters.catalogue.energy import boot_start_times

_Board = tuple[GpuStatus, Domain | None]


def _boards(snapshot: Snapshot) -> Iterator[_Board]:
    domains = {account.domain.id: account.domain for account in snapshot.domains}
    for gpu in snapshot.gpus:
        yield gpu, domains.get(gpu.domain_id)


def _named(board: _Board) -> tuple[str, str]:
    gpu, domain = board
    return gpu.domain_id, domain.name if domain else ""


def _gauge(field: Callable[[GpuStatus], int | float | None]) -> Draw:
    """One figure of every GPU that reports it."""
    return each(_boards, _named, lambda board: field(board[0]))


def _power_sensor(field: str) -> Draw:
    """A power sensor, which is `measured` even if energy is `derived` from it."""
    return each(
        _boards,
        lambda board: (*_named(board), _sensed(board[1])),
        lambda board: getattr(board[0], field),
    )


def _sensed(domain: Domain | None) -> str:
    if domain is None:
        return ""
    emulated = domain.provenance is Provenance.EMULATED
    return Provenance.EMULATED if emulated else Provenance.MEASURED


def temperatures(snapshot: Snapshot) -> Iterator[Sample]:
    for board in _boards(snapshot):
        if (celsius := board[0].temperature_celsius) is not None:
            device, name = _named(board)
            yield (device, "gpu", name), celsius


def clocks(snapshot: Snapshot) -> Iterator[Sample]:
    for board in _boards(snapshot):
        gpu = board[0]
        for clock, hertz in (("sm", gpu.sm_clock_hz), ("memory", gpu.memory_clock_hz)):
            if hertz is not None:
                yield (*_named(board), clock), hertz


REPORTED_LIMITS = ("minimum", "default", "maximum", "requested", "enforced")
"""The fields of PowerLimits and of KnobState, which are label values."""

MEGAHERTZ = 1_000_000  # clock limits are in megahertz


def power_limits(snapshot: Snapshot) -> Iterator[Sample]:
    """The limits that GPUs report, and those of every other device with a power knob."""
    for gpu in snapshot.gpus:
        for limit in REPORTED_LIMITS:
            if (milliwatts := getattr(gpu.limits, limit)) is not None:
                yield (gpu.domain_id, limit), milliwatts
    reported = {gpu.domain_id for gpu in snapshot.gpus}
    for row in snapshot.tuning.caps:
        if row.state.key.knob.unit == "mW":
            yield from _limits(row, 1, own=row.state.key.device not in reported)


def clock_limits(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.tuning.caps:
        if row.state.key.knob.unit == "MHz":
            yield from _limits(row, MEGAHERTZ, own=True)


def _limits(row: CapRow, scale: int, *, own: bool) -> Iterator[Sample]:
    """The limits of a knob; with ``own``, also those that the device reports."""
    known = {"original": row.original, "ceiling": row.ceiling}
    if own:
        known |= {limit: getattr(row.state, limit) for limit in REPORTED_LIMITS}
    for limit, value in known.items():
        if value is not None:
            yield (row.state.key.device, limit), value * scale


def throttling(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield 1 for active reasons and 0 for earlier ones."""
    for gpu in snapshot.gpus:
        if gpu.throttling is None:
            continue
        for reason in sorted({*gpu.throttling, *gpu.throttled}):
            yield (gpu.domain_id, reason), int(reason in gpu.throttling)


def compared_energy(snapshot: Snapshot) -> Iterator[Sample]:
    for gpu, domain in _boards(snapshot):
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


def energy_sources(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield what each board's energy is taken from, and whether both of its sensors agree."""
    words = {None: "unknown", True: "disagree", False: "agree"}
    for gpu, _ in _boards(snapshot):
        if gpu.energy_basis:
            yield (gpu.domain_id, gpu.energy_basis, words[gpu.energy_disagrees]), 1


def gpu_info(snapshot: Snapshot) -> Iterator[Sample]:
    for board in _boards(snapshot):
        gpu = board[0]
        mig = "" if gpu.mig is None else str(gpu.mig).lower()
        yield (*_named(board), gpu.model, gpu.driver, mig), 1


def device_pods(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield each container that a present GPU or MIG instance is allotted to.

    Of several domains of one board, such as a card and its parts, the counted one is named.
    """
    present = [account.domain for account in snapshot.domains if account.present]
    present.sort(key=attrgetter("in_cover"))
    domains = {one.pci: one.id for one in present if one.pci and one.hw_type is HwType.GPU}
    domains |= {one.id.removeprefix("gpu:"): one.id for one in present}
    pods = ((domains.get(one.device), one) for one in snapshot.device_pods)
    named = {(where, one.namespace, one.pod, one.container) for where, one in pods if where}
    yield from ((labels, 1) for labels in sorted(named))


GPUS = (
    declared("wattspan.power.limit", power_limits),
    declared("wattspan.gpu.power.average", _power_sensor("power_average")),
    declared("wattspan.gpu.power.instant", _power_sensor("power_instant")),
    declared("wattspan.gpu.compared.energy", compared_energy),
    declared("wattspan.gpu.energy.divergence", _gauge(divergence)),
    declared("wattspan.gpu.energy.info", energy_sources),
    declared("hw.gpu.utilization", _gauge(attrgetter("utilisation"))),
    # hw.gpu.memory.utilization is the used fraction of the memory.
    declared("wattspan.gpu.memory.busy", _gauge(attrgetter("memory_utilisation"))),
    declared("hw.gpu.memory.usage", _gauge(attrgetter("memory_used"))),
    declared("hw.gpu.memory.limit", _gauge(attrgetter("memory_total"))),
    declared("hw.temperature", temperatures),
    declared("wattspan.gpu.clock", clocks),
    declared(
        "wattspan.gpu.throttled",
        each_item(attrgetter("gpus"), lambda gpu: (gpu.domain_id,), attrgetter("throttled")),
        begins=boot_start_times,
    ),
    declared("wattspan.gpu.throttling", throttling),
    declared("wattspan.gpu.info", gpu_info),
    declared("wattspan.device.pod.info", device_pods),
)


# ------------------------------------------------------- under the names of dcgm-exporter
# Names, types and units are those of its default counters. MIG instances have no series: they
# would repeat the figures of their board.

DCGM_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname", "hostname", "provenance")
"""Both names of the host: dcgm-exporter wrote ``Hostname``, since May 2026 ``hostname``."""

MIB = 1 << 20


class _DcgmRow(NamedTuple):
    """A GPU of the cover with a known state."""

    host: str
    account: DomainAccount
    gpu: GpuStatus

    @property
    def labels(self) -> Labels:
        gpu = self.gpu
        index = "" if gpu.index is None else str(gpu.index)
        device = f"nvidia{index}" if index else ""
        uuid = gpu.domain_id.removeprefix("gpu:")
        return index, uuid, device, gpu.model, self.host, self.host, self.account.provenance


def _dcgm_rows(snapshot: Snapshot) -> Iterator[_DcgmRow]:
    known = {gpu.domain_id: gpu for gpu in snapshot.gpus}
    for account in snapshot.cover:
        if account.domain.hw_type is HwType.GPU and account.domain.id in known:
            yield _DcgmRow(snapshot.host, account, known[account.domain.id])


def _dcgm(name: str, text: str, field: Callable[[GpuStatus], int | float | None]) -> Metric:
    """A gauge of one field of every present GPU that reports it."""
    draw = each(
        _dcgm_rows,
        attrgetter("labels"),
        lambda row: field(row.gpu) if row.account.present else None,
    )
    # OpenMetrics requires units in names, so none is declared.
    return Metric(name, Instrument.GAUGE, "", text, DCGM_LABELS, draw, series=name)


def counted_millijoules(row: _DcgmRow) -> int | None:
    """The energy of a GPU; None if none was ever measured."""
    known = row.account.energy_certainty is not Certainty.UNKNOWN
    return row.account.energy // 1000 if known else None


def sensor_watts(gpu: GpuStatus) -> float | None:
    """The average power where there is one, as DCGM reports it."""
    milliwatts = gpu.power_average if gpu.power_average is not None else gpu.power_instant
    return None if milliwatts is None else milliwatts / 1000


def free_mebibytes(gpu: GpuStatus) -> int | None:
    """The total less the used memory, which includes the driver's."""
    if gpu.memory_total is None or gpu.memory_used is None:
        return None
    return (gpu.memory_total - gpu.memory_used) // MIB


def _whole(value: int | None, unit: int) -> int | None:
    """``value`` in whole ``unit``, rounded down as by DCGM."""
    return None if value is None else value // unit


def _percent(fraction: float | None) -> int | None:
    return None if fraction is None else round(fraction * 100)


DCGM = (
    _dcgm("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", sensor_watts),
    Metric("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", Instrument.COUNTER, "",
           "Energy consumption since the agent first saw the GPU (in mJ).", DCGM_LABELS,
           each(_dcgm_rows, attrgetter("labels"), counted_millijoules),
           series="DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"),
    _dcgm("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", attrgetter("temperature_celsius")),
    _dcgm("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).",
          lambda gpu: _percent(gpu.utilisation)),
    _dcgm("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).",
          lambda gpu: _percent(gpu.memory_utilisation)),
    _dcgm("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).",
          lambda gpu: _whole(gpu.memory_used, MIB)),
    _dcgm("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", free_mebibytes),
    _dcgm("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).",
          lambda gpu: _whole(gpu.sm_clock_hz, MEGAHERTZ)),
    _dcgm("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).",
          lambda gpu: _whole(gpu.memory_clock_hz, MEGAHERTZ)),
)  # fmt: skip
"""Metrics for existing dashboards; not in the catalogue."""
