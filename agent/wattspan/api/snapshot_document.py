"""The snapshot schema: the document that ``GET /v1/snapshot`` serves.

Times are nanoseconds, energies joules, powers watts; each field name ends with its unit. Null is
unknown, never zero; every number is finite. Names come from outside: they are printable, of at
most ``MAX_TEXT_LENGTH`` characters, and to be shown as text, never as markup.
``SCHEMA_VERSION`` rises when a field changes its meaning or goes; new fields do not raise it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from wattspan.api.inference_entries import (
    ENGINE_SOURCE,
    EngineEntry,
    InferenceEntry,
    engine_entries,
    inference_entry,
    printable_row,
)
from wattspan.model import (
    BaselineQuality,
    Certainty,
    Consumer,
    DomainAccount,
    GpuStatus,
    Group,
    GroupKind,
    GroupRow,
    HwType,
    ProcessRow,
    Provenance,
    RatedEnergy,
    Snapshot,
    SpanAccounts,
    SpanRow,
    StaticBasis,
    UnmeteredRow,
    service_label,
)
from wattspan.tuning.serialization import TuningDocument, tuning_document
from wattspan.util.text import printable

SCHEMA_VERSION = 1
SNAPSHOT_PATH = "/v1/snapshot"
MAX_TEXT_LENGTH = 400

Joules = dict[HwType, float]
Watts = dict[HwType, float]


class HostEntry(Struct, frozen=True):
    """Sums over the cover. ``power_watts`` is null while the power of a present device is.

    ``least_power_watts`` is the sum of the known powers: a lower bound where ``power_certainty`` is
    not ``known``, null if none is. ``energy_joules`` is null only if all energy is unknown.
    """

    power_watts: float | None
    energy_joules: float | None
    consumers_joules: float | None
    idle_joules: float | None
    unattributed_joules: float | None
    least_power_watts: float | None = None
    power_certainty: Certainty = Certainty.UNKNOWN
    energy_certainty: Certainty = Certainty.KNOWN


class GpuEntry(Struct, frozen=True):
    """The state of a GPU; ``throttling`` lists the reasons in force, null if they are unknown."""

    model: str
    utilization_ratio: float | None
    sm_clock_hertz: int | None
    temperature_celsius: int | None
    throttling: list[str] | None
    limit_watts: float | None
    default_limit_watts: float | None
    driver: str = ""


class DomainEntry(Struct, frozen=True):
    """One domain. Only powers of those with ``in_cover`` may be summed, and all ``counted_joules``.

    The energies of consumers, idle and unattributed are null if the domain is not ``attributed``,
    and every energy is if none was ever measured. ``silent``: no reading is given now.
    ``lost``: it is gone and its source still fails to read it; else it was removed.
    """

    hw_id: str
    hw_type: HwType
    hw_name: str
    hw_parent: str | None
    source: str
    provenance: Provenance
    method: str
    in_cover: bool
    attributed: bool
    present: bool
    power_watts: float | None
    idle_power_watts: float | None
    energy_joules: float | None
    consumers_joules: float | None
    idle_joules: float | None
    unattributed_joules: float | None
    pending_joules: float | None
    gap_seconds: dict[str, float]
    gpu: GpuEntry | None
    baseline: BaselineQuality | None = None  # of idle_power_watts
    baseline_unknown_joules: float | None = None  # the part of unattributed_joules without it
    idle_power_error_watts: float | None = None  # half of the 95 % range; null unless learned
    counted_joules: float | None = None  # the part of energy_joules from within the cover
    energy_certainty: Certainty = Certainty.KNOWN
    silent: bool = False
    lost: bool = False


class ListedProcess(Struct, frozen=True):
    """One listed process; ``pid`` is null for the short-lived processes of a cgroup together.

    ``bounded`` are the types of which ``energy_joules`` is a lower bound, ``power_bounded`` those
    of ``power_watts``; so they are of groups and spans.
    """

    pid: int | None
    started: int | None  # clock ticks since boot
    name: str
    group: str  # the most specific group; "" for none
    group_kind: GroupKind | None
    alive: bool
    energy_joules: Joules
    power_watts: Watts
    bounded: list[HwType] = []
    power_bounded: list[HwType] = []


class GroupEntry(Struct, frozen=True):
    kind: GroupKind
    name: str
    energy_joules: Joules
    power_watts: Watts
    bounded: list[HwType] = []
    power_bounded: list[HwType] = []


class SpanEntry(Struct, frozen=True):
    """Ended spans of one name in one service: exclusive energy, so entries add up."""

    service: str
    name: str
    calls: int
    seconds: float
    energy_joules: Joules
    tokens: dict[str, int]
    trace: str | None  # of the newest exemplar
    # By the basis of the static power: the parts of the GPU energy of spans with a known one.
    static_joules: dict[StaticBasis, float] = {}
    dynamic_joules: dict[StaticBasis, float] = {}
    owner: str = ""  # of its processes, as the kernel proves it
    bounded: list[HwType] = []


class SpansEntry(Struct, frozen=True):
    """``outside_joules`` is, by service and owner, the energy while none of its spans was open."""

    names: list[SpanEntry]
    outside_joules: dict[str, Joules]
    outcomes: dict[str, int]
    received: int
    refused: dict[str, int]
    open: int
    deferred: int
    forwarded: int
    forward_drops: dict[str, int]
    forward_repeats: int
    forward_queue_bytes: int
    announcers: int
    announcers_refused: dict[str, int]
    announcements_lost: int
    inference: list[InferenceEntry] = []
    inference_idle_joules: float = 0.0
    inference_waiting: int = 0
    unmetered: list[UnmeteredRow] = []


class SourceEntry(Struct, frozen=True):
    """The health of a source; each of ``failures`` is one sentence."""

    source: str
    up: bool
    reads: int
    failed: int
    failures: list[str]


class AgentEntry(Struct, frozen=True):
    started_unix_ns: int
    ticks: int
    missed_ticks: int
    cpu_seconds: float
    rss_bytes: int | None
    processes: int


class RateEntry(Struct, frozen=True):
    """Cost or carbon, in ``unit``. ``unknown_joules`` were spent without a known rate."""

    unit: str
    origin: str
    per_kilowatt_hour: float | None
    per_hour: float | None  # at the present power
    total: float
    unknown_joules: float


class SnapshotDocument(Struct, frozen=True, kw_only=True):
    """One snapshot. ``restricted`` is true if the reader may not see other users' processes.

    ``bounded`` are the types of which the energy of all processes together is a lower bound, and so
    that of unlisted and ended ones and outside of spans.
    """

    schema_version: int = SCHEMA_VERSION
    agent_version: str
    host_name: str
    emulated: bool
    restricted: bool = False
    sequence: int
    at_unix_ns: int
    at_mono_ns: int
    since_unix_ns: int | None  # creation of the ledger
    host: HostEntry
    domains: list[DomainEntry]
    processes: list[ListedProcess]
    other_joules: Joules  # of processes that are not listed
    ended_joules: Joules  # of processes that are no longer listed
    bounded: list[HwType] = []
    groups: list[GroupEntry]
    spans: SpansEntry
    engines: list[EngineEntry] = []
    tuning: TuningDocument
    sources: list[SourceEntry]
    agent: AgentEntry
    cost: RateEntry | None
    carbon: RateEntry | None


class SnapshotSchemaError(ValueError):
    """A document is not a snapshot of a schema that this release reads."""


_decoder = msgspec.json.Decoder(SnapshotDocument)


def decode_snapshot(body: bytes) -> SnapshotDocument:
    """The document in ``body``; unknown fields are ignored. SnapshotSchemaError."""
    try:
        document = _decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise SnapshotSchemaError(f"it is not a snapshot of a wattspan agent: {error}") from None
    if document.schema_version != SCHEMA_VERSION:
        raise SnapshotSchemaError(
            f"its snapshot schema is version {document.schema_version}, this release reads "
            f"version {SCHEMA_VERSION}"
        )
    return document


def snapshot_document(snapshot: Snapshot, version: str) -> SnapshotDocument:
    """The document of ``snapshot``, for a reader who may see everything."""
    gpus = {gpu.domain_id: gpu for gpu in snapshot.gpus}
    host, bounded, lost = _host(snapshot), snapshot.bounded_powers, snapshot.lost
    stats, certain = snapshot.stats, snapshot.attribution_certainty
    return SnapshotDocument(
        agent_version=version,
        host_name=_text(snapshot.host),
        emulated=snapshot.emulated,
        sequence=snapshot.sequence,
        at_unix_ns=snapshot.at.wall,
        at_mono_ns=snapshot.at.mono,
        since_unix_ns=None if snapshot.since is None else snapshot.since.wall,
        host=host,
        domains=[
            _domain(account, gpus.get(account.domain.id), lost=account.domain.id in lost)
            for account in snapshot.domains
        ],
        processes=[_process(row, bounded) for row in snapshot.processes],
        other_joules=_joules_by_type(snapshot.other),
        ended_joules=_joules_by_type(snapshot.retired),
        bounded=sorted(kind for kind in certain if certain[kind] is not Certainty.KNOWN),
        groups=[_group(row, bounded) for row in snapshot.groups],
        spans=_spans(snapshot.spans),
        engines=engine_entries(snapshot, _text),
        tuning=tuning_document(snapshot.tuning),
        sources=[
            SourceEntry(
                _text(source.source),
                source.up,
                source.reads,
                source.failed,
                [_text(str(failure)) for failure in source.failures],
            )
            for source in snapshot.health
        ],
        agent=AgentEntry(
            stats.started.wall,
            stats.ticks,
            stats.missed_ticks,
            stats.cpu_seconds,
            stats.rss_bytes,
            stats.processes,
        ),
        cost=_rate(snapshot.footprint.cost, host.power_watts),
        carbon=_rate(snapshot.footprint.carbon, host.power_watts),
    )


def restrict(
    document: SnapshotDocument,
    may_see: Callable[[Consumer], bool],
    coarse_watts: Mapping[str, float | None] | None,
) -> SnapshotDocument:
    """``document`` for a user who may not read the counters.

    Only processes that ``may_see`` admits stay; groups, spans, engines and the footprint,
    which would reveal the others, do not. Unless ``coarse_watts`` is None, domains other than GPUs,
    and those in it, have the power in it, by ``hw_id``, and no energies.
    """
    domains = document.domains
    if coarse_watts is not None:
        domains = [
            one
            if one.hw_type is HwType.GPU and one.hw_id not in coarse_watts
            else replace(
                one,
                power_watts=coarse_watts.get(one.hw_id),
                **dict.fromkeys(("pending_joules", "counted_joules", "baseline_unknown_joules")),
                **_NO_ENERGIES,
            )
            for one in domains
        ]
    powers = [one.power_watts for one in domains if one.in_cover and one.present]
    known = [power for power in powers if power is not None]
    least = math.fsum(known) if known else None
    certainties = (Certainty.UNKNOWN if power is None else Certainty.KNOWN for power in powers)
    certainty = Certainty.of_sum((*certainties, document.host.power_certainty))
    return replace(
        document,
        restricted=True,
        host=HostEntry(
            power_watts=least if certainty is Certainty.KNOWN else None,
            least_power_watts=least,
            power_certainty=certainty,
            energy_certainty=Certainty.UNKNOWN,
            **_NO_ENERGIES,
        ),
        domains=domains,
        processes=[
            one
            for one in document.processes
            if one.pid is not None
            and one.started is not None
            and may_see(Consumer(one.pid, one.started))
        ],
        other_joules={},
        ended_joules={},
        groups=[],
        spans=_spans(SpanAccounts()),
        engines=[],
        sources=[one for one in document.sources if not one.source.startswith(ENGINE_SOURCE)],
        cost=None,
        carbon=None,
    )


_NO_ENERGIES = dict.fromkeys(
    ("energy_joules", "consumers_joules", "idle_joules", "unattributed_joules")
)


def _host(snapshot: Snapshot) -> HostEntry:
    summed = snapshot.summed
    energy, energy_certainty = snapshot.host_energy
    power, certainty = snapshot.host_power
    measured = energy_certainty is not Certainty.UNKNOWN
    parts = (
        sum(account.consumers for account in summed),
        sum(account.idle for account in summed),
        sum(account.unattributed for account in summed),
    )
    return HostEntry(
        power_watts=_watts(power) if certainty is Certainty.KNOWN else None,
        energy_joules=_joules(energy) if measured else None,
        consumers_joules=_joules(parts[0]) if measured else None,
        idle_joules=_joules(parts[1]) if measured else None,
        unattributed_joules=_joules(parts[2]) if measured else None,
        least_power_watts=_watts(None if certainty is Certainty.UNKNOWN else power),
        power_certainty=certainty,
        energy_certainty=energy_certainty,
    )


def _domain(account: DomainAccount, gpu: GpuStatus | None, *, lost: bool) -> DomainEntry:
    domain, attributed = account.domain, account.attributed
    measured = account.energy_certainty is not Certainty.UNKNOWN
    booked = measured and attributed
    return DomainEntry(
        hw_id=_text(domain.id),
        hw_type=domain.hw_type,
        hw_name=_text(domain.name),
        hw_parent=None if domain.parent is None else _text(domain.parent),
        source=_text(domain.source),
        provenance=domain.provenance,
        method=account.method,
        in_cover=domain.in_cover,
        attributed=attributed,
        present=account.present,
        power_watts=_watts(account.power),
        idle_power_watts=_watts(account.idle_power),
        idle_power_error_watts=_watts(account.idle_power_error),
        energy_joules=_joules(account.energy) if measured else None,
        counted_joules=_joules(account.counted) if measured else None,
        energy_certainty=account.energy_certainty,
        silent=account.silent,
        lost=lost,
        consumers_joules=_joules(account.consumers) if booked else None,
        idle_joules=_joules(account.idle) if booked else None,
        unattributed_joules=_joules(account.unattributed) if booked else None,
        baseline_unknown_joules=_joules(account.withheld) if booked else None,
        baseline=account.baseline,
        pending_joules=_joules(account.pending) if measured else None,
        gap_seconds={reason: lasted / 1e9 for reason, lasted in account.gaps.items() if lasted},
        gpu=None if gpu is None else _gpu(gpu),
    )


def _gpu(gpu: GpuStatus) -> GpuEntry:
    return GpuEntry(
        _text(gpu.model),
        _finite(gpu.utilisation),
        gpu.sm_clock_hz,
        gpu.temperature_celsius,
        None if gpu.throttling is None else list(map(_text, gpu.throttling)),
        _watts(gpu.limits.enforced),
        _watts(gpu.limits.default),
        _text(gpu.driver),
    )


def _process(row: ProcessRow, bounded: frozenset[HwType]) -> ListedProcess:
    payer = row.info.payer
    consumer = payer if isinstance(payer, Consumer) else None
    group: Group | None = row.info.groups[0] if row.info.groups else None
    return ListedProcess(
        None if consumer is None else consumer.pid,
        None if consumer is None else consumer.started,
        _text(row.info.command),
        "" if group is None else _text(group.name),
        None if group is None else group.kind,
        row.alive,
        _joules_by_type(row.energy),
        _watts_by_type(row.power),
        sorted(row.bounded),
        sorted(row.bounded & bounded),
    )


def _group(row: GroupRow, bounded: frozenset[HwType]) -> GroupEntry:
    return GroupEntry(
        row.group.kind,
        _text(row.group.name),
        _joules_by_type(row.energy),
        _watts_by_type(row.power),
        sorted(row.bounded),
        sorted(row.bounded & bounded),
    )


def _spans(spans: SpanAccounts) -> SpansEntry:
    outside: dict[str, Joules] = {}
    for (service, owner, kind), energy in spans.outside.items():
        outside.setdefault(_text(service_label(service, owner)), {})[kind] = _joules(energy)
    return SpansEntry(
        list(map(_span, spans.rows)),
        outside,
        dict(spans.outcomes),
        spans.received,
        dict(spans.refused),
        spans.open,
        spans.deferred,
        spans.forwarded,
        dict(spans.forward_drops),
        spans.forward_repeats,
        spans.forward_queue,
        spans.announcers,
        dict(spans.announcers_refused),
        spans.announcements_lost,
        [inference_entry(row, _text) for row in spans.inference],
        _joules(spans.inference_idle),
        spans.inference_waiting,
        [printable_row(row, _text) for row in spans.unmetered],
    )


def _span(row: SpanRow) -> SpanEntry:
    newest = max(row.exemplars.values(), key=lambda exemplar: exemplar.wall, default=None)
    return SpanEntry(
        _text(row.service),
        _text(row.name),
        row.count,
        row.time / 1e9,
        _joules_by_type(row.energy),
        dict(row.tokens),
        None if newest is None else _text(newest.trace),
        {basis: _joules(split.static) for basis, split in row.splits.items()},
        {basis: _joules(split.dynamic) for basis, split in row.splits.items()},
        _text(row.owner),
        sorted(row.bounded),
    )


def _rate(rated: RatedEnergy | None, power_watts: float | None) -> RateEntry | None:
    if rated is None:
        return None
    rate = None if rated.rate is None else rated.rate / 1e9
    return RateEntry(
        _text(rated.unit),
        rated.origin,
        rate,
        None if rate is None or power_watts is None else rate * power_watts / 1000,
        rated.total / 1e9,
        _joules(rated.unknown),
    )


def _joules(microjoules: int) -> float:
    return microjoules / 1e6


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def _joules_by_type(energy: Mapping[HwType, int]) -> Joules:
    return {kind: microjoules / 1e6 for kind, microjoules in energy.items()}


def _watts_by_type(power: Mapping[HwType, int]) -> Watts:
    return {kind: milliwatts / 1e3 for kind, milliwatts in power.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _text(text: str) -> str:
    return printable(text[:MAX_TEXT_LENGTH])
