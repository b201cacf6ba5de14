"""How the series about spans are drawn from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from wattspan.model import Exemplar, Snapshot, SpanAccounts, SpanRow
from wattspan_exporters.draw_energy import provenances
from wattspan_exporters.metric import Draw, Labels, Sample


def energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = provenances(snapshot)
    for row in snapshot.spans.rows:
        for hw_type, spent in row.energy.items():
            yield (hw_type, row.service, row.name, provenance.get(hw_type, "")), spent


def exemplars(snapshot: Snapshot) -> dict[Labels, Exemplar]:
    """One span for each series of ``energy`` that has one to show."""
    provenance = provenances(snapshot)
    return {
        (hw_type, row.service, row.name, provenance.get(hw_type, "")): exemplar
        for row in snapshot.spans.rows
        for hw_type, exemplar in row.exemplars.items()
    }


def of_row(field: Callable[[SpanRow], int]) -> Draw:
    """Draw one figure of every name, labelled ``service_name span_name``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.spans.rows:
            yield (row.service, row.name), field(row)

    return draw


def tokens(snapshot: Snapshot) -> Iterator[Sample]:
    """Only of names that have tokens: most spans are no requests to a language model."""
    for row in snapshot.spans.rows:
        for direction, count in row.tokens.items():
            yield (row.service, row.name, direction), count


def outside(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = provenances(snapshot)
    for (service, hw_type), spent in snapshot.spans.outside.items():
        yield (hw_type, service, provenance.get(hw_type, "")), spent


def of_all(field: Callable[[SpanAccounts], int]) -> Draw:
    """Draw one figure of all spans together, without labels."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        yield (), field(snapshot.spans)

    return draw


def by_reason(field: Callable[[SpanAccounts], Mapping[str, int]]) -> Draw:
    """Draw counts of spans, labelled ``reason``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for reason, count in field(snapshot.spans).items():
            yield (reason,), count

    return draw
