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
    options.add_argument("--points", type=int, default=10_000)
    options.add_argument("--repeats", type=int, default=31)
    chosen = options.parse_args()
    print(describe())
    print(f"\nCPU milliseconds a push of {chosen.points:,} points (goal: 300 for 10,000)\n")
    print("| by | first | others | kB sent |")
    print("|---|---|---|---|")
    with over_http() as http, over_grpc() as grpc:
        snapshots = [host(chosen.points, tick) for tick in range(chosen.repeats + 1)]
        gc.freeze()  # an agent has one of them, and not so many to look through for garbage
        for url in (http, grpc):
            for compress in (True, False):
                print(ours(url, snapshots, chosen.points, compress=compress))
        print(theirs(http, snapshots, chosen.points))


def ours(url: str, snapshots: list[Snapshot], points: int, *, compress: bool) -> str:
    encoder = MetricsEncoder(lambda _: {"service.name": "wattspan"}, "bench", [ENERGY])
    transport = way(url, compress=compress)

    def push(snapshot: Snapshot) -> None:
        for request in encoder.encode(snapshot):
            assert transport.send(request.body).verdict is ExportStatus.TAKEN

    first = timed(lambda: push(snapshots[0]))
    others = [timed(lambda world=each: push(world)) for each in snapshots[1:]]
    transport.close()
    requests = encoder.encode(snapshots[-1])
    assert sum(request.points for request in requests) == points
    bodies = [gzip_compress(each.body) if compress else each.body for each in requests]
    name = f"wattspan, {'gRPC' if url.startswith('grpc') else 'HTTP'}{', gzip' * compress}"
    return row(name, first, others, sum(map(len, bodies)))


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
    others = [timed(lambda d=each: push(d)) for each in worlds[1:]]
    exporter.shutdown()
    assert len(worlds[0].resource_metrics[0].scope_metrics[0].metrics[0].data.data_points) == points
    sent = len(zlib.compress(encode_metrics(worlds[-1]).SerializeToString(), 9))
    return row("SDK, HTTP, gzip", first, others, sent)


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


def row(name: str, first: float, others: list[float], sent: int) -> str:
    return f"| {name} | {first:.0f} | {statistics.median(others):.1f} | {sent / 1e3:.0f} |"


def timed(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e6


if __name__ == "__main__":
    main()
