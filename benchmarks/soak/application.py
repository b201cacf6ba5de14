"""An instrumented application: its spans over OTLP, and their starts on the side channel.

    python -m benchmarks.soak.application train HOST ENDPOINT        until it is ended
    python -m benchmarks.soak.application visit NUMBER ENDPOINT      some seconds, spans left open

Where the side channel is comes from WATTSPAN_RUN_DIR.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer
from testbed.emulated_training import EmulatedTraining

from wattspan import otel

VISIT = 3.0  # seconds


def traced(service: str, endpoint: str) -> tuple[TracerProvider, Tracer]:
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=200))
    otel.instrument(provider)
    return provider, provider.get_tracer("soak")


def train(host: Path, endpoint: str) -> None:
    _, tracer = traced("trainer", endpoint)
    offset = time.time_ns() - time.monotonic_ns()
    with EmulatedTraining(step=0.05, noise=0.01, host=host) as training:
        while True:
            began, ended = training.step()
            span = tracer.start_span("train_step", start_time=began + offset)
            span.end(end_time=ended + offset)


def visit(number: int, endpoint: str) -> None:
    """Some spans with unique names, and some that never end."""
    provider, tracer = traced(f"visitor-{number % 7}", endpoint)
    until = time.monotonic() + VISIT
    left = [tracer.start_span(f"left open {n}") for n in range(20)]
    while time.monotonic() < until:
        with tracer.start_as_current_span(f"visit {number}"), tracer.start_as_current_span("part"):
            time.sleep(0.01)
    provider.force_flush()
    del left


def main() -> None:
    what, first, endpoint = sys.argv[1:]
    if what == "train":
        train(Path(first), endpoint)
    else:
        visit(int(first), endpoint)


if __name__ == "__main__":
    main()
