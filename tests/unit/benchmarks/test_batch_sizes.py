"""The replay of recurring trainings, and the goals of the batch-size optimizer in it."""

from __future__ import annotations

import math
from random import Random

import pytest
from benchmarks.batch_sizes import COMPUTED, Arm, Job, jobs, zeus

from wattspan.recurring.search import BatchSizeChoice, SearchPhase, TrialOutcome, choose

JOBS = list(jobs())
TOY = Job(
    "A40",
    "cifar100/shufflenetv2",
    {512: Arm(2.0, 1.0, 1.5, (5, None)), 1024: Arm(1.0, 0.5, 0.8, (20, 200))},
)


def test_traces_have_every_job_on_both_gpus() -> None:
    assert {(job.gpu, job.name) for job in JOBS} == COMPUTED.keys()
    assert [len(job.arms) for job in JOBS] == [10, 12, 5, 10, 13, 5]


def test_run_ends_at_its_target_its_stop_or_the_last_epoch() -> None:
    def run(size: int, stop: float | None, seed: int) -> tuple[TrialOutcome, float]:
        trial, _ = TOY.run(BatchSizeChoice(size, SearchPhase.SAMPLING, stop), Random(seed))
        return trial.outcome, trial.cost

    assert {run(512, None, seed) for seed in range(9)} == {
        (TrialOutcome.CONVERGED, 10.0),
        (TrialOutcome.MISSED, 200.0),
    }
    assert {run(1024, 12.5, seed) for seed in range(9)} == {(TrialOutcome.STOPPED, 13.0)}
    assert TOY.expected(512) == 10.0
    assert TOY.oracle == 10.0


def test_size_that_never_reaches_the_target_has_no_cost() -> None:
    never = Job("A40", "movielens-1m/ncf", {8: Arm(1.0, 1.0, 1.0, (None, 500))})
    assert never.expected(8) == math.inf


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.name} on {job.gpu}")
def test_optimizer_meets_its_goals_and_is_no_worse_than_the_published_rules(job: Job) -> None:
    own, peer = job.replay(choose, 20, 60), job.replay(zeus, 20, 60)
    assert own.last <= 1.04
    assert own.all <= 1.23
    assert own.failures <= peer.failures
    assert own.all <= peer.all + 0.01
    assert own.saved >= COMPUTED[job.gpu, job.name] - 0.02
