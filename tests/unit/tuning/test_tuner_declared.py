"""Declared jobs in the tuner: their terms, their spans and their rows."""

from __future__ import annotations

import pytest
from testbed.tuned_host import DEFAULT, Host, Job, held, held_host, quick

from wattspan.config import AutotuneSettings
from wattspan.model import (
    Consumer,
    DecisionReason,
    DeclarationOutcome,
    Group,
    GroupKind,
    Knob,
    Move,
    Principal,
    TuningRow,
    TuningState,
)
from wattspan.sharing.pools import PoolName

ANN, BOB = 1000, 2000
MAX_JOBS = PoolName.TUNED_JOBS.limit // 2  # of one user
JOB = "trainer/train_step"
UNNAMED: dict[str, object] = {"job": ()}


def row(host: Host, name: str = JOB) -> TuningRow:
    found = host.row(name)
    assert found is not None, [one.job for one in host.tuner.accounts().rows]
    return found


def names(host: Host) -> list[str]:
    return [one.job for one in host.tuner.accounts().rows]


def owned(host: Host, uid: int = ANN, **more: object) -> Job:
    job = host.train(**more)
    host.owners[job.consumer] = Principal(uid)
    return job


# ------------------------------------------------------------------------------------ terms


def test_unnamed_declared_job_is_applied_if_the_operator_allows_it() -> None:
    host = Host(settings=quick(**UNNAMED, declared="allow", max_slowdown=0.05))
    host.declare(owned(host), max_slowdown=0.08)
    host.run(900, until=lambda: held(host))
    found = row(host)
    assert held(host)
    assert (found.applied, found.budget) == (True, 0.08)
    assert host.gpus[0].cap < DEFAULT
    assert found.declared.decision is DeclarationOutcome.ACCEPTED
    assert found.unit_time == pytest.approx(100_000_000, rel=0.02)
    assert found.unit_energy == pytest.approx(64_000_000, rel=0.02)


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05])
def test_first_saving_with_default_settings_takes_less_than_ten_minutes(noise: float) -> None:
    host = Host(settings=AutotuneSettings(mode="apply", declared="allow"))
    host.declare(owned(host, noise=noise))
    host.run(600, until=lambda: (row(host).saved_low or 0) > 0)
    assert (row(host).saved_low or 0) > 0
    assert (row(host).slowdown_bound or 1.0) <= 0.05


def test_unnamed_declared_job_is_advised_by_default() -> None:
    host = Host(settings=quick(**UNNAMED))
    terms = host.declare(owned(host), max_slowdown=0.03)
    assert (terms.given.mode, terms.given.max_slowdown) == ("advise", 0.03)
    host.run(300)
    advised = row(host)
    assert (advised.applied, advised.budget) == (False, 0.03)
    assert advised.decision.reason is DecisionReason.NOT_CHOSEN
    assert "the job was declared and is not configured" in advised.decision.sentence
    assert host.gpus[0].cap == DEFAULT


def test_declared_job_is_never_applied_on_a_host_that_advises() -> None:
    host = Host(settings=quick(**UNNAMED, declared="allow", mode="advise"))
    host.declare(owned(host))
    host.run(300)
    assert row(host).decision.reason is DecisionReason.ADVICE
    assert host.gpus[0].cap == DEFAULT


def test_named_job_is_applied_within_the_smaller_budget() -> None:
    host = Host(settings=quick())
    host.declare(owned(host), max_slowdown=0.02)
    host.run(900, until=lambda: held(host))
    assert (row(host).applied, row(host).budget) == (True, 0.02)


def test_declared_knobs_replace_those_of_the_configuration() -> None:
    host = Host(settings=quick(knobs=(Knob.CPU_POWER, Knob.GPU_POWER)))
    job = owned(host)
    job.paused = True
    host.run(1)
    assert row(host).knob is Knob.CPU_POWER
    host.declare(job, knobs=(Knob.GPU_POWER,))
    host.run(1)
    assert row(host).knob is Knob.GPU_POWER


def test_budget_of_zero_keeps_the_original_setting() -> None:
    host = Host()
    host.declare(owned(host), max_slowdown=0.0)
    host.run(120)
    assert row(host).decision.reason is DecisionReason.NOT_ALLOWED
    assert "a budget of 0 % permits no trial" in row(host).decision.sentence
    assert host.gpus[0].cap == DEFAULT


def test_declined_process_is_not_tuned() -> None:
    host = Host(settings=quick(groups=("user:ann",)))
    job = owned(host)
    host.declare(job)
    host.run(60)
    assert row(host).decision.reason is DecisionReason.NOT_ALLOWED
    assert f"process {job.consumer.pid} is in none of" in row(host).decision.sentence


