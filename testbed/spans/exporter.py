"""An application with OpenTelemetry's own batch exporter; a process of its own.

``python testbed/spans/exporter.py URL SECONDS THREADS``: each thread makes one span of 20 to
200 ms after another. Prints the number of spans when all are exported, and ends with its input.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

SERVICE = "batches"


def main() -> None:
    url, seconds, threads = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    resource = Resource.create({"service.name": SERVICE, "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    tracer = provider.get_tracer("benchmark")
    end = time.monotonic() + seconds
    made: list[int] = []

    def work(seed: int) -> None:
        draw, count = random.Random(seed), 0
        while time.monotonic() < end:
            with tracer.start_as_current_span(f"request {seed % 4}"):
                time.sleep(draw.uniform(0.02, 0.2))
            count += 1
        made.append(count)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    provider.force_flush()
    print(sum(made), flush=True)
    sys.stdin.read()  # stay until all is counted
    provider.shutdown()


if __name__ == "__main__":
    main()
