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
    each,
    each_item,
    no_samples,
    single,
)

COUNTER, UPDOWN = Instrument.COUNTER, Instrument.UPDOWN
GAUGE, INFO = Instrument.GAUGE, Instrument.INFO

_MODEL = ("service.name", "model", "owner")
_ENGINE = ("engine", "model", "owner")


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
    Metric("wattspan.gen_ai.token.energy", COUNTER, "J",
           "GPU energy of requests to a language model, by prompt and generated tokens.",
           (*_MODEL, "token_type", "provenance"), token_energy, lasting=True),
    Metric("wattspan.gen_ai.tokens", COUNTER, "{token}",
           "Tokens of requests to a language model with settled energy; cached ones included.",
           (*_MODEL, "token_type"), _of_rows("inference", "tokens"), lasting=True),
    Metric("wattspan.gen_ai.requests", COUNTER, "{request}",
           "Requests to a language model with settled energy, by the division of the energy.",
           (*_MODEL, "division"), _of_rows("inference", "requests"), lasting=True),
    Metric("wattspan.gen_ai.request.energy", Instrument.HISTOGRAM, "J",
           "GPU energy of a request to a language model.",
           (*_MODEL, "provenance"), no_samples, lasting=True,
           histogram=Histogram(REQUEST_ENERGY_BOUNDS, request_energies)),
    Metric("wattspan.gen_ai.idle.energy", COUNTER, "J",
           "GPU energy of engines for language models without active requests.",
           ("provenance",), idle_energy, lasting=True),
    Metric("wattspan.gen_ai.host.energy", COUNTER, "J",
           "Energy of requests to a language model of which all parts are known, by `part`: `gpu`, "
           "`cpu` and `memory` of the engine's processes, and `idle`, their part of the devices' "
           "idle energy if `[serving] idle` is proportional.",
           (*_MODEL, "part", "provenance"), _parts(attrgetter("spans.inference")), lasting=True),
    Metric("wattspan.gen_ai.host.tokens", COUNTER, "{token}",
           "Tokens of requests to a language model of which all parts of the energy are known.",
           (*_MODEL, "token_type"), _of_rows("inference", "host.tokens"), lasting=True),
    Metric("wattspan.gen_ai.request.host.energy", Instrument.HISTOGRAM, "J",
           "Energy of a request to a language model on the whole host, the sum of its parts.",
           (*_MODEL, "provenance"), no_samples, lasting=True,
           histogram=Histogram(REQUEST_ENERGY_BOUNDS, host_energies)),
    Metric("wattspan.gen_ai.host.idle.energy", COUNTER, "J",
           "Energy beyond GPUs of engines for language models without active requests, by `part`; "
           "that of requests of which a part is unknown included.",
           ("part", "provenance"), host_idle_energy, lasting=True),
    Metric("wattspan.gen_ai.requests.waiting", UPDOWN, "{request}",
           "Ended requests to language models whose energy has not settled.",
           (), single(attrgetter("spans.inference_waiting"))),
    Metric("wattspan.gen_ai.unmetered.requests", COUNTER, "{request}",
           "Requests to a language model whose energy is unknown, by `role`: of a `client`, which "
           "calls a model elsewhere, or of an `engine` without known energy of a GPU for them.",
           (*_MODEL, "role"),
           each(attrgetter("spans.unmetered"), attrgetter("key"), attrgetter("requests")),
           lasting=True),
    Metric("wattspan.gen_ai.unmetered.tokens", COUNTER, "{token}",
           "Tokens of requests to a language model whose energy is unknown; cached ones included.",
           (*_MODEL, "role", "token_type"), _of_rows("unmetered", "tokens"), lasting=True),
    Metric("wattspan.gen_ai.engine.energy", COUNTER, "J",
           "GPU energy of a serving engine whose page is read, idle time included.",
           (*_ENGINE, "provenance"), _known("energy", metered=True), lasting=True),
    Metric("wattspan.gen_ai.engine.tokens", COUNTER, "{token}",
           "Tokens by the counters of a serving engine; cached ones included, as far as it counts "
           "them. Spans may report the same tokens: never add the two.",
           (*_ENGINE, "token_type"), _of_rows("engines", "tokens"), lasting=True),
    Metric("wattspan.gen_ai.engine.requests", COUNTER, "{request}",
           "Finished requests by the counters of a serving engine.", _ENGINE, _known("requests"),
           lasting=True),
    Metric("wattspan.gen_ai.engine.host.energy", COUNTER, "J",
           "Energy of a serving engine while all parts are known, idle time included, by `part` as "
           "in `wattspan.gen_ai.host.energy`.",
           (*_ENGINE, "part", "provenance"), _parts(attrgetter("spans.engines")), lasting=True),
    Metric("wattspan.gen_ai.engine.host.tokens", COUNTER, "{token}",
           "Tokens by the counters of a serving engine while all parts of its energy are known.",
           (*_ENGINE, "token_type"), _of_rows("engines", "host.tokens"), lasting=True),
    Metric("wattspan.gen_ai.engine.host.requests", COUNTER, "{request}",
           "Finished requests of a serving engine while all parts of its energy are known.",
           _ENGINE, _engines(_host_requests, metered=False), lasting=True),
    Metric("wattspan.gen_ai.engine.service.info", INFO, "",
           "Services whose spans report the requests of a serving engine: the same joules and "
           "tokens, which no sum may have twice.",
           (*_ENGINE, "service.name"),
           _engines(lambda row: [((one,), 1) for one in row.services], metered=False)),
    Metric("wattspan.gen_ai.engine.token.energy", GAUGE, "J",
           "GPU energy of a token in the last minute, or hour at most where counters are late: of "
           "`all` tokens with the engine's idle time, of `input` and `output` tokens without it.",
           (*_ENGINE, "token_type", "method", "provenance"), _per_token(0)),
    Metric("wattspan.gen_ai.engine.token.energy.uncertainty", GAUGE, "J",
           "Half-width of the 95 % range of the energy of a token.",
           (*_ENGINE, "token_type", "method", "provenance"), _per_token(1)),
    Metric("wattspan.gen_ai.engine.request.energy", GAUGE, "J",
           "GPU energy of a request in the same time, the engine's idle time included.",
           (*_ENGINE, "method", "provenance"), _per_request(0)),
    Metric("wattspan.gen_ai.engine.request.energy.uncertainty", GAUGE, "J",
           "Half-width of the 95 % range of the energy of a request.",
           (*_ENGINE, "method", "provenance"), _per_request(1)),
    Metric("wattspan.gen_ai.engine.idle", GAUGE, "1",
           "Part of the engine's energy in the same time while it waited for requests.",
           _ENGINE, _known("idle")),
)  # fmt: skip


def proposed_energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = snapshot.provenance.get(HwType.GPU, "")
    for row in snapshot.spans.engines:
        if row.energy is not None:
            yield (row.model, snapshot.host, row.engine, row.owner, provenance), row.energy


# Draft of aitra-meter for OpenTelemetry's semantic-conventions-genai, July 2026:
# docs/proposals/otel-semconv-energy-metrics.yaml. Of its four metrics, these figures fit one: its
# energy per token divides by generated tokens only, its idle ratio is a part of time.
GEN_AI_PROPOSAL = (
    Metric("gen_ai.infrastructure.energy", COUNTER, "J",
           "Accelerator energy of a serving engine, by its name in a draft for OpenTelemetry.",
           ("gen_ai.request.model", "server.address", "engine", "owner", "provenance"),
           proposed_energy),
)  # fmt: skip
"""Names that may become OpenTelemetry's; not in the catalogue."""
