"""Hosts of one synchronous job exchange their records and the turn over a real etcd."""

from __future__ import annotations

import pytest
from testbed.etcd import EtcdCluster
from testbed.fixtures import entered_in
from testbed.ranks_on_hosts import JOB, RankedHosts, place_of
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.fleet.etcd import EtcdCoordination
from wattspan.fleet.job_exchange import JobExchange
from wattspan.fleet.job_records import RECORD_INTERVAL, JobRecord, RankSetting
from wattspan.testing import ManualClock
from wattspan.tuning.host_turns import HostTurn, judged

pytestmark = pytest.mark.needs_etcd

EXPLORER = f"{place_of(JOB)}explorer"
COMPARING = RankSetting(since=5, lost=0.001)
HOLDING = RankSetting(since=5, setting="560 W", lost=0.002)


class ShortLeases(EtcdCoordination):
    """A client whose leases end soon after it has vanished."""

    def grant(self, seconds: int) -> int:
        return super().grant(2)


class OneHost:
    """The exchange of a host; its passes are made by ``tell``, in the order of the test."""

    def __init__(self, name: str, client: EtcdCoordination) -> None:
        self.name, self.client, self._clock = name, client, ManualClock()
        self._exchange = JobExchange("/fleet/", name, client, self._clock, lambda line: None)

    def tell(self, ranks: RankSetting, *, asks: bool) -> HostTurn:
        """Publish a record, exchange it, and return the turn."""
        now = self._clock.advance(ns=RECORD_INTERVAL).mono
        record = JobRecord(session=self.name, sent=now, ranks=ranks)
        self._exchange.publish(JOB, record, explores=asks)
        self._exchange.round()
        return judged(self._exchange.view(JOB), 2, None, now)


etcd = entered_in(EtcdCluster)


def test_turn_passes_on_with_the_setting_of_the_host_that_leaves_it(etcd: EtcdCluster) -> None:
    first, second = OneHost("host-1", etcd.client()), OneHost("host-2", etcd.client())
    assert first.tell(RankSetting(), asks=True).may_explore
    waiting = second.tell(RankSetting(), asks=True)
    assert not waiting.may_explore
    assert waiting.waits == "host-1 compares settings for this job"
    assert first.tell(COMPARING, asks=True).may_explore
    (figures,) = second.tell(RankSetting(), asks=True).figures
    assert figures.sentence == "It compares settings, which has cost at most 0.1% of its time."
    assert not first.tell(HOLDING, asks=False).may_explore
    turn = second.tell(RankSetting(), asks=True)
    assert (turn.may_explore, turn.waits) == (True, "")
    assert turn.holders == {"host-1": ("host-1", 5)}
    (figures,) = turn.figures
    assert figures.sentence == "It holds 560 W, which has cost at most 0.2% of its time."
    assert not first.tell(HOLDING, asks=True).may_explore


def test_turn_of_a_host_that_vanishes_passes_on_with_the_end_of_its_lease(
    etcd: EtcdCluster,
) -> None:
    client = ShortLeases(etcd.settings(), SystemClock())
    first, second = OneHost("host-1", client), OneHost("host-2", etcd.client())
    changes = etcd.client().watch(EXPLORER, etcd.client().read(EXPLORER).revision)
    eventually(lambda: first.tell(COMPARING, asks=True).may_explore, "the first host has the turn")
    client.close()
    eventually(lambda: second.tell(RankSetting(), asks=True).may_explore, "the turn passes on")
    # Nothing of the other host is left.
    assert second.tell(RankSetting(), asks=True) == HostTurn(may_explore=True)
    seen: list[bytes | None] = []
    while b"host-2" not in seen:
        found = eventually(lambda: changes.wait(1), "the changes of the turn", within=20)
        seen += [one.entry and one.entry.value for one in found]
    changes.close()
    assert seen[-2:] == [None, b"host-2"]
    assert set(seen[:-1]) == {b"host-1", None}


def test_simulated_hosts_certify_settings_in_turn(etcd: EtcdCluster) -> None:
    """Their tuners and records are real, their time and devices are not."""
    hosts = RankedHosts((0.1, 0.1), noise=0.002, cluster=etcd)
    turns: list[str] = []

    def all_hold() -> bool:
        compare = [one.name for one in hosts.members if one.compares]
        if compare:
            assert compare == [hosts.explorer]
            turns.extend(compare)
        return all(one.holds for one in hosts.members)

    hosts.run(1800, until=all_hold)
    assert all_hold()
    assert set(turns) == {"host-0", "host-1"}
    assert hosts.lost <= 0.05 * hosts.together.usual
