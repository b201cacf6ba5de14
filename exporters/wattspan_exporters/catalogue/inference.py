"""Metrics of requests to language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from wattspan.model import (
    ENGINE_METRICS,
    IDLE_PART,
    REQUEST_ENERGY_BOUNDS,
    EngineRow,
    HwType,
    InferenceRow,
    Snapshot,
)
from wattspan_exporters.catalogue.definition import (
    Distribution,
    Draw,
    Histogram,
    Instrument,
    Labels,
    Metric,
    Sample,
    declared,
    each,
    each_item,
    single,
)


def token_energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = snapshot.provenance.get(HwType.GPU, "")
    for row in snapshot.spans.inference:
        for token_type, energy in row.energy.items():
            yield (*row.key, token_type, provenance), energy


def request_energies(snapshot: Snapshot) -> Iterator[tuple[Labels, Distribution]]:
    provenance = snapshot.provenance.get(HwType.GPU, "")
    for row in snapshot.spans.inference:
        count, total = sum(row.requests.values()), sum(row.energy.values())
        yield (*row.key, provenance), Distribution(count, total, row.buckets)


def idle_energy(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield nothing before the first request: no engine is known."""
    if snapshot.spans.inference:
        yield (snapshot.provenance.get(HwType.GPU, ""),), snapshot.spans.inference_idle


def _provenance(snapshot: Snapshot, parts: Iterable[str]) -> str:
    """The least reliable provenance of some parts; idle energy is that of all devices."""
    known = {str(kind): one for kind, one in snapshot.provenance.items()}
    found = [known[part] for part in parts if part in known]
    if IDLE_PART in parts:
        found += known.values()
    return max(found, key=attrgetter("rank"), default="")


def _parts(rows: Callable[[Snapshot], Iterable[InferenceRow | EngineRow]]) -> Draw:
    """The energy of requests on the whole host, by part."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in rows(snapshot):
            for part, energy in row.host.energy.items():
                yield (*row.key, part, _provenance(snapshot, [part])), energy

    return draw


def host_energies(snapshot: Snapshot) -> Iterator[tuple[Labels, Distribution]]:
    for row in snapshot.spans.inference:
        if (host := row.host).requests:
            total = sum(host.energy.values())
            labels = (*row.key, _provenance(snapshot, host.energy))
            yield labels, Distribution(host.requests, total, host.buckets)


def host_idle_energy(snapshot: Snapshot) -> Iterator[Sample]:
    for part, energy in snapshot.spans.inference_host_idle.items():
        yield (part, _provenance(snapshot, [part])), energy


def _engines(of: Callable[[EngineRow], Iterable[Sample]], *, metered: bool = True) -> Draw:
    """The samples of every engine, with the provenance of GPU energy where it is ``metered``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        provenance = (snapshot.provenance.get(HwType.GPU, ""),) if metered else ()
        for row in snapshot.spans.engines:
            for labels, value in of(row):
                yield (*row.key, *labels, *provenance), value

    return draw


def _per_token(which: int) -> Draw:
    """The joules per token, or with 1 their uncertainty."""
    return _engines(
        lambda row: (((way, ENGINE_METRICS), one[which]) for way, one in row.token_energy.items())
    )


def _per_request(which: int) -> Draw:
    """The joules per request, or with 1 their uncertainty."""
    return _engines(
        lambda row: [((ENGINE_METRICS,), row.request_energy[which])] if row.request_energy else []
    )


def _known(figure: str, *, metered: bool = False) -> Draw:
    """A figure of every engine that has it."""
    value = attrgetter(figure)
    return _engines(
        lambda row: [] if value(row) is None else [((), value(row))],
        metered=metered,
    )


def _host_requests(row: EngineRow) -> Iterable[Sample]:
    """None of an engine that does not count its requests, or has no known energy.

    Of several models of one, another row has the energy.
    """
    counted = row.requests is not None and bool(row.host.energy or row.host.tokens)
    return [((), row.host.requests)] if counted else []


def _of_rows(rows: str, field: str) -> Draw:
    """The items of a field of every row."""
    return each_item(attrgetter(f"spans.{rows}"), attrgetter("key"), attrgetter(field))


INFERENCE = (
    declared("wattspan.gen_ai.token.energy", token_energy),
    declared("wattspan.gen_ai.tokens", _of_rows("inference", "tokens")),
    declared("wattspan.gen_ai.requests", _of_rows("inference", "requests")),
    declared(
        "wattspan.gen_ai.request.energy",
        histogram=Histogram(REQUEST_ENERGY_BOUNDS, request_energies),
    ),
    declared("wattspan.gen_ai.idle.energy", idle_energy),
    declared("wattspan.gen_ai.host.energy", _parts(attrgetter("spans.inference"))),
    declared("wattspan.gen_ai.host.tokens", _of_rows("inference", "host.tokens")),
    declared(
        "wattspan.gen_ai.request.host.energy",
        histogram=Histogram(REQUEST_ENERGY_BOUNDS, host_energies),
    ),
    declared("wattspan.gen_ai.host.idle.energy", host_idle_energy),
    declared("wattspan.gen_ai.requests.waiting", single(attrgetter("spans.inference_waiting"))),
    declared(
        "wattspan.gen_ai.unmetered.requests",
        each(attrgetter("spans.unmetered"), attrgetter("key"), attrgetter("requests")),
    ),
    declared("wattspan.gen_ai.unmetered.tokens", _of_rows("unmetered", "tokens")),
    declared("wattspan.gen_ai.engine.energy", _known("energy", metered=True)),
    declared("wattspan.gen_ai.engine.tokens", _of_rows("engines", "tokens")),
    declared("wattspan.gen_ai.engine.requests", _known("requests")),
    declared("wattspan.gen_ai.engine.host.energy", _parts(attrgetter("spans.engines"))),
    declared("wattspan.gen_ai.engine.host.tokens", _of_rows("engines", "host.tokens")),
    declared("wattspan.gen_ai.engine.host.requests", _engines(_host_requests, metered=False)),
    declared(
        "wattspan.gen_ai.engine.service.info",
        _engines(lambda row: [((one,), 1) for one in row.services], metered=False),
    ),
    declared("wattspan.gen_ai.engine.token.energy", _per_token(0)),
    declared("wattspan.gen_ai.engine.token.energy.uncertainty", _per_token(1)),
    declared("wattspan.gen_ai.engine.request.energy", _per_request(0)),
    declared("wattspan.gen_ai.engine.request.energy.uncertainty", _per_request(1)),
    declared("wattspan.gen_ai.engine.idle", _known("idle")),
)


def proposed_energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = snapshot.provenance.get(HwType.GPU, "")
    for row in snapshot.spans.engines:
        if row.energy is not None:
            yield (row.model, snapshot.host, row.engine, row.owner, provenance), row.energy


# Draft of aitra-meter for OpenTelemetry's semantic-conventions-genai, July 2026:
# docs/proposals/otel-semconv-energy-metrics.yaml. Of its four metrics, these figures fit one: its
# energy per token divides by generated tokens only, its idle ratio is a part of time.
GEN_AI_PROPOSAL = (
    Metric("gen_ai.infrastructure.energy", Instrument.COUNTER, "J",
           "Accelerator energy of a serving engine, by its name in a draft for OpenTelemetry.",
           ("gen_ai.request.model", "server.address", "engine", "owner", "provenance"),
           proposed_energy),
)  # fmt: skip
"""Names that may become OpenTelemetry's; not in the catalogue."""
