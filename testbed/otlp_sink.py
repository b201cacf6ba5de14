"""Data received by an OTLP sink, in a form comparable with a scrape and with the OTLP rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from testbed.scrapes import Series
from wattspan_exporters.catalogue.definition import Instrument, prometheus_name

CUMULATIVE = 2

Key = tuple[str, frozenset[tuple[str, object]]]
"""A metric's OpenTelemetry name, and the attributes of one of its series."""

FIXED_NAMES = {
    "wattspan_gap_time_seconds_total": "wattspan_gap_seconds_total",
    "wattspan_span_time_seconds_total": "wattspan_span_seconds_total",
}
"""The two names that are fixed otherwise than by the rules (`test_catalogue.py`)."""

FIXED_LABELS = {"exported_job": "job"}
"""The one label that the agent's own page calls otherwise: Prometheus would overwrite it."""

TARGET = {"job": "wattspan", "instance": "node7"}
"""All series of an agent in Prometheus, scraped or pushed."""


INSTRUMENTS = {
    "counter": Instrument.COUNTER,
    "updown": Instrument.UPDOWN,
    "gauge": Instrument.GAUGE,
    "histogram": Instrument.HISTOGRAM,
}


@dataclass(frozen=True)
class Point:
    """One data point with the metadata of its metric.

    A data point of a histogram is several, as Prometheus stores it.
    """

    name: str
    unit: str
    kind: str  # "counter", "updown", "gauge" or "histogram"
    attributes: dict[str, object]
    start: int
    time: int
    value: int | float
    exemplars: tuple[Any, ...] = field(default=(), compare=False)
    part: str = ""  # of a histogram: "_bucket", "_sum" or "_count"

    @property
    def key(self) -> Key:
        return self.name + self.part, frozenset(self.attributes.items())

    @property
    def series(self) -> Series:
        """Name of the series on the agent's page."""
        name, labels = self.translated
        labels = {FIXED_LABELS.get(label, label): value for label, value in labels.items()}
        return FIXED_NAMES.get(name, name), frozenset(labels.items())

    @property
    def stored(self) -> Series:
        """Name of the series in Prometheus' OTLP receiver: the resource's labels win."""
        name, labels = self.translated
        return name, frozenset((labels | TARGET).items())

    @property
    def translated(self) -> tuple[str, dict[str, str]]:
        """OpenTelemetry's translation of the name to Prometheus."""
        name = prometheus_name(self.name, self.unit, INSTRUMENTS[self.kind]) + self.part
        labels = {key.replace(".", "_"): str(value) for key, value in self.attributes.items()}
        return name, labels


def scraped_into_prometheus(series: Series) -> Series:
    """The OTLP form of a Prometheus series: the original value of an overwritten label is kept
    in another label."""
    name, labels = series
    kept = {f"exported_{label}" if label in TARGET else label: value for label, value in labels}
    return name, frozenset((kept | TARGET).items())


def plain(value: AnyValue) -> object:
    return getattr(value, value.WhichOneof("value"))


def as_dict(pairs: Iterable[KeyValue]) -> dict[str, object]:
    found = {pair.key: plain(pair.value) for pair in pairs}
    assert len(found) == len(list(pairs)), "an attribute is there twice"
    return found


def points(*requests: ExportMetricsServiceRequest) -> Iterator[Point]:
    """Every point of ``requests`` in order; AssertionError for violations of OTLP."""
    for request in requests:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    yield from _points(metric)


def count_points(*requests: ExportMetricsServiceRequest) -> int:
    """The number of data points; that of a histogram is one."""
    return sum(one.part in ("", "_count") for one in points(*requests))


def _points(metric: Any) -> Iterator[Point]:
    which = metric.WhichOneof("data")
    if which == "histogram":
        assert metric.histogram.aggregation_temporality == CUMULATIVE
        for distribution in metric.histogram.data_points:
            yield from _parts(metric, distribution)
        return
    if which == "sum":
        assert metric.sum.aggregation_temporality == CUMULATIVE
        kind = "counter" if metric.sum.is_monotonic else "updown"
    else:
        assert which == "gauge", which
        kind = "gauge"
    data = getattr(metric, which).data_points
    assert len(data) > 0
    types = {point.WhichOneof("value") for point in data}
    assert len(types) == 1, f"{metric.name} mixes {types}"
    for point in data:
        yield Point(
            metric.name,
            metric.unit,
            kind,
            as_dict(point.attributes),
            point.start_time_unix_nano,
            point.time_unix_nano,
            getattr(point, point.WhichOneof("value")),
            tuple(point.exemplars),
        )


def _parts(metric: Any, one: Any) -> Iterator[Point]:
    assert len(one.bucket_counts) == len(one.explicit_bounds) + 1
    assert list(one.explicit_bounds) == sorted(one.explicit_bounds)
    assert sum(one.bucket_counts) == one.count
    attributes = as_dict(one.attributes)
    times = one.start_time_unix_nano, one.time_unix_nano

    def part(name: str, value: float, **bound: str) -> Point:
        named = metric.name, metric.unit, "histogram", attributes | bound
        return Point(*named, *times, value, part=f"_{name}")

    bounds = (*(f"{bound:g}" for bound in one.explicit_bounds), "+Inf")
    for bound, count in zip(bounds, accumulate(one.bucket_counts), strict=True):
        yield part("bucket", count, le=bound)
    yield part("sum", one.sum)
    yield part("count", one.count)


def by_series(found: Iterable[Point]) -> dict[Series, int | float]:
    """Values as a scrape would have them; AssertionError if a series is there twice."""
    listed = list(found)
    values = {point.series: point.value for point in listed}
    assert len(values) == len(listed), "a series is there twice"
    return values


def total_seen(found: Iterable[Point]) -> float:
    """Total that a receiver counts for one series: the last value of each of its streams."""
    ended = 0.0
    last: Point | None = None
    for point in found:
        if last is None:
            pass
        elif point.start > last.start:
            assert point.start >= last.time, "streams overlap"
            ended += last.value
        else:
            assert point.start == last.start, "a start time went back"
            assert point.value >= last.value, "a counter fell within one stream"
        last = point
    return ended if last is None else ended + last.value


def resource_of(request: ExportMetricsServiceRequest) -> dict[str, object]:
    (resource,) = request.resource_metrics
    return as_dict(resource.resource.attributes)
