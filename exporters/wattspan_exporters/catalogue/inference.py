"""Metrics of requests to language models."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from wattspan.model import REQUEST_ENERGY_BOUNDS, HwType, Snapshot
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

_MODEL = ("service.name", "model", "owner")


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
)  # fmt: skip
