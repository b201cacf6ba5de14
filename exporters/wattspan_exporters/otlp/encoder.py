"""Snapshots to OTLP requests, with series as cumulative streams.

A stream is a sequence of points with one start time, within which a counter never falls. If the
value of a series falls, the series was restarted (a reused pid, a row that had left the list) and
gets a new start time; otherwise a receiver would see negative energy. If only the provenance of a
series changes, the stream of the new one begins there and counts from 0; otherwise a receiver would
see the energy of the first one twice.

The SDK's encoder builds an object and a message for every point and attribute of every push, and
takes several times as long (docs/decisions/0017). Here the data point of a series is kept, and a
push sets its time and its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.metrics.v1 import metrics_pb2

from wattspan.model import Exemplar, Snapshot
from wattspan.util.protobuf import add_attributes, serialize
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import (
    Distribution,
    Histogram,
    Instrument,
    Labels,
    Metric,
    counters,
    sanitize,
)
from wattspan_exporters.catalogue.series import SeriesCache

Value = str | bool
DataPoint = Any
"""A NumberDataPoint or a HistogramDataPoint."""

# Prometheus' OTLP receiver overwrites an attribute ``job`` with the resource's service.name, which
# would merge all tuned jobs of a host. A scrape renames it to ``exported_job``, the name that rules
# and dashboards use.
RENAMED_ATTRIBUTES = {"job": "exported_job"}
"""Attributes of the catalogue with another name in OTLP."""


_NOTHING = Distribution(0, 0, ())


class SeriesStream:
    """One series, with the data point that is sent with new times and values."""

    __slots__ = ("before", "distribution", "exemplar", "point", "value")

    def __init__(self, point: DataPoint) -> None:
        self.point = point
        self.value: int | float = 0
        self.distribution = _NOTHING
        self.before: SeriesStream | None = None
        """The ended stream that has counted a part of ``value``."""
        self.exemplar: Exemplar | None = None

    def begin(self, at: int, before: SeriesStream | None = None) -> None:
        self.point.start_time_unix_nano, self.before = at, before

    def show(self, exemplar: Exemplar | None, one: int) -> None:
        """Set the exemplar, with ``one`` microjoules in the unit of the metric."""
        self.exemplar = exemplar
        del self.point.exemplars[:]
        ids = None if exemplar is None else _ids(exemplar)
        if exemplar is not None and ids is not None:
            self.point.exemplars.add(
                time_unix_nano=exemplar.wall,
                as_double=exemplar.energy / one,
                trace_id=ids[0],
                span_id=ids[1],
            )


def _ids(exemplar: Exemplar) -> tuple[bytes, bytes] | None:
    """The ids of the trace and the span; None if they are invalid."""
    try:
        trace, span = bytes.fromhex(exemplar.trace), bytes.fromhex(exemplar.span)
    except ValueError:
        return None
    return (trace, span) if (len(trace), len(span)) == (16, 8) else None


class MetricStreams:
    """The series of one metric, at most about twice those of the newest snapshot.

    Absent series are remembered while there is room. A series that returns after it was forgotten
    starts no earlier than it was forgotten, so that its streams never overlap.
    """

    def __init__(self, metric: Metric, first: DataPoint) -> None:
        """``first`` is a data point without attributes, of which each series gets a copy."""
        self._metric, self._first = metric, first
        self._keys = tuple(RENAMED_ATTRIBUTES.get(key, key) for key in metric.attributes)
        self._series = SeriesCache(self._stream)
        self._fresh: list[tuple[Labels, SeriesStream]] = []
        self._forgotten_at = 0
        self._seen_at = 0  # the time of the snapshot before

    def __len__(self) -> int:
        return len(self._series)

    def drawn(self, snapshot: Snapshot) -> Sequence[SeriesStream]:
        """The series of ``snapshot`` in its order."""
        metric = self._metric
        counts = metric.instrument is Instrument.COUNTER
        last = self._series.last
        if snapshot.at.wall < self._seen_at:
            self._set_back(snapshot.at.wall)
        drawn: list[SeriesStream] = []
        for stream, value in self._series.drawn(metric.draw(snapshot)):
            if counts and value < stream.value:
                stream.begin(self._seen_at)
            stream.value = value
            drawn.append(stream)
        if self._fresh:
            self._begin(self._fresh, snapshot)
            if counts and "provenance" in self._keys:
                self._continue(self._fresh, last)
            self._fresh = []
        self._seen_at = snapshot.at.wall
        if self._series.shrink():
            self._forgotten_at = snapshot.at.wall
        if metric.exemplars is not None:
            self._show(snapshot)
        return drawn

    def _stream(self, labels: Labels) -> SeriesStream:
        """A new series, whose start time is not set yet."""
        point = type(self._first)()
        point.CopyFrom(self._first)
        pairs = zip(self._keys, labels, strict=True)
        add_attributes(point.attributes, {key: sanitize(value) for key, value in pairs if value})
        stream = SeriesStream(point)
        self._fresh.append((labels, stream))
        return stream

    def _set_back(self, wall: int) -> None:
        """After the clock was set back, no stream starts in the future."""
        self._seen_at = wall
        self._forgotten_at = min(self._forgotten_at, wall)
        for _, stream in self._series.items:
            if stream.point.start_time_unix_nano > wall:
                stream.begin(wall, stream.before)

    def _begin(self, fresh: Iterable[tuple[Labels, SeriesStream]], snapshot: Snapshot) -> None:
        """Set the start time of new series."""
        metric = self._metric
        if metric.instrument in (Instrument.GAUGE, Instrument.INFO):
            return  # these have no start time
        begun = snapshot.stats.started.wall
        if metric.lasting and snapshot.since is not None:
            begun = snapshot.since.wall
        of_series = metric.begins(snapshot) if metric.begins is not None else lambda _: None
        for labels, stream in fresh:
            own = of_series(labels)
            start = max(begun if own is None else own, self._forgotten_at)
            stream.begin(max(0, min(start, snapshot.at.wall)))

    def _continue(
        self, fresh: Iterable[tuple[Labels, SeriesStream]], last: Iterable[Labels]
    ) -> None:
        """Begin the streams of series that differ in the provenance from one that has ended."""
        place, now = self._keys.index("provenance"), self._series.last
        ended = {
            labels[:place] + labels[place + 1 :]: labels for labels in last if labels not in now
        }
        for labels, stream in fresh:
            one = ended.get(labels[:place] + labels[place + 1 :])
            before = None if one is None else self._series.get(one)
            if before is not None and before.value <= stream.value:
                stream.begin(self._seen_at, before)

    def _show(self, snapshot: Snapshot) -> None:
        """Update the exemplars of the series."""
        metric = self._metric
        exemplars = metric.exemplars(snapshot) if metric.exemplars is not None else {}
        for labels, stream in self._series.items:
            if (shown := exemplars.get(labels)) != stream.exemplar:
                stream.show(shown, 10**metric.decimals)


SCOPE_NAME = "wattspan"

MAX_REQUEST_BYTES = 2 << 20
"""Approximate size of a request: half the default limit of gRPC collectors."""

_CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
_DATA: Mapping[Instrument, tuple[str, Mapping[str, Any]]] = {
    Instrument.COUNTER: ("sum", {"aggregation_temporality": _CUMULATIVE, "is_monotonic": True}),
    Instrument.UPDOWN: ("sum", {"aggregation_temporality": _CUMULATIVE}),
    Instrument.HISTOGRAM: ("histogram", {"aggregation_temporality": _CUMULATIVE}),
    Instrument.GAUGE: ("gauge", {}),
    Instrument.INFO: ("gauge", {}),  # facts as attributes, the value always 1
}
"""The field of a metric that holds its data, and what it has beside its points."""


class MetricsRequest(NamedTuple):
    """An ExportMetricsServiceRequest and the number of its points."""

    body: bytes
    points: int


class MetricsEncoder:
    """Encodes snapshots, oldest first. For one thread."""

    def __init__(
        self,
        resource: Callable[[Snapshot], Mapping[str, Value]],
        version: str,
        metrics: Sequence[Metric] = CATALOGUE,
        limit: int = MAX_REQUEST_BYTES,
    ) -> None:
        """``limit`` is the approximate size of a request; it may be changed at any time."""
        self._resource, self._version = resource, version
        self._families = [_MetricFamily(metric) for metric in metrics]
        self.limit = limit

    @property
    def kept(self) -> int:
        """The number of remembered series."""
        return sum(len(family.streams) for family in self._families)

    def encode(self, snapshot: Snapshot) -> list[MetricsRequest]:
        """The requests of ``snapshot``; a metric of many series may be in several."""
        requests: list[MetricsRequest] = []
        resource = self._resource(snapshot)
        request, size, count = self._request(resource), 0, 0
        for family in self._families:
            for points, length in _split(family.points(snapshot), self.limit):
                length += family.size
                if count and size + length > self.limit:
                    requests.append(MetricsRequest(serialize(request), count))
                    request, size, count = self._request(resource), 0, 0
                family.add_to(request.resource_metrics[0].scope_metrics[0].metrics, points)
                size += length
                count += len(points)
        return [*requests, MetricsRequest(serialize(request), count)] if count else requests

    def _request(self, resource: Mapping[str, Value]) -> ExportMetricsServiceRequest:
        request = ExportMetricsServiceRequest()
        metrics = request.resource_metrics.add()
        add_attributes(metrics.resource.attributes, resource)
        metrics.scope_metrics.add().scope.MergeFrom(
            InstrumentationScope(name=SCOPE_NAME, version=self._version)
        )
        return request


class _MetricFamily:
    """One metric and its series; the streams of a histogram are those of its observations."""

    def __init__(self, metric: Metric) -> None:
        self._one = one = 10**metric.decimals
        # The type of a series must not change when a ratio happens to be 0 or 1.
        self._whole = metric.decimals == 0 and metric.unit != "1"
        self._data, fields = _DATA[metric.instrument]
        data: dict[str, Any] = {self._data: fields}
        self._empty = metrics_pb2.Metric(
            name=metric.name, description=metric.help, unit=metric.unit, **data
        )
        self.size = self._empty.ByteSize()
        """Bytes of the metric without points."""
        self._histogram = metric.histogram
        if metric.histogram is None:
            self.streams = MetricStreams(metric, metrics_pb2.NumberDataPoint())
        else:
            bounds = [bound / one for bound in metric.histogram.bounds]
            first = metrics_pb2.HistogramDataPoint(explicit_bounds=bounds)
            self.streams = MetricStreams(counters(metric)[-1], first)

    def add_to(self, metrics: Any, points: Iterable[DataPoint]) -> None:
        metric = metrics.add()
        metric.CopyFrom(self._empty)
        getattr(metric, self._data).data_points.extend(points)

    def points(self, snapshot: Snapshot) -> list[DataPoint]:
        """The data points of ``snapshot``, valid until the next call."""
        streams = self.streams.drawn(snapshot)
        for stream in streams:
            stream.point.time_unix_nano = snapshot.at.wall
        if self._histogram is not None:
            self._set_distributions(streams, self._histogram, snapshot)
        else:
            self._set_values(streams)
        return [stream.point for stream in streams]

    def _set_values(self, streams: Sequence[SeriesStream]) -> None:
        if self._whole and any(isinstance(stream.value, float) for stream in streams):
            self._whole = False
        one = self._one
        for stream in streams:
            value = stream.value if stream.before is None else stream.value - stream.before.value
            if self._whole and -_BEYOND_64_BITS <= value < _BEYOND_64_BITS:
                stream.point.as_int = int(value)
            else:
                stream.point.as_double = value / one

    def _set_distributions(
        self, streams: Sequence[SeriesStream], histogram: Histogram, snapshot: Snapshot
    ) -> None:
        """Set the counts, the sums, and the numbers of observations in each bucket alone."""
        drawn = histogram.drawn(snapshot).values()
        for stream, one in zip(streams, drawn, strict=True):
            stream.distribution = one
            if stream.before is not None:
                one = one.since(stream.before.distribution)
            point, up_to = stream.point, (*one.up_to, one.observations)
            point.count, point.sum = one.observations, one.total / self._one
            point.bucket_counts[:] = [after - before for before, after in pairwise((0, *up_to))]


_BEYOND_64_BITS = 1 << 63


def _split(points: list[DataPoint], limit: int) -> Iterator[tuple[list[DataPoint], int]]:
    """``points`` in pieces of about ``limit`` bytes, of at least one point each, and their size."""
    piece: list[DataPoint] = []
    size = 0
    for point in points:
        length = point.ByteSize()
        if piece and size + length > limit:
            yield piece, size
            piece, size = [], 0
        piece.append(point)
        size += length
    if piece:
        yield piece, size
