"""Hosts of a job exchange records over a service in memory, and explore one at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from testbed.memory_cluster import MemoryCluster, MemoryCoordination
from testbed.waiting import eventually

from wattspan.fleet.coordination import KeyWrite, RevisionCondition
from wattspan.fleet.job_exchange import LEASE_SECONDS, JobExchange
from wattspan.fleet.job_records import (
    MAX_HOSTS,
    MAX_RECORD_BYTES,
    RECORD_INTERVAL,
    RECORD_LIFETIME,
    HostRanks,
    InstructionRecord,
    JobRecord,
    PipelineSummary,
    RankRecord,
    UnitRecord,
    encode_record,
)
from wattspan.model import SECOND
from wattspan.testing import ManualClock

JOB = "gpt/iteration step"
PLACE = "/wattspan/fleet-jobs/gpt%2Fiteration%20step/"
PIPELINE = PipelineSummary(name="0", whole=1.0, computed=0.9, tail=0.1, noise=0.0, state="hold")


class Hosts:
    """Exchanges of two hosts, whose passes are made by ``pass_time``."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        self.logged: list[str] = []
        self.clients: dict[str, MemoryCoordination] = {}
        self.exchanges: dict[str, JobExchange] = {}
        for name in ("a", "b"):
            self.add(name)

    def add(self, name: str, client: MemoryCoordination | None = None) -> JobExchange:
        client = self.clients[name] = client or self.cluster.client()
        made = JobExchange("/wattspan/fleet/", name, client, self.clock, self.logged.append)
        self.exchanges[name] = made
        return made

    def publish(self, *names: str, explores: bool = False) -> None:
        for name in names:
            record = JobRecord(session=name, sent=self.clock.monotonic(), pipelines=(PIPELINE,))
            self.exchanges[name].publish(JOB, record, explores=explores)

    def pass_time(self, seconds: float, *tuned: str, explores: bool = False) -> None:
        """Let time pass; the tuners of some hosts publish twice a second."""
        for _ in range(round(2 * seconds)):
            self.clock.advance(0.5)
            self.publish(*tuned, explores=explores)
            for one in self.exchanges.values():
                one.round()

    def stored(self) -> set[str]:
        entries = self.clients["a"].read("").entries
        return {entry.key.removeprefix(PLACE) for entry in entries}

    def told(self, name: str) -> dict[str, str]:
        """The session, or refusal, of the records that a host sees."""
        return {
            seen.host: seen.record.session if seen.record else seen.refusal
            for seen in self.exchanges[name].view(JOB).records
        }


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


