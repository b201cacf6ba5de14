"""Tuners of two hosts with ranks of one synchronous job certify settings in turn."""

from __future__ import annotations

import pytest
from testbed.ranks_on_hosts import JOB, RankedHosts, RankHost, row, searches, spread
from testbed.saved_state import saved
from testbed.tuned_host import DEFAULT

from wattspan.config import TunedJobSettings
from wattspan.fleet.job_exchange import LEASE_SECONDS
from wattspan.model import SECOND, DecisionReason
from wattspan.tuning.host_turns import host_part

MINUTES = 1800
LOCAL = TunedJobSettings(service="local", span="train_step", kind="steps")


def explores_locally(member: RankHost) -> bool:
    """True if the job of this host alone explores."""
    return searches(member.host.row("local/train_step"))


def evidence(member: RankHost) -> bool:
    """True if its tuner has compared settings."""
    state = member.host.tuner._jobs[JOB].strategy.state
    return state is not None and bool(state.estimates.levels)


def all_hold(hosts: RankedHosts) -> bool:
    return all(one.holds for one in hosts.members)


@saved
def certified() -> RankedHosts:
    """Two hosts that hold settings, the first one before the other."""
    hosts = RankedHosts((0.1, 0.1), later=(1,), noise=0.002)
    first, second = hosts.members
    hosts.run(MINUTES, until=lambda: first.holds)
    second.start()
    hosts.run(MINUTES, until=lambda: all_hold(hosts))
    assert all_hold(hosts)
    return hosts


@pytest.mark.exhaustive
def test_hosts_of_a_job_certify_settings_one_after_another() -> None:
    hosts = RankedHosts((0.1, 0.1), noise=0.002)
    first, second = hosts.members
    both: list[float] = []
    waiting: set[str] = set()

    def observed() -> bool:
        if first.compares and second.compares:
            both.append(hosts.elapsed)
        waiting.update(
            one.row.decision.sentence
            for one in hosts.members
            if one.row is not None and one.row.decision.reason is DecisionReason.WAITING
        )
        return all_hold(hosts)

    hosts.run(MINUTES, until=observed)
    assert all_hold(hosts)
    assert not both
    assert "Keep the original setting: host-0 compares settings for this job." in waiting
    assert hosts.together.slowdown <= 1.05
    assert hosts.lost <= 0.05 * hosts.together.usual
    for number, other in ((0, "host-1"), (1, "host-0")):
        found = row(hosts, number)
        assert found.budget == host_part(0.05, 2)
        (partner,) = found.partners
        assert (partner.host, partner.used) == (other, True)


@pytest.mark.slow
def test_later_host_is_compared_and_the_one_before_it_is_not() -> None:
    hosts = certified()
    hosts.run(5)
    known = [len(one.host.book.decided) for one in hosts.members]
    hosts.run(300)
    hosts.run(MINUTES, until=lambda: all_hold(hosts))
    assert all_hold(hosts)
    first, second = (
        {entry.decision.reason for entry in one.host.book.decided[count:]}
        for one, count in zip(hosts.members, known, strict=True)
    )
    assert not first
    assert {DecisionReason.SENTINEL, DecisionReason.CERTIFIED} <= second
    (partner,) = row(hosts, 1).partners
    assert partner.sentence.startswith(f"It holds {hosts.members[0].cap / 1000:.0f} W, which has")


@pytest.mark.slow
def test_last_host_improves_its_setting() -> None:
    hosts = certified()
    caps = [one.cap for one in hosts.members]
    hosts.run(MINUTES, until=lambda: hosts.members[1].holds and hosts.members[1].cap < caps[1])
    assert hosts.members[0].cap == caps[0]
    assert hosts.members[1].cap < caps[1]
    assert all_hold(hosts)
    assert hosts.together.slowdown <= 1.05


@pytest.mark.slow
def test_held_setting_is_compared_in_the_turn_of_its_host_only() -> None:
    hosts = RankedHosts((0.1, 0.1), spread(3), later=(1,), noise=0.002)
    first = hosts.members[0]
    hosts.run(MINUTES, until=lambda: first.holds)
    first.host.capper.largest = 10_000  # its setting is in force again after some steps only
    certified, compared, turns = first.cap, [], set()

    def observed() -> bool:
        compared.append(first.compares)
        turns.add(hosts.explorer)
        assert first.cap == certified or hosts.explorer == first.name
        return False

    hosts.run(300, until=observed)
    assert 0 < sum(compared) < len(compared) / 2
    assert turns == {"", first.name}
    assert first.holds


@pytest.mark.slow
def test_host_waits_for_the_comparison_of_a_held_setting() -> None:
    hosts = RankedHosts((0.1, 0.1), spread(3, settle=3 * SECOND), noise=0.002)
    first, second = hosts.members
    second.host.gpus[0].throttling = ("hw_slowdown",)
    hosts.run(MINUTES, until=lambda: first.holds)
    hosts.run(MINUTES, until=lambda: first.compares)
    assert first.compares
    second.host.gpus[0].throttling = ()
    hosts.run(60, until=lambda: second.compares)
    assert (first.compares, second.compares) == (False, True)
    assert first.cap < DEFAULT
    second.host.gpus[0].throttling = ("hw_slowdown",)
    ended = first.host.clock.monotonic()
    hosts.run(5)
    state = first.host.tuner._jobs[JOB].strategy.state
    # The next comparison has no work beside those of the second host.
    assert state.samples.periods[-1].since >= ended
    assert (hosts.explorer, first.holds) == ("", True)


