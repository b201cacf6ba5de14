"""Metrics of requests to language models.

The buckets of the energy of requests are one cumulative counter with the label ``most_joules``. A
query renames it for ``histogram_quantile``: ``label_join(rate(...), "le", "", "most_joules")``.
Their sum is the energy of tokens, their count that of requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from wattspan.model import REQUEST_ENERGY_BOUNDS, HwType, Snapshot
from wattspan_exporters.catalogue.definition import Instrument, Metric, Sample, single
from wattspan_exporters.catalogue.energy import provenances

COUNTER, UPDOWN = Instrument.COUNTER, Instrument.UPDOWN

_BOUNDS = (*(f"{bound / 1e6:g}" for bound in REQUEST_ENERGY_BOUNDS), "+Inf")
_MODEL = ("service.name", "model")


def token_energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = provenances(snapshot).get(HwType.GPU, "")
    for row in snapshot.spans.inference:
        for token_type, energy in row.energy.items():
            yield (row.service, row.model, token_type, provenance), energy


def tokens(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.spans.inference:
        for token_type, count in row.tokens.items():
            yield (row.service, row.model, token_type), count


def requests(snapshot: Snapshot) -> Iterator[Sample]:
    for row in snapshot.spans.inference:
        for division, count in row.requests.items():
            yield (row.service, row.model, division), count


def buckets(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = provenances(snapshot).get(HwType.GPU, "")
    for row in snapshot.spans.inference:
        for bound, count in zip(_BOUNDS, (*row.buckets, sum(row.requests.values())), strict=True):
            yield (row.service, row.model, bound, provenance), count


def idle_energy(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield nothing before the first request: no engine is known."""
    if snapshot.spans.inference:
        yield (provenances(snapshot).get(HwType.GPU, ""),), snapshot.spans.inference_idle


INFERENCE = (
    Metric("wattspan.gen_ai.token.energy", COUNTER, "J",
           "GPU energy of requests to a language model, by prompt and generated tokens.",
           (*_MODEL, "token_type", "provenance"), token_energy),
    Metric("wattspan.gen_ai.tokens", COUNTER, "{token}",
           "Tokens of requests to a language model with settled energy; cached ones included.",
           (*_MODEL, "token_type"), tokens),
    Metric("wattspan.gen_ai.requests", COUNTER, "{request}",
           "Requests to a language model with settled energy, by the division of the energy.",
           (*_MODEL, "division"), requests),
    Metric("wattspan.gen_ai.request.energy.buckets", COUNTER, "{request}",
           "Requests to a language model with at most `most_joules` of GPU energy.",
           (*_MODEL, "most_joules", "provenance"), buckets),
    Metric("wattspan.gen_ai.idle.energy", COUNTER, "J",
           "GPU energy of engines for language models without active requests.",
           ("provenance",), idle_energy),
    Metric("wattspan.gen_ai.requests.waiting", UPDOWN, "{request}",
           "Ended requests to language models whose energy has not settled.",
           (), single(attrgetter("spans.inference_waiting"))),
)  # fmt: skip