def test_hosts_see_the_records_of_each_other(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", "b")
    assert hosts.told("a") == {"b": "b"}
    assert hosts.told("b") == {"a": "a"}
    assert hosts.stored() == {"hosts/a", "hosts/b"}
    assert hosts.clients["a"].read("/wattspan/fleet/").entries == ()


def test_host_without_a_job_calls_nothing(hosts: Hosts) -> None:
    hosts.clients["a"].connected = False
    hosts.pass_time(10)
    assert hosts.exchanges["a"].view(JOB).trouble == ""
    assert hosts.exchanges["a"].view(JOB).may_explore is False
    assert hosts.logged == []


def test_record_is_written_once_in_an_interval(hosts: Hosts) -> None:
    hosts.pass_time(20, "a")
    (entry,) = hosts.clients["b"].read(PLACE).entries
    assert entry.revision - 1 <= 20 * SECOND / RECORD_INTERVAL + 1


def test_record_keeps_the_time_of_its_first_sight(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", "b")
    hosts.pass_time(4, "a")  # the tuner of the other host hangs
    before = hosts.exchanges["a"].view(JOB).records
    hosts.pass_time(6, "a")
    assert hosts.exchanges["a"].view(JOB).records == before


def test_one_host_explores_until_it_has_finished(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", "b", explores=True)
    views = {name: one.view(JOB) for name, one in hosts.exchanges.items()}
    (explorer,) = [name for name, view in views.items() if view.may_explore]
    (other,) = views.keys() - {explorer}
    assert (views[other].explorer, views[explorer].explorer) == (explorer, "")
    for _ in range(12):
        hosts.publish(explorer)
        hosts.pass_time(0.5, other, explores=True)
    assert hosts.exchanges[other].view(JOB).may_explore
    assert hosts.exchanges[explorer].view(JOB).explorer == other


def test_turn_of_a_lost_host_passes_on(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", explores=True)
    hosts.clients["a"].connected = False
    hosts.pass_time(LEASE_SECONDS + 6, "b", explores=True)
    assert hosts.exchanges["b"].view(JOB).may_explore


def test_turn_of_a_hung_tuner_passes_on(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", explores=True)
    hosts.pass_time(RECORD_LIFETIME / SECOND + 6, "b", explores=True)
    assert hosts.exchanges["b"].view(JOB).may_explore


def test_lost_contact_is_reported_and_lets_the_host_explore(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", "b", explores=True)
    hosts.clients["b"].connected = False
    hosts.pass_time(4, "a", "b", explores=True)
    view = hosts.exchanges["b"].view(JOB)
    assert view.trouble.startswith("No endpoint answers")
    assert (view.may_explore, view.explorer) == (False, "a")  # a short interruption
    hosts.pass_time(12, "a", "b", explores=True)
    view = hosts.exchanges["b"].view(JOB)
    assert (view.may_explore, view.explorer) == (True, "")
    assert len(hosts.logged) == 1
    hosts.clients["b"].connected = True
    hosts.pass_time(40, "a", "b", explores=True)
    view = hosts.exchanges["b"].view(JOB)
    assert (view.trouble, view.may_explore, view.explorer) == ("", False, "a")
    assert hosts.told("a") == {"b": "b"}


def test_contact_ends_with_the_lifetime_of_a_record(hosts: Hosts) -> None:
    exchange = hosts.exchanges["a"]
    hosts.publish("a")
    assert exchange.view(JOB).contact is False  # nothing was exchanged yet
    hosts.pass_time(6, "a", explores=True)
    assert exchange.view(JOB).contact is True
    hosts.clock.advance(RECORD_LIFETIME / SECOND + 2)  # the exchange hangs, without an error
    view = exchange.view(JOB)
    assert (view.contact, view.may_explore, view.trouble) == (False, True, "")
    hosts.pass_time(1, "a", explores=True)
    assert exchange.view(JOB).contact is True


@pytest.mark.parametrize("cause", ["left", "hung", "lease"])
def test_host_may_not_explore_before_its_turn_ends(hosts: Hosts, cause: str) -> None:
    seen: list[bool] = []

    class Watched(MemoryCoordination):
        """Looks at the turn when another host may have it from then on."""

        def commit(
            self, writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition] = ()
        ) -> int:
            if any(one.key == f"{PLACE}explorer" for one in writes):
                seen.append(exchange.view(JOB).may_explore)
            return super().commit(writes, conditions)

        def grant(self, seconds: int) -> int:
            seen.append(exchange.view(JOB).may_explore)
            return super().grant(seconds)

    exchange = hosts.add("a", Watched(hosts.cluster))
    hosts.pass_time(6, "a", explores=True)
    assert exchange.view(JOB).may_explore
    seen.clear()
    if cause == "left":
        hosts.pass_time(4, "a")
    elif cause == "hung":
        hosts.pass_time(RECORD_LIFETIME / SECOND + 4)
    else:
        hosts.clock.advance(LEASE_SECONDS + 1)
        hosts.pass_time(0.5, "a", explores=True)
    assert seen
    assert not any(seen)


def test_host_that_never_had_contact_explores(hosts: Hosts) -> None:
    hosts.clients["a"].connected = False
    hosts.pass_time(4, "a", explores=True)
    assert hosts.exchanges["a"].view(JOB).may_explore


def test_withdrawn_job_leaves_nothing(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", "b", explores=True)
    hosts.exchanges["a"].withdraw(JOB)
    hosts.exchanges["a"].withdraw(JOB)
    hosts.pass_time(4, "b", explores=True)
    assert hosts.stored() == {"hosts/b", "explorer"}
    assert hosts.exchanges["b"].view(JOB).may_explore
    assert hosts.told("b") == {}
    hosts.exchanges["b"].withdraw(JOB)
    hosts.pass_time(4)
    assert hosts.stored() == set()
    hosts.pass_time(4, "a")
    assert hosts.stored() == {"hosts/a"}


def test_job_that_is_published_again_keeps_its_record(hosts: Hosts) -> None:
    hosts.pass_time(6, "a")
    hosts.exchanges["a"].withdraw(JOB)
    hosts.pass_time(3, "a")
    assert hosts.stored() == {"hosts/a"}


def test_withdrawal_without_contact_ends_with_the_lease(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", "b")
    hosts.clients["a"].connected = False
    hosts.exchanges["a"].withdraw(JOB)
    hosts.pass_time(LEASE_SECONDS + 4, "b")
    assert hosts.told("b") == {}


def test_withdrawal_is_repeated_after_a_failure(hosts: Hosts) -> None:
    hosts.pass_time(6, "a")
    hosts.exchanges["a"].withdraw(JOB)
    hosts.clients["a"].connected = False
    hosts.pass_time(2)
    hosts.clients["a"].connected = True
    assert hosts.stored() == {"hosts/a"}
    hosts.pass_time(5)
    assert hosts.stored() == set()


def test_lease_that_has_ended_is_granted_anew(hosts: Hosts) -> None:
    hosts.pass_time(6, "a", explores=True)
    hosts.clock.advance(LEASE_SECONDS + 1)  # the agent was stopped
    hosts.pass_time(6, "a", "b", explores=True)
    assert hosts.told("b") == {"a": "a"}
    assert sum(one.view(JOB).may_explore for one in hosts.exchanges.values()) == 1


def test_closed_exchange_leaves_nothing(hosts: Hosts) -> None:
    hosts.pass_time(6, "b", "a", explores=True)
    hosts.exchanges["b"].close()
    assert "hosts/b" not in hosts.stored()
    assert not hosts.clients["b"].connected


def test_foreign_record_is_refused_and_harms_nobody(hosts: Hosts) -> None:
    foreign = hosts.cluster.client()
    large = encode_record(JobRecord(session="c", sent=1)) + b" " * MAX_RECORD_BYTES
    foreign.commit(
        [
            KeyWrite(f"{PLACE}hosts/old", b'{"schema": 0}'),
            KeyWrite(f"{PLACE}hosts/large", large),
            KeyWrite(f"{PLACE}hosts/{'x' * 100}", encode_record(JobRecord(session="x", sent=1))),
            KeyWrite(f"{PLACE}hosts/{'x' * 100}y", encode_record(JobRecord(session="y", sent=1))),
            KeyWrite(f"{PLACE}hosts/{'x' * 5000}", b"\xff"),
            KeyWrite(f"{PLACE}other", b"\xff"),
            KeyWrite(f"{PLACE}explorer", b"\xff" * 5000),
        ]
    )
    hosts.pass_time(6, "a", "b", explores=True)
    told = hosts.told("a")
    assert told.pop("b") == "b"
    assert "another schema" in told["old"]
    assert "more than the permitted" in told["large"]
    assert told.pop("x" * 100) == "x"
    assert told.keys() == {"old", "large"}  # no host has a name of 101 characters
    view = hosts.exchanges["a"].view(JOB)
    assert (view.may_explore, len(view.explorer)) == (False, 100)


def test_records_of_many_hosts_are_bounded(hosts: Hosts) -> None:
    foreign = hosts.cluster.client()
    for number in range(MAX_HOSTS + 10):
        value = encode_record(JobRecord(session="c", sent=1))
        foreign.commit([KeyWrite(f"{PLACE}hosts/c{number}", value)])
    hosts.pass_time(4, "a")
    assert len(hosts.told("a")) == MAX_HOSTS


def test_too_large_record_is_named_and_not_written(hosts: Hosts) -> None:
    unit = UnitRecord(1, 2, (InstructionRecord(0, "forward", 0, 0, 1),) * 4000)
    rank = RankRecord(rank=0, device="gpu:0", original=1980, floor=990, step=15, units=(unit,))
    record = JobRecord(session="a", sent=1, stages=HostRanks(wall=1, ranks=(rank,)))
    hosts.exchanges["a"].publish(JOB, record, explores=False)
    hosts.pass_time(4)
    assert hosts.stored() == set()
    assert hosts.logged[0].startswith(f"{JOB} is not told to other hosts: Its record has")


def test_thread_exchanges_until_it_is_stopped() -> None:
    hosts = Hosts()
    exchange = hosts.exchanges["a"]
    stop = threading.Event()
    thread = threading.Thread(target=exchange.run, args=(stop,))
    thread.start()
    hosts.publish("a")
    eventually(lambda: bool(hosts.clients["b"].read(PLACE).entries), "the record is written")
    stop.set()
    thread.join(20)
    assert hosts.clients["b"].read(PLACE).entries == ()
    assert not thread.is_alive()
