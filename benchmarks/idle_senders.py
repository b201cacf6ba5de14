"""CPU cost of many sending processes in the joiner and the energy history.

A simulated host with two sockets and two GPUs, whose energy settles twice a second, runs in
simulated time. Some processes work all the time. Others send one span each and are idle from then
on, or send a batch of one span every five seconds and work while it is open. The figures are CPU
time of one thread as a part of a core: ``merge`` is the work in the poller's thread, ``join`` that
in the joiner's. Decoding of requests and the identification of senders are not part of it.

Then an agent on an emulated host receives spans of real processes; the figures are its CPU time
beyond that without senders, and its missed ticks. The intake of a request is the CPU time of a
listeners' thread: connection, HTTP, decoding, identification of the sender, inbox.

    .venv/bin/python -m benchmarks.idle_senders [--simulated]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from testbed.machine import describe
from testbed.sending_host import BelievingResolver, request_of_span
from testbed.spans.agent import SpanAgent

from benchmarks.harness import piped
from wattspan.clock import SystemClock
from wattspan.config import SpansSettings
from wattspan.http.access_policy import AccessPolicy
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_unix
from wattspan.ingest.identity_verification import IdentityResolver
from wattspan.ingest.otlp_http import OtlpHttpHandler
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Domain,
    HwType,
    Interval,
    Microjoules,
    Provenance,
    Share,
    Tick,
)
from wattspan.processes.inspector import ProcessInspector
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.span_joiner import SpanJoiner
from wattspan.testing import ManualClock

ROOT = Path(__file__).resolve().parents[1]
TICK = 100 * MILLISECOND
TURN = 50 * MILLISECOND
SETTLE_TICKS = 5
BATCH_EVERY = 5 * SECOND
WORK = 20 * MILLISECOND
BUSY = 8
HISTORY = 300 * SECOND
HISTORY_BYTES = 32 << 20
POWER = 100_000  # microjoules a tick and busy process


def domain(name: str, kind: HwType, resource: str) -> Domain:
    return Domain(name, kind, name, "simulated", Provenance.EMULATED, resource=resource)


DOMAINS = (
    domain("cpu0", HwType.CPU, "cpu"),
    domain("cpu1", HwType.CPU, "cpu"),
    domain("dram0", HwType.MEMORY, "cpu"),
    domain("dram1", HwType.MEMORY, "cpu"),
    domain("gpu0", HwType.GPU, "gpu:0"),
    domain("gpu1", HwType.GPU, "gpu:1"),
)


class Cost(NamedTuple):
    """CPU seconds of a second of simulated time."""

    merge: float
    join: float
    longest: float  # CPU seconds of the longest settlement


@dataclass
class SimulatedHost:
    """A joiner on a host in simulated time, and the CPU time that it has used."""

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.history = EnergyHistory(HISTORY, HISTORY_BYTES)
        settings = SpansSettings()
        self.joiner = SpanJoiner(
            self.clock, self.history, BelievingResolver(), settings, keep=HISTORY
        )
        self.busy = [Consumer(pid, 1) for pid in range(2, 2 + BUSY)]
        self.history.apply(Tick(self.clock.now(), domains={"simulated": DOMAINS}), ())
        self.settled = self.clock.now()
        self.merged = self.joined = self.longest = 0
        self.working: dict[int, list[Consumer]] = {}  # by the number of the tick
        self.sent = 0

    def reset(self) -> None:
        self.merged = self.joined = self.longest = 0

    def send(self, pid: int) -> None:
        """One span of 20 ms that ended now; its process has worked in it."""
        now = self.clock.now()
        self.sent += 1
        self.working.setdefault((now.mono - WORK) // TICK, []).append(Consumer(pid, 1))
        self.joiner.inbox.accept(request_of_span(self.sent, pid, now, WORK))

    def pass_turn(self) -> None:
        """One turn of the joiner, and the settlement of all ticks if it is due."""
        now = self.clock.advance(ns=TURN)
        if now.mono - self.settled.mono >= SETTLE_TICKS * TICK:
            self._settle()
        began = time.thread_time_ns()
        self.joiner.turn()
        self.joined += time.thread_time_ns() - began

    def _settle(self) -> None:
        used = 0
        for _ in range(SETTLE_TICKS):
            start = self.settled
            self.settled = start._replace(mono=start.mono + TICK, wall=start.wall + TICK)
            guests = dict.fromkeys(self.working.pop(start.mono // TICK, ()))
            settled = [
                attribution(one, Interval(one.id, start, self.settled, Microjoules(0)), payers)
                for one in DOMAINS
                for payers in [
                    [*self.busy, *guests] if one.hw_type is not HwType.GPU else self.busy
                ]
            ]
            tick = Tick(self.settled)
            began = time.thread_time_ns()
            self.history.apply(tick, settled)
            used += time.thread_time_ns() - began
        self.merged += used
        self.longest = max(self.longest, used)


def attribution(one: Domain, interval: Interval, payers: Sequence[Consumer]) -> Attribution:
    energy = POWER * len(payers)
    return Attribution(
        interval._replace(energy=Microjoules(energy + POWER)),
        tuple(Share(payer, Microjoules(POWER)) for payer in payers),
        Microjoules(POWER),
        Microjoules(0),
    )


def measure(senders: int, *, again: bool, seconds: float, arrive: float) -> Cost:
    """The cost with ``senders`` that have sent one span each, or send ``again`` all the time."""
    host = SimulatedHost()
    first = 1000
    turns = round(arrive * SECOND / TURN)
    for turn in range(turns):
        for pid in range(senders * turn // turns, senders * (turn + 1) // turns):
            host.send(first + pid)
        host.pass_turn()
    if not again:
        for _ in range(round(15 * SECOND / TURN)):
            host.pass_turn()
    host.reset()
    steps = round(seconds * SECOND / TURN)
    every = BATCH_EVERY // TURN
    for step in range(steps):
        if again:
            turn = step % every
            for pid in range(senders * turn // every, senders * (turn + 1) // every):
                host.send(first + pid)
        host.pass_turn()
    whole = steps * TURN
    return Cost(host.merged / whole, host.joined / whole, host.longest / 1e9)


@contextmanager
def crowd(where: Path, senders: int, period: float) -> Iterator[None]:
    """Processes that send spans to a socket, once all have begun."""
    script = ROOT / "testbed" / "spans" / "crowd.py"
    with piped([sys.executable, script, where, str(senders), str(period)]) as (_, output):
        output.readline()
        yield


def real(senders: int, period: float, seconds: float) -> tuple[float, float]:
    """The cores of an agent, and its missed ticks meanwhile."""
    with (
        tempfile.TemporaryDirectory() as folder,
        SpanAgent(Path(folder)) as agent,
        crowd(agent.otlp, senders, period),
    ):
        time.sleep(20)
        missed = "wattspan_agent_missed_ticks_total"
        before = agent.cpu_seconds(), agent.total(missed)
        began = time.monotonic()
        time.sleep(seconds)
        used, lasted = agent.cpu_seconds() - before[0], time.monotonic() - began
        return used / lasted, agent.total(missed) - before[1]


def intake(senders: int, period: float, seconds: float) -> float:
    """The CPU milliseconds of a listeners' thread for a request of one span."""
    clock, inspector = SystemClock(), ProcessInspector()
    history = EnergyHistory(HISTORY, HISTORY_BYTES)
    resolver = IdentityResolver(clock, inspector)
    joiner = SpanJoiner(clock, history, resolver, SpansSettings(), keep=HISTORY)
    server = HttpServer(clock, log=print)
    receiver = TraceReceiver(joiner.inbox, clock, max_request=16 << 20)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "otlp.sock"
        server.add_http(listen_unix(where, what="spans"), OtlpHttpHandler(receiver), AccessPolicy())
        server.start()
        try:
            (thread,) = (one for one in threading.enumerate() if one.name == "wattspan-web")
            cpu_clock = (~(thread.native_id or 0) << 3) | 6
            with crowd(where, senders, period):
                joiner.turn()
                received, used = joiner.accounts().received, time.clock_gettime_ns(cpu_clock)
                time.sleep(seconds)
                used = time.clock_gettime_ns(cpu_clock) - used
                joiner.turn()
                received = joiner.accounts().received - received
        finally:
            server.stop()
            inspector.close()
    return used / 1e6 / received


