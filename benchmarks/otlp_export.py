"""Cost of a push of many points, next to the OpenTelemetry SDK on the same values.

Both push the same snapshots, of a host whose counters have all grown since the push before, to
receivers on loopback that take everything. CPU time of the pushing thread, medians: wattspan's is
from the snapshot to the answer; the SDK is handed its data points ready made, and encodes,
compresses and sends them by its own OTLP/HTTP exporter. Bytes are those of the messages.

    .venv/bin/python -m benchmarks.otlp_export
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import zlib
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from testbed.machine import describe

from benchmarks.otlp_receivers import over_grpc, over_http
from benchmarks.scrape import ENERGY, host
from wattspan.clock import SystemClock
from wattspan.model import Snapshot
from wattspan.otlp.destination import METRICS, parse_destination
from wattspan.otlp.grpc_transport import GrpcTransport
from wattspan.otlp.http_transport import HttpTransport
from wattspan.otlp.transport import ExportStatus, Transport
from wattspan.util.encoding import gzip_compress
from wattspan_exporters.otlp.encoder import MetricsEncoder


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--points", type=int, nargs="+", default=[1_000, 10_000])
    options.add_argument("--repeats", type=int, default=31)
    chosen = options.parse_args()
    print(describe())
    print("\nCPU milliseconds a push (goal: 10,000 points in 300 ms)\n")
    print("| points | by | first | encode | gzip | whole push | kB | kB sent |")
    print("|---|---|---|---|---|---|---|---|")
    with over_http() as http, over_grpc() as grpc:
        for points in chosen.points:
            snapshots = [host(points, tick) for tick in range(chosen.repeats + 1)]
            gc.freeze()  # an agent has one of them, and not so many to look through for garbage
            for url in (http, grpc):
                for compress in (True, False):
                    print(ours(url, snapshots, points, compress=compress))
            print(theirs(http, snapshots, points))


def ours(url: str, snapshots: list[Snapshot], points: int, *, compress: bool) -> str:
    encoder = MetricsEncoder(lambda _: {"service.name": "wattspan"}, "bench", [ENERGY])
    transport = way(url, compress=compress)

    def push(snapshot: Snapshot) -> None:
        for request in encoder.encode(snapshot):
            assert transport.send(request.body).verdict is ExportStatus.TAKEN

    first = timed(lambda: push(snapshots[0]))
    bodies: list[bytes] = []

    def encode(snapshot: Snapshot) -> None:
        requests = encoder.encode(snapshot)
        assert sum(request.points for request in requests) == points
        bodies[:] = [request.body for request in requests]

    encoding = [timed(lambda world=each: encode(world)) for each in snapshots[1:]]
    pressing = (
        [timed(lambda: list(map(gzip_compress, bodies))) for _ in snapshots] if compress else []
    )
    whole = [timed(lambda world=each: push(world)) for each in snapshots[1:]]
    transport.close()
    plain = sum(map(len, bodies))
    sent = sum(len(gzip_compress(body)) for body in bodies) if compress else plain
    name = f"wattspan, {'gRPC' if url.startswith('grpc') else 'HTTP'}{', gzip' * compress}"
    return row(points, name, first, encoding, pressing, whole, (plain, sent))


def way(url: str, *, compress: bool) -> Transport:
    to, clock = parse_destination(url, METRICS), SystemClock()
    if url.startswith("grpc"):
        return GrpcTransport(to, {}, clock, agent="bench", compress=compress)
    return HttpTransport(to, {}, clock, agent="bench", compress=compress)


def theirs(url: str, snapshots: list[Snapshot], points: int) -> str:
    exporter = OTLPMetricExporter(f"{url}/v1/metrics", compression=Compression.Gzip)

    def push(data: MetricsData) -> None:
        assert exporter.export(data) is MetricExportResult.SUCCESS

    worlds = [data(snapshot) for snapshot in snapshots]
    first = timed(lambda: push(worlds[0]))
    encoding = [timed(lambda d=each: encode_metrics(d).SerializeToString()) for each in worlds[1:]]
    body = encode_metrics(worlds[-1]).SerializeToString()
    small = zlib.compress(body, 9)
    pressing = [timed(lambda: zlib.compress(body, 9)) for _ in worlds]
    whole = [timed(lambda d=each: push(d)) for each in worlds[1:]]
    exporter.shutdown()
    assert len(worlds[0].resource_metrics[0].scope_metrics[0].metrics[0].data.data_points) == points
    return row(points, "SDK, HTTP, gzip", first, encoding, pressing, whole, (len(body), len(small)))


def data(snapshot: Snapshot) -> MetricsData:
    """The snapshot as the SDK's own values."""
    points = [
        NumberDataPoint(
            {key: value for key, value in zip(ENERGY.attributes, labels, strict=True) if value},
            start_time_unix_nano=1,
            time_unix_nano=snapshot.at.wall,
            value=value / 10**6,
        )
        for labels, value in ENERGY.draw(snapshot)
    ]
    form = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    metric = Metric(ENERGY.name, ENERGY.help, ENERGY.unit, form)
    scope = ScopeMetrics(InstrumentationScope("wattspan", "bench"), [metric], "")
    return MetricsData([ResourceMetrics(Resource({"service.name": "wattspan"}), [scope], "")])


def row(
    points: int,
    name: str,
    first: float,
    encoding: list[float],
    pressing: list[float],
    whole: list[float],
    sizes: tuple[int, int],
) -> str:
    medians = " | ".join(
        f"{statistics.median(each):.1f}" if each else "" for each in (encoding, pressing, whole)
    )
    plain, small = sizes
    return (
        f"| {points:,} | {name} | {first:.0f} | {medians} | {plain / 1e3:.0f} | {small / 1e3:.0f} |"
    )


def timed(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e6


if __name__ == "__main__":
    main()
