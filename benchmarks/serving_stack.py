"""Load tracking of a server through the whole stack in real time: a real agent, emulated hardware.

A process serves an excerpt of the Azure conversation trace at its original speed with the emulated
engine of ``benchmarks.serving``, loads a board of an emulated host as the engine does at the clock
of that board, and sends its requests as spans of the OpenTelemetry SDK, announced by
``wattspan.otel``. A real agent receives them; its real capper locks the clock of the emulated
board. Two such stacks run side by side on the same arrivals: one with ``mode = "apply"``, the
other with ``mode = "advise"``, which leaves the original clock. Latencies and misses are those of
the engine, energy is that of the emulated board.

    PYTHONPATH=tests python -m benchmarks.serving_stack [--begin 0] [--seconds 600] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from testbed.continuous_batching import ModelCosts
from testbed.machine import describe
from testbed.reserved_port import reserved_port
from testbed.serving_plant import VirtualServer
from testbed.serving_replay import SIZE, TBT, TTFT, Arrival, trace

from benchmarks.tuner.stack import BoardClient, StackHost, job_report, running_agent, until
from wattspan.emulation.boards import H100
from wattspan.emulation.control import EmulatedGpu
from wattspan.emulation.host import KERNELS

PROFILE = "one-socket-h100"
SERVICE, SPAN, KERNEL = "chat", "POST /v1/chat/completions", "train"
LOOK = 0.05  # seconds between two steps of the server
AWAKE = 1e-6  # the load of an idle engine, whose board keeps its clock
CONFIG = """\
[agent]
state_dir = "{folder}/state"
run_dir = "{folder}/run"
log_level = "warning"
[spans]
http = "127.0.0.1:PORT"
[exporters.prometheus]
listen = "127.0.0.1:0"
[caps]
users = []
[autotune]
mode = "MODE"
knobs = ["gpu_clock"]
[[autotune.job]]
service = "chat"
span = "POST /v1/chat/completions"
kind = "requests"
control = "track"
slo = {ttft_p99 = "400ms", tbt_p99 = "100ms"}
period = "5s"
ttft = "event:first_token"
"""


class ServedExcerpt(NamedTuple):
    """The truth about a run: requests, those over a limit, tokens, microjoules, clocks over time.

    ``latest`` is the longest time by which the process woke late, in seconds.
    """

    requests: int
    missed: int
    tokens: int
    energy: int
    clocks: list[tuple[float, int]]
    latest: float


@dataclass
class StackRun:
    """One run: its truth, what the agent reported last, and the clock at the end."""

    mode: str
    served: ServedExcerpt
    report: dict[str, Any]
    unlocked: bool

    @property
    def joules_per_token(self) -> float:
        return self.served.energy / 1e6 / self.served.tokens

    @property
    def missed(self) -> float:
        return self.served.missed / self.served.requests


def excerpt(begin: float, seconds: float) -> list[Arrival]:
    """The arrivals of a part of the trace, from its beginning."""
    return [
        (at - begin, prompt, output)
        for at, prompt, output in trace()
        if begin <= at < begin + seconds
    ]


# ------------------------------------------------------------------------------- the server


class _Board:
    """The emulated board: its clock, and the load that draws a given power at this clock."""

    def __init__(self, host: Path) -> None:
        self._gpu = EmulatedGpu(0, kernel=KERNEL, host=host)
        self._client = BoardClient(host)
        self.draw(0.0, H100.silicon.max_mhz)

    @property
    def clock(self) -> int:
        return self._client.clock

    def draw(self, watts: float, mhz: int) -> None:
        silicon = H100.silicon
        most = silicon.busy_power(mhz, KERNELS[KERNEL].activity) - silicon.idle
        self._gpu.set(min(1.0, max(AWAKE, (1000 * watts - silicon.idle) / most)))


def serve(host: Path, endpoint: str, arrivals: Sequence[Arrival]) -> ServedExcerpt:
    """Serve the arrivals in real time; a request arrives when this process next wakes."""
    from opentelemetry import trace as tracing
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    import wattspan.otel

    provider = TracerProvider(resource=Resource({"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    tracing.set_tracer_provider(provider)
    if not wattspan.otel.instrument():
        raise RuntimeError("the spans of the server are not announced; set WATTSPAN_DEBUG=1")
    tracer = tracing.get_tracer("server")

    board, control = _Board(host), StackHost(host)
    coming = deque(arrivals)
    server = VirtualServer((), ModelCosts().scaled(SIZE), delay=0.0)
    active: dict[Arrival, Any] = {}
    clocks: list[tuple[float, int]] = []
    before_all = control.energy(time.monotonic_ns())
    began, unix = time.monotonic(), time.time_ns()
    told, energy, latest, at = 0, 0.0, 0.0, 0.0
    while coming or active:
        time.sleep(LOOK)
        before, at = at, time.monotonic() - began
        latest = max(latest, at - before - LOOK)
        clock = board.clock
        server.set_clock(clock)
        if not clocks or clocks[-1][1] != clock:
            clocks.append((at, clock))
        while coming and coming[0][0] <= at:
            _, prompt, output = coming.popleft()
            one = at + len(active) * 1e-9, prompt, output
            active[one] = tracer.start_span(SPAN, Context(), start_time=unix + round(at * 1e9))
            server.add(*one)
        server.advance(at)
        board.draw((server.energy - energy) / (at - before), clock)
        energy = server.energy
        while told < len(server.finished) and server.finished[told].ended <= at:
            request, told = server.finished[told], told + 1
            span = active.pop((request.arrived, request.prompt, request.output))
            span.add_event("first_token", timestamp=unix + round(request.first_token * 1e9))
            span.set_attribute("gen_ai.usage.input_tokens", request.prompt)
            span.set_attribute("gen_ai.usage.output_tokens", request.output)
            span.end(unix + round(request.ended * 1e9))
    clocks.append((at, clocks[-1][1]))
    spent = control.energy(time.monotonic_ns()) - before_all
    provider.shutdown()
    missed = sum(one.to_first > TTFT or one.between > TBT for one in server.finished)
    return ServedExcerpt(len(server.finished), missed, server.tokens, spent, clocks, latest)


# ------------------------------------------------------------------------------- the runs


def run(mode: str, begin: float, seconds: float) -> StackRun:
    """One stack: an agent, its capper, an emulated host and the server's process."""
    with reserved_port() as port:
        config = CONFIG.replace("PORT", str(port)).replace("MODE", mode)
        with running_agent(config, PROFILE) as (folder, host):
            time.sleep(5)  # the agent learns the idle power while the host is idle
            command = [
                *(sys.executable, "-m", "benchmarks.serving_stack", "--begin", str(begin)),
                *("--seconds", str(seconds), "--host", str(host.directory)),
                *("--endpoint", f"http://127.0.0.1:{port}/v1/traces"),
            ]
            environ = os.environ | {"WATTSPAN_RUN_DIR": str(folder / "run")}
            process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
            report: dict[str, Any] = {}
            while process.poll() is None:
                time.sleep(1.0)
                report = job_report(folder, f"{SERVICE}/{SPAN}") or report
            served = ServedExcerpt(*json.loads(process.stdout.read()))
            return StackRun(mode, served, report, _unlocked(host))