def print_real(seconds: float) -> None:
    rest, missed = real(0, 0, seconds)
    print("\nReal processes and an agent on an emulated host\n")
    print("| senders | one span each | cores more than without | missed ticks |")
    print("|---:|---|---:|---:|")
    print(f"| 0 | | {rest:.3f} in total | {missed:.0f} |", flush=True)
    for senders, period in ((3000, 0), (1000, 5)):
        cores, missed = real(senders, period, seconds)
        what = f"every {period} s" if period else "once"
        print(f"| {senders:,} | {what} | {cores - rest:.3f} | {missed:.0f} |", flush=True)
    cost = intake(300, 3, seconds)
    print(f"\nIntake: {cost:.2f} ms of CPU a request, 100 new connections a second.", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=40.0, help="simulated seconds of a row")
    options.add_argument("--idle", type=int, nargs="*", default=[3000])
    options.add_argument("--sending", type=int, nargs="*", default=[1000])
    options.add_argument("--simulated", action="store_true", help="only in simulated time")
    chosen = options.parse_args()
    print(describe())
    print("\nSimulated time; CPU time of the poller's and the joiner's part as cores\n")
    print("| senders | one span each | merge, cores | join, cores | longest settlement, ms |")
    print("|---:|---|---:|---:|---:|", flush=True)
    rows = [*((n, False) for n in chosen.idle), *((n, True) for n in chosen.sending)]
    for senders, again in rows:
        arrive = max(BATCH_EVERY / SECOND, senders / 200)
        found = measure(senders, again=again, seconds=chosen.seconds, arrive=arrive)
        print(
            f"| {senders:,} | {'every 5 s' if again else 'once'} | {found.merge:.3f} "
            f"| {found.join:.3f} | {found.longest * 1000:.1f} |",
            flush=True,
        )
    if not chosen.simulated:
        print_real(chosen.seconds)


if __name__ == "__main__":
    main()
