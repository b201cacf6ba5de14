"""The joiner with many processes: its work depends on their spans, not on their number."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.sending_host import CPU, BelievingResolver, request_of_span

from wattspan.config import SpansSettings
from wattspan.http.sockets import Peer
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    HwType,
    Interval,
    Microjoules,
    Principal,
    Share,
    SpanAccounts,
    Tick,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.sending_processes import (
    EXPECTED,
    MAX_PROCESSES,
    MAX_SHARING,
    PendingSpans,
    SendingProcess,
    SendingProcesses,
)
from wattspan.service.span_joiner import TIDY_IDLE_EVERY, SpanJoiner
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import Span, SpanColumns, SpanStart
from wattspan.testing import ManualClock

TICK = 100 * MILLISECOND
OF_ANOTHER = 100_000  # pids from this one on belong to another user
POWER = 10_000  # uJ a tick of a busy process
HISTORY = 60 * SECOND
CROWD = range(1000, 1000 + 3 * MAX_PROCESSES)


class Sampler:
    """A sampler with few places; ``reads`` counts the processes of all sweeps."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.watched: set[Consumer] = set()

    def watch(self, consumer: Consumer) -> bool:
        if len(self.watched) < self.places:
            self.watched.add(consumer)
        return consumer in self.watched

    def unwatch(self, consumer: Consumer) -> None:
        self.watched.remove(consumer)

    def take(self, consumer: Consumer) -> list[tuple[int, int]]:
        return []


class Host:
    """A joiner on a host whose processes ``busy`` work all the time, and settle at once."""

    def __init__(
        self, busy: Iterable[int] = (), places: int = 256, processes: int = MAX_PROCESSES
    ) -> None:
        self.clock = ManualClock()
        self.history = EnergyHistory(HISTORY, 10**7)
        self.sampler = Sampler(places)
        self.joiner = SpanJoiner(
            self.clock,
            self.history,
            BelievingResolver(of_another=OF_ANOTHER),  # type: ignore[arg-type]
            SpansSettings(),
            keep=HISTORY,
            sampler=self.sampler,  # type: ignore[arg-type]
            processes=processes,
        )
        self.busy = [Consumer(pid, 1) for pid in busy]
        self.sent = 0
        self.history.apply(Tick(self.clock.now(), domains={"fake": [CPU]}), ())

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            start, now = self.clock.now(), self.clock.advance(ns=TICK)
            energy = Microjoules(POWER * len(self.busy) + POWER)
            settled = Attribution(
                Interval(CPU.id, start, now, energy),
                tuple(Share(one, Microjoules(POWER)) for one in self.busy),
                Microjoules(POWER),
                Microjoules(0),
            )
            self.history.apply(Tick(now), [settled])
            self.joiner.turn()

    def send(self, pid: int, seconds: float = 0.5, user: int = 0) -> None:
        """One span that ends now."""
        self.sent += 1
        now, length, peer = self.clock.now(), round(seconds * SECOND), Peer(uid=user)
        sent = request_of_span(self.sent, pid, now, length, name=f"by {pid}", peer=peer)
        self.joiner.inbox.accept(sent)

    @property
    def accounts(self) -> SpanAccounts:
        return self.joiner.accounts()

    def energies(self, *pids: int) -> dict[str, int]:
        """The microjoules of the spans of some processes."""
        names = {f"by {pid}" for pid in pids}
        return {row.name: row.energy[HwType.CPU] for row in self.accounts.rows if row.name in names}


@pytest.mark.exhaustive
def test_processes_that_sent_one_span_are_not_merged_again() -> None:
    host = Host()
    host.run(5)
    for pid in CROWD:
        host.send(pid)
    host.run(10)
    assert host.accounts.outcomes["joined"] == len(CROWD)
    before = host.history.merged
    host.run(30)
    assert host.history.merged == before


def test_join_merges_only_processes_with_waiting_spans() -> None:
    """A span of one process costs as much with a crowd of idle senders as without."""
    costs = []
    for crowd in ([], CROWD[:500]):
        host = Host()
        host.run(5)
        for pid in (1, *crowd):
            host.send(pid)
        host.run(10)
        before = host.history.merged
        host.send(1)
        host.run(10)
        costs.append(host.history.merged - before)
    assert costs[0] == costs[1] <= 4


@pytest.mark.exhaustive
def test_spans_of_others_are_unchanged_by_a_crowd_of_senders() -> None:
    found = []
    for crowd in ((), CROWD):
        host = Host(busy=(1, 2))
        host.run(5)
        for second in range(20):
            for pid in crowd[second * 200 : second * 200 + 200]:
                host.send(pid, user=2)
            for pid in (1, 2):
                host.send(pid, user=1)
            host.run(1)
        host.run(10)
        assert host.accounts.outcomes["joined"] == 40 + len(crowd)
        found.append(host.energies(1, 2))
    assert found[0] == found[1] == {"by 1": 20 * 5 * POWER, "by 2": 20 * 5 * POWER}


def test_places_of_the_sampler_are_for_processes_with_expected_spans() -> None:
    host = Host(places=64)
    host.run(5)
    for pid in CROWD[:100]:
        host.send(pid)
    host.run(1)
    assert len(host.sampler.watched) == 64
    host.run((EXPECTED + TIDY_IDLE_EVERY) / SECOND + 2)
    assert host.sampler.watched == set()
    host.send(CROWD[99])
    host.run(1)
    assert host.sampler.watched == {Consumer(CROWD[99], 1)}


def test_process_without_a_place_gets_the_next_free_one() -> None:
    host = Host(places=1)
    host.run(5)
    host.send(1)
    for _ in range(40):
        host.send(2)
        host.run(1)
    assert host.sampler.watched == {Consumer(2, 1)}