@pytest.mark.slow
def test_changed_job_is_certified_again() -> None:
    hosts = certified()
    hosts.together.loads = [0.13, 0.13]
    known = len(hosts.hosts[0].book.decided)
    hosts.run(120, until=lambda: not any(one.holds for one in hosts.members))
    reasons = [one.decision.reason for one in hosts.hosts[0].book.decided[known:]]
    assert DecisionReason.CHANGED in reasons
    assert not any(one.holds for one in hosts.members)


@pytest.mark.slow
def test_released_host_ends_the_setting_of_the_later_one() -> None:
    hosts = certified()
    first, second = hosts.members
    first.host.gpus[0].throttling = ("hw_slowdown",)
    hosts.run(10, until=lambda: second.cap == DEFAULT)
    assert [one.cap for one in hosts.members] == [DEFAULT, DEFAULT]
    assert "host-0 has another setting" in row(hosts, 1).decision.sentence
    hosts.run(MINUTES, until=lambda: second.holds)
    assert second.holds
    assert first.cap == DEFAULT


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_host_without_contact_has_the_original_setting(lost: int) -> None:
    hosts = certified()
    member = hosts.members[lost]
    member.client.connected = False
    hosts.run(12, until=lambda: member.cap == DEFAULT)
    assert member.cap == DEFAULT
    found = row(hosts, lost)
    assert found.decision.reason is DecisionReason.WAITING
    assert "are out of contact. No endpoint answers" in found.decision.sentence
    hosts.run(LEASE_SECONDS + 5)
    # The first host holds its setting independently of the later one.
    assert hosts.members[0].holds is (lost == 1)
    member.client.connected = True
    hosts.run(MINUTES, until=lambda: all_hold(hosts))
    assert all_hold(hosts)


@pytest.mark.slow
def test_turn_of_a_host_that_vanishes_while_it_compares_passes_on() -> None:
    hosts = RankedHosts((0.1, 0.1), noise=0.002)
    first, second = hosts.members
    hosts.run(MINUTES, until=lambda: first.cap < DEFAULT)
    assert first.compares
    first.kill()
    hosts.run(LEASE_SECONDS - 1)
    assert second.cap == DEFAULT
    hosts.run(MINUTES, until=lambda: second.holds)
    assert (second.holds, first.cap) == (True, DEFAULT)
    first.start()
    hosts.run(MINUTES, until=lambda: all_hold(hosts))
    assert all_hold(hosts)
    assert hosts.lost <= 0.05 * hosts.together.usual


@pytest.mark.parametrize("cause", ["throttled", "no capper"])
def test_host_that_cannot_compare_settings_leaves_the_turn(cause: str) -> None:
    hosts = RankedHosts((0.1, 0.1), noise=0.002)
    first, second = hosts.members
    assert first.host.capper is not None
    if cause == "throttled":
        first.host.gpus[0].throttling = ("hw_slowdown",)
    else:
        first.host.capper.refusal = ("", "No capper answers.")
    hosts.run(MINUTES, until=lambda: second.holds or hosts.explorer == first.name)
    assert second.holds
    first.host.gpus[0].throttling, first.host.capper.refusal = (), None
    hosts.run(MINUTES, until=lambda: first.compares and first.cap == DEFAULT and evidence(first))
    assert evidence(first)
    first.host.gpus[0].throttling = ("hw_slowdown",)
    hosts.run(10, until=lambda: not hosts.explorer)
    assert (hosts.explorer, first.cap) == ("", DEFAULT)
    assert not evidence(first)  # the other host may have another setting afterwards


@pytest.mark.slow
def test_other_jobs_of_a_host_explore_while_it_waits_for_another_host() -> None:
    hosts = RankedHosts((0.1, 0.1), spread(2, LOCAL), gpus=2, noise=0.002)
    first, second = hosts.members
    second.host.train("local", 1, noise=0.05)  # its search takes long

    def one_explores(until: bool) -> bool:
        assert not (searches(second.row) and explores_locally(second))
        return until

    hosts.run(60, until=lambda: one_explores(first.compares and explores_locally(second)))
    assert first.compares
    hosts.run(MINUTES, until=lambda: one_explores(first.holds))
    assert explores_locally(second)
    hosts.run(10, until=lambda: one_explores(second.compares))
    assert second.compares
    hosts.run(MINUTES, until=lambda: one_explores(second.holds))
    hosts.run(5, until=lambda: one_explores(explores_locally(second)))
    assert explores_locally(second)


def test_advice_needs_no_other_host() -> None:
    hosts = RankedHosts((0.1, 0.1), spread(2, mode="advise"), noise=0.002)
    hosts.run(60)
    assert row(hosts, 0).decision.reason is DecisionReason.ADVICE
    assert hosts.cluster.read("/fleet-jobs/").entries == ()
