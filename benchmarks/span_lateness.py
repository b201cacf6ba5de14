"""Share of late spans of an application with OpenTelemetry's own batch exporter.

A real agent on an emulated host, and an application that does not announce its spans: threads make
spans of 20 to 200 ms, and the exporter sends them every 5 s, or earlier when 512 wait. A span is
late if a part of its time had been divided among other spans before it arrived.

    .venv/bin/python -m benchmarks.span_lateness
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from testbed.machine import describe
from testbed.spans.agent import SpanAgent
from testbed.spans.exporter import SERVICE

from benchmarks.harness import piped

ROOT = Path(__file__).resolve().parents[1]
OUTCOMES = "wattspan_span_outcomes_total"
GOAL = 0.005
JOINED_WITHIN = 30.0


def lateness(agent: SpanAgent, seconds: float, threads: int, delay: int) -> tuple[int, float]:
    """The number of spans, and the part of them that was late; ``delay`` in milliseconds."""
    before = {reason: agent.total(OUTCOMES, reason=reason) for reason in ("joined", "late")}
    script = ROOT / "testbed" / "spans" / "exporter.py"
    url = f"http://127.0.0.1:{agent.http_port}/v1/traces"
    setting = f"OTEL_BSP_SCHEDULE_DELAY={delay}"
    command = ["env", setting, sys.executable, script, url, str(seconds), str(threads)]
    with piped(command) as (_, output):
        spans = int(output.readline())
        deadline = time.monotonic() + JOINED_WITHIN
        while agent.total("wattspan_spans_total", service_name=SERVICE) < spans:
            if time.monotonic() > deadline:
                raise RuntimeError(f"some of {spans} spans were not joined: {agent.said()}")
            time.sleep(0.2)
    late = agent.total(OUTCOMES, reason="late") - before["late"]
    joined = agent.total(OUTCOMES, reason="joined") - before["joined"]
    return round(joined + late), late / max(1.0, joined + late)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=40.0)
    chosen = options.parse_args()
    print(describe())
    print(f"\nOne process, spans of 20 to 200 ms (goal: at most {GOAL:.1%} late)\n")
    print("| threads | sent every | spans | late |")
    print("|---:|---:|---:|---:|")
    for threads, delay in ((4, 5000), (16, 5000), (16, 1000)):
        with (
            tempfile.TemporaryDirectory() as folder,
            SpanAgent(Path(folder), profile="two-socket") as agent,
        ):
            time.sleep(3)
            spans, late = lateness(agent, chosen.seconds, threads, delay)
            print(f"| {threads} | {delay / 1000:g} s | {spans:,} | {late:.2%} |", flush=True)


if __name__ == "__main__":
    main()