def test_sampled_processes_of_a_user_leave_a_place_to_another_users() -> None:
    host = Host(places=256)
    host.run(5)
    for number in range(300):
        host.send(OF_ANOTHER + number)
    host.run(0.5)
    assert len(host.sampler.watched) == 256
    host.send(1)
    host.run(0.5)
    assert Consumer(1, 1) in host.sampler.watched
    assert len(host.sampler.watched) == 256
    host.run(5)
    assert host.accounts.outcomes["joined"] == 301


@pytest.mark.slow
def test_displaced_process_loses_no_span() -> None:
    host = Host(busy=CROWD[:4])
    host.run(5)
    for pid in CROWD[: MAX_PROCESSES + 100]:
        host.send(pid)
    host.run(5)
    assert host.accounts.outcomes["joined"] == MAX_PROCESSES + 100
    assert host.energies(*CROWD[:4]) == {f"by {pid}": 5 * POWER for pid in CROWD[:4]}
    assert len(host.history.watched) == MAX_PROCESSES


def sender(pid: int, owner: int, *, active: bool = False) -> SendingProcess:
    spans = ProcessSpans()
    if active:
        spans.open(SpanStart(bytes(8), b"", 1, 1, 0))
    return SendingProcess(Consumer(pid, 1), spans, EnergyProfile(), 0, Principal(owner))


@pytest.mark.parametrize(
    ("present", "owner", "displaced"),
    [
        ([sender(1, 1), sender(2, 1)], 1, None),
        ([sender(1, 1), sender(2, 1), sender(3, 1)], 1, 1),
        ([sender(1, 1, active=True), sender(2, 1), sender(3, 1)], 2, 2),
        ([sender(1, 1), sender(2, 2), sender(3, 2)], 3, 2),
        ([sender(1, 1), sender(2, 2, active=True), sender(3, 2, active=True)], 2, 2),
        ([sender(1, 1, active=True), *(sender(pid, 2, active=True) for pid in (2, 3))], 2, 2),
        ([sender(1, 1), sender(2, 2), sender(3, 3, active=True)], 3, 3),
    ],
    ids=["room", "oldest", "idle", "owner of most", "idle of another", "active", "own"],
)
def test_displaced_process_is_an_idle_one_of_the_owner_of_most(
    present: list[SendingProcess], owner: int, displaced: int | None
) -> None:
    processes = SendingProcesses(3)
    for process in present:
        processes.add(process)
    found = processes.displaced(sender(9, owner).share)
    assert (None if found is None else found.consumer.pid) == displaced


def test_process_seen_last_is_displaced_last() -> None:
    processes = SendingProcesses(2)
    first, second = sender(1, 1), sender(2, 1)
    processes.add(first)
    processes.add(second)
    processes.seen(first, 5, "app")
    assert processes.displaced(first.share) is second
    processes.remove(second)
    assert processes.displaced(first.share) is None
    assert processes.services() == {"app": (first.consumer,)}


def test_removed_processes_keep_the_time_up_to_which_their_energy_was_divided() -> None:
    processes = SendingProcesses(2)
    removed = [sender(1, 1), *(sender(pid, 2) for pid in range(2, 30))]
    for until, process in enumerate(removed, 100):
        processes.divided(process, until, until)
    for until, one in enumerate(removed, 100):
        assert processes.begin(one.consumer, one.share) >= until
    assert processes.begin(removed[0].consumer, removed[0].share) == 100
    assert processes.begin(Consumer(99, 1), removed[0].share) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 2, 3, 0]),
            st.sampled_from([0.1, 0.5, 3, 20]),
            st.sampled_from([0, 0.1, 0.3, 1, 2]),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_energy_is_divided_once_if_a_process_is_displaced_and_returns(
    script: list[tuple[int, float, float]], queried: bool
) -> None:
    """Pid 0 begins or ends a query, which has a profile of its own while no account has one."""
    host, spent, queries = Host(busy=(1,), processes=1), POWER * 10, list[str]()
    host.run(1)
    for pid, seconds, pause in [(0, 0, 0)] * queried + script:
        if pid:
            host.send(pid, seconds)
        elif "query" in queries:
            host.history.forget(Consumer(1, 1), holder=queries.pop())
        else:
            queries.append("query")
            host.history.watch(Consumer(1, 1), holder="query")
        host.run(pause)
        spent += round(pause * 10) * POWER
    host.joiner.finish()
    spans = sum(row.energy.get(HwType.CPU, 0) for row in host.accounts.rows)
    assert spans + sum(host.accounts.outside.values()) <= spent


def test_waiting_spans_that_share_energy_are_limited() -> None:
    process = sender(1, 1)
    one = SpanColumns.of([Span(bytes(16), bytes(8), b"", "s", "n", 0, 1)])
    chunks = [(0, MAX_SHARING // 2), (9, MAX_SHARING), (1, MAX_SHARING), (2, 1)]
    for start, count in chunks:
        spans = SpanColumns.joined([one] * count)
        process.waiting.append(PendingSpans(None, (), spans, start, 9, 0))  # type: ignore[arg-type]
    assert [len(found) for found in process.sharing(5)] == [MAX_SHARING // 2, MAX_SHARING // 2]


def test_failed_merge_of_one_process_leaves_the_spans_of_others() -> None:
    host = Host(busy=(1,), places=0)
    host.run(5)
    host.send(1)
    host.send(2)
    host.send(2)  # at the same time, so that both wait
    host.run(0.1)
    host.history.forget(Consumer(2, 1))
    host.run(10)
    assert host.accounts.outcomes["joined"] == 1
    assert host.energies(1) == {"by 1": 5 * POWER}
