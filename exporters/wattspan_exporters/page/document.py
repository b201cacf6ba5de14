"""The document of ``/live.json``: the snapshot, and the page's figures of the last hour.

Times are Unix seconds, energies joules, powers watts. None is unknown; every number is finite.
"""

from __future__ import annotations

from operator import attrgetter

import msgspec
from msgspec import Struct

from wattspan.model import Snapshot
from wattspan_exporters.catalogue.definition import sanitize
from wattspan_exporters.page.flow import FlowGraph, build_flow
from wattspan_exporters.page.history import PageHistory, time_since_boot
from wattspan_exporters.page.snapshot_delta import SnapshotDelta

MAX_POINTS = 240
"""Points of the power curve of one device: more than a page is wide."""

MAX_SPANS = 20
"""Span names in the document, those with the highest energy."""


class FlowNodeEntry(Struct, frozen=True):
    id: str
    layer: str  # device, type, rest, group, process or span
    name: str
    detail: str
    type: str | None
    watts: float | None
    joules: float
    provenance: str | None


class FlowLinkEntry(Struct, frozen=True):
    source: str
    target: str
    watts: float | None


class FlowEntry(Struct, frozen=True):
    seconds: float
    joules: float
    watts: float | None
    nodes: list[FlowNodeEntry]
    links: list[FlowLinkEntry]


class PowerSeries(Struct, frozen=True):
    id: str
    name: str
    type: str
    provenance: str
    watts: list[float | None]


class PowerEntry(Struct, frozen=True):
    """``step`` seconds a point; the last one ends at ``end``."""

    step: float
    end: float
    series: list[PowerSeries]


class HourSpan(Struct, frozen=True):
    service: str
    name: str
    calls: int
    joules: float
    seconds: float
    output_tokens: int
    trace: str | None


class LiveDocument(Struct, frozen=True):
    snapshot: msgspec.Raw  # of wattspan.api.snapshot.SnapshotDocument
    since: float | None
    now: FlowEntry
    hour: FlowEntry | None
    power: PowerEntry
    hour_spans: list[HourSpan]
    agent_cpu: float | None  # cores


def build_document(snapshot: Snapshot, encoded: bytes, history: PageHistory) -> bytes:
    """The document of ``snapshot``, whose JSON is ``encoded``."""
    now, hour = history.recent(snapshot)
    return msgspec.json.encode(
        LiveDocument(
            snapshot=msgspec.Raw(encoded),
            since=None if hour is None else _unix_time(snapshot, time_since_boot(hour.start)),
            now=_flow(build_flow(now)),
            hour=None if hour is None else _flow(build_flow(hour, attrgetter("mean_power"))),
            power=_power(snapshot, history),
            hour_spans=[] if hour is None else _spans(hour),
            agent_cpu=now.agent_cpu * 1e9 / now.duration if now and now.duration else None,
        )
    )


def _flow(flow: FlowGraph) -> FlowEntry:
    return FlowEntry(
        flow.duration / 1e9,
        flow.total / 1e6,
        _rounded(flow.power, 4),
        [
            FlowNodeEntry(
                node.id,
                node.layer,
                node.name,
                node.detail,
                node.type,
                _rounded(flow.watts[node.id], 4),
                flow.energy[node.id] / 1e6,
                node.provenance,
            )
            for node in flow.nodes.values()
        ],
        [FlowLinkEntry(link.source, link.target, _rounded(link.watts, 4)) for link in flow.links],
    )


def _power(snapshot: Snapshot, history: PageHistory) -> PowerEntry:
    step, end, series = history.powers(MAX_POINTS)
    domains = [account.domain for account in snapshot.cover if account.domain.id in series]
    return PowerEntry(
        step / 1e9,
        _unix_time(snapshot, end),
        [
            PowerSeries(
                sanitize(domain.id),
                sanitize(domain.name),
                domain.hw_type,
                domain.provenance,
                [
                    _rounded(None if power is None else power / 1000, 2)
                    for power in series[domain.id]
                ],
            )
            for domain in domains
        ],
    )


def _spans(hour: SnapshotDelta) -> list[HourSpan]:
    ranked = sorted(
        ((sum(span.parts), key, span) for key, span in hour.spans.items() if key[1] is not None),
        key=lambda each: (-each[0], each[1]),
    )
    return [
        HourSpan(
            sanitize(service),
            sanitize(name or ""),
            span.calls,
            energy / 1e6,
            span.time / 1e9,
            span.tokens,
            span.trace,
        )
        for energy, (service, name), span in ranked[:MAX_SPANS]
    ]


def _unix_time(snapshot: Snapshot, since_boot: int) -> float:
    """The Unix time of a moment by the present wall clock."""
    return round((snapshot.at.wall - time_since_boot(snapshot.at) + since_boot) / 1e9, 3)


def _rounded(watts: float | None, digits: int) -> float | None:
    return None if watts is None else round(watts, digits)
