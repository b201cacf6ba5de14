"""What ``/live.json`` says, field by field. None is unknown; every number is finite."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class LiveNode(Struct):
    id: str
    layer: str  # device, type, rest, group, process or span
    name: str
    detail: str
    type: str | None
    watts: float | None
    joules: float
    provenance: str | None


class LiveLink(Struct):
    source: str
    target: str
    watts: float | None


class LiveFlow(Struct):
    seconds: float
    joules: float
    watts: float | None
    nodes: list[LiveNode]
    links: list[LiveLink]


class LiveSeries(Struct):
    id: str
    name: str
    type: str
    provenance: str
    watts: list[float | None]


class LivePower(Struct):
    step: float
    end: float
    series: list[LiveSeries]


class LiveDevice(Struct):
    id: str
    name: str
    type: str
    provenance: str
    source: str
    present: bool
    watts: float | None
    joules: float
    idle_watts: float | None
    unattributed_joules: float
    limit_watts: float | None
    limit_default_watts: float | None
    utilisation: float | None
    celsius: int | None
    throttling: list[str] | None
    gap_seconds: float
    gaps: Mapping[str, float]


class LiveSpan(Struct):
    service: str
    name: str
    calls: int
    joules: float
    joules_per_call: float | None
    joules_per_token: float | None
    seconds_per_call: float | None
    trace: str | None


class LiveJob(Struct):
    job: str
    service: str
    span: str
    knob: str
    unit: str
    state: str
    applied: bool
    setting: float | None
    original: float | None
    slowdown: float | None
    bound: float | None
    budget: float
    confidence: float
    saving: float | None
    saved_surely_joules: float
    saved_joules: float | None
    sentence: str
    at: float | None


class LiveTuning(Struct):
    mode: str
    capper: bool | None
    jobs: list[LiveJob]


class LiveSource(Struct):
    source: str
    up: bool
    reads: int
    failed: int
    failures: list[str]


class LiveAgent(Struct):
    cpu: float | None
    rss_bytes: int | None
    processes: int
    ticks: int
    missed_ticks: int
    started: float


class LiveRate(Struct):
    unit: str
    origin: str
    rate: float | None
    per_hour: float | None
    total: float
    unknown_joules: float


class LiveFootprint(Struct):
    cost: LiveRate | None
    carbon: LiveRate | None


class LiveDocument(Struct):
    version: str
    host: str
    emulated: bool
    at: float
    age: float
    since: float | None
    now: LiveFlow
    hour: LiveFlow | None
    power: LivePower
    devices: list[LiveDevice]
    spans: list[LiveSpan]
    tuning: LiveTuning
    health: list[LiveSource]
    agent: LiveAgent
    footprint: LiveFootprint
