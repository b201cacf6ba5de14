"""Hosts of a synchronous job compare settings in turn, each beside those of the hosts before it."""

from __future__ import annotations

import pytest
from testbed.memory_cluster import MemoryCluster
from testbed.ranks_on_hosts import (
    EXPLORER,
    JOB,
    RankedHosts,
    RankHost,
    place_of,
    row,
    searches,
    spread,
)
from testbed.tuned_host import DEFAULT, TICK, Host
from testbed.tuned_ranks import train_together
from testbed.tuning_plant import with_fields

from wattspan.config import TunedJobSettings
from wattspan.fleet.coordination import KeyWrite
from wattspan.fleet.job_records import (
    RECORD_LIFETIME,
    JobRecord,
    JobView,
    RankSetting,
    SeenRecord,
    decode_record,
    encode_record,
)
from wattspan.model import SECOND, DecisionReason, Move
from wattspan.testing import ManualClock
from wattspan.tuning.decisions.values import Observation
from wattspan.tuning.host_turns import LONGEST_HOLD, HostTurn, host_part, judged, kept

NOW = 100 * SECOND
MINUTES = 1800
ORIGINAL = RankSetting()
COMPARING = RankSetting(since=5, lost=0.002)
HOLDING = RankSetting(since=5, setting="560 W", lost=0.004)


def seen(
    ranks: RankSetting | None, host: str = "b", *, session: str = "1", age: int = 0
) -> SeenRecord:
    return SeenRecord(host, NOW - age, JobRecord(session=session, sent=9, ranks=ranks))


def turn(
    *records: SeenRecord,
    hosts: int = 3,
    before: dict[str, tuple[str, int]] | None = None,
    **view: object,
) -> HostTurn:
    return judged(JobView(records, **view), hosts, before, NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", [1, 2, 3, 64])
@pytest.mark.parametrize("budget", [0.001, 0.05, 1.0])
def test_parts_of_all_hosts_are_the_budget(hosts: int, budget: float) -> None:
    part = host_part(budget, hosts)
    assert hosts * part / (1 + part) == pytest.approx(budget / (1 + budget))
    assert (1 + part) ** hosts <= 1 + budget + 1e-12


def test_only_host_gets_the_turn() -> None:
    assert turn() == HostTurn(may_explore=True)
    assert turn(may_explore=False) == HostTurn()


def test_host_waits_for_the_one_that_compares() -> None:
    found = turn(seen(COMPARING), may_explore=False, explorer="b")
    assert (found.may_explore, found.holders) == (False, {})
    assert found.waits == "b compares settings for this job"
    (figures,) = found.figures
    assert (figures.host, figures.used) == ("b", True)
    assert figures.sentence == "It compares settings, which has cost at most 0.2% of its time."


def test_holder_is_before_the_host_that_compares_after_it() -> None:
    found = turn(seen(HOLDING), seen(ORIGINAL, "c"))
    assert found.may_explore
    assert not found.later
    assert found.holders == {"b": ("1", 5)}
    assert [one.sentence for one in found.figures] == [
        "It holds 560 W, which has cost at most 0.4% of its time.",
        "It has the original setting.",
    ]
    unchanged = turn(seen(HOLDING), before=found.holders)
    assert (unchanged.may_explore, unchanged.later, unchanged.trouble) == (True, False, "")
    assert not unchanged.last
    assert turn(seen(HOLDING), before=found.holders, hosts=2).last
    assert not turn(before=found.holders, hosts=2).last


def test_later_holder_ends_the_comparisons_of_those_before_it() -> None:
    found = turn(seen(HOLDING), before={})
    assert (found.may_explore, found.later, found.trouble) == (False, True, "")
    assert turn(seen(COMPARING), before={}, may_explore=False, explorer="b").later


@pytest.mark.parametrize(
    "now",
    [
        (),
        (seen(ORIGINAL),),
        (seen(RankSetting(since=6, setting="560 W")),),
        (seen(HOLDING, session="2"),),
        (seen(HOLDING, age=RECORD_LIFETIME + 1),),
    ],
)
def test_changed_setting_of_a_host_before_ends_this_one(now: tuple[SeenRecord, ...]) -> None:
    found = turn(*now, before={"b": ("1", 5)})
    assert not found.may_explore
    assert found.trouble == "b has another setting than in the comparisons of this host."


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (seen(ORIGINAL, age=RECORD_LIFETIME + 1), "Its last record came 8 s ago"),
        (SeenRecord("b", NOW, None, "Its record has another schema."), "another schema"),
        (seen(None), "configure the same `hosts` on it"),
    ],
)
def test_unknown_host_permits_no_comparison(record: SeenRecord, cause: str) -> None:
    found = turn(record)
    assert not found.may_explore
    assert (found.waits, found.trouble) == ("b is unknown", "")
    (figures,) = found.figures
    assert not figures.used
    assert cause in figures.sentence


def test_lost_contact_permits_the_original_setting_only() -> None:
    found = turn(contact=False, trouble="No endpoint answers.")
    assert not found.may_explore
    assert found.trouble == "the other hosts of this job are out of contact. No endpoint answers."
    (figures,) = found.figures
    assert (figures.host, figures.used, figures.sentence) == ("", False, "No endpoint answers.")
    assert turn(contact=False).trouble == "the other hosts of this job are out of contact."


