"""Data-parallel pipelines of one service: each has clocks of its own, and all share one budget."""

from __future__ import annotations

import pytest
from testbed.saved_state import saved
from testbed.tuned_host import Host
from testbed.tuned_pipeline import FIRST, JOB, SECOND, TOP, PipelineTraining, train_replicas

from wattspan.model import DecisionReason, PipelineFigures, TuningRow, TuningState


def row(host: Host) -> TuningRow:
    found = host.row(JOB)
    assert found is not None
    return found


def pipelines(host: Host) -> dict[str, PipelineFigures]:
    found = host.row(JOB)
    return {} if found is None else {one.name: one for one in found.pipelines}


def planned(host: Host, name: str) -> bool:
    one = pipelines(host).get(name)
    return one is not None and any(rank.planned is not None for rank in one.ranks)


def both_planned(host: Host) -> bool:
    return planned(host, FIRST) and planned(host, SECOND)


def reason(host: Host) -> DecisionReason:
    return row(host).decision.reason


def follows(host: Host) -> bool:
    """True if the ranks of the first pipeline have the clocks of a plan for the second one."""
    one = pipelines(host)[FIRST]
    return one.straggler_time is not None and all(
        rank.clock == rank.planned and rank.clock is not None and rank.clock < TOP
        for rank in one.ranks
    )


Trained = tuple[Host, PipelineTraining, PipelineTraining]


@saved
def first_planned() -> Trained:
    """Two equal pipelines, of which the first one has a plan."""
    host, one, other = train_replicas()
    host.run(1800, until=lambda: planned(host, FIRST))
    return host, one, other


@saved
def held() -> Trained:
    """Two equal pipelines, of which each has a plan."""
    host, one, other = first_planned()
    host.run(1800, until=lambda: both_planned(host))
    assert both_planned(host)
    host.run(60)
    return host, one, other


@saved
def straggling() -> Trained:
    """The first pipeline has clocks for the second one, which has become slower."""
    host, one, other = first_planned()
    other.slower = 1.25
    host.run(1800, until=lambda: max(one.used[-1]) < TOP and follows(host))
    return host, one, other


@pytest.mark.exhaustive
def test_each_replica_has_a_plan_of_its_own() -> None:
    host, *_ = held()
    found = row(host)
    assert found.decision.shown["pipelines"] == 2.0
    assert found.decision.shown["ranks"] == 4.0
    for one in found.pipelines:
        first, second = one.ranks
        assert second.planned < first.planned <= TOP


def test_run_of_all_replicas_keeps_the_budget() -> None:
    host, one, other = held()
    found = row(host)
    assert found.slowdown is not None
    assert found.lost <= found.allowance
    times = {clocks: one.seconds(clocks) for clocks in {*one.used, *other.used}}
    usual = one.seconds((TOP, TOP))
    seconds = [max(times[a], times[b]) for a, b in zip(one.used, other.used, strict=True)]
    assert sum(seconds) <= 1.05 * usual * len(seconds)


def test_figures_of_ranks_are_measured() -> None:
    host, *_ = held()
    for one in row(host).pipelines:
        assert one.unit_time == pytest.approx(one.original_time, rel=0.1)
        bottleneck, slack = one.ranks
        assert slack.waiting is not None
        assert 0 < bottleneck.waiting < slack.waiting < 1
        assert slack.saved > 0


@pytest.mark.slow
def test_faster_pipeline_gets_the_clocks_of_a_straggler() -> None:
    host, *_ = straggling()
    found = row(host)
    assert found.decision.reason is DecisionReason.STRAGGLER
    assert found.decision.sentence.startswith(f"Pipeline {FIRST}: Another pipeline takes")
    assert found.state is TuningState.HOLDING
    one, other = pipelines(host)[FIRST], pipelines(host)[SECOND]
    assert one.reason is DecisionReason.STRAGGLER
    assert other.reason is not DecisionReason.STRAGGLER
    assert one.straggler_time is not None
    assert one.original_time < one.unit_time < one.straggler_time * 1.01
    assert all(rank.clock is not None and rank.clock < TOP for rank in one.ranks)


def test_recovered_straggler_restores_the_clocks_within_an_iteration() -> None:
    host, one, other = straggling()
    slow = one.used[-1]
    assert max(slow) < TOP
    other.slower = 1.0
    before = len(one.used)
    host.run(30, until=lambda: one.used[-1] == (TOP, TOP))
    # The first iteration is known after its end, when the next one has begun.
    assert one.used[before:].count(slow) <= 2
    assert reason(host) is not DecisionReason.STRAGGLER


def test_missing_attribute_of_the_replica_is_named() -> None:
    host, one, _ = train_replicas()
    one.replica = None
    host.run(30)
    assert reason(host) is DecisionReason.NO_SIGNAL
    assert "with the attribute dp.rank" in row(host).decision.sentence
    one.replica = FIRST
    host.run(10)
    assert set(pipelines(host)) == {FIRST, SECOND}


def test_replica_of_one_rank_is_declined() -> None:
    host, *_ = train_replicas(bases=(0.05,))
    host.run(30)
    assert reason(host) is DecisionReason.NO_DEVICE
    assert f"pipeline {FIRST} has one rank" in row(host).decision.sentence


def test_rank_of_another_replica_begins_anew() -> None:
    host, _, other = train_replicas()
    host.run(60)
    assert {name: len(of.ranks) for name, of in pipelines(host).items()} == {FIRST: 2, SECOND: 2}
    other.replica = "c"
    host.run(10)
    assert set(pipelines(host)) == {FIRST, "c"}