def _unlocked(host: StackHost) -> bool:
    """True if the board has its original clock again, soon after the end of the server."""
    with EmulatedGpu(0, kernel=KERNEL, host=host.directory) as gpu:
        gpu.set(AWAKE)
        board = BoardClient(host.directory)
        until(lambda: board.clock == H100.silicon.max_mhz, 30)
        return board.clock == H100.silicon.max_mhz


def table(tracked: StackRun, original: StackRun) -> str:
    """Both runs in Markdown."""
    rows = [
        "| clock (emulated) | requests | over a limit | J/token | saved | clocks in force "
        "| woke late by at most |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, one in (("original", original), ("load tracking", tracked)):
        saved = 1 - one.joules_per_token / original.joules_per_token
        times = ", ".join(f"{mhz} MHz {part:.0%}" for mhz, part in time_shares(one.served.clocks))
        rows.append(
            f"| {title} | {one.served.requests} | {one.served.missed} ({one.missed:.2%}) "
            f"| {one.joules_per_token:.3f} | {saved:.1%} | {times} | {one.served.latest:.1f} s |"
        )
    return "\n".join(rows)


def time_shares(clocks: Sequence[tuple[float, int]]) -> list[tuple[int, float]]:
    """The part of the time at each clock, the highest clock first.

    ``clocks`` has the time and the clock of each change, and of the end.
    """
    spent: dict[int, float] = {}
    for (at, mhz), (following, _) in pairwise(clocks):
        spent[mhz] = spent.get(mhz, 0.0) + following - at
    whole = sum(spent.values())
    return [(mhz, spent[mhz] / whole) for mhz in sorted(spent, reverse=True)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--begin", type=float, default=0.0, help="second of the trace")
    options.add_argument("--seconds", type=float, default=600.0, help="length of the excerpt")
    options.add_argument("--out", type=Path, help="keep the figures as JSON in this file")
    options.add_argument("--host", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--endpoint", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.host is not None:
        served = serve(chosen.host, chosen.endpoint, excerpt(chosen.begin, chosen.seconds))
        print(json.dumps(served))
        return
    print(f"{describe()}; emulated, seconds {chosen.begin:.0f} to "
          f"{chosen.begin + chosen.seconds:.0f} of the trace at its own speed.\n")  # fmt: skip
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(run, mode, chosen.begin, chosen.seconds) for mode in ("apply", "advise")
        ]
        tracked, original = (one.result() for one in runs)
    if chosen.out is not None:
        each = [(one.mode, one.served, one.report, one.unlocked) for one in (tracked, original)]
        chosen.out.write_text(json.dumps(each), encoding="utf-8")
    print(table(tracked, original))
    print(f"\nThe agent's last decision: {tracked.report['decision']['sentence']}")
    unlocked = "is" if tracked.unlocked else "is NOT"
    print(f"The original clock {unlocked} in force again after the end of the server.")


if __name__ == "__main__":
    main()