def test_gpu_without_permission_is_not_tuned() -> None:
    host = Host(settings=quick(gpus=("7",)))
    terms = host.declare(owned(host))
    assert (terms.decision, terms.given.mode) == (DeclarationOutcome.DECLINED, "off")
    assert "no GPU of this host is in [autotune] gpus (7)" in terms.reason
    host.run(60)
    assert row(host).decision.reason is DecisionReason.NOT_ALLOWED
    assert row(host).decision.sentence == terms.reason


def test_declaration_before_the_first_use_of_a_gpu_states_the_condition() -> None:
    host = Host(gpus=2, settings=quick(gpus=("0",)))
    job = owned(host, gpu=1)
    terms = host.declare(job)
    assert (terms.decision, terms.provisional) == (DeclarationOutcome.ACCEPTED, True)
    assert "a job that uses a GPU outside of [autotune] gpus (0) is not tuned" in terms.reason
    host.run(30)
    refused = "trainer/train_step uses GPU 1 (GPU-1), which is not in [autotune] gpus (0)."
    again = host.declare(job)
    assert (again.decision, again.reason) == (DeclarationOutcome.DECLINED, refused)
    (listed,) = host.declared.living()
    assert listed.answer == again
    assert row(host).decision.reason is DecisionReason.NOT_ALLOWED
    assert row(host).decision.sentence == refused


def test_refused_gpu_is_remembered_while_its_job_pauses() -> None:
    host = Host(gpus=2, settings=quick(gpus=("0",)))
    job = owned(host, gpu=1)
    host.declare(job)
    host.run(30)
    job.gpu = host.gpus[0]
    host.run(60)
    assert host.declare(job).decision is DeclarationOutcome.DECLINED
    assert [gpu.cap for gpu in host.gpus] == [DEFAULT, DEFAULT]


def test_declaration_is_final_once_its_job_uses_permitted_gpus() -> None:
    host = Host(gpus=2, settings=quick(gpus=("0",)))
    job = owned(host)
    assert host.declare(job).provisional
    host.run(30)
    terms = host.declare(job)
    assert (terms.decision, terms.provisional) == (DeclarationOutcome.ACCEPTED, False)
    assert "[autotune] gpus" not in terms.reason


def test_configuration_with_every_gpu_is_no_condition() -> None:
    host = Host(gpus=2, settings=quick(gpus=("0", "1")))
    assert not host.declare(owned(host)).provisional


# ------------------------------------------------------------------------- limits of a profile


def test_limit_of_a_profile_is_certified_first() -> None:
    host = Host(settings=quick())
    terms = host.declare(owned(host), first_watts=560.0)
    assert "with 560 W first" in terms.reason
    host.run(600, until=lambda: row(host).decision.reason is DecisionReason.RECERTIFYING)
    assert row(host).decision.sentence.startswith("Certify 560 W again")
    assert [one.setting for one in row(host).tried] in ([], [560_000])


@pytest.mark.exhaustive
def test_limit_of_a_profile_over_the_budget_is_not_held() -> None:
    host = Host(settings=quick(max_slowdown=0.03))
    host.declare(owned(host), first_watts=450.0)
    host.run(1800, until=lambda: held(host))
    assert host.gpus[0].slowdown <= 1.03
    assert (row(host).slowdown_bound or 1) <= 0.03


@pytest.mark.parametrize("watts", [700.0, 900.0])
def test_first_limit_without_effect_is_ignored(watts: float) -> None:
    host = Host(settings=quick())
    host.declare(owned(host), first_watts=watts)
    host.run(600, until=lambda: row(host).decision.reason is DecisionReason.SCREENING)
    assert row(host).decision.reason is DecisionReason.SCREENING


def test_own_result_precedes_the_limit_of_a_profile() -> None:
    host = Host(settings=quick())
    job = owned(host)
    host.declare(job)
    host.run(1200, until=lambda: held(host))
    certified = host.gpus[0].cap
    job.alive = False
    host.run(30)
    host.declare(owned(host), first_watts=650.0)
    host.run(600, until=lambda: row(host).decision.reason is DecisionReason.RECERTIFYING)
    assert row(host).decision.sentence.startswith(f"Certify {certified / 1000:.0f} W again")


def test_job_never_gets_less_than_its_lowest_limit() -> None:
    host, lowest = Host(settings=quick(max_slowdown=0.1)), DEFAULT
    host.declare(owned(host), floor_watts=600.0, first_watts=600.0)

    def watch() -> bool:
        nonlocal lowest
        lowest = min(lowest, host.gpus[0].cap)
        return row(host).decision.move is Move.HOLD

    host.run(1800, until=watch)
    assert row(host).decision.move is Move.HOLD
    host.run(300, until=lambda: watch() and False)
    assert lowest == 600_000


