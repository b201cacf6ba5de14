"""A snapshot as OTLP requests: the values of /metrics, in OTLP form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from testbed.otlp_sink import (
    FIXED_LABELS,
    FIXED_NAMES,
    Point,
    as_dict,
    by_series,
    count_points,
    points,
    scraped_into_prometheus,
)
from testbed.requirements import ROOT
from testbed.scrapes import full_host, parse
from testbed.snapshots import NOON, busy_host, serving_host

from wattspan.model import Instant, Microjoules, Snapshot
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import Instrument, counters
from wattspan_exporters.otlp.encoder import MetricsEncoder
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

METRICS = {metric.name: metric for metric in CATALOGUE}
KINDS = {
    Instrument.COUNTER: "counter",
    Instrument.UPDOWN: "updown",
    Instrument.HISTOGRAM: "histogram",
}


def encoder(**settings: object) -> MetricsEncoder:
    return MetricsEncoder(lambda _: {"service.name": "wattspan"}, "1.2.3", **settings)  # type: ignore[arg-type]


def decoded(one: MetricsEncoder, snapshot: Snapshot) -> list[ExportMetricsServiceRequest]:
    return [ExportMetricsServiceRequest.FromString(each.body) for each in one.encode(snapshot)]


def pushed(snapshot: Snapshot) -> list[Point]:
    return list(points(*decoded(encoder(), snapshot)))


# ------------------------------------------------------------------------- as Prometheus has it


def scraped() -> dict[Any, Any]:
    text = Renderer(CATALOGUE).render(full_host(), ExpositionFormat.TEXT)
    return parse(text, ExpositionFormat.TEXT)


def test_push_and_scrape_have_the_same_metrics() -> None:
    received = pushed(full_host())
    known = {
        (metric.name, metric.unit, KINDS.get(metric.instrument, "gauge")) for metric in CATALOGUE
    }
    assert {(point.name, point.unit, point.kind) for point in received} <= known
    assert by_series(received) == scraped()


def test_prometheus_has_the_same_series_of_a_push_and_of_a_scrape() -> None:
    """Except for the two names that deviate from the rules."""
    received = pushed(full_host())
    stored = {
        (FIXED_NAMES.get(name, name), labels): point.value
        for point in received
        for name, labels in [point.stored]
    }
    assert len(stored) == len(received), "Prometheus would take two series for one"
    assert stored == {scraped_into_prometheus(one): value for one, value in scraped().items()}


def test_each_tuned_job_of_a_host_is_a_series_in_prometheus() -> None:
    received = [one for one in pushed(full_host()) if one.name == "wattspan.autotune.confidence"]
    tuned = {dict(labels)["exported_job"] for _, labels in (one.stored for one in received)}
    assert len(tuned) == len(full_host().tuning.rows) == 3
    assert {dict(labels)["job"] for _, labels in (one.stored for one in received)} == {"wattspan"}


def test_differences_of_push_and_scrape_are_documented() -> None:
    named: dict[str, str] = {}
    labelled: dict[str, str] = {}
    for point in pushed(full_host()):
        name, labels = point.translated
        metric = METRICS[point.name]
        if name not in {one.series for one in counters(metric)}:
            named[name] = metric.series
        for label in labels.keys() - set(metric.labels) - {"le"}:
            (labelled[label],) = set(metric.labels) & {FIXED_LABELS.get(label)}
    assert (named, labelled) == (FIXED_NAMES, FIXED_LABELS)
    page = (ROOT / "docs" / "how-to" / "push-otlp-metrics.md").read_text(encoding="utf-8")
    for other, own in (named | labelled).items():
        assert f"`{other}`" in page
        assert f"`{own}`" in page


def test_host_that_is_compared_has_something_of_every_metric() -> None:
    drawn = {point.name for point in pushed(full_host())}
    assert drawn == {metric.name for metric in CATALOGUE}


@pytest.mark.parametrize("snapshot", [full_host(), busy_host(), serving_host()])
def test_full_push_matches_a_full_scrape(snapshot: Snapshot) -> None:
    scraped = parse(Renderer().render(snapshot, ExpositionFormat.TEXT), ExpositionFormat.TEXT)
    assert by_series(pushed(snapshot)) == scraped


def test_facts_are_gauges_of_one() -> None:
    (host,) = [point for point in pushed(full_host()) if point.name == "wattspan.host.info"]
    assert (host.kind, host.value) == ("gauge", 1)
    assert host.attributes == {"host.name": "node7", "emulated": "false"}


def test_joules_watts_and_seconds_are_doubles_and_counts_are_integers() -> None:
    kinds: dict[str, type] = {}
    for point in pushed(full_host()):
        kinds[point.unit] = type(point.value)
    assert {unit: kinds[unit] for unit in ("J", "W", "s", "1")} == dict.fromkeys("JWs1", float)
    assert {kinds[unit] for unit in ("By", "Hz", "Cel", "{span}", "")} == {int}


def test_microjoule_survives_in_gigajoule_sums() -> None:
    snapshot = busy_host()
    account = replace(snapshot.domains[0], energy=Microjoules(8 * 10**15 + 1))
    snapshot = replace(snapshot, domains=(account,))
    (energy,) = [point for point in pushed(snapshot) if point.name == "hw.energy"]
    assert round(energy.value * 10**6) == 8 * 10**15 + 1


def test_labels_that_would_be_empty_are_left_out() -> None:
    for point in pushed(full_host()):
        assert "" not in point.attributes.values()


def test_exemplars_lead_to_the_trace() -> None:
    shown = [point for point in pushed(full_host()) if point.exemplars]
    assert {(p.name, p.attributes["hw.type"]) for p in shown} == {
        ("wattspan.span.energy", "gpu"),
        ("wattspan.span.energy", "cpu"),
    }
    (gpu,) = [point for point in shown if point.attributes["hw.type"] == "gpu"]
    (exemplar,) = gpu.exemplars
    assert exemplar.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert exemplar.span_id.hex() == "b7ad6b7169203331"
    assert exemplar.as_double == 412.000001
    assert exemplar.time_unix_nano == NOON - 3_250_000_000
    assert not exemplar.filtered_attributes


@pytest.mark.parametrize(("trace", "span"), [("", ""), ("xyz", "b7ad6b7169203331"), ("0af7", "00")])
def test_exemplar_with_invalid_ids_is_omitted(trace: str, span: str) -> None:
    snapshot = full_host()
    row = snapshot.spans.rows[0]
    shown = {kind: e._replace(trace=trace, span=span) for kind, e in row.exemplars.items()}
    spans = replace(snapshot.spans, rows=(replace(row, exemplars=shown),))
    assert not [point for point in pushed(replace(snapshot, spans=spans)) if point.exemplars]


# ------------------------------------------------------------------------------- as OTLP has it


def test_encoding_matches_the_sdk_encoder() -> None:
    """Attributes, times, values and forms, against an encoder that others rely on."""
    (ours,) = decoded(encoder(), full_host())
    (resource,) = ours.resource_metrics
    (scope,) = resource.scope_metrics
    metrics = []
    for metric in scope.metrics:
        instrument = METRICS[metric.name].instrument
        if instrument is Instrument.HISTOGRAM:
            form: Sum | Gauge | Histogram = _histogram(metric)
            metrics.append(SdkMetric(metric.name, metric.description, metric.unit, form))
            continue
        data = [
            NumberDataPoint(p.attributes, p.start or None, p.time, p.value)  # type: ignore[arg-type]
            for p in points(_alone(ours, metric))
        ]
        form = Gauge(data)
        if instrument in KINDS:
            monotonic = instrument is Instrument.COUNTER
            form = Sum(data, AggregationTemporality.CUMULATIVE, monotonic)
        metrics.append(SdkMetric(metric.name, metric.description, metric.unit, form))
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            point.ClearField("exemplars")
    theirs = encode_metrics(
        MetricsData(
            [
                ResourceMetrics(
                    SdkResource(as_dict(resource.resource.attributes)),  # type: ignore[arg-type]
                    [ScopeMetrics(InstrumentationScope("wattspan", "1.2.3"), metrics, "")],
                    "",
                )
            ]
        )
    )
    for metric in theirs.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.histogram.data_points:  # these are optional, and unknown
            point.ClearField("min")
            point.ClearField("max")
    assert theirs.SerializeToString(deterministic=True) == ours.SerializeToString(
        deterministic=True
    )


def _histogram(metric: Any) -> Histogram:
    data = [
        HistogramDataPoint(
            as_dict(p.attributes),  # type: ignore[arg-type]
            p.start_time_unix_nano,
            p.time_unix_nano,
            p.count,
            p.sum,
            list(p.bucket_counts),
            list(p.explicit_bounds),
            min=0,
            max=0,
        )
        for p in metric.histogram.data_points
    ]
    return Histogram(data, AggregationTemporality.CUMULATIVE)


def _alone(request: ExportMetricsServiceRequest, metric: object) -> ExportMetricsServiceRequest:
    alone = ExportMetricsServiceRequest()
    alone.resource_metrics.add().scope_metrics.add().metrics.append(metric)
    return alone


def test_scope_and_every_metric_are_named_and_described() -> None:
    (request,) = decoded(encoder(), full_host())
    (scope,) = request.resource_metrics[0].scope_metrics
    assert (scope.scope.name, scope.scope.version) == ("wattspan", "1.2.3")
    for metric in scope.metrics:
        assert metric.description == METRICS[metric.name].help


def test_every_point_is_of_the_snapshots_time() -> None:
    assert {point.time for point in pushed(full_host())} == {NOON}


def test_large_snapshot_is_split_without_loss() -> None:
    whole = by_series(pushed(full_host()))
    parts = encoder(limit=4_000).encode(full_host())
    assert len(parts) > 5
    assert max(len(part.body) for part in parts) < 6_000
    requests = [ExportMetricsServiceRequest.FromString(part.body) for part in parts]
    assert by_series(points(*requests)) == whole
    assert sum(part.points for part in parts) == count_points(*requests)


def test_labels_are_sanitized_as_in_a_scrape() -> None:
    snapshot = full_host()
    row = snapshot.processes[0]
    evil = replace(row, info=replace(row.info, command="\ud800\x1b" + "é" * 500))
    snapshot = replace(snapshot, processes=(evil,))
    scraped = parse(Renderer().render(snapshot, ExpositionFormat.TEXT), ExpositionFormat.TEXT)
    assert by_series(pushed(snapshot)) == scraped


# ------------------------------------------------------------------------------- since when


def starts(snapshot: Snapshot) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for point in pushed(snapshot):
        found.setdefault(point.name, set()).add(point.start)
    return found


def test_start_times_of_lasting_series_are_those_of_the_ledger() -> None:
    books, started = NOON - 10**15, NOON - 10**9
    found = starts(replace(full_host(), since=Instant(0, books)))
    lasting = {metric.name for metric in CATALOGUE if metric.lasting}
    for name in lasting - {"wattspan.process.energy"}:
        assert found.get(name, {books}) == {books}, name
    assert found["wattspan.agent.ticks"] == {started}
    assert found["wattspan.spans.received"] == {started}


def test_gauges_have_no_start() -> None:
    assert {point.start for point in pushed(full_host()) if point.kind == "gauge"} == {0}


def test_process_series_start_at_the_process_start() -> None:
    """Rows of an earlier boot, or of an earlier process of that pid, are not gone on with."""
    snapshot = full_host()  # at mono 1000 s: booted at NOON - 1000 s
    boot = NOON - 10**12
    snapshot = replace(snapshot, since=Instant(0, NOON - 10**15))
    found = {
        point.attributes.get("pid", point.attributes["command"]): point.start
        for point in pushed(snapshot)
        if point.name == "wattspan.process.energy"
    }
    assert found["4123"] == boot + 10**7  # one clock tick after the boot
    assert found["9"] == boot + 5 * 10**7
    assert found["other"] == NOON - 10**15
    assert found["short-lived /build.slice"] == boot


def test_start_times_of_device_counters_are_the_boot() -> None:
    assert starts(full_host())["wattspan.gpu.throttled"] == {NOON - 10**12}
