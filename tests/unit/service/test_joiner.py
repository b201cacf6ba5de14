"""The joiner: waiting, order, refusal, side channel, end."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import pytest
from testbed.sending_host import CPU, USER, BelievingResolver

from wattspan.config import SpansSettings
from wattspan.http.sockets import Peer
from wattspan.inference.estimate import RequestEstimate
from wattspan.ingest.export_request import ExportRequest, ResourceClaim, ResourceSpans
from wattspan.ingest.request_limits import ReceiverBusyError
from wattspan.ingest.side_channel import SideChannelCounters
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Domain,
    HwType,
    Interval,
    Microjoules,
    Nanoseconds,
    Principal,
    Provenance,
    Share,
    SpanAccounts,
    Tick,
)
from wattspan.model.settings import Size
from wattspan.otlp.forwarder import ForwardStats
from wattspan.processes.principals import owner_label
from wattspan.service.device_history import WindowEdges
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.span_joiner import (
    EXITED_PROCESS_TIMEOUT,
    IDLE_INTERVAL,
    JOIN_INTERVAL,
    LONGEST_QUEUEING,
    PARTS_A_PASS,
    REPORT_EVERY,
    SETTLEMENT_TIMEOUT,
    TIDY_EVERY,
    UNEXPORTED_SPAN_TIMEOUT,
    SpanJoiner,
)
from wattspan.sharing.pools import Pools
from wattspan.spans.values import (
    InferenceDetails,
    Outcome,
    Span,
    SpanColumns,
    SpanEnd,
    SpanEnergy,
    SpanStart,
)
from wattspan.testing import ManualClock

TICK = 100 * MILLISECOND
APP, OTHER = Consumer(10, 1), Consumer(11, 1)
POWER = 10_000  # uJ a tick and process: 0.1 W
HISTORY = 20 * SECOND


class Heard(NamedTuple):
    pid: int
    records: Sequence[SpanStart | SpanEnd]
    lost: int = 0
    gone: bool = False
    principal: Principal | None = USER
    edges: Sequence[int] = ()


@dataclass
class Channel:
    reports: list[Heard] = field(default_factory=list)
    counts: SideChannelCounters = field(default_factory=SideChannelCounters)
    descriptor: int | None = None

    def drain(self) -> list[Heard]:
        drained, self.reports = self.reports, []
        return drained


@dataclass
class Collector:
    got: list[tuple[ExportRequest, list[SpanEnergy | None]]] = field(default_factory=list)
    estimates: list[Mapping[int, RequestEstimate]] = field(default_factory=list)

    def offer(
        self,
        delivery: ExportRequest,
        energies: Sequence[SpanEnergy | None],
        estimates: Mapping[int, RequestEstimate],
    ) -> None:
        self.got.append((delivery, list(energies)))
        self.estimates.append(estimates)

    @property
    def stats(self) -> ForwardStats:
        return ForwardStats(forwarded=sum(len(energies) for _, energies in self.got))


class SlowClock(ManualClock):
    """The work between two looks at it takes ``step`` nanoseconds."""

    step = 0

    def monotonic(self) -> int:
        self.advance(ns=self.step)
        return super().monotonic()


class Agent:
    """A joiner on a host where two processes spend 0.1 W each, settled half a second late."""

    def __init__(
        self, buffer: int = 10**6, open_spans: int = 1000, remembered: int = 10**6
    ) -> None:
        self.clock = SlowClock()
        self.gaps: dict[Consumer, dict[HwType, int]] = {}
        self.past = EnergyHistory(
            HISTORY,
            10**7,
            missing_until=lambda payer: self.gaps.get(payer, {}),  # type: ignore[call-overload]
        )
        self.feed, self.collector, self.edges = Channel(), Collector(), WindowEdges()
        self.said: list[str] = []
        self.resolver, self.pools = BelievingResolver((10, 11)), Pools()
        self.joiner = SpanJoiner(
            self.clock,
            self.past,
            self.resolver,
            SpansSettings(buffer=Size(buffer), open_spans=open_spans, names=100),
            keep=HISTORY,
            remembered=remembered,
            side_channel=self.feed,
            edges=self.edges,
            forwarder=self.collector,
            log=self.said.append,
            pools=self.pools,
        )
        self.settled = self.clock.now()
        self.past.apply(Tick(self.settled, domains={"fake": [CPU]}), ())
        self.late = 5 * TICK
        self.spent: dict[Consumer, int] = {}
        self.run(2.0)

    def run(self, seconds: float, *, turns: bool = True) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(ns=TICK)
            self.tick(turns=turns)

    def tick(self, *, turns: bool = True) -> None:
        now = self.clock.now()
        while self.settled.mono + TICK + self.late <= now.mono:
            start = self.settled
            self.settled = start._replace(mono=start.mono + TICK, wall=start.wall + TICK)
            shares = tuple(Share(one, Microjoules(POWER)) for one in (APP, OTHER))
            interval = Interval("cpu0", start, self.settled, Microjoules(2 * POWER))
            attribution = Attribution(interval, shares, Microjoules(0), Microjoules(0))
            self.past.apply(Tick(now), [attribution])
        if turns:
            self.joiner.turn()

    def send(
        self,
        *spans: Span,
        pid: int | None = 10,
        size: int = 300,
        user: int = 1,
        parts: bool = False,
    ) -> ExportRequest:
        """A request of a user; with ``parts``, each span has its own resource."""
        claim = ResourceClaim("app", pid)
        delivery = ExportRequest(
            Peer(principal=Principal(user)),
            self.clock.monotonic(),
            size,
            tuple(
                ResourceSpans(claim, SpanColumns.of(part))
                for part in ([[one] for one in spans] if parts else [spans])
            ),
            "raw",
        )
        self.joiner.inbox.accept(delivery)
        return delivery

    def span(self, ident: int, start: float, end: float, parent: int = 0, name: str = "s") -> Span:
        """A span that began and ended so many seconds from now (the past is negative)."""
        wall = self.clock.now().wall
        return Span(
            bytes([1]) * 16,
            ident.to_bytes(8, "big"),
            parent.to_bytes(8, "big") if parent else b"",
            "app",
            name,
            wall + round(start * SECOND),
            wall + round(end * SECOND),
        )

    @property
    def accounts(self) -> SpanAccounts:
        return self.joiner.accounts()

    def energy(self, name: str = "s") -> int:
        rows = [row for row in self.accounts.rows if row.name == name]
        return sum(row.energy.get(HwType.CPU, 0) for row in rows)

    def remembered(self, whose: Consumer = APP) -> int:
        """Number of spans of a process with stored ids."""
        return self.joiner._processes[whose].spans.remembered

    def outcomes(self) -> dict[str, int]:
        return {reason: n for reason, n in self.accounts.outcomes.items() if n}


def test_span_waits_until_its_energy_has_settled() -> None:
    agent = Agent()
    agent.send(agent.span(1, -1.0, 0.0))
    agent.run(0.3)
    assert agent.accounts.received == 1
    assert agent.outcomes() == {}
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 1}
    assert agent.energy() == pytest.approx(100_000, abs=2)


def test_spans_of_a_process_whose_gpu_is_not_measured_are_partial() -> None:
    agent = Agent()
    agent.gaps[APP] = {HwType.GPU: agent.clock.monotonic() + SECOND}
    agent.send(agent.span(1, -1.0, 0.0, name="gap"))
    agent.send(agent.span(2, -1.0, 0.0, name="other"), pid=11)
    agent.run(2.3)
    agent.send(agent.span(3, -0.3, 0.0, name="after"))
    agent.run(2.3)
    assert agent.outcomes() == {"partial": 1, "joined": 2}
    assert {row.name: set(row.bounded) for row in agent.accounts.rows} == {
        "gap": {HwType.CPU}, "other": set(), "after": set(),
    }  # fmt: skip


def exported(agent: Agent, batches: int, every: float) -> None:
    """Batches of overlapping spans of 0.2 s, two a tick, as an unmodified exporter sends them."""
    ident = 0
    for _ in range(batches):
        spans = []
        for _ in range(round(every * 10)):
            agent.run(0.1)
            spans += [agent.span(ident := ident + 1, -0.2, 0.0) for _ in range(2)]
        since = agent.clock.now().wall
        agent.send(*spans)
        assert max(span.end for span in spans) == since
    agent.run(15.0)


@pytest.mark.parametrize("every", [0.5, 2.0, 5.0])
def test_spans_at_the_edges_of_batches_are_not_late(every: float) -> None:
    agent = Agent()
    exported(agent, 6, every)
    assert agent.outcomes() == {"joined": 6 * round(every * 20)}


def test_span_waits_for_the_usual_delay_of_its_sender() -> None:
    agent = Agent()
    exported(agent, 3, 2.0)
    agent.send(agent.span(1001, -0.1, 0.0))
    agent.run(1.5)
    assert agent.outcomes() == {"joined": 120}
    agent.run(1.0)
    assert agent.outcomes() == {"joined": 121}


def test_spans_of_a_sender_that_works_on_one_thing_do_not_wait_for_others() -> None:
    """Batches of 4 s with two steps and their children; the last step of the first comes later."""
    agent = Agent()
    agent.run(4.0)
    spans: list[Span] = []
    for joined in (3, 8, 12):
        for start in (-4.0, -2.0):
            step = 2 * len(spans) + joined * 100
            spans.append(agent.span(step + 1, start + 0.5, start + 1.0, parent=step))
            spans.append(agent.span(step, start, start + 2.0))
        last = [spans.pop()] if joined == 3 else []
        agent.send(*spans)
        spans = last
        agent.run(0.7)
        assert agent.outcomes() == {"joined": joined}
        agent.run(3.3)


def test_spans_of_an_announcing_process_do_not_wait_for_others() -> None:
    agent = Agent()
    exported(agent, 3, 2.0)
    start, ident = agent.clock.monotonic(), bytes(7) + b"\xff"
    agent.feed.reports.append(Heard(10, [SpanStart(ident, b"", start, 5, 0)]))
    agent.run(0.1)
    agent.send(agent.span(1001, -0.1, 0.0))
    agent.run(0.7)
    assert agent.outcomes() == {"joined": 121}


def test_spans_do_not_wait_for_others_if_room_is_scarce() -> None:
    agent = Agent(buffer=400_000)
    exported(agent, 3, 2.0)
    agent.send(agent.span(1001, -0.1, 0.0), size=150_000)
    agent.run(0.7)
    assert agent.outcomes() == {"joined": 121}


def test_span_is_joined_without_settlement_after_a_timeout() -> None:
    agent = Agent()
    agent.late = 3600 * SECOND
    agent.send(agent.span(1, -1.0, 0.0))
    agent.run(SETTLEMENT_TIMEOUT / SECOND - 0.5)
    assert agent.outcomes() == {}
    agent.run(1.0)
    assert agent.outcomes() == {"partial": 1}


def test_spans_without_a_process_are_counted_and_forwarded() -> None:
    agent = Agent()
    agent.send(agent.span(1, -1.0, 0.0), agent.span(2, -1.0, 0.0), pid=None)
    agent.send(agent.span(3, -1.0, 0.0), pid=99)
    agent.run(0.3)
    assert agent.outcomes() == {"unknown_process": 2, "not_believed": 1}
    assert [energies for _, energies in agent.collector.got] == [[None, None], [None]]
    assert agent.accounts.rows == ()


@pytest.mark.parametrize("user", [1, 2], ids=["same user", "other user"])
def test_requests_of_a_user_are_forwarded_in_the_order_of_their_receipt(user: int) -> None:
    agent = Agent()
    first = agent.send(agent.span(1, -1.0, 0.0))
    second = agent.send(agent.span(2, -1.0, 0.0), pid=None, user=user)
    agent.joiner.turn()
    early = [second] if user == 2 else []
    assert [delivery for delivery, _ in agent.collector.got] == early
    agent.run(2.0)
    late = [first] if user == 2 else [first, second]
    assert [delivery for delivery, _ in agent.collector.got] == early + late
    energies = agent.collector.got[len(early)][1]
    assert energies[0] is not None
    assert energies[0].exclusive[HwType.CPU] == agent.energy()


def test_requests_of_another_user_do_not_wait_for_many_parts() -> None:
    agent = Agent()
    spans = [agent.span(number, -1.0, 0.0) for number in range(1, 3 * PARTS_A_PASS)]
    agent.send(*spans[1:], parts=True)
    agent.send(spans[0], pid=11, user=2)
    agent.joiner.turn()
    assert OTHER in agent.joiner._processes
    stop = Stop(2)
    agent.joiner.run(stop)  # type: ignore[arg-type]
    assert stop.waits[0] == 0
    assert sum(agent.outcomes().values()) == len(spans)


def test_pass_ends_before_all_parts_of_a_request_that_take_long() -> None:
    agent = Agent()
    agent.send(*(agent.span(number, -1.0, 0.0) for number in range(1, 9)), parts=True)
    agent.clock.step = LONGEST_QUEUEING
    agent.joiner.turn()
    agent.clock.step = 0
    agent.send(agent.span(9, -1.0, 0.0), pid=11, user=2)
    assert agent.joiner.inbox.backlog
    assert OTHER not in agent.joiner._processes
    agent.joiner.turn()
    assert OTHER in agent.joiner._processes
    assert not agent.joiner.inbox.backlog


def test_energies_have_the_positions_of_their_spans_in_the_request() -> None:
    agent = Agent()
    spans = SpanColumns.of([agent.span(1, -1.0, 0.0), agent.span(2, -0.5, 0.0)])
    delivery = ExportRequest(
        Peer(),
        agent.clock.monotonic(),
        300,
        (
            ResourceSpans(ResourceClaim("a", 10), spans[:1]),
            ResourceSpans(ResourceClaim("b", 11), spans[1:]),
        ),
        "raw",
        frozenset({0, 2}),
    )
    agent.joiner.inbox.accept(delivery)
    agent.run(2.0)
    ((_, energies),) = agent.collector.got
    assert [energy.span.id if energy else None for energy in energies] == [
        None, spans[0].id, None, spans[1].id,
    ]  # fmt: skip


def test_request_beyond_the_buffer_is_refused_until_others_are_done() -> None:
    agent = Agent(buffer=3000)
    agent.send(agent.span(1, -1.0, 0.0), size=1500)
    with pytest.raises(ReceiverBusyError):
        agent.send(agent.span(2, -1.0, 0.0), size=1500)
    agent.run(2.0)
    agent.send(agent.span(2, -1.0, 0.0), size=1500)
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 2}
    assert (agent.accounts.received, agent.accounts.deferred) == (2, 1)


def test_single_request_larger_than_the_buffer_is_accepted() -> None:
    agent = Agent(buffer=1000)
    agent.send(agent.span(1, -1.0, 0.0), size=50_000)
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 1}


def test_announcement_determines_the_process_of_a_span() -> None:
    agent = Agent()
    start = agent.clock.monotonic()
    ident = (1).to_bytes(8, "big")
    agent.feed.reports.append(Heard(11, [SpanStart(ident, b"", start, 5, 0)]))
    agent.run(1.0)
    assert agent.accounts.open == 1
    agent.feed.reports.append(Heard(11, [SpanEnd(ident, start + SECOND, 5, SECOND // 2)]))
    agent.send(agent.span(1, -1.0, 0.0), pid=99)
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 1}
    ((_, energies),) = agent.collector.got
    assert energies[0] is not None
    assert energies[0].exclusive[HwType.CPU] == pytest.approx(100_000, rel=0.01)
    assert agent.accounts.open == 0


def test_first_announcement_of_a_span_wins() -> None:
    agent = Agent()
    now = agent.clock.monotonic()
    mine = SpanStart(bytes(7) + b"\x01", b"", now - SECOND, 1, 0)
    agent.feed.reports = [Heard(10, [mine]), Heard(11, [mine])]
    agent.run(0.1)
    agent.send(agent.span(1, -1.0, 0.0), pid=None)
    agent.run(2.0)
    assert [one.consumer for one in agent.joiner._processes.values() if one.service] == [APP]


def test_ranks_with_the_same_span_ids_have_their_own_spans() -> None:
    agent = Agent()
    now = agent.clock.monotonic()
    span = SpanStart(bytes(7) + b"\x01", b"", now - SECOND, 1, 0)
    agent.feed.reports = [Heard(10, [span]), Heard(11, [span])]
    agent.run(0.1)
    agent.send(agent.span(1, -1.1, 0.0, name="rank 0"), pid=10)
    agent.send(agent.span(1, -1.1, 0.0, name="rank 1"), pid=11)
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 2}
    assert agent.energy("rank 0") == agent.energy("rank 1") == pytest.approx(110_000, rel=0.01)
    senders = {whose: one.spans.remembered for whose, one in agent.joiner._processes.items()}
    assert senders == {APP: 1, OTHER: 1}


def test_announced_spans_without_receipt_are_abandoned() -> None:
    agent = Agent()
    start, ident = agent.clock.monotonic(), (1).to_bytes(8, "big")
    agent.feed.reports.append(Heard(10, [SpanStart(ident, b"", start, 5, 0)]))
    agent.feed.reports.append(Heard(10, [SpanEnd(ident, start + MILLISECOND, 5, 0)]))
    agent.run(UNEXPORTED_SPAN_TIMEOUT / SECOND - 1)
    assert agent.outcomes() == {}
    agent.run(4.0)
    assert agent.outcomes() == {"abandoned": 1}


def test_spans_of_one_request_belong_to_the_processes_that_announced_them() -> None:
    agent = Agent()
    start = agent.clock.monotonic()
    spans = [agent.span(ident, 0.0, 1.0) for ident in (1, 2, 3)]
    for pid, span in ((10, spans[0]), (11, spans[1]), (10, spans[2])):
        agent.feed.reports.append(Heard(pid, [SpanStart(span.id, b"", start, 5, 0)]))
    agent.run(1.2)
    delivery = agent.send(*spans, pid=None)
    agent.run(2.0)
    ((got, energies),) = agent.collector.got
    assert got is delivery
    assert [energy.span.id for energy in energies if energy] == [span.id for span in spans]
    # Two concurrent spans share the power of one process; the other process has one span.
    shares = [energy.exclusive[HwType.CPU] for energy in energies if energy]
    assert shares[0] == pytest.approx(shares[2], abs=4)
    assert shares[1] == pytest.approx(shares[0] + shares[2], abs=8)


@pytest.mark.parametrize("first", ["flood", "modest"])
def test_flood_of_starts_does_not_change_the_spans_of_another_user(first: str) -> None:
    agent = Agent(open_spans=10)
    now = agent.clock.monotonic()
    flood = [SpanStart(i.to_bytes(8, "big"), b"", now, 5, 0) for i in range(100, 200)]
    modest = [SpanStart(i.to_bytes(8, "big"), b"", now, 6, 0) for i in range(1, 6)]
    reports = [Heard(11, flood, principal=Principal(1001)), Heard(10, modest)]
    agent.feed.reports = reports if first == "flood" else reports[::-1]
    agent.run(1.0)
    assert agent.accounts.open == 10
    for i in range(1, 6):
        agent.send(agent.span(i, -1.0, 0.0, name="modest"))
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 5}
    assert agent.energy("modest") == pytest.approx(100_000, rel=0.01)
    assert agent.accounts.open == 5
    refusals = agent.pools.refusals()
    assert sum(refusals["open_spans", reason] for reason in ("full", "displaced")) == 95


def test_process_without_places_for_its_starts_waits_for_later_batches() -> None:
    agent = Agent(open_spans=1)
    exported(agent, 3, 2.0)
    now = agent.clock.monotonic()
    starts = [SpanStart(i.to_bytes(8, "big"), b"", now, 5, 0) for i in (901, 902)]
    agent.feed.reports.append(Heard(10, [*starts, starts[0]]))
    agent.run(0.1)
    before = agent.outcomes()
    agent.send(agent.span(1001, -0.1, 0.0))
    agent.run(0.7)
    assert agent.outcomes() == before


def test_announced_start_of_a_received_span_takes_no_place() -> None:
    agent = Agent(open_spans=1)
    agent.send(agent.span(1, -0.1, 0.0))
    agent.run(2.0)
    again = SpanStart((1).to_bytes(8, "big"), b"", agent.clock.monotonic(), 5, 0)
    agent.feed.reports.append(Heard(10, [again]))
    agent.run(0.1)
    assert agent.accounts.open == 0


def test_open_spans_of_an_exited_process_are_abandoned() -> None:
    agent = Agent()
    opened = [
        SpanStart(i.to_bytes(8, "big"), b"", agent.clock.monotonic(), 5, 0) for i in range(1, 4)
    ]
    agent.feed.reports.append(Heard(10, opened))
    agent.run(1.0)
    agent.feed.reports.append(Heard(10, [], gone=True))
    agent.run(EXITED_PROCESS_TIMEOUT / SECOND + 3)
    assert agent.outcomes() == {"abandoned": 3}
    assert agent.accounts.open == 0
    assert agent.past.watched == ()


def test_last_records_of_an_exited_process_are_charged_to_it() -> None:
    agent = Agent()
    start = agent.clock.monotonic()
    opened = [SpanStart(i.to_bytes(8, "big"), b"", start, 5, 0) for i in range(1, 4)]
    agent.feed.reports.append(Heard(10, opened))
    agent.run(1.0)
    agent.resolver.ended.add(10)
    last = SpanEnd(opened[0].id, agent.clock.monotonic(), 5, 0)
    agent.feed.reports.append(Heard(10, [last], gone=True))
    agent.run(EXITED_PROCESS_TIMEOUT / SECOND + 3)
    assert agent.outcomes() == {"abandoned": 3}
    assert agent.accounts.open == 0
    assert agent.past.watched == ()
    agent.feed.reports.append(Heard(10, opened))  # of an unknown process
    agent.run(1.0)
    assert agent.accounts.open == 0


def test_number_of_open_spans_is_limited() -> None:
    agent = Agent(open_spans=50)
    for batch in range(40):
        flood = [
            SpanStart((batch * 25 + i + 1).to_bytes(8, "big"), b"", agent.clock.monotonic(), 5, 0)
            for i in range(25)
        ]
        agent.feed.reports.append(Heard(10, flood))
        agent.run(0.1)
    assert 0 < agent.accounts.open <= 50
    assert len(agent.joiner._announcers) <= 3 * 50 + 25


def test_span_ids_are_remembered_as_long_as_the_history() -> None:
    agent = Agent()
    twice = agent.span(1, -1.0, 0.0, parent=9)
    agent.send(twice)
    agent.run(HISTORY / SECOND - 1)
    agent.send(twice)
    agent.run(1.0)
    assert agent.outcomes() == {"joined": 1, "duplicate": 1}
    agent.run(2 * HISTORY / SECOND)
    assert agent.remembered() == 0
    agent.send(twice)
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 1, "duplicate": 1, "late": 1}
    assert agent.energy() == pytest.approx(100_000, abs=2)


def test_span_ids_of_the_largest_sender_are_forgotten_first() -> None:
    agent = Agent(remembered=1000)
    few = [agent.span(i, -1.0, 0.0) for i in range(1, 11)]
    agent.send(*few, pid=11)
    for second in range(8):
        ids = range(200 * second, 200 * (second + 1))
        agent.send(*[agent.span(100 + i, -1.0, 0.0) for i in ids])
        agent.run(2.0)
        assert agent.remembered() + agent.remembered(OTHER) <= 1200
    assert agent.remembered() >= 200
    agent.send(*few, pid=11)
    agent.run(2.0)
    assert agent.outcomes()["duplicate"] == 10


def test_failure_of_a_join_affects_only_its_batch() -> None:
    agent = Agent()
    agent.send(agent.span(1, -1.0, 0.0)._replace(weight="heavy"))  # type: ignore[arg-type]
    agent.send(agent.span(2, -1.0, 0.0), pid=11)
    agent.run(2.0)
    agent.send(agent.span(3, -1.0, 0.0))
    agent.run(2.0)
    assert agent.outcomes() == {"no_energy": 1, "joined": 2}
    assert len(agent.collector.got) == 3
    (said,) = agent.said
    assert "1 spans of process 10 failed: TypeError" in said


@pytest.mark.parametrize(
    ("broken", "outcomes"),
    [
        ("_wall.offset", {"no_energy": 1, "joined": 1}),
        ("_inference.add", {"joined": 2}),
    ],
)
def test_failure_to_read_a_request_holds_no_later_one_up(
    broken: str, outcomes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent()
    with monkeypatch.context() as patched:
        part, _, method = broken.partition(".")
        patched.setattr(getattr(agent.joiner, part), method, lambda *_: 1 // 0)
        agent.send(agent.span(1, -1.0, 0.0))
        agent.run(0.1)
    agent.send(agent.span(2, -1.0, 0.0))
    agent.run(2.0)
    assert agent.outcomes() == outcomes
    assert len(agent.collector.got) == 2
    (said,) = agent.said
    assert "failed: ZeroDivisionError" in said


def test_failed_resolution_of_a_sender_frees_its_room() -> None:
    agent = Agent(buffer=3000)
    for _ in range(10):
        with pytest.raises(OverflowError):
            agent.send(agent.span(1, -1.0, 0.0), pid=2**70, size=1500)
    agent.send(agent.span(2, -1.0, 0.0), size=1500)
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 1}


def test_side_channel_counters_are_in_the_accounts() -> None:
    agent = Agent()
    agent.feed.counts = SideChannelCounters(
        connected=3, admitted=9, crowded_out=2, put_out=1, lost=5
    )
    agent.run(1.0)
    shown = agent.accounts
    assert (shown.announcers, shown.announcements_lost) == (3, 5)
    assert shown.announcers_refused == {"no_room": 2, "protocol": 1}


def test_outside_energy_has_a_separate_total() -> None:
    agent = Agent()
    agent.send(agent.span(1, -1.0, 0.0))
    agent.run(HISTORY / SECOND + 10)
    agent.send(agent.span(2, -1.0, 0.0))
    agent.run(HISTORY / SECOND + 5)
    outside = agent.accounts.outside["app", owner_label(USER), HwType.CPU]
    assert agent.energy() == pytest.approx(200_000, abs=4)
    # From the first span's end to a history ago, without the second span's second.
    assert outside > 10 * 100_000


def test_finish_joins_waiting_spans_with_the_known_energy() -> None:
    agent = Agent()
    agent.late = 3600 * SECOND
    agent.run(2.0)
    agent.send(agent.span(1, -4.0, 0.0))
    agent.joiner.finish()
    assert sum(agent.outcomes().values()) == 1
    assert len(agent.collector.got) == 1
    assert agent.past.watched == ()


def test_refusals_are_counted_by_reason() -> None:
    agent = Agent()
    agent.joiner.inbox.refuse("malformed")
    agent.joiner.inbox.refuse("invalid_id", 3)
    agent.run(0.3)
    assert agent.accounts.refused == {"malformed": 1, "invalid_id": 3}


def test_idle_process_is_released_and_watched_again() -> None:
    agent = Agent()
    agent.send(agent.span(1, -1.0, 0.0))
    agent.run(3.0)
    assert agent.past.watched == (APP,)
    agent.run(HISTORY / SECOND + 65)
    assert agent.past.watched == ()
    agent.send(agent.span(2, -1.0, 0.0))
    agent.run(3.0)
    assert agent.outcomes() == {"joined": 2}
    assert agent.energy() == pytest.approx(200_000, abs=4)


class Stop:
    """Records the waits of a thread in nanoseconds; set after ``passes`` of them."""

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self.waits: list[int] = []

    def wait(self, timeout: float) -> bool:
        self.waits.append(round(timeout * SECOND))
        return self.is_set()

    def rest(self, longest: int, _: int | None = None) -> bool:
        self.waits.append(longest)
        return False

    def is_set(self) -> bool:
        return len(self.waits) > self._passes


def test_passes_are_rare_while_no_process_sends_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()

    def waits() -> list[int]:
        stop = Stop(1)
        monkeypatch.setattr(agent.joiner.inbox, "rest", stop.rest)
        agent.joiner.run(stop)  # type: ignore[arg-type]
        return stop.waits

    assert waits() == [IDLE_INTERVAL] * 2
    agent.feed.counts.connected = 1
    assert waits() == [JOIN_INTERVAL] * 2
    agent.feed.counts.connected = 0
    agent.send(agent.span(1, 0, TICK))
    assert waits()[0] == JOIN_INTERVAL
    agent.send(agent.span(2, 0, TICK))
    agent.run(10.0)
    assert waits() == [TIDY_EVERY] * 2


class Clocks:
    """Samples of processes that use half a CPU."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def watch(self, consumer: Consumer) -> bool:
        return True

    def take(self, consumer: Consumer) -> list[tuple[int, int]]:
        now = self._clock.monotonic()
        return [(now, now // 2)]


def test_profile_of_a_waiting_process_is_merged_once_for_each_settlement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, merges = Agent(), list[Consumer]()
    monkeypatch.setattr(agent.joiner, "_sampler", Clocks(agent.clock))
    steps = replace(CPU, resolution=Nanoseconds(15 * MILLISECOND))  # of which profiles pool seven
    agent.past.apply(Tick(agent.clock.now(), domains={"fake": [steps]}), ())
    merge = agent.past.merge
    monkeypatch.setattr(agent.past, "merge", lambda one: merges.append(one) or merge(one))
    agent.send(agent.span(1, -0.1, 0.0))
    agent.run(3.0)
    agent.send(agent.span(2, -0.1, 0.0))
    merges.clear()
    settlements = 0
    while agent.outcomes() != {"joined": 2}:
        agent.run(0.1)
        settlements += 1
        for _ in range(5):
            agent.joiner.turn()
    assert 5 < settlements < 20
    assert 0 < len(merges) <= settlements


def test_known_senders_without_waiting_spans_cost_no_more_passes_than_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, passes = Agent(), 0
    agent.send(agent.span(1, -0.1, 0.0))
    agent.run(2.0)
    assert agent.outcomes() == {"joined": 1}

    class Clocked(Stop):
        """Time goes on while the joiner waits, and a span comes after 60 passes."""

        def wait(self, timeout: float) -> bool:
            agent.clock.advance(ns=round(timeout * SECOND))
            agent.tick(turns=False)
            return super().wait(timeout)

        def rest(self, longest: int, _: int | None = None) -> bool:
            nonlocal passes
            assert not agent.joiner._waiting
            agent.clock.advance(ns=longest)
            agent.tick(turns=False)
            passes += 1
            if passes == 60:
                assert agent.clock.monotonic() - start >= 59 * REPORT_EVERY
                agent.send(agent.span(2, -0.1, 0.0))
            return passes == 60

        def is_set(self) -> bool:
            return passes > 60

    stop, start = Clocked(0), agent.clock.monotonic()
    monkeypatch.setattr(agent.joiner.inbox, "rest", stop.rest)
    agent.joiner.run(stop)  # type: ignore[arg-type]
    assert agent.outcomes() == {"joined": 2}
    assert set(stop.waits) == {JOIN_INTERVAL}, "while a span waits"


@pytest.mark.parametrize("arrival", ["request", "refusal", "connection", "stop"])
def test_rest_of_the_joiner_ends_with_an_arrival(arrival: str) -> None:
    agent, (ours, theirs) = Agent(), socket.socketpair()
    with ours, theirs:
        assert not agent.joiner.inbox.rest(0, ours.fileno())
        match arrival:
            case "request":
                agent.send(agent.span(1, 0, TICK))
            case "refusal":
                agent.joiner.inbox.refuse("malformed")
            case "connection":
                theirs.send(b"1")
            case "stop":
                agent.joiner.inbox.notify()
        assert agent.joiner.inbox.rest(3600 * SECOND, ours.fileno())
        ours.setblocking(False)
        assert arrival == "connection" or not agent.joiner.inbox.rest(0, ours.fileno())


def test_step_of_the_wall_clock_during_a_rest_counts_for_the_next_span() -> None:
    agent = Agent()
    agent.run(1.0)
    agent.clock.step_wall(0.05)
    agent.joiner.inbox.notify()
    agent.joiner._paused(Stop(1))  # type: ignore[arg-type]
    unix = agent.clock.now().wall
    assert agent.joiner._wall.monotonic(unix) == agent.clock.monotonic()


@pytest.mark.exhaustive
def test_request_to_a_language_model_is_estimated_before_it_is_forwarded() -> None:
    agent = Agent()
    gpu = Domain("gpu0", HwType.GPU, "gpu0", "fake", Provenance.MEASURED, resource="gpu")
    agent.past.apply(Tick(agent.clock.now(), domains={"fake": [CPU, gpu]}), ())
    chance = random.Random(1)

    def run(steps: int, watts: int) -> None:
        for _ in range(steps):
            before = agent.clock.now()
            agent.run(0.1)
            energy = Microjoules(watts * 100_000)
            interval = Interval("gpu0", before, agent.clock.now(), energy)
            none = Microjoules(0)
            settled = Attribution(interval, (Share(APP, energy),), none, none)
            agent.past.apply(Tick(agent.clock.now()), [settled])

    for number in range(1, 151):
        prompt, steps = chance.randint(100, 4000), chance.randint(2, 12)
        run(steps + 2, 100)
        record = agent.span(number, -0.1 * steps - 0.2, 0.0, name="llm_request")
        details = InferenceDetails("m", queue=0, first_token=SECOND // 5)
        tokens = {"tokens_in": prompt, "tokens_out": 10 * steps}
        agent.send(record._replace(inference=details, **tokens))
    run(350, 100)

    (row,) = agent.accounts.inference
    assert sum(row.requests.values()) == 150 - agent.accounts.inference_waiting
    first, last = agent.collector.estimates[0], agent.collector.estimates[-1]
    assert not first
    assert 100_000 < last[0].energy < 1_000_000_000


class TimedSpan(NamedTuple):
    start: int  # milliseconds after the step of the clock
    end: int
    joined: float | None  # milliseconds whose energy it has; None if its times are refused


def spans_around_a_step(step: float, phase: int, length: int, delay: int) -> list[TimedSpan]:
    """Spans of ``length`` milliseconds, one after the other, with a step of the wall clock.

    The step is ``phase`` milliseconds after an observation of the clocks. Each span is received
    ``delay`` milliseconds after its end.
    """
    agent, at = Agent(), 1000 + phase
    begun = agent.clock.now().wall, 0
    unsent: list[tuple[int, int, int, Span]] = []
    sent: list[tuple[int, int, ExportRequest]] = []
    for now in range(10, 2500, 10):
        agent.clock.advance(ns=10 * MILLISECOND)
        if now % 100 == 0:
            agent.tick()
        if now == at:
            agent.clock.step_wall(step)
        if now % length == 0:
            wall, ident = agent.clock.now().wall, now.to_bytes(8, "big")
            record = Span(bytes([1]) * 16, ident, b"", "app", "s", begun[0], wall)
            unsent.append((now + delay, begun[1], now, record))
            begun = wall, now
        while unsent and unsent[0][0] <= now:
            _, start, end, record = unsent.pop(0)
            sent.append((start - at, end - at, agent.send(record)))
    agent.run(3)
    spans = []
    found = {id(request): energies[0] for request, energies in agent.collector.got}
    for start, end, request in sent:
        energy = found[id(request)]
        assert energy.outcome in {Outcome.JOINED, Outcome.INVERTED}
        is_joined = energy.outcome is Outcome.JOINED
        joined = energy.exclusive[HwType.CPU] * 100 / POWER if is_joined else None
        spans.append(TimedSpan(start, end, joined))
    return spans


AROUND_A_STEP = [
    pytest.param(step, phase, length, marks=() if (a + b + c) % 4 == 0 else pytest.mark.exhaustive)
    for (a, step), (b, phase), (c, length) in product(
        enumerate([0.05, -0.05, 3600.0, -3600.0]),
        enumerate([0, 10, 50, 90]),
        enumerate([30, 100, 250, 700]),
    )
]
"""Every combination; those beyond a table of all pairs are exhaustive."""


@pytest.mark.parametrize("delay", [0, 50, 300])
@pytest.mark.parametrize(("step", "phase", "length"), AROUND_A_STEP)
def test_clock_step_affects_only_spans_with_an_end_near_it(
    step: float, phase: int, length: int, delay: int
) -> None:
    """An error is at most the step; a span that seems to end before its start is refused."""
    spans = spans_around_a_step(step, phase, length, delay)
    assert len(spans) > 2
    near = 100 + min(abs(step), 0.05) * 1000  # between two observations, or a repeated time
    for start, end, joined in spans:
        if joined is None:
            assert start < near
            assert end > -near
            continue
        error = abs(joined - (end - start))
        assert error <= min(abs(step) * 1000, 100) + 1.5
        if not (abs(start) <= near or abs(end) <= near):
            assert error <= 1.5, (start, end)


def test_edges_of_windows_are_kept_until_their_process_ends() -> None:
    agent = Agent()
    now = agent.clock.monotonic()
    foreign = Heard(99, [], edges=[now], principal=None)
    agent.feed.reports = [Heard(10, [], edges=[now, now - 2]), foreign]
    agent.run(0.1)
    assert agent.edges.of(APP.pid) == [now - 2, now]
    assert agent.edges.of() == [now - 2, now]
    assert APP not in agent.past.watched  # it has announced no span
    agent.feed.reports = [Heard(10, [], edges=[now], gone=True)]
    agent.run(0.1)
    assert agent.edges.of() == []


def test_edge_that_is_told_late_shows_no_old_readings() -> None:
    agent = Agent()
    agent.run(40.0)
    now = agent.clock.monotonic()
    agent.feed.reports = [Heard(10, [], edges=[now - 31 * SECOND, now - 20 * SECOND, 1])]
    agent.run(0.1)
    assert agent.edges.of() == [now - 20 * SECOND]


def test_records_of_an_ended_process_are_read_to_the_last() -> None:
    agent = Agent()
    now = agent.clock.monotonic()
    for edge in range(5):
        agent.feed.reports = [Heard(10, [], edges=[now + edge])]
        agent.run(0.3)
        agent.resolver.ended.add(10)
    assert agent.edges.of(APP.pid) == [now + edge for edge in range(5)]


def test_edges_of_a_process_are_forgotten_once_it_runs_a_setuid_program() -> None:
    agent = Agent()
    now = agent.clock.monotonic()
    agent.feed.reports = [Heard(10, [], edges=[now])]
    agent.run(0.3)
    agent.resolver.changed.add(10)
    agent.feed.reports = [Heard(10, [], edges=[now + 1], gone=True)]
    agent.run(0.1)
    assert agent.edges.of() == []
