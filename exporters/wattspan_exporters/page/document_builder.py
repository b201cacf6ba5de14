"""From a snapshot and what is remembered to what the page is told.

Text from outside (names, sentences of drivers) is bounded and printable here already; that it is
text and never markup is the page's part.
"""

from __future__ import annotations

from operator import attrgetter

import msgspec

from wattspan.model import (
    DomainAccount,
    GpuStatus,
    Knob,
    Milliwatts,
    RatedEnergy,
    Snapshot,
    TuningRow,
)
from wattspan_exporters.catalogue.metric import sanitize
from wattspan_exporters.page import document as say
from wattspan_exporters.page.flow import FlowGraph, build_flow
from wattspan_exporters.page.history import PageHistory, time_since_boot
from wattspan_exporters.page.snapshot_delta import SnapshotDelta

MAX_POINTS = 240
"""Figures of power of one device: more than a page is wide."""

SPANS, JOBS, FAILURES = 20, 20, 8
"""Rows of each kind that are told."""

MAX_SENTENCE_LENGTH = 400
"""Characters of a sentence."""


def build_document(snapshot: Snapshot, memory: PageHistory, version: str, age: int) -> bytes:
    """The document of one snapshot, ``age`` nanoseconds old."""
    now, hour = memory.recent(snapshot)
    return msgspec.json.encode(
        say.LiveDocument(
            version=version,
            host=sanitize(snapshot.host),
            emulated=snapshot.emulated,
            at=_seconds(snapshot.at.wall),
            age=_seconds(max(0, age)),
            since=None
            if hour is None
            else _current_unix_time(snapshot, time_since_boot(hour.start)),
            now=_flow(build_flow(now)),
            hour=None if hour is None else _flow(build_flow(hour, attrgetter("spread"))),
            power=_power(snapshot, memory),
            devices=_devices(snapshot),
            spans=_spans(hour),
            tuning=_tuning(snapshot),
            health=_health(snapshot),
            agent=_agent(snapshot, now),
            footprint=say.LiveFootprint(
                _weighed(snapshot, snapshot.footprint.cost),
                _weighed(snapshot, snapshot.footprint.carbon),
            ),
        )
    )


def _flow(flow: FlowGraph) -> say.LiveFlow:
    return say.LiveFlow(
        seconds=_seconds(flow.duration),
        joules=_joules(flow.total),
        watts=_rounded(flow.power),
        nodes=[
            say.LiveNode(
                node.id,
                node.layer,
                node.name,
                node.detail,
                node.type,
                _rounded(flow.watts[node.id]),
                _joules(flow.energy[node.id]),
                node.provenance,
            )
            for node in flow.nodes.values()
        ],
        links=[say.LiveLink(link.source, link.target, _rounded(link.watts)) for link in flow.links],
    )


def _rounded(watts: float | None) -> float | None:
    return None if watts is None else round(watts, 4)


def _power(snapshot: Snapshot, memory: PageHistory) -> say.LivePower:
    step, end, series = memory.powers(MAX_POINTS)
    return say.LivePower(
        step=_seconds(step),
        end=_current_unix_time(snapshot, end),
        series=[
            say.LiveSeries(
                sanitize(account.domain.id),
                sanitize(account.domain.name),
                account.domain.hw_type,
                account.domain.provenance,
                [
                    None if power is None else round(power / 1000, 2)
                    for power in series[account.domain.id]
                ],
            )
            for account in snapshot.cover
            if account.domain.id in series
        ],
    )


def _current_unix_time(snapshot: Snapshot, since_boot: int) -> float:
    """The Unix time of a moment, as the clock of now would call it."""
    return _seconds(snapshot.at.wall - time_since_boot(snapshot.at) + since_boot)


# ------------------------------------------------------------------------------------- devices


def _devices(snapshot: Snapshot) -> list[say.LiveDevice]:
    gpus = {gpu.domain_id: gpu for gpu in snapshot.gpus}
    limits = {
        cap.state.key.device: cap.state
        for cap in snapshot.tuning.caps
        if cap.state.key.knob is Knob.CPU_POWER
    }
    devices = []
    for account in snapshot.cover:
        gpu = gpus.get(account.domain.id)
        enforced: int | None = None
        default: int | None = None
        if gpu is not None:
            enforced, default = gpu.limits.enforced, gpu.limits.default
        elif (state := limits.get(account.domain.id)) is not None:
            enforced, default = state.enforced or state.requested, state.default
        devices.append(_device(account, gpu, enforced, default))
    return devices


