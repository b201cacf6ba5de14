"""Exemplars on the wire: only where they may be, and never so that a scrape is lost by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from testbed.scrapes import full_host, parse
from testbed.snapshots import CPU, GPU, NOON

from wattspan.model import Exemplar, Microjoules, Snapshot, SpanAccounts, SpanRow
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import Instrument
from wattspan_exporters.prometheus.exporter import ViewWithoutExemplars
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

SHOWN = Exemplar("ab" * 16, "cd" * 8, Microjoules(1_500_000), NOON)


def host(*rows: SpanRow) -> Snapshot:
    return replace(full_host(), spans=SpanAccounts(rows))


def row(joules: int = 1, name: str = "pay", exemplar: Exemplar = SHOWN) -> SpanRow:
    return SpanRow("shop", name, {CPU: Microjoules(joules)}, exemplars={CPU: exemplar})


def scrape(
    renderer: Renderer, snapshot: Snapshot, form: ExpositionFormat = ExpositionFormat.OPENMETRICS
) -> str:
    return renderer.render(snapshot, form).decode()


def exemplars(document: str) -> dict[str, tuple[dict[str, str], float, float]]:
    """By span name: the exemplar's labels, its value, its time."""
    return {
        sample.labels["span_name"]: (
            sample.exemplar.labels,
            sample.exemplar.value,
            float(sample.exemplar.timestamp),
        )
        for family in text_string_to_metric_families(document)
        for sample in family.samples
        if sample.exemplar
    }


def test_exemplar_names_its_trace_and_span_with_their_joules_and_time() -> None:
    assert exemplars(scrape(Renderer(), host(row()))) == {
        "pay": ({"trace_id": "ab" * 16, "span_id": "cd" * 8}, 1.5, NOON / 1e9)
    }


def test_text_format_has_no_exemplars() -> None:
    document = scrape(Renderer(), host(row()), ExpositionFormat.TEXT)
    assert "trace_id" not in document
    assert parse(document.encode(), ExpositionFormat.TEXT)


def test_exemplars_are_optional_per_series() -> None:
    bare = SpanRow("shop", "ship", {CPU: Microjoules(2), GPU: Microjoules(0)})
    assert set(exemplars(scrape(Renderer(), host(row(), bare)))) == {"pay"}


def test_formats_may_alternate_and_exemplars_may_change_while_the_value_stays() -> None:
    renderer = Renderer()
    other = SHOWN._replace(span="ef" * 8)
    for exemplar in (SHOWN, other, SHOWN):
        snapshot = host(row(exemplar=exemplar))
        assert exemplars(scrape(renderer, snapshot))["pay"][0]["span_id"] == exemplar.span
        assert "trace_id" not in scrape(renderer, snapshot, ExpositionFormat.TEXT)


def test_exemplar_of_a_series_that_is_not_drawn_is_left_out() -> None:
    strange = SpanRow("shop", "pay", {CPU: Microjoules(1)}, exemplars={GPU: SHOWN})
    assert exemplars(scrape(Renderer(), host(strange))) == {}


def test_exemplar_of_a_removed_series_is_omitted() -> None:
    renderer = Renderer()
    scrape(renderer, host(row(), row(name="gone")))
    assert set(exemplars(scrape(renderer, host(row())))) == {"pay"}


@pytest.mark.parametrize("trace", ["", "a" * 200, 'a"b\n\\', "été"])
def test_invalid_exemplar_ids_are_omitted(trace: str) -> None:
    assert exemplars(scrape(Renderer(), host(row(exemplar=SHOWN._replace(trace=trace))))) == {}


def test_exemplars_stand_only_where_openmetrics_allows_them() -> None:
    own = [metric for metric in CATALOGUE if metric.exemplars is not None]
    assert own
    assert {metric.instrument for metric in own} == {Instrument.COUNTER}


def test_view_without_exemplars_keeps_unchanged_rows() -> None:
    kept, changed = row(), row(name="ship")
    snapshots = [host(kept, changed), host(kept, row(2, name="ship"))]
    view = ViewWithoutExemplars(lambda: snapshots[0])
    first = view()
    assert view() is first
    assert not any(one.exemplars for one in first.spans.rows)
    assert first.spans.rows[0].energy == kept.energy
    del snapshots[0]
    assert [
        one is before for one, before in zip(view().spans.rows, first.spans.rows, strict=True)
    ] == [
        True,
        False,
    ]
