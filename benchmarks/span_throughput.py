"""Rate at which the agent receives, joins, counts and forwards spans.

The agent runs on one core, the sender on another: batches of 512 spans with eight attributes,
gzip, as OpenTelemetry's SDKs send them, as fast as the agent takes them. A span counts when it is
in ``wattspan_spans_total``. The lower bound next to it is the cost of decoding alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.machine import describe
from testbed.spans.agent import SpanAgent
from testbed.spans.batches import SERVICE, SPANS, Batches

from benchmarks.harness import piped

ROOT = Path(__file__).resolve().parents[1]
AGENT_CPU, OTHERS_CPU = 0, 1


@dataclass(frozen=True)
class Result:
    """Result of one flood."""

    way: str
    seconds: float
    accepted: int
    counted: int
    refused: int
    cpu: float  # of the agent, without its idle usage
    rss: float
    outcomes: str

    @property
    def rate(self) -> float:
        return self.counted / self.seconds

    @property
    def rate_per_cpu(self) -> float:
        return self.counted / self.cpu


def flooded(way: str, where: str, agent: SpanAgent, seconds: float) -> Result:
    """Send for a given time, wait until all is counted, and report the cost."""
    rest, began = agent.cpu_seconds(), time.monotonic()
    time.sleep(5)
    rest = (agent.cpu_seconds() - rest) / (time.monotonic() - began)

    before = agent.total("wattspan_spans_total", service_name=SERVICE)
    used, began = agent.cpu_seconds(), time.monotonic()
    sender = subprocess.Popen(
        ["taskset", "--cpu-list", str(OTHERS_CPU), sys.executable,
         str(ROOT / "testbed" / "spans" / "batches.py"), where, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert sender.stdin is not None
    said = json.loads(sender.stdout.readline() or "{}")
    if not said:
        raise RuntimeError(f"the sender failed; the agent said: {agent.said()}")
    rss = agent.rss_megabytes()
    counted, deadline = 0, time.monotonic() + 20
    while counted < said["spans"] and time.monotonic() < deadline:
        time.sleep(0.2)
        counted = round(agent.total("wattspan_spans_total", service_name=SERVICE) - before)
    cpu = agent.cpu_seconds() - used - rest * (time.monotonic() - began)
    sender.stdin.close()
    sender.wait()
    sender.stdout.close()
    return Result(
        way, said["seconds"], said["spans"], counted, said["refused"], cpu, rss, _outcomes(agent)
    )


def _outcomes(agent: SpanAgent) -> str:
    return "; ".join(
        line for line in agent.scrape().splitlines() if line.startswith("wattspan_span_outcomes")
    )


def floor(seconds: float = 3.0) -> float:
    """Spans a CPU-second of decompressing and parsing alone."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies = [packed for batches in [Batches()] for packed in (batches.packed() for _ in range(20))]
    done, began = 0, time.process_time()
    while time.process_time() - began < seconds:
        for body in bodies:
            ExportTraceServiceRequest.FromString(zlib.decompress(body, wbits=31))
        done += len(bodies) * SPANS
    return done / (time.process_time() - began)


@contextmanager
def sink() -> Iterator[str]:
    """A collector in a process of its own, on the others' core; its URL."""
    script = ROOT / "testbed" / "spans" / "sink.py"
    command = ["taskset", "--cpu-list", str(OTHERS_CPU), sys.executable, script]
    with piped(command) as (_, output):
        yield f"http://127.0.0.1:{output.readline().strip()}"


@contextmanager
def pinned_agent(**settings: object) -> Iterator[SpanAgent]:
    with (
        tempfile.TemporaryDirectory() as folder,
        SpanAgent(Path(folder), profile="two-socket", cpus=[AGENT_CPU], **settings) as agent,
    ):
        os.sched_setaffinity(agent.engine, {OTHERS_CPU})  # the hardware is not the agent
        time.sleep(3)
        yield agent


def results(seconds: float) -> Iterator[Result]:
    with pinned_agent() as agent:
        yield flooded("Unix socket", str(agent.otlp), agent, seconds)
    with pinned_agent() as agent:
        yield flooded("loopback", f"127.0.0.1:{agent.http_port}", agent, seconds)
    with sink() as url, pinned_agent(spans__forward=url) as agent:
        yield flooded("Unix socket, forwarded", str(agent.otlp), agent, seconds)
    with sink() as url, pinned_agent(spans__forward=url) as agent:
        way = "loopback, forwarded"
        yield flooded(way, f"127.0.0.1:{agent.http_port}", agent, seconds)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=15.0)
    chosen = options.parse_args()
    print(describe() + "\n")
    print("| way | spans/s | spans per CPU-second | counted | refused requests | RSS, MB |")
    print("|---|---:|---:|---:|---:|---:|")
    for one in results(chosen.seconds):
        print(
            f"| {one.way} | {one.rate:,.0f} | {one.rate_per_cpu:,.0f} "
            f"| {one.counted / max(1, one.accepted):.2%} | {one.refused} | {one.rss:.0f} |",
            flush=True,
        )
        print(one.outcomes, file=sys.stderr)
    print(f"| floor: gunzip and parse alone | | {floor():,.0f} | | | |")


if __name__ == "__main__":
    main()
