"""CPU cost of many sending processes in the joiner and the energy history.

A simulated host with two sockets and two GPUs, whose energy settles twice a second, runs in
simulated time. Some processes work all the time. Others send one span each and are idle from then
on, or send a batch of one span every five seconds and work while it is open. The figures are CPU
time of one thread as a part of a core: ``merge`` is the work in the poller's thread, ``join`` that
in the joiner's. Decoding of requests and the identification of senders are not part of it.

    .venv/bin/python -m benchmarks.idle_senders
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.machine import describe
from wattspan.attribution.history import AttributionHistory
from wattspan.config import SpansSettings
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import (
    ExportRequest,
    ResourceClaim,
    ResourceSpanRecords,
    SpanRecord,
    SpanRecordColumns,
)
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
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.span_joiner import SpanJoiner
from wattspan.spans.values import Outcome
from wattspan.testing import ManualClock

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


class Resolver:
    """Believes each claimed pid."""

    def resolve(self, peer: Peer, claim: ResourceClaim) -> Consumer | Outcome:
        return Outcome.UNKNOWN_PROCESS if claim.pid is None else Consumer(claim.pid, 1)

    def identify(self, pid: int) -> Consumer | None:
        return Consumer(pid, 1)


class Cost(NamedTuple):
    """CPU seconds of a second of simulated time, and the outcomes of spans."""

    merge: float
    join: float
    longest: float  # CPU seconds of the longest settlement
    joined: int


@dataclass
class SimulatedHost:
    """A joiner on a host in simulated time, and the CPU time that it has used."""

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.history = EnergyHistory(AttributionHistory(HISTORY, HISTORY_BYTES))
        settings = SpansSettings()
        self.joiner = SpanJoiner(self.clock, self.history, Resolver(), settings, keep=HISTORY)
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
        ident = self.sent.to_bytes(8, "big")
        span = SpanRecord(ident * 2, ident, b"", "work", now.wall - WORK, now.wall)
        part = ResourceSpanRecords(ResourceClaim("sender", pid), SpanRecordColumns.of([span]))
        self.working.setdefault((now.mono - WORK) // TICK, []).append(Consumer(pid, 1))
        self.joiner.accept(ExportRequest(Peer(), now.mono, 400, (part,), "raw"))

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
    joined = host.joiner.accounts().outcomes["joined"]
    return Cost(host.merged / whole, host.joined / whole, host.longest / 1e9, joined)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=40.0, help="simulated seconds of a row")
    options.add_argument("--idle", type=int, nargs="*", default=[100, 600, 3000])
    options.add_argument("--sending", type=int, nargs="*", default=[100, 1000])
    chosen = options.parse_args()
    print(describe())
    print("\n| senders | activity | merge, cores | join, cores | longest settlement, ms | joined |")
    print("|---:|---|---:|---:|---:|---:|", flush=True)
    rows = [(0, False), *((n, False) for n in chosen.idle), *((n, True) for n in chosen.sending)]
    for senders, again in rows:
        arrive = max(BATCH_EVERY / SECOND, senders / 200)
        found = measure(senders, again=again, seconds=chosen.seconds, arrive=arrive)
        what = "one span each every 5 s" if again else "one span each, then idle"
        print(
            f"| {senders:,} | {what} | {found.merge:.3f} | {found.join:.3f} "
            f"| {found.longest * 1000:.1f} | {found.joined:,} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
