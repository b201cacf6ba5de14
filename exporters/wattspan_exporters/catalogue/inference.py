"""Metrics of requests to language models."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from wattspan.model import REQUEST_ENERGY_BOUNDS, HwType, Snapshot
from wattspan_exporters.catalogue.definition import (
    Distribution,
    Histogram,
    Instrument,
    Labels,
    Metric,
    Sample,
    no_samples,
    single,
)
from wattspan_exporters.catalogue.energy import provenances

COUNTER, UPDOWN = Instrument.COUNTER, Instrument.UPDOWN

_MODEL = ("service.name", "model", "owner")


def token_energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = provenances(snapshot).get(HwType.GPU, "")
    for row in snapshot.spans.inference:
        for token_type, energy in row.energy.items():
            yield (*row.key, token_type, provenance), energy


def tokens(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.spans.inference:
        for token_type, count in row.tokens.items():
            yield (*row.key, token_type), count


def requests(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.spans.inference:
        for division, count in row.requests.items():
            yield (*row.key, division), count


def request_energies(snapshot: Snapshot) -> Iterator[tuple[Labels, Distribution]]:
    provenance = provenances(snapshot).get(HwType.GPU, "")
    for row in snapshot.spans.inference:
        count, total = sum(row.requests.values()), sum(row.energy.values())
        yield (*row.key, provenance), Distribution(count, total, row.buckets)


def idle_energy(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield nothing before the first request: no engine is known."""
    if snapshot.spans.inference:
        yield (provenances(snapshot).get(HwType.GPU, ""),), snapshot.spans.inference_idle


def unmetered_requests(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.spans.unmetered:
        yield row.key, row.requests


def unmetered_tokens(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.spans.unmetered:
        for token_type, count in row.tokens.items():
            yield (*row.key, token_type), count


INFERENCE = (
    Metric("wattspan.gen_ai.token.energy", COUNTER, "J",
           "GPU energy of requests to a language model, by prompt and generated tokens.",
           (*_MODEL, "token_type", "provenance"), token_energy, lasting=True),
    Metric("wattspan.gen_ai.tokens", COUNTER, "{token}",
           "Tokens of requests to a language model with settled energy; cached ones included.",
           (*_MODEL, "token_type"), tokens, lasting=True),
    Metric("wattspan.gen_ai.requests", COUNTER, "{request}",
           "Requests to a language model with settled energy, by the division of the energy.",
           (*_MODEL, "division"), requests, lasting=True),
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
           (*_MODEL, "role"), unmetered_requests, lasting=True),
    Metric("wattspan.gen_ai.unmetered.tokens", COUNTER, "{token}",
           "Tokens of requests to a language model whose energy is unknown; cached ones included.",
           (*_MODEL, "role", "token_type"), unmetered_tokens, lasting=True),
)  # fmt: skip
