"""The tables of spans and of language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from wattspan.api.snapshot_document import (
    InferenceEntry,
    SnapshotDocument,
    SpanEntry,
    SpansEntry,
)
from wattspan.cli import formatting
from wattspan.cli.formatting import at_least, count, duration_each, energy_each
from wattspan.cli.top.controls import ViewOptions
from wattspan.cli.top.tables import (
    HW_TYPE_LABELS,
    WIDE_COLUMNS,
    VisibleRows,
    bounded_joules,
    hw_types,
    joules,
    joules_cell,
    listing,
    name_cell,
    number_field,
    one_line,
    text_field,
)
from wattspan.model import HwType, service_label
from wattspan.util.text import printable


def span_table(
    document: SnapshotDocument, options: ViewOptions, visible: VisibleRows
) -> RenderableType:
    """One line for each name: calls, joules, joules per call and per output token."""
    wide = options.width >= WIDE_COLUMNS
    kinds = hw_types(document) if wide else ()
    fields = (
        text_field("SPAN", 3, name_cell),
        text_field("service", 2, partial(_service, document)),
        number_field("calls", lambda row: count(row.calls)),
        *(number_field(f"{HW_TYPE_LABELS[kind]} J", partial(_joules_of, kind)) for kind in kinds),
        number_field("joules", lambda row: Text(bounded_joules(row, joules(row)), style="bold")),
        number_field("J/call", lambda row: _joules_each(row, row.calls)),
        number_field("time/call", lambda row: duration_each(row.seconds * 1e9, row.calls)),
        number_field("tokens out", lambda row: _tokens(row, count)) if wide else None,
        number_field(
            "J/token",
            lambda row: _tokens(row, lambda tokens: _joules_each(row, tokens)),
        ),
    )
    return listing(options, fields, visible)


def _service(document: SnapshotDocument, row: SpanEntry | InferenceEntry) -> Text:
    """The service of a row, with its owner where services have several owners."""
    owners = {one.owner for one in document.spans.names if one.owner}
    label = service_label(row.service, row.owner if len(owners) > 1 else "")
    return Text(printable(label), style="dim")


def _joules_of(kind: HwType, row: SpanEntry) -> str:
    known = joules_cell(row.energy_joules[kind]) if kind in row.energy_joules else ""
    return at_least(known, bounded=kind in row.bounded)


def _joules_each(row: SpanEntry, parts: int) -> str:
    return at_least(energy_each(joules(row) * 1e6, parts), bounded=bool(row.bounded))


def _tokens(row: SpanEntry, text: Callable[[int], str]) -> str:
    tokens = row.tokens.get("output", 0)
    return text(tokens) if tokens else ""


def model_table(
    document: SnapshotDocument, options: ViewOptions, visible: VisibleRows
) -> RenderableType:
    """One line for each language model: GPU joules of its requests and tokens.

    The last column is the part of the requests whose energy was divided by the learned energy of
    tokens; the others were divided by their numbers of tokens.
    """
    fields = (
        text_field("MODEL", 3, lambda row: Text(printable(row.model))),
        text_field("service", 2, partial(_service, document)),
        number_field("requests", lambda row: count(_requests(row))),
        number_field("gpu J", lambda row: Text(joules_cell(_gpu_joules(row)), style="bold")),
        number_field("J/request", lambda row: energy_each(_gpu_joules(row) * 1e6, _requests(row))),
        *(
            number_field(f"J/token {title}", partial(_joules_a_token, token_type))
            for title, token_type in (("in", "input"), ("out", "output"))
        ),
        number_field("learned", _learned),
    )
    return listing(options, fields, visible)


def _requests(row: InferenceEntry) -> int:
    return sum(row.requests.values())


def _gpu_joules(row: InferenceEntry) -> float:
    return sum(row.gpu_joules.values())


def _learned(row: InferenceEntry) -> str:
    return formatting.share(row.requests.get("model", 0), _requests(row))


def _joules_a_token(token_type: str, row: InferenceEntry) -> str:
    tokens = row.tokens.get(token_type, 0)
    return energy_each(row.gpu_joules.get(token_type, 0.0) * 1e6, tokens) if tokens else ""


def spans_remainder(spans: SpansEntry, options: ViewOptions) -> Text:
    """The energy of services outside their spans, and the spans that no row counts."""
    outside = {service: sum(joules.values()) for service, joules in spans.outside_joules.items()}
    greatest = sorted(outside.items(), key=lambda one: -one[1])
    services = ", ".join(
        f"{printable(service)} {formatting.joules_text(joules)}" for service, joules in greatest
    )
    parts = [f"outside spans: {services}"] if any(outside.values()) else []
    parts += [
        f"{count(number)} {reason.replace('_', ' ')}"
        for reason, number in _uncounted(spans)
        if number
    ]
    return one_line(Text("; ".join(parts), style="dim"), options)


def _uncounted(spans: SpansEntry) -> Iterator[tuple[str, int]]:
    counted = {"joined", "partial", "late"}
    yield from ((reason, n) for reason, n in spans.outcomes.items() if reason not in counted)
    yield from ((f"refused ({reason})", n) for reason, n in spans.refused.items())
    yield from ((f"not forwarded ({reason})", n) for reason, n in spans.forward_drops.items())