def test_lowest_limit_above_the_original_leaves_no_room() -> None:
    host = Host(settings=quick())
    host.declare(owned(host), floor_watts=800.0)
    host.run(300)
    assert row(host).decision.move is Move.DECLINE
    assert host.gpus[0].cap == DEFAULT


def test_highest_of_the_lowest_limits_applies_to_all_ranks() -> None:
    host = Host(gpus=2, settings=quick())
    host.declare(owned(host), floor_watts=500.0, first_watts=520.0)
    terms = host.declare(owned(host, gpu=1), floor_watts=550.0, first_watts=560.0)
    assert (terms.given.floor_watts, terms.given.first_watts) == (550.0, 520.0)


def test_declared_span_is_the_only_unit_of_its_service() -> None:
    host = Host(settings=quick(**UNNAMED))
    detected = owned(host, span="epoch", step=0.4)
    job = host.train()
    job.consumer = detected.consumer
    host.declare(job)
    host.run(60)
    assert names(host) == [JOB]
    assert row(host).units > 0


def test_declared_work_counts_units() -> None:
    host = Host(settings=quick(**UNNAMED))
    host.declare(owned(host, work=lambda _: -1.0), work="samples")
    host.run(60)
    assert row(host).decision.reason is DecisionReason.BAD_WORK


def test_ignored_declaration_changes_nothing() -> None:
    host = Host(settings=quick(declared="ignore"))
    host.declare(owned(host), max_slowdown=0.01)
    host.run(30)
    assert (row(host).budget, row(host).declared) == (0.05, None)


# ------------------------------------------------------------------------------- missing spans


def test_declared_job_without_spans_is_listed() -> None:
    host = Host(settings=quick(**UNNAMED))
    job = owned(host)
    host.declare(job, max_slowdown=0.02)
    job.paused = True
    host.run(1)
    waiting = row(host)
    assert (waiting.state, waiting.budget) == (TuningState.WAITING, 0.02)
    assert 'No span of the service "trainer" was received yet' in waiting.decision.sentence
    assert waiting.declared is not None
    job.alive = False
    host.run(1)
    assert names(host) == []


def test_declared_job_that_must_not_be_tuned_is_listed_without_spans() -> None:
    host = Host(settings=quick(**UNNAMED))
    job = owned(host)
    job.paused = True
    host.declare(job, max_slowdown=0.0)
    host.run(1)
    assert row(host).state is TuningState.DECLINED
    assert row(host).decision.reason is DecisionReason.NOT_ALLOWED


def test_waiting_jobs_of_two_users_have_two_names() -> None:
    host = Host()
    for uid in (ANN, BOB):
        job = owned(host, uid)
        job.paused = True
        host.declare(job, uid)
    host.run(1)
    assert names(host) == [JOB, f"{JOB}@{BOB}"]


# --------------------------------------------------------------------------- spans of two users


def test_equal_jobs_of_two_users_are_tuned_separately() -> None:
    host = Host(2, settings=quick(**UNNAMED))
    first, second = owned(host), owned(host, BOB, gpu=1)
    host.declare(first, max_slowdown=0.02)
    host.declare(second, BOB, max_slowdown=0.04)
    host.run(60)
    found = {one.job: (one.budget, one.devices) for one in host.tuner.accounts().rows}
    assert found == {JOB: (0.02, ("GPU-0",)), f"{JOB}@{BOB}": (0.04, ("GPU-1",))}


def test_process_of_another_user_stays_outside_a_declared_job() -> None:
    host = Host(2)
    host.declare(owned(host), max_slowdown=0.02)
    owned(host, BOB, gpu=1)
    host.run(60)
    found = {one.job: (one.budget, one.devices) for one in host.tuner.accounts().rows}
    assert found == {JOB: (0.02, ("GPU-0",)), f"{JOB}@{BOB}": (0.05, ("GPU-1",))}


def test_rank_without_a_declaration_joins_the_job_of_its_user() -> None:
    host = Host(2, settings=quick(**UNNAMED))
    host.declare(owned(host), max_slowdown=0.02)
    owned(host, gpu=1)
    host.run(60)
    assert names(host) == [JOB]
    assert row(host).devices == ("GPU-0", "GPU-1")


def test_declaration_of_another_user_does_not_name_the_units_of_a_service() -> None:
    host = Host(2, settings=quick(**UNNAMED))
    stranger = owned(host, BOB, gpu=1, span="noise")
    stranger.paused = True
    host.declare(stranger, BOB)
    owned(host, span="epoch")
    host.run(60)
    assert "trainer/epoch" in names(host)


