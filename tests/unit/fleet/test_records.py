"""fleet.records, fleet.leader: records of other versions, and of other programs."""

from __future__ import annotations

import pytest
from testbed.memory_cluster import MemoryCluster, MemoryCoordination
from testbed.simulated_fleet import W

from wattspan.fleet.allotment import (
    ENDED_AFTER,
    RETREATED_AFTER,
    AllotmentBook,
    HostReport,
    accept_budgets,
    remove_host,
)
from wattspan.fleet.coordination import ConflictError, KeyWrite, RevisionCondition
from wattspan.fleet.participant import FleetLeader
from wattspan.fleet.records import (
    MAX_LIFETIME,
    FleetKeys,
    Presence,
    RecordError,
    encode,
    read_state,
)
from wattspan.model import SECOND
from wattspan.testing import ManualClock

KEYS = FleetKeys("/fleet/")


class Desk:
    """A leader over a cluster in memory, and reports that the test writes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        self.client: MemoryCoordination = self.cluster.client()
        book = accept_budgets(AllotmentBook(), {"": 2000 * W})
        self.client.commit([KeyWrite(KEYS.book, encode(book))])
        revision = self.client.commit([KeyWrite(KEYS.leader, b"me")])
        self.fence = RevisionCondition(KEYS.leader, revision)
        self.leader = FleetLeader(KEYS, self.client, self.clock, 0)

    def report(self, name: str, session: str = "s", beat: int = 1, acknowledged: int = 0) -> None:
        report = HostReport(
            session=session, place="", floor=300 * W, ceiling=1500 * W, limit=300 * W,
            acknowledged=acknowledged,
        )  # fmt: skip
        presence = Presence(report=report, beat=beat, lifetime=10 * SECOND)
        self.client.commit([KeyWrite(KEYS.report(name), encode(presence))])

    def step(self, seconds: float = 0) -> None:
        self.clock.advance(seconds)
        self.leader.step(self.fence)

    def cluster_keys(self) -> set[str]:
        return {entry.key for entry in self.client.read(KEYS.prefix).entries}

    @property
    def limits(self) -> dict[str, int]:
        state = read_state(KEYS, self.client.read(KEYS.prefix))
        return {name: one.limit // W for name, one in state.allotments.items()}


def test_hosts_are_admitted_and_allotments_delivered() -> None:
    desk = Desk()
    desk.report("a")
    desk.report("b")
    desk.step()
    assert desk.limits == {"a": 1000, "b": 1000}
    desk.step()


def test_silent_host_is_ended_after_its_lifetime_only() -> None:
    desk = Desk()
    desk.report("a")
    desk.step()
    desk.step(10)
    assert KEYS.report("a") in desk.cluster_keys()
    desk.step(0.1)
    assert KEYS.report("a") not in desk.cluster_keys()


def test_silence_is_counted_anew_by_another_leader() -> None:
    desk = Desk()
    desk.report("a")
    desk.step()
    desk.clock.advance(9)
    desk.fence = RevisionCondition(KEYS.leader, desk.client.commit([KeyWrite(KEYS.leader, b"x")]))
    desk.step()
    desk.step(9)
    assert KEYS.report("a") in desk.cluster_keys()


def test_renewed_host_is_not_ended() -> None:
    desk = Desk()
    for beat in range(5):
        desk.report("a", beat=beat)
        desk.step(9)
    assert KEYS.report("a") in desk.cluster_keys()


def test_replaced_leader_writes_nothing() -> None:
    desk = Desk()
    desk.report("a")
    desk.client.commit([KeyWrite(KEYS.leader, b"other")])
    with pytest.raises(ConflictError):
        desk.step()
    assert desk.limits == {}


@pytest.mark.parametrize("value", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"beat":1}'])
def test_invalid_report_keeps_the_host_with_its_limits(value: bytes) -> None:
    desk = Desk()
    desk.report("a")
    desk.step()
    desk.client.commit([KeyWrite(KEYS.report("a"), value)])
    desk.report("b")
    desk.step(60)
    state = read_state(KEYS, desk.client.read(KEYS.prefix))
    assert "The record /fleet/reports/a of the fleet is invalid" in state.invalid["a"]
    assert KEYS.report("a") in state.written
    assert sum(entry.limit_bound for entry in state.book.hosts.values()) <= 2000 * W
    desk.step(MAX_LIFETIME / SECOND + 1)
    assert KEYS.report("a") not in desk.cluster_keys()


def test_invalid_book_is_an_error_and_stays() -> None:
    desk = Desk()
    desk.client.commit([KeyWrite(KEYS.book, b"{}x")])
    with pytest.raises(RecordError, match="/fleet/book"):
        desk.step()
    assert desk.client.read(KEYS.book).entries[0].value == b"{}x"


@pytest.mark.parametrize("place", ["//", "a b", "a/b\n"])
def test_report_with_an_invalid_place_is_not_admitted(place: str) -> None:
    desk = Desk()
    report = HostReport(session="s", place=place, floor=1, ceiling=2, limit=1)
    presence = Presence(report=report, beat=1, lifetime=SECOND)
    desk.client.commit([KeyWrite(KEYS.report("a"), encode(presence))])
    desk.step()
    assert "is not a place" in desk.leader.plan.waiting["a"]
    assert desk.limits == {}


def test_absent_host_counts_with_its_floor_and_ends_after_stated_times() -> None:
    desk = Desk()
    desk.report("a")
    desk.step()
    desk.step(11)  # its session ends

    def entry() -> tuple[int, int] | None:
        book = read_state(KEYS, desk.client.read(KEYS.prefix)).book
        one = book.hosts.get("a")
        return None if one is None else (one.limit_bound, one.absent)

    for _ in range(RETREATED_AFTER // 100):
        desk.step(100)
    assert entry() == (1500 * W, RETREATED_AFTER - 100)
    desk.fence = RevisionCondition(KEYS.leader, desk.client.commit([KeyWrite(KEYS.leader, b"x")]))
    desk.step(500)  # nobody has led
    assert entry() == (1500 * W, RETREATED_AFTER - 100)
    desk.step(101)
    assert entry() == (300 * W, RETREATED_AFTER + 1)
    assert desk.leader.plan.nodes[""].absent == 1
    desk.step(ENDED_AFTER)
    assert entry() is None
    assert desk.leader.ended == 1
    book = read_state(KEYS, desk.client.read(KEYS.prefix)).book
    assert book.ended == ("a",)
    assert remove_host(book, "a", None).ended == ()
    desk.report("a", session="t")
    desk.step()
    desk.step()
    assert desk.leader.ended == 0
    assert entry() == (1500 * W, 0)
