"""Pipelines: the GPU of each rank gets a clock of its own, within the slowdown budget."""

from __future__ import annotations

import pytest
from testbed.pipelines import model
from testbed.saved_state import saved
from testbed.tuned_host import Host
from testbed.tuned_pipeline import (
    JOB,
    TOP,
    PipelineTraining,
    add_rank,
    pipelined,
    train_pipeline,
)

from wattspan.model import DecisionReason, Move, TuningRow, TuningState
from wattspan.service.plan_processes import PlanSearchError, search_plan
from wattspan.tuning.pipeline.plan import RankClocks
from wattspan.tuning.pipeline.session_state import PlanTask

BASES = 0.05, 0.03, 0.05


def row(host: Host) -> TuningRow:
    found = host.row(JOB)
    assert found is not None
    return found


def reason(host: Host) -> DecisionReason:
    return row(host).decision.reason


def holds_plan(host: Host) -> bool:
    found = host.row(JOB)
    return found is not None and found.decision.move is Move.HOLD and bool(found.decision.caps)


@saved
def clocked() -> tuple[Host, PipelineTraining]:
    """A host whose pipeline has lower clocks for the first time."""
    host, training = train_pipeline(bases=BASES)
    host.run(1800, until=lambda: bool(host.capper.clocked))
    assert host.capper.clocked
    return host, training


@saved
def planned() -> Host:
    """A host whose pipeline holds a plan."""
    host, _ = clocked()
    host.run(1800, until=lambda: holds_plan(host))
    assert holds_plan(host)
    return host


@pytest.mark.exhaustive
def test_held_clocks_save_nearly_as_much_as_the_best_ones() -> None:
    held = planned()
    search = RankClocks(PipelineTraining(held, BASES).model())
    best = search.best(search.fastest.seconds * 1.05)
    clocks = [held.capper.clocked.get(gpu.device, TOP) for gpu in held.gpus]
    found = search.evaluated(clocks)
    assert found.seconds <= search.fastest.seconds * 1.05
    whole = search.fastest.joules
    assert whole - found.joules >= 0.8 * (whole - best.joules)
    assert row(held).state is TuningState.HOLDING
    assert row(held).applied


@pytest.mark.exhaustive
def test_figures_of_a_held_plan() -> None:
    held = planned()
    found = row(held)
    assert found.slowdown <= 0.05
    assert found.lost <= found.allowance
    assert found.units > 22
    assert found.unit_time == pytest.approx(0.92e9, rel=0.1)
    shown = dict(found.decision.shown)
    assert (shown["ranks"], shown["stages"]) == (3.0, 3.0)


def test_end_of_the_training_restores_the_clocks() -> None:
    host, training = clocked()
    for rank in training.ranks:
        rank.alive = False
    host.run(20)
    assert host.capper.clocked == {}
    assert row(host).state is TuningState.ENDED


def test_throttled_device_restores_all_clocks() -> None:
    host, _ = clocked()
    host.gpus[1].throttling = ("hw_thermal",)
    host.run(2)
    assert host.capper.clocked == {}
    assert reason(host) is DecisionReason.THROTTLED


def test_clocks_that_never_come_into_force_are_given_up() -> None:
    host, _ = train_pipeline()
    host.capper.deaf = True
    host.run(300, until=lambda: reason(host) is DecisionReason.FOREIGN_WRITER)
    assert reason(host) is DecisionReason.FOREIGN_WRITER
    assert row(host).decision.caps == {}


def test_wrong_stages_are_a_bad_pipeline() -> None:
    host, training = train_pipeline()
    training.wrong_stage = True
    host.run(60)
    assert reason(host) is DecisionReason.BAD_PIPELINE
    assert host.capper.clocked == {}


def test_two_ranks_on_one_gpu_are_declined() -> None:
    host, training = train_pipeline()
    host.jobs.remove(training.ranks[2])
    training.ranks[2] = add_rank(host, training, host.gpus[1], 2)
    host.run(60)
    assert reason(host) is DecisionReason.NO_DEVICE
    assert "3 ranks use 2 GPUs" in row(host).decision.sentence


def test_single_rank_is_no_pipeline() -> None:
    host, _ = train_pipeline(bases=(0.05,))
    host.run(60)
    assert reason(host) is DecisionReason.NO_DEVICE


def test_gpus_without_the_clock_knob_are_declined() -> None:
    host, _ = train_pipeline()
    host.capper.clocks = False
    host.run(60)
    assert reason(host) is DecisionReason.NO_DEVICE


def test_advice_writes_no_clock() -> None:
    host, _ = train_pipeline(pipelined(mode="advise"))
    host.run(120)
    assert host.capper.clocked == {}
    assert reason(host) is DecisionReason.ADVICE
    assert "each of the 3 ranks" in row(host).decision.sentence


@pytest.mark.exhaustive
def test_account_of_the_run_survives_a_restart_of_the_agent() -> None:
    host = planned()
    host.run(30)
    before = row(host)
    host.restart()
    host.run(5)
    after = row(host)
    assert after.allowance > 0.9 * before.allowance


def test_search_in_a_process_finds_the_same_plan() -> None:
    task = PlanTask(model(), 0.05)
    assert search_plan(task).result(timeout=60) == task.solved()


def test_failed_search_names_its_cause() -> None:
    with pytest.raises(PlanSearchError, match=r"ended with code 1: .*solved"):
        search_plan(None).result(timeout=60)  # type: ignore[arg-type]