def test_more_hosts_than_configured_have_the_original_setting() -> None:
    found = turn(seen(ORIGINAL), seen(ORIGINAL, "c"), hosts=2)
    assert not found.may_explore
    assert found.trouble == "3 hosts have such a job, more than `hosts` (2)."


def test_setting_is_held_for_a_limited_time_without_comparison() -> None:
    hosts = RankedHosts((0.1, 0.1), later=(1,), noise=0.002)
    host, first = hosts.hosts[0], hosts.members[0]
    hosts.run(MINUTES, until=lambda: first.holds)
    state, now = host.tuner._jobs[JOB].strategy.state, host.clock.monotonic()
    assert state is not None
    in_force = {gpu.device: gpu.cap for gpu in host.gpus}
    assert kept(state, Observation(now, in_force=in_force)) is not None
    assert kept(state, Observation(now + LONGEST_HOLD, in_force=in_force)) is None


def test_long_text_of_a_setting_is_truncated_in_the_record() -> None:
    hosts = RankedHosts((0.1, 0.1), later=(1,), noise=0.002)
    hosts.run(MINUTES, until=lambda: hosts.members[0].holds)
    job = hosts.hosts[0].tuner._jobs[JOB]
    assert job.strategy.state is not None
    state = with_fields(job.strategy.state, candidate=10**300)  # milliwatts
    ranks = job.turns.rank_setting(state, job.report, explores=False)
    record = JobRecord(session="a", sent=1, ranks=ranks)
    assert decode_record(encode_record(record)) == record
    assert len(record.ranks.setting) == 100


def test_lost_turn_ends_the_comparisons() -> None:
    hosts = RankedHosts((0.1, 0.1), later=(1,), noise=0.002)
    first = hosts.members[0]
    hosts.run(MINUTES, until=lambda: first.cap < DEFAULT)
    foreign = hosts.cluster.client()
    foreign.commit([KeyWrite(EXPLORER, b"host-9")])
    hosts.run(5, until=lambda: row(hosts, 0).decision.reason is DecisionReason.WAITING)
    assert "the turn of this host to compare settings has ended" in row(hosts, 0).decision.sentence
    hosts.run(5)
    assert first.cap == DEFAULT
    foreign.commit([KeyWrite(EXPLORER, None)])
    hosts.run(MINUTES, until=lambda: first.holds)
    assert first.holds


def test_ended_turn_ends_the_comparison_of_a_held_setting() -> None:
    hosts = RankedHosts((0.1, 0.1), spread(3, settle=5 * SECOND), later=(1,), noise=0.002)
    first = hosts.members[0]
    hosts.run(MINUTES, until=lambda: first.holds)
    hosts.run(MINUTES, until=lambda: first.compares)
    hosts.cluster.client().commit([KeyWrite(EXPLORER, b"host-9")])
    hosts.run(5, until=lambda: not first.compares)
    assert "the turn of this host to compare settings has ended" in row(hosts, 0).decision.sentence


def test_turn_that_another_job_of_the_host_keeps_from_use_is_left() -> None:
    jobs = tuple(
        TunedJobSettings(service=service, span="train_step", kind="steps", hosts=2)
        for service in ("a", "b")
    )
    clock = ManualClock()
    cluster = MemoryCluster(clock)
    member = RankHost("host-0", spread(2, job=jobs), cluster, 1, gpus=2)
    for number, one in enumerate(jobs):
        member.host.train(one.service, number, noise=0.002)
    names = [f"{one.service}/{one.span}" for one in jobs]
    unused: list[bool] = []
    for tick in range(MINUTES * SECOND // TICK):
        member.turn(tick)
        clock.advance(ns=TICK)
        rows = {name: member.host.row(name) for name in names}
        exploring = [name for name in names if searches(rows[name])]
        assert len(exploring) <= 1
        held = [one for one in rows.values() if one and one.decision.move is Move.HOLD]
        if exploring and not held:
            other = names[1 - names.index(exploring[0])]
            unused.append(bool(cluster.read(f"{place_of(other)}explorer").entries))
        if len(held) == 2:
            break
    assert all(gpu.cap < DEFAULT for gpu in member.host.gpus)
    assert 0 < sum(unused) < len(unused) / 5


def test_ended_job_is_withdrawn() -> None:
    hosts = RankedHosts((0.1, 0.1), noise=0.002)
    hosts.run(30)
    assert hosts.cluster.read("/fleet-jobs/").entries
    for host in hosts.hosts:
        host.jobs[0].alive = False
    hosts.run(20)
    assert hosts.cluster.read("/fleet-jobs/").entries == ()
    assert row(hosts, 0).partners == ()


def test_host_without_a_service_has_the_original_setting() -> None:
    host = Host(settings=spread(2))
    train_together(host, (0.1,))
    host.run(120)
    found = host.row(JOB)
    assert (found.decision.move, found.decision.reason) == (Move.DECLINE, DecisionReason.WAITING)
    assert "[fleet] names no service" in found.decision.sentence
    assert host.gpus[0].cap == DEFAULT


def test_first_comparison_has_no_work_of_the_time_before_the_turn() -> None:
    hosts = RankedHosts((0.1, 0.1), spread(2, block=2 * SECOND), noise=0.002)
    first, second = hosts.members
    hosts.run(MINUTES, until=lambda: first.holds)
    hosts.run(60, until=lambda: second.compares)
    assert second.compares
    began = hosts.elapsed
    hosts.run(60, until=lambda: second.cap < DEFAULT)
    assert second.cap < DEFAULT
    assert hosts.elapsed - began >= 2