def _device(
    account: DomainAccount, gpu: GpuStatus | None, enforced: int | None, default: int | None
) -> say.LiveDevice:
    domain = account.domain
    return say.LiveDevice(
        id=sanitize(domain.id),
        name=sanitize(domain.name),
        type=domain.hw_type,
        provenance=domain.provenance,
        source=sanitize(domain.source),
        present=account.present,
        watts=_watts(account.power),
        joules=_joules(account.energy),
        idle_watts=_watts(account.idle_power),
        unattributed_joules=_joules(account.unattributed),
        limit_watts=_watts(enforced),
        limit_default_watts=_watts(default),
        utilisation=None if gpu is None or gpu.utilisation is None else round(gpu.utilisation, 3),
        celsius=None if gpu is None else gpu.temperature_celsius,
        throttling=_throttle_reasons(gpu),
        gap_seconds=_seconds(sum(account.gaps.values())),
        gaps={reason: _seconds(lasted) for reason, lasted in account.gaps.items() if lasted},
    )


def _throttle_reasons(gpu: GpuStatus | None) -> list[str] | None:
    """Why a device is slowed down; None if nobody could be asked."""
    if gpu is None or gpu.throttling is None:
        return None
    return [sanitize(reason) for reason in gpu.throttling]


def _spans(stretch: SnapshotDelta | None) -> list[say.LiveSpan]:
    if stretch is None:
        return []
    most = sorted(
        ((sum(called.parts), name, called) for name, called in stretch.spans.items()),
        key=lambda one: (-one[0], str(one[1])),
    )
    return [
        say.LiveSpan(
            service=sanitize(service),
            name=sanitize(name),
            calls=called.calls,
            joules=_joules(energy),
            joules_per_call=_ratio(energy / 1e6, called.calls),
            joules_per_token=_ratio(energy / 1e6, called.tokens),
            seconds_per_call=_ratio(called.time / 1e9, called.calls),
            trace=called.trace,
        )
        for energy, (service, name), called in most
        if name is not None
    ][:SPANS]


# --------------------------------------------------------------------------- tuning and health


def _tuning(snapshot: Snapshot) -> say.LiveTuning:
    tuning = snapshot.tuning
    return say.LiveTuning(tuning.mode, tuning.capper, [_job(row) for row in tuning.rows[:JOBS]])


def _job(row: TuningRow) -> say.LiveJob:
    scale = 1 if row.knob is Knob.GPU_CLOCK else 1000
    asked = set(row.decision.caps.values()) if row.applied else set()
    before = set(row.original.values())
    return say.LiveJob(
        job=sanitize(row.job),
        service=sanitize(row.service),
        span=sanitize(row.span),
        knob=row.knob,
        unit="MHz" if row.knob is Knob.GPU_CLOCK else "W",
        state=row.state,
        applied=row.applied,
        # Devices that differ have no one setting to tell.
        setting=asked.pop() / scale if len(asked) == 1 else None,
        original=before.pop() / scale if len(before) == 1 else None,
        slowdown=_finite(row.slowdown),
        bound=_finite(row.slowdown_bound),
        budget=row.budget,
        confidence=row.confidence,
        saving=_finite(row.saving),
        saved_surely_joules=_joules(row.saved_surely),
        saved_joules=None if row.saved is None else _joules(row.saved),
        sentence=_sentence(row.decision.sentence),
        at=_seconds(row.since.wall),
    )


def _health(snapshot: Snapshot) -> list[say.LiveSource]:
    return [
        say.LiveSource(
            sanitize(health.source),
            health.up,
            health.reads,
            health.failed,
            [_sentence(str(failure)) for failure in health.failures[:FAILURES]],
        )
        for health in snapshot.health
    ]


def _agent(snapshot: Snapshot, now: SnapshotDelta | None) -> say.LiveAgent:
    stats = snapshot.stats
    return say.LiveAgent(
        cpu=_ratio(now.agent_cpu, now.duration / 1e9) if now is not None else None,
        rss_bytes=stats.rss_bytes,
        processes=stats.processes,
        ticks=stats.ticks,
        missed_ticks=stats.missed_ticks,
        started=_seconds(stats.started.wall),
    )


def _weighed(snapshot: Snapshot, weighed: RatedEnergy | None) -> say.LiveRate | None:
    if weighed is None:
        return None
    present = [account for account in snapshot.cover if account.present]
    powers = [account.power for account in present if account.power is not None]
    per_hour = None
    if weighed.rate is not None and powers and len(powers) == len(present):
        per_hour = weighed.rate / 1e9 * sum(powers) / 1e6
    return say.LiveRate(
        unit=sanitize(weighed.unit),
        origin=weighed.origin,
        rate=None if weighed.rate is None else weighed.rate / 1e9,
        per_hour=per_hour,
        total=weighed.total / 1e9,
        unknown_joules=_joules(weighed.unknown),
    )


# -------------------------------------------------------------------------------------- figures


def _joules(microjoules: int) -> float:
    return microjoules / 1e6


def _watts(milliwatts: Milliwatts | int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 3)


def _ratio(one: float, other: float) -> float | None:
    return one / other if other else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def _sentence(text: str) -> str:
    return sanitize(text, MAX_SENTENCE_LENGTH)