# ------------------------------------------------------------------------------- changes in mid-run


def test_later_declaration_takes_over_the_job_of_its_process() -> None:
    host = Host()
    job = owned(host)
    host.run(60)
    units = row(host).units
    assert units > 0
    host.declare(job, max_slowdown=0.02)
    host.run(60)
    assert names(host) == [JOB]
    assert row(host).budget == 0.02
    assert row(host).units > units


def test_withdrawal_returns_the_job_to_the_terms_of_the_operator() -> None:
    host = Host(settings=quick(declared="allow"))
    job = owned(host)
    host.declare(job, max_slowdown=0.2)
    host.run(900, until=lambda: held(host))
    host.run(1)
    assert host.gpus[0].cap < DEFAULT
    assert host.declared.withdraw(job.consumer, "train")
    host.run(1)
    assert (row(host).budget, row(host).declared) == (0.05, None)
    assert host.gpus[0].cap == DEFAULT
    host.run(60)
    assert names(host) == [JOB]


def test_end_of_a_declared_process_ends_its_job_under_its_terms() -> None:
    host = Host(settings=quick(**UNNAMED, declared="allow"))
    job = owned(host)
    host.declare(job, max_slowdown=0.08)
    host.run(900, until=lambda: held(host))
    job.alive = False
    host.run(10)
    assert (row(host).state, row(host).budget) == (TuningState.ENDED, 0.08)
    assert host.gpus[0].cap == DEFAULT
    assert host.memory.kept  # for the next run
    assert host.declared.living() == ()


def test_unchanged_terms_do_not_restart_the_search() -> None:
    host = Host()
    job = owned(host)
    host.declare(job, max_slowdown=0.03)
    host.run(900, until=lambda: held(host))
    decided = len(host.book.decided)
    host.declare(job, name="the same again", max_slowdown=0.03)
    host.run(2)
    since = [one.decision.reason for one in host.book.decided[decided:]]
    assert DecisionReason.BASELINE not in since
    assert row(host).decision.move in (Move.HOLD, Move.PROBE)
    declared = row(host).declared
    assert declared.name == "the same again"


def test_processes_of_declared_jobs_come_and_go_without_a_trace() -> None:
    host = Host(settings=quick(**UNNAMED))
    for number in range(200):
        job = owned(host, ANN + number)
        host.declare(job, ANN + number)
        host.run(0.5)
        job.alive = False
    host.run(30)
    assert host.declared.living() == ()
    assert len(host.tuner.accounts().rows) <= MAX_JOBS


def test_groups_of_a_process_are_read_at_each_declaration() -> None:
    host = Host(settings=quick(groups=("user:ann",)))
    job = owned(host)
    host.groups[Consumer(job.consumer.pid, 1)] = (Group(GroupKind.USER, "ann"),)
    assert host.declare(job).decision is DeclarationOutcome.ACCEPTED


# -------------------------------------------------------------------------------------- MIG


def test_board_with_mig_is_tuned_if_all_its_tenants_belong_to_the_declared_job() -> None:
    host = Host(settings=quick())
    host.gpus[0].mig = host.gpus[0].mig_users_known = True
    host.declare(owned(host))
    host.run(900, until=lambda: held(host))
    assert host.gpus[0].cap < DEFAULT
    host.strangers.append(Consumer(9999, 1))  # another tenant, in any instance
    host.run(2)
    assert row(host).decision.move is not Move.HOLD
    assert host.gpus[0].cap == DEFAULT


@pytest.mark.exhaustive
def test_limit_is_released_with_the_reason_when_mig_is_turned_on() -> None:
    host = held_host()
    assert host.gpus[0].cap < DEFAULT
    host.gpus[0].mig = True
    host.run(2)
    released = row(host).decision
    assert (released.move, released.reason) == (Move.RELEASE, DecisionReason.MIG)
    assert released.sentence.endswith(
        "the processes of the device's instances are not all of one declared job."
    )
    assert host.gpus[0].cap == DEFAULT
    host.gpus[0].mig = False
    host.run(900, until=lambda: held(host))
    assert host.gpus[0].cap < DEFAULT


@pytest.mark.parametrize(("known", "declared"), [(False, True), (True, False)])
def test_board_with_mig_is_not_tuned_otherwise(known: bool, declared: bool) -> None:
    host = Host(settings=quick())
    host.gpus[0].mig, host.gpus[0].mig_users_known = True, known
    job = owned(host)
    if declared:
        host.declare(job)
    host.run(120)
    assert row(host).decision.reason is DecisionReason.MIG
    assert host.gpus[0].cap == DEFAULT
