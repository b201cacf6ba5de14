"""Tuners of two hosts with one pipeline of the same job each."""

from __future__ import annotations

import pytest
from testbed.saved_state import saved
from testbed.tuned_host import Host
from testbed.tuned_pipeline import JOB, TOP, TrainedHosts

from wattspan.fleet.job_records import RECORD_LIFETIME
from wattspan.model import DecisionReason, PipelineFigures, TuningRow


def row(host: Host) -> TuningRow:
    found = host.row(JOB)
    assert found is not None
    return found


def pipeline(host: Host) -> PipelineFigures:
    (found,) = row(host).pipelines
    return found


def planned(host: Host) -> bool:
    return any(rank.planned is not None for one in row(host).pipelines for rank in one.ranks)


def follows(host: Host) -> bool:
    """True if all ranks have the lower clocks of a plan for a straggler."""
    straggles = row(host).decision.reason is DecisionReason.STRAGGLER
    return straggles and all(
        rank.clock == rank.planned and rank.clock is not None and rank.clock < TOP
        for rank in pipeline(host).ranks
    )


@saved
def all_planned() -> TrainedHosts:
    trained = TrainedHosts()
    trained.run(10)
    trained.run(1200, until=lambda: all(map(planned, trained.hosts)))
    assert all(map(planned, trained.hosts))
    return trained


@saved
def straggling() -> TrainedHosts:
    """Hosts with plans, of which the first follows the second one, which has become slower."""
    trained = all_planned()
    host, _ = trained.hosts
    trained.trainings[1].slower = 1.25
    trained.run(1200, until=lambda: follows(host))
    # The clocks are in force in whole iterations.
    trained.run(3)
    assert follows(host)
    return trained


@pytest.mark.exhaustive
def test_hosts_show_each_other_and_the_reason_of_the_clocks() -> None:
    host, other = straggling().hosts
    found = row(host)
    assert found.decision.sentence.startswith("Pipeline dp-1 of host-2 takes 0.")
    for one, partner, name, straggler in (
        (host, "host-2", "dp-1", "dp-1"),
        (other, "host-1", "dp-0", ""),
    ):
        (figures,) = row(one).partners
        assert (figures.host, figures.used, figures.straggler) == (partner, True, straggler)
        assert figures.sentence.startswith(f"Its pipeline {name} takes 0.")
        assert 0 <= figures.age <= RECORD_LIFETIME


def test_ended_job_is_withdrawn() -> None:
    trained = TrainedHosts()
    trained.run(30)
    assert {entry.key.rpartition("/")[2] for entry in trained.cluster.read("/fleet-jobs/").entries}
    first, _ = trained.hosts
    assert row(first).partners
    for host in trained.hosts:
        for job in host.jobs:
            job.alive = False
    trained.run(20)
    assert trained.cluster.read("/fleet-jobs/").entries == ()
    assert row(first).partners == ()


@pytest.mark.slow
def test_host_without_the_service_is_tuned_alone() -> None:
    trained = TrainedHosts()
    for client in trained.clients:
        client.connected = False
    trained.run(600, until=lambda: all(planned(host) for host in trained.hosts))
    for host in trained.hosts:
        assert planned(host)
        (figures,) = row(host).partners
        assert (figures.host, figures.used) == ("", False)
        assert "No endpoint answers" in figures.sentence


@pytest.mark.exhaustive
def test_throttled_host_is_not_tuned_and_is_followed() -> None:
    trained = all_planned()
    host, other = trained.hosts
    trained.trainings[1].slower = 1.25
    other.gpus[0].throttling = ("hw_slowdown",)
    trained.run(600, until=lambda: follows(host))
    assert follows(host)
    assert row(other).decision.reason is DecisionReason.THROTTLED
    (figures,) = row(host).partners
    assert figures.used
    assert figures.sentence.endswith("and has the original clocks.")
