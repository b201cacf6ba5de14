"""Several jobs on one GPU: tuned together within the budget of each, or declined."""

from __future__ import annotations

import pytest
from testbed.saved_state import saved
from testbed.tuned_host import DEFAULT, Host, held, quick

from wattspan.config import TunedJobSettings
from wattspan.model import Consumer, DecisionReason, TuningState

LIMIT = 1800  # seconds of a simulated search
A, B = "a/train_step", "b/train_step"


def both(**budgets: float) -> Host:
    """A host that tunes the jobs ``a`` and ``b``, by default with 5 % budget each."""
    jobs = tuple(
        TunedJobSettings(
            service=name, span="train_step", kind="steps", max_slowdown=budgets.get(name, 0.05)
        )
        for name in ("a", "b")
    )
    return Host(settings=quick(job=jobs))


def reason(host: Host, job: str) -> DecisionReason | None:
    row = host.row(job)
    return None if row is None else row.decision.reason


@saved
def both_held() -> Host:
    """A host on whose GPU the jobs ``a`` and ``b`` have a common certified setting."""
    host = both()
    host.train("a")
    host.train("b")
    host.run(LIMIT, until=lambda: held(host, A))
    return host


def test_two_jobs_on_one_gpu_are_tuned_within_the_budget_of_each() -> None:
    host = both(b=0.03)
    jobs = [host.train("a"), host.train("b", step=0.17)]
    host.run(LIMIT, until=lambda: held(host, A) and host.gpus[0].cap < DEFAULT)
    assert host.gpus[0].cap < DEFAULT
    assert all(job.steps for job in jobs)
    leader, other = host.row(B), host.row(A)
    assert host.gpus[0].slowdown - 1 <= 0.03, "the smallest budget counts"
    assert leader.decision.caps
    assert other.decision.caps == {}
    assert other.decision.sentence.startswith(f"Tuned with {B}, which shares its devices: Hold ")
    assert (other.devices, other.applied, other.original) == (
        leader.devices,
        True,
        leader.original,
    )
    for row in (leader, other):
        assert row.state is TuningState.HOLDING
        assert row.held_bound <= row.budget
        assert row.slowdown_bound <= row.budget
    assert leader.saved_surely >= 0
    assert (other.saved, other.saved_surely) == (None, 0), "the energy is saved once"


def test_job_without_a_signal_declines_the_gpu_of_both() -> None:
    host = both()
    host.train("a")
    host.strangers.append(Consumer(9999, 1))
    host.train("b")
    host.run(60)
    assert (reason(host, A), reason(host, B)) == (DecisionReason.SHARED, DecisionReason.SHARED)
    assert host.gpus[0].cap == DEFAULT


def test_job_that_may_not_be_tuned_declines_the_gpu_of_both() -> None:
    host = both()
    first, second = host.train("a"), host.train("b", span="other")
    host.run(60)
    assert first.steps
    assert second.steps
    assert reason(host, A) is DecisionReason.SHARED
    assert host.gpus[0].cap == DEFAULT


def test_stranger_ends_the_common_cap_at_once() -> None:
    host = both_held()
    assert host.gpus[0].cap < DEFAULT
    host.strangers.append(Consumer(9999, 1))
    host.run(2)
    assert host.gpus[0].cap == DEFAULT
    assert reason(host, A) is DecisionReason.SHARED


@pytest.mark.slow
def test_job_that_joins_a_tuned_gpu_is_tuned_with_it_under_one_account() -> None:
    host = both()
    host.train("a")
    host.run(LIMIT, until=lambda: held(host, A))
    joined = host.train("b")
    host.run(2)
    assert host.gpus[0].cap == DEFAULT, "no setting is certified for the new tenant"
    before = host.row(A)
    host.run(LIMIT, until=lambda: host.gpus[0].cap < DEFAULT and held(host, A))
    after = host.row(A)
    assert after.units > before.units
    assert joined.steps


@pytest.mark.parametrize("ending", ["a", "b"])
def test_job_without_partners_is_tuned_alone(ending: str) -> None:
    host = both_held()
    next(job for job in host.jobs if job.service == ending).alive = False
    host.run(60)
    stays = B if ending == "a" else A
    host.run(LIMIT, until=lambda: (row := host.row(stays)) is not None and bool(row.decision.caps))
    row = host.row(stays)
    assert "Tuned with" not in row.decision.sentence
    ended = host.row(f"{ending}/train_step")
    assert ended.state is TuningState.ENDED


def test_jobs_that_share_one_of_two_gpus_are_declined() -> None:
    host = Host(2, settings=quick(job=(TunedJobSettings(span="train_step", kind="steps"),)))
    host.train("a")
    second = host.train("b")
    third = host.train("b", gpu=1)
    host.run(60)
    assert second.steps
    assert third.steps
    assert reason(host, A) is DecisionReason.SHARED
    assert host.gpus[0].cap == DEFAULT


@pytest.mark.exhaustive
def test_shared_tuning_survives_a_restart_with_every_account() -> None:
    host = both_held()
    host.run(30)
    assert set(host.accounts.kept) == {A, B}
    before = {name: account.elapsed for name, (_, account) in host.accounts.kept.items()}
    host.restart()
    host.run(60)
    for name, elapsed in before.items():
        assert host.accounts.kept[name][1].elapsed > elapsed
