"""The poller at changing intervals: no joule is lost or doubled, no resolution held by the dead.

The real poller, ledger and demand run on a manual clock. Energy and consumers are those of a script
of events; its expectations are computed here, from the events alone.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from testbed.simulated_host import PACKAGE, imbalances

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Gap,
    Interval,
    Microjoules,
    Milliwatts,
    PayerInfo,
    Reading,
    Snapshot,
    Usage,
)
from wattspan.ports import Batch, UsageBatch
from wattspan.service import sampling_demand as sampling
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import LatestSnapshot, MeteredTick, Poller, SnapshotProviders
from wattspan.service.sampling_demand import FINE, REST, Intervals, Reason, SamplingDemand
from wattspan.testing import FakeDirectory, ManualClock

DOMAIN = replace(
    PACKAGE,
    modulus=Microjoules(1_000 * 10**6),  # it laps in 10 s at least
    max_power=Milliwatts(100_000),
    resolution=MILLISECOND,
)
MODULUS, LAP = 1_000 * 10**6, 10 * SECOND
RELEASED = SECOND + FINE  # the time from the end of the last consumer to the last fine tick
UNSTEADY = 3  # ticks after a lapse of the clock, until their times are on the grid again

Event = tuple[int, str, int]


class Host(LatestSnapshot):
    """Energy, processes and the clock of a host, its events, and what the poller makes of them."""

    name = "rapl"

    def __init__(self, counter: int, script: list[Event]) -> None:
        self.clock, self.stop, self.script = ManualClock(), threading.Event(), deque(script)
        self.polled, began = self.clock.now(), self.clock.monotonic()
        self.due = began + script[0][0]
        self.power, self.offset, self.spent = 30_000, counter, 0  # mW, uJ, and mW * ns
        self.running: dict[int, Consumer] = {}
        self.exited: list[Consumer] = []
        self.last: tuple[int, int] | None = None  # uJ and the time of the last reading
        self.least = self.most = 0  # that may be booked, uJ
        self.faulty = False  # a part of the energy since the last reading may be unknown
        self.ticks: list[tuple[int, bool]] = []  # their times, and True on the grid
        self.unsteady = UNSTEADY
        self.periods: list[Interval | Gap] = []
        self.settled: list[Attribution] = []
        self.wanted = [(Consumer(0, 0), began, began + sampling.START)]
        self.ended: dict[Consumer, int] = {}
        self.demand = SamplingDemand(
            self.clock, Intervals(), lambda process: process not in self.running.values()
        )
        ledger = Ledger(LedgerSettings(), now=began)
        super().__init__(ledger.snapshot(self.polled, "h"))
        self.poller = Poller(
            self.clock,
            ledger,
            EnergyHistory(300 * SECOND, 10**6),
            [self],
            self,
            FakeDirectory(),
            self,
            demand=self.demand,
            providers=SnapshotProviders(),
            observers={"test": lambda _, settled: self.settled.extend(settled)},
            recorders={"test": self.record},
            sleep=self.sleep,
        )

    # --------------------------------------------------------------------- what the poller calls

    def read(self) -> Batch:
        now, energy = self.clock.now(), self.spent // 10**6
        before, at = self.last or (energy, now.mono)
        if self.last is None or now.mono > at:
            self.most += energy - before
            self.least += 0 if self.faulty or now.mono - at >= LAP else energy - before
            self.last, self.faulty = (energy, now.mono), False
        counter = Microjoules((self.offset + energy) % MODULUS)
        return Batch((DOMAIN,), (Reading(DOMAIN.id, now, counter),))

    def poll(self, *, settle: bool = True, watched: object = None) -> UsageBatch:
        start, now = self.polled, self.clock.now()
        self.ticks.append((now.mono, not self.unsteady))
        self.unsteady = max(0, self.unsteady - 1)
        exited, self.exited = tuple(self.exited), []
        if now.mono == start.mono or not settle:
            return UsageBatch(exited=exited)
        self.polled, everyone = now, {*self.running.values(), *exited}
        usage = Usage("cpu:0", start, now, dict.fromkeys(everyone, 10**6), 5)
        return UsageBatch((usage,), tuple(PayerInfo(one, "job") for one in everyone), exited)

    def record(self, tick: MeteredTick, gpus: object) -> None:
        self.periods += [one.period for one in tick.periods() if one.period is not None]

    def publish(self, snapshot: Snapshot) -> None:
        super().publish(snapshot)
        account = snapshot.account(DOMAIN.id)
        assert self.least <= account.energy + account.pending <= self.most
        assert imbalances(snapshot) == []

    def sleep(self, mono: int) -> None:
        """Sleep until ``mono``, or an event before."""
        now = self.clock.monotonic()
        if self.due > mono:
            self.work(mono - now)
            return
        self.work(max(0, self.due - now))
        _, what, how = self.script.popleft()
        getattr(self, what)(how)
        if self.script:
            self.due = self.clock.monotonic() + self.script[0][0]
        else:
            self.stop.set()

    def close(self) -> None: ...

    # ------------------------------------------------------------------------------------ events

    def work(self, ns: int) -> None:
        self.spent += self.power * ns
        self.clock.advance(ns=ns)

    def load(self, how: int) -> None:
        self.power = (5_000, 20_000, 40_000, 60_000)[how]

    def spans(self, how: int) -> None:
        self.register(Reason.SPANS, how, sampling.SPAN_EXPIRY)

    def window(self, how: int) -> None:
        self.register(Reason.WINDOWS, how, sampling.WINDOW_EXPIRY)

    def register(self, reason: Reason, how: int, lasts: int) -> None:
        now = self.clock.monotonic()
        process = self.running.setdefault(how, Consumer(how + 1, now))
        self.demand.register(reason, process, how % 2)
        self.wanted.append((process, now, now + lasts))

    def death(self, how: int) -> None:
        if (process := self.running.pop(how, None)) is not None:
            self.ended[process] = self.clock.monotonic()
            self.exited.append(process)

    def hold(self, how: int) -> None:
        now, lasts = self.clock.monotonic(), (1, SECOND // 2, 3 * SECOND, 7 * SECOND)[how]
        self.demand.hold(Reason.QUERY, lasts)
        self.poller.history.expect(now)
        self.wanted.append((Consumer(0, 0), now, now + lasts))

    def reset(self, how: int) -> None:
        """Clear the counter; near its modulus, nobody can tell this from a wrap."""
        if (self.offset + self.spent // 10**6) % MODULUS < MODULUS // 2:
            self.offset, self.faulty = -(self.spent // 10**6), True

    def suspend(self, how: int) -> None:
        """Suspend the host; its counter continues or is cleared."""
        self.clock.suspend(60)
        self.spent += 500 * 60 * SECOND * (how % 2)
        self.offset, self.faulty = (-(self.spent // 10**6) if how > 1 else self.offset), True

    def stall(self, how: int) -> None:
        """Stop the clock almost, for half a second of work or for a few ticks."""
        self.spent += self.power * SECOND // 2 * (how % 2)
        self.faulty |= how % 2 == 1
        self.unsteady = how + UNSTEADY
        for _ in range(how):
            self.work(1)
            self.poller.turn()

    def lapse(self, how: int) -> None:
        """Keep the poller from the CPU."""
        self.work((1, 3, 20, 1200)[how] * SECOND)
        self.unsteady = UNSTEADY

    def consumers(self) -> Sequence[tuple[int, int, int]]:
        """Of each: when it began, until when it surely is one, and when it surely is none."""
        found, forever = [], self.clock.monotonic() + 1
        for process, began, until in self.wanted:
            none = self.ended.get(process, forever) if process.pid else until
            found.append((began, min(until, none), none))
        return found


delays = st.sampled_from([1, MILLISECOND, 70 * MILLISECOND, SECOND // 2, SECOND, 4 * SECOND])
whats = ["spans", "window", "death", "death", "hold", "load", "reset", "suspend", "stall", "lapse"]
events = st.tuples(delays, st.sampled_from(whats), st.integers(0, 3))


@given(counter=st.integers(0, MODULUS - 1), script=st.lists(events, max_size=20))
def test_energy_is_conserved_at_intervals_that_follow_living_consumers(
    counter: int, script: list[Event]
) -> None:
    ends = [(SECOND, "death", pid) for pid in range(4)]
    host = Host(counter, [*script, *ends, (7 * SECOND, "load", 0), (1, "lapse", 0)])
    host.poller.run(host.stop)
    host.poller.finish()

    for earlier, later in zip(host.periods, host.periods[1:], strict=False):
        assert earlier.end == later.start
    measured = [one for one in host.periods if isinstance(one, Interval)]
    assert [one.interval for one in host.settled] == measured[: len(host.settled)]
    account = host.view().account(DOMAIN.id)
    assert sum(one.interval.energy for one in host.settled) == account.energy
    assert sum(one.energy for one in measured) == account.energy + account.pending

    consumers = host.consumers()
    for (before, _), (after, steady) in zip(host.ticks, host.ticks[1:], strict=False):
        since, found = after + 1, after
        while found < since:  # the begin of the unbroken time with consumers up to this tick
            since = found
            found = min((one for one, sure, _ in consumers if one < since <= sure), default=since)
        assert not steady or after <= max(since, before + FINE)
        unused = all(one > after or none <= before - RELEASED for one, _, none in consumers)
        assert not steady or not unused or after - before >= REST
