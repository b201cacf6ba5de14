"""Snapshots to OTLP requests, with series as cumulative streams.

A stream is a sequence of points with one start time, within which a counter never falls. If the
value of a series falls, the series was restarted (a reused pid, a row that had left the list) and
gets a new start time; otherwise a receiver would see negative energy.

The SDK's encoder builds an object and a protobuf message for every point and attribute of every
push, and takes about sixty times as long (docs/decisions/0017). This encoder encodes the attributes
of a series once. Field numbers are those of opentelemetry-proto's ``metrics.proto``,
``common.proto`` and ``resource.proto``. The fields of a message may be in any order, so those that
stay the same from push to push come first and are cached.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from wattspan.model import Exemplar, Snapshot
from wattspan.util.protobuf import length_delimited, varint
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import (
    Distribution,
    Instrument,
    Labels,
    Metric,
    cache_must_shrink,
    counters,
    sanitize,
)

Value = str | bool

START, TIME = b"\x11", b"\x19"  # of a data point: 2 and 3, fixed64
AS_DOUBLE, AS_INT = 0x21, 0x31  # of a data point: 4, double, and 6, sfixed64
NUMBER_ATTRIBUTE, HISTOGRAM_ATTRIBUTE = 7, 9  # the fields of attributes in their data points

_FIXED = struct.Struct("<Q")
_DOUBLE, _INT = struct.Struct("<Bd"), struct.Struct("<Bq")

CUMULATIVE = b"\x10\x02"  # of a sum: its aggregation temporality
MONOTONIC = b"\x18\x01"  # of a sum

STAMP = 18
"""Bytes of the time and the value of a data point, with their tags."""


@lru_cache(maxsize=1024)
def point_head(size: int) -> bytes:
    """The tag and length of a data point of ``size`` bytes."""
    return b"\x0a" + varint(size)


def fixed64(tag: bytes, number: int) -> bytes:
    """A time with its tag."""
    return tag + _FIXED.pack(number)


def double_value(value: float) -> bytes:
    """The value of a data point."""
    return _DOUBLE.pack(AS_DOUBLE, value)


def integer_value(value: int) -> bytes:
    """The value of a data point; a double if it exceeds 64 bits."""
    try:
        return _INT.pack(AS_INT, value)
    except struct.error:
        return double_value(float(value))


def encode_attribute(number: int, key: str, value: Value) -> bytes:
    """An attribute as the field ``number`` of its message."""
    if isinstance(value, bool):
        content = b"\x10\x01" if value else b"\x10\x00"
    else:
        # Values from the environment and host names may be no valid Unicode.
        content = length_delimited(1, value.encode(errors="replace"))
    return length_delimited(
        number, length_delimited(1, key.encode()) + length_delimited(2, content)
    )


def encode_exemplar(shown: Exemplar, one: int) -> bytes:
    """An exemplar with ``one`` microjoules in the unit of the metric; b"" for invalid ids."""
    try:
        trace, span = bytes.fromhex(shown.trace), bytes.fromhex(shown.span)
    except ValueError:
        return b""
    if len(trace) != 16 or len(span) != 8:
        return b""
    value = b"\x19" + struct.pack("<d", shown.energy / one)
    return length_delimited(
        5,
        fixed64(START, shown.wall) + value + length_delimited(4, span) + length_delimited(5, trace),
    )


def encode_resource(pairs: Mapping[str, Value]) -> bytes:
    return b"".join([encode_attribute(1, *pair) for pair in pairs.items()])


def encode_scope(name: str, version: str) -> bytes:
    return length_delimited(1, name.encode()) + length_delimited(2, version.encode())


def encode_request(resource: bytes, scope: bytes, metrics: Iterable[bytes]) -> bytes:
    """An ExportMetricsServiceRequest of one resource and one scope."""
    scoped = length_delimited(1, scope) + b"".join(
        [length_delimited(2, metric) for metric in metrics]
    )
    return length_delimited(1, length_delimited(1, resource) + length_delimited(2, scoped))


# Prometheus' OTLP receiver overwrites an attribute ``job`` with the resource's service.name, which
# would merge all tuned jobs of a host. A scrape renames it to ``exported_job``, the name that rules
# and dashboards use.
RENAMED_ATTRIBUTES = {"job": "exported_job"}
"""Attributes of the catalogue with another name in OTLP."""


class SeriesStream:
    """One series; ``fixed`` are the bytes that its points share, start time included."""

    __slots__ = ("attributes", "exemplar", "fixed", "start", "tail", "turn", "value")

    def __init__(self, attributes: bytes) -> None:
        self.attributes = self.fixed = attributes
        self.start = self.turn = 0
        self.value: int | float = 0
        self.exemplar: Exemplar | None = None
        self.tail = b""

    def begin(self, at: int) -> None:
        self.start = at
        self.fixed = self.attributes + fixed64(START, at)


class MetricStreams:
    """The series of one metric, at most about twice those of the newest snapshot.

    Absent series are remembered while there is room. A series that returns after it was forgotten
    starts no earlier than it was forgotten, so that its streams never overlap.
    """

    def __init__(self, metric: Metric, attribute: int = NUMBER_ATTRIBUTE) -> None:
        """``attribute`` is the field of the attributes in a data point."""
        self._metric, self._attribute = metric, attribute
        self._keys = tuple(RENAMED_ATTRIBUTES.get(key, key) for key in metric.attributes)
        self._kept: dict[Labels, SeriesStream] = {}
        self._turn = 0
        self._forgotten_at = 0
        self._seen_at = 0  # the time of the snapshot before

    def __len__(self) -> int:
        return len(self._kept)

    def drawn(self, snapshot: Snapshot) -> Iterable[SeriesStream]:
        """The series of ``snapshot`` in its order."""
        metric, kept = self._metric, self._kept
        counts = metric.instrument is Instrument.COUNTER
        self._turn = turn = self._turn + 1
        if snapshot.at.wall < self._seen_at:
            self._set_back(snapshot.at.wall)
        drawn: list[SeriesStream] = []
        fresh: list[tuple[Labels, SeriesStream]] = []
        for labels, value in metric.draw(snapshot):
            stream = kept.get(labels)
            if stream is None:
                stream = kept[labels] = SeriesStream(self._attributes(labels))
                fresh.append((labels, stream))
            elif stream.turn == turn:  # a duplicate series: the first counts, as in a scrape
                continue
            elif counts and value < stream.value:
                stream.begin(self._seen_at)
            stream.turn, stream.value = turn, value
            drawn.append(stream)
        if fresh:
            self._begin(fresh, snapshot)
        self._seen_at = snapshot.at.wall
        if cache_must_shrink(len(kept), len(drawn)):
            self._kept = {labels: one for labels, one in kept.items() if one.turn == turn}
            self._forgotten_at = snapshot.at.wall
        if metric.exemplars is not None:
            self._show(snapshot)
        return drawn

    def _set_back(self, wall: int) -> None:
        """After the clock was set back, no stream starts in the future."""
        self._seen_at = wall
        self._forgotten_at = min(self._forgotten_at, wall)
        for stream in self._kept.values():
            if stream.start > wall:
                stream.begin(wall)

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

    def _attributes(self, labels: Labels) -> bytes:
        pairs = zip(self._keys, labels, strict=True)
        number = self._attribute
        return b"".join([_point_attribute(number, key, value) for key, value in pairs if value])

    def _show(self, snapshot: Snapshot) -> None:
        """Update the exemplars of the series."""
        metric, kept = self._metric, self._kept
        exemplars = metric.exemplars(snapshot) if metric.exemplars is not None else {}
        for labels, stream in kept.items():
            shown = exemplars.get(labels)
            if shown != stream.exemplar:
                stream.exemplar = shown
                stream.tail = encode_exemplar(shown, 10**metric.decimals) if shown else b""


@lru_cache(maxsize=4096)  # most attributes of a new series occur in older ones
def _point_attribute(number: int, key: str, value: str) -> bytes:
    return encode_attribute(number, key, sanitize(value))


SCOPE_NAME = "wattspan"

MAX_REQUEST_BYTES = 2 << 20
"""Approximate size of a request: half the default limit of gRPC collectors."""

_SUM, _GAUGE, _HISTOGRAM = 7, 5, 9  # the fields of a metric that hold its data
_METRIC_FIELDS = {
    Instrument.COUNTER: (_SUM, CUMULATIVE + MONOTONIC),
    Instrument.UPDOWN: (_SUM, CUMULATIVE),
    Instrument.HISTOGRAM: (_HISTOGRAM, CUMULATIVE),
    Instrument.GAUGE: (_GAUGE, b""),
    Instrument.INFO: (_GAUGE, b""),  # facts as attributes, the value always 1
}


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
        self._resource = resource
        self._scope = encode_scope(SCOPE_NAME, version)
        self._families = [
            _MetricFamily(metric) if metric.histogram is None else _HistogramFamily(metric)
            for metric in metrics
        ]
        self.limit = limit

    @property
    def kept(self) -> int:
        """The number of remembered series."""
        return sum(len(family.streams) for family in self._families)

    def encode(self, snapshot: Snapshot) -> list[MetricsRequest]:
        """The requests of ``snapshot``."""
        encoded = encode_resource(self._resource(snapshot))
        return [
            MetricsRequest(encode_request(encoded, self._scope, metrics), points)
            for metrics, points in self._portions(snapshot)
        ]

    def _portions(self, snapshot: Snapshot) -> Iterator[tuple[list[bytes], int]]:
        """Lists of metrics within the limit; a metric of many series may be in several."""
        metrics: list[bytes] = []
        size = count = 0
        for family in self._families:
            for points in _split(family.points(snapshot), self.limit):
                metric = family.metric(points)
                if metrics and size + len(metric) > self.limit:
                    yield metrics, count
                    metrics, size, count = [], 0, 0
                metrics.append(metric)
                size += len(metric)
                count += len(points)
        if metrics:
            yield metrics, count


class _MetricFamily:
    """One metric and its series."""

    def __init__(self, metric: Metric, streams: MetricStreams | None = None) -> None:
        self.streams = MetricStreams(metric) if streams is None else streams
        self._one = 10**metric.decimals
        # The type of a series must not change when a ratio happens to be 0 or 1.
        self._whole = metric.decimals == 0 and metric.unit != "1"
        self._field, self._suffix = _METRIC_FIELDS[metric.instrument]
        self._preamble = b"".join(
            length_delimited(number, text.encode())
            for number, text in ((1, metric.name), (2, metric.help), (3, metric.unit))
            if text
        )

    def metric(self, points: Iterable[bytes]) -> bytes:
        data = b"".join(points) + self._suffix
        return self._preamble + length_delimited(self._field, data)

    def points(self, snapshot: Snapshot) -> list[bytes]:
        streams = self.streams.drawn(snapshot)
        if self._whole and any(isinstance(stream.value, float) for stream in streams):
            self._whole = False
        stamp = fixed64(TIME, snapshot.at.wall)
        if self._whole:
            return [_point(stream, stamp, integer_value(int(stream.value))) for stream in streams]
        one = self._one
        return [_point(stream, stamp, double_value(stream.value / one)) for stream in streams]


class _HistogramFamily(_MetricFamily):
    """A histogram, whose streams are those of the numbers of observations."""

    def __init__(self, metric: Metric) -> None:
        assert metric.histogram is not None  # noqa: S101 - the caller has checked it
        super().__init__(metric, MetricStreams(counters(metric)[-1], HISTOGRAM_ATTRIBUTE))
        self._drawn, one = metric.histogram.drawn, 10**metric.decimals
        bounds = [bound / one for bound in metric.histogram.bounds]
        self._bounds = length_delimited(7, struct.pack(f"<{len(bounds)}d", *bounds))

    def points(self, snapshot: Snapshot) -> list[bytes]:
        stamp = fixed64(TIME, snapshot.at.wall)
        streams = self.streams.drawn(snapshot)
        return [
            length_delimited(1, stream.fixed + stamp + self._distribution(one) + self._bounds)
            for stream, one in zip(streams, self._drawn(snapshot).values(), strict=True)
        ]

    def _distribution(self, one: Distribution) -> bytes:
        """The count, the sum, and the number of observations in each bucket alone."""
        up_to = (*one.up_to, one.observations)
        alone = (after - before for before, after in pairwise((0, *up_to)))
        return (
            fixed64(b"\x21", one.observations)
            + _DOUBLE.pack(0x29, one.total / self._one)
            + length_delimited(6, struct.pack(f"<{len(up_to)}Q", *alone))
        )


def _point(stream: SeriesStream, stamp: bytes, value: bytes) -> bytes:
    size = len(stream.fixed) + STAMP + len(stream.tail)
    return b"".join((point_head(size), stream.fixed, stamp, value, stream.tail))


def _split(points: list[bytes], limit: int) -> Iterator[list[bytes]]:
    """``points`` in pieces of at most ``limit`` bytes, of at least one point each."""
    if sum(map(len, points)) <= limit:
        if points:
            yield points
        return
    piece: list[bytes] = []
    size = 0
    for point in points:
        if piece and size + len(point) > limit:
            yield piece
            piece, size = [], 0
        piece.append(point)
        size += len(point)
    yield piece
