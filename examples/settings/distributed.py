"""One rank of a distributed training on an emulated board, with spans of its steps.

    python distributed.py [SECONDS]

Each step computes and then waits in ``all_reduce`` for the other ranks, longer in some steps. A
collective spins: the board stays busy, with little power.
"""

from __future__ import annotations

import itertools
import sys
import time

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import wattspan.otel
from wattspan.emulation.control import EmulatedGpu

COMPUTING, SPINNING = 0.9, 0.08  # load of the board
COMPUTE = 0.6  # seconds
WAITS = (0.2, 0.4, 0.8, 1.2)  # seconds for the slowest rank, which differ from step to step


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 240.0
    provider = TracerProvider(resource=Resource.create({"service.name": "rank-0"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=1000))
    trace.set_tracer_provider(provider)
    wattspan.otel.instrument()
    tracer = trace.get_tracer("distributed")
    end = time.monotonic() + seconds
    steps = 0
    with EmulatedGpu(0, kernel="train") as gpu:
        for wait in itertools.cycle(WAITS):
            if time.monotonic() >= end:
                break
            with tracer.start_as_current_span("train_step"):
                gpu.set(COMPUTING)
                time.sleep(COMPUTE)
                with tracer.start_as_current_span("all_reduce"):
                    gpu.set(SPINNING)
                    time.sleep(wait)
            steps += 1
    provider.shutdown()  # sends the rest
    print(f"{steps} steps, each with a wait in all_reduce")


if __name__ == "__main__":
    main()
