"""Replay real arrivals of a chat service on an emulated GPU, a ``gen_ai`` span a request."""

from __future__ import annotations

import argparse
import csv
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from opentelemetry import trace

from wattspan.emulation.control import EmulatedGpu

ARRIVALS = Path(__file__).with_name("arrivals.csv")
MODEL = "llama-3-70b"
PREFILL = 8_000  # tokens a second; reading a prompt fills the board
DECODE = 60  # tokens a second and request; writing takes little of it, so many share it
SHARE = 0.04

tracer = trace.get_tracer("serve")


class Request(NamedTuple):
    at: float  # seconds since the first
    input_tokens: int
    output_tokens: int


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="of arrivals, then no more")
    options.add_argument("--speed", type=float, default=1.0, help="how much faster than they came")
    options.add_argument("--gpu", type=int, default=0)
    chosen = options.parse_args()
    serving: list[threading.Thread] = []
    with EmulatedGpu(chosen.gpu, kernel="decode") as gpu:
        prefill = threading.Lock()  # one prompt at a time, as an engine without chunking does
        start = time.monotonic()
        for request in arrivals(until=chosen.seconds * chosen.speed):
            time.sleep(max(0.0, start + request.at / chosen.speed - time.monotonic()))
            thread = threading.Thread(target=chat, args=(gpu, prefill, request))
            thread.start()
            serving.append(thread)
        for thread in serving:
            thread.join()
    print(f"{len(serving)} requests served")


def chat(gpu: EmulatedGpu, prefill: threading.Lock, request: Request) -> None:
    """One request: wait for its turn, read the prompt, write the answer."""
    with tracer.start_as_current_span(
        "chat",
        kind=trace.SpanKind.SERVER,
        attributes={
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "emulated",
            "gen_ai.request.model": MODEL,
        },
    ) as span:
        with prefill, gpu.busy(0.9):
            time.sleep(request.input_tokens / PREFILL)
        with gpu.busy(SHARE):
            time.sleep(request.output_tokens / DECODE)
        span.set_attribute("gen_ai.usage.input_tokens", request.input_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", request.output_tokens)


def arrivals(until: float) -> Iterator[Request]:
    with ARRIVALS.open(newline="") as file:
        for row in csv.DictReader(file):
            at = float(row["seconds"])
            if at > until:
                return
            yield Request(at, int(row["input_tokens"]), int(row["output_tokens"]))


if __name__ == "__main__":
    main()
