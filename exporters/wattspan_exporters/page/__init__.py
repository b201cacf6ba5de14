"""The live page of the browser: static files, and the document ``/live.json``.

``snapshot_delta`` and ``flow`` are pure arithmetic on snapshots, ``history`` keeps the last hour.
The files are read once, when the exporter starts; a request's path is looked up among them and
never opened. They need nothing from elsewhere, and the content security policy sent with each
response lets a browser fetch nothing from elsewhere.
"""

from __future__ import annotations

import gzip
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from wattspan.http.messages import HttpResponse
from wattspan.model import Snapshot, StaticBasis
from wattspan.ports import SnapshotView
from wattspan.util.files import located_pages
from wattspan_exporters.catalogue.definition import sanitize
from wattspan_exporters.page.flow import FlowGraph, build_flow
from wattspan_exporters.page.history import PageHistory
from wattspan_exporters.page.snapshot_delta import STATIC_BASES, SnapshotDelta

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
    """The flow of a period.

    ``watts`` is null if the power of a device is unknown; ``least_watts`` is the sum of the known
    ones. ``bounded``: the energy of a part of the time of a device is unknown.
    """

    seconds: float
    joules: float
    watts: float | None
    nodes: list[FlowNodeEntry]
    links: list[FlowLinkEntry]
    least_watts: float | None = None
    bounded: bool = False


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


class SplitEntry(Struct, frozen=True):
    """GPU energy in two parts, and the least certain basis of the static power."""

    static_joules: float
    dynamic_joules: float
    basis: StaticBasis


class HourSpan(Struct, frozen=True):
    service: str
    name: str
    calls: int
    joules: float
    seconds: float
    output_tokens: int
    trace: str | None
    split: SplitEntry | None
    bounded: bool = False  # its energy is a lower bound


class LiveDocument(Struct, frozen=True):
    snapshot: msgspec.Raw  # of wattspan.api.snapshot_document.SnapshotDocument
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
            since=None if hour is None else _unix_time(snapshot, hour.start.since_boot),
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
        _rounded(flow.least_power, 4),
        flow.bounded,
    )


def _power(snapshot: Snapshot, history: PageHistory) -> PowerEntry:
    step, end, series = history.powers(MAX_POINTS)
    domains = [account.domain for account in snapshot.summed if account.domain.id in series]
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
            _split(span.splits),
            bool(span.bounded),
        )
        for energy, (service, name), span in ranked[:MAX_SPANS]
    ]


def _split(splits: tuple[int, ...]) -> SplitEntry | None:
    parts = zip(STATIC_BASES, splits[::2], splits[1::2], strict=True)
    known = [(basis, static, dynamic) for basis, static, dynamic in parts if static or dynamic]
    if not known:
        return None
    basis = known[0][0]
    for other, _, _ in known:
        basis = basis.worse(other)
    return SplitEntry(sum(s for _, s, _ in known) / 1e6, sum(d for _, _, d in known) / 1e6, basis)


def _unix_time(snapshot: Snapshot, since_boot: int) -> float:
    """The Unix time of a moment by the present wall clock."""
    return round((snapshot.at.wall - snapshot.at.since_boot + since_boot) / 1e9, 3)


def _rounded(watts: float | None, digits: int) -> float | None:
    return None if watts is None else round(watts, digits)


CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
}
"""Content types by file extension; other files are not served."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""Headers of every response: no external resources, no embedding, no cross-origin reads."""

STATIC_DIRECTORY = Path(__file__).with_name("static")

LIVE_JSON_PATH = "/live.json"


class _StaticFile(NamedTuple):
    kind: str
    tag: str
    body: bytes
    zipped: bytes


class LivePage:
    """The page: its static files, and the last hour for its document. Safe from any thread."""

    def __init__(self, view: SnapshotView) -> None:
        self._view = view
        self._files = _load(STATIC_DIRECTORY, "/")
        self._history = PageHistory()

    def is_due(self) -> bool:
        """True if ``remember`` would record the newest snapshot."""
        return self._history.is_due(self._view())

    def pause(self) -> float:
        """Seconds until ``remember`` has something to record."""
        return self._history.pause(self._view())

    def remember(self) -> None:
        """Record the newest snapshot, if it is time."""
        self._history.record(self._view())

    def document(self, snapshot: Snapshot, encoded: bytes) -> bytes:
        """The body of ``/live.json``; ``encoded`` is the JSON of ``snapshot``."""
        return build_document(snapshot, encoded, self._history)

    def file(self, path: str, zipped: bool, known: str = "") -> HttpResponse | None:
        """The static file at ``path``, None if there is none; ``known`` is If-None-Match."""
        file = self._files.get(path)
        if file is None:
            return None
        headers = {
            "Cache-Control": "no-cache",
            "Vary": "Accept-Encoding",
            "ETag": file.tag,
            **SECURITY_HEADERS,
        }
        if file.tag in known:
            return HttpResponse(304, b"", file.kind, headers)
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return HttpResponse(200, file.zipped if zipped else file.body, file.kind, headers)


def _load(folder: Path, path: str) -> dict[str, _StaticFile]:
    """The files below ``folder`` with a content type, by URL path; they name pages by place."""
    found: dict[str, _StaticFile] = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        kind = CONTENT_TYPES.get(entry.name.rpartition(".")[2])
        if entry.is_dir():
            found |= _load(entry, f"{path}{entry.name}/")
        elif kind is not None:
            body = entry.read_bytes()
            if kind.startswith("text/"):
                body = located_pages(body.decode()).encode()
            tag = f'"{sha256(body).hexdigest()[:32]}"'
            name = path if entry.name == "index.html" else f"{path}{entry.name}"
            found[name] = _StaticFile(kind, tag, body, gzip.compress(body, mtime=0))
    return found
