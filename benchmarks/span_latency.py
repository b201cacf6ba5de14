"""Delay from the receipt of a span to its energy in a metric, and memory cost of false spans.

A span's energy is known when the counters of its time have been read and divided: the *watermark
delay*, which the agent's query socket reports (a query about now is answered once now has settled).
The rest is wattspan's own delay. And an application that announces a million spans
over the side channel, and ends none, may not cost the agent its memory.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from testbed.machine import describe
from testbed.spans.accuracy import quantile
from testbed.spans.agent import SpanAgent
from testbed.spans.workload import UnixConnection, send

SETTLED = 10.0


def latencies(agent: SpanAgent, spans: int) -> list[float]:
    """Seconds from the agent's answer to a span until its name is in the metrics."""
    taken: dict[str, float] = {}
    seen: dict[str, float] = {}
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            text = agent.scrape()
            now = time.monotonic()
            for name in [name for name in list(taken) if name not in seen]:
                if f'span_name="{name}"' in text:
                    seen[name] = now
            time.sleep(0.02)

    watcher = threading.Thread(target=look)
    watcher.start()
    draw = random.Random(7)
    try:
        for number in range(spans):
            time.sleep(draw.uniform(0.02, 0.2))
            now, name = time.time_ns(), f"n{number}."
            span = {
                "trace": os.urandom(16).hex(), "id": os.urandom(8).hex(), "parent": "",
                "kind": name, "seconds": 0.05, "name": name, "start": now - 50_000_000, "end": now,
            }  # fmt: skip
            send(str(agent.otlp), [span])
            taken[name] = time.monotonic()
        deadline = time.monotonic() + SETTLED
        while len(seen) < spans and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        done.set()
        watcher.join()
    if len(seen) < spans:
        print(f"{spans - len(seen)} of {spans} spans were never seen", file=sys.stderr)
    return [seen[name] - taken[name] for name in seen]


def watermark_delays(agent: SpanAgent, questions: int) -> list[float]:
    """Seconds until the agent answers with this process's energy up to the time of the query."""
    delays = []
    for _ in range(questions):
        time.sleep(random.uniform(0.02, 0.2))
        began, end = time.monotonic(), time.time_ns()
        query = urllib.parse.urlencode(
            {"pid": os.getpid(), "start": end - 50_000_000, "end": end, "wait": "5s"}
        )
        connection = UnixConnection(str(agent.run_dir / "api.sock"))
        connection.request("GET", f"/v1/energy?{query}")
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {said!r}")
        delays.append(time.monotonic() - began)
    return delays


def announce(agent: SpanAgent, spans: int) -> tuple[float, float, float]:
    """Announce spans and end none; the agent's megabytes before and after, and the seconds."""
    from wattspan.sdk.ring import RECORD_SIZE, RECORDS, STARTED, WRITE_FORMAT, RingChannel

    send_one(agent)
    before = agent.rss_megabytes()
    channel = RingChannel()
    if not channel.connect([str(agent.run_dir / "feed.sock")]):
        raise RuntimeError("the agent has no side channel")
    ring, thread = channel.pen.memory, threading.get_native_id()
    began = time.monotonic()
    for number in range(1, spans + 1):
        place = number % RECORDS * RECORD_SIZE
        now = time.monotonic_ns()
        WRITE_FORMAT.pack_into(ring, place, number, number - 1, now, 0, thread, STARTED, number)
        if number % 1000 == 0:
            time.sleep(0.005)  # at the rate of the ring's drain, so that all of them arrive
    lasted = time.monotonic() - began
    time.sleep(3)
    after = agent.rss_megabytes()
    channel.close()
    return before, after, lasted


def send_one(agent: SpanAgent) -> None:
    now = time.time_ns()
    span = {
        "trace": os.urandom(16).hex(), "id": os.urandom(8).hex(), "parent": "",
        "kind": "one", "seconds": 0, "start": now - 1_000_000, "end": now,
    }  # fmt: skip
    send(str(agent.otlp), [span])
    time.sleep(2)


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} s | {quantile(values, 0.99):.2f} s"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--spans", type=int, default=300)
    chosen = options.parse_args()
    print(describe() + "\n")
    print("| host | figure | median | p99 |")
    print("|---|---|---:|---:|")
    for profile in ("two-socket", "two-socket-h100"):
        with (
            tempfile.TemporaryDirectory() as folder,
            SpanAgent(Path(folder), profile=profile, emulation__counters="1ms") as agent,
        ):
            time.sleep(3)
            print(f"| {profile} | watermark delay | {_seconds(watermark_delays(agent, 100))} |")
            found = latencies(agent, chosen.spans)
            print(f"| {profile} | from receipt to metric | {_seconds(found)} |", flush=True)
    with tempfile.TemporaryDirectory() as folder, SpanAgent(Path(folder)) as agent:
        time.sleep(3)
        before, after, lasted = announce(agent, 1_000_000)
        print(
            f"\nMemory while an application announced 1,000,000 spans in {lasted:.0f} s and ended "
            f"none: {before:.0f} to {after:.0f} MB "
            f"({agent.total('wattspan_spans_open'):,.0f} open spans kept)."
        )


if __name__ == "__main__":
    main()
