"""Unexpected and missing input of the tuner."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from testbed.tuned_host import DEFAULT, MINIMUM, Host, held, quick

from wattspan.config import TunedJobSettings
from wattspan.model import (
    CapKey,
    Consumer,
    DecisionReason,
    Group,
    GroupKind,
    Knob,
    Move,
    Principal,
    TuningState,
)
from wattspan.sharing.pools import PoolName
from wattspan.spans.values import Span, SpanColumns
from wattspan.tuning.declared_jobs import MISSING_AFTER
from wattspan.tuning.job import TuningJob

HOUR = 3600
MAX_JOBS = PoolName.TUNED_JOBS.limit // 2  # of one user
COUNTED = TunedJobSettings(service="trainer", span="train_step", kind="steps", work="tokens.n")


def tuning_job(host: Host, name: str = "trainer/train_step") -> TuningJob:
    return host.tuner._jobs[name]


def send(host: Host, consumer: Consumer, *times: tuple[int, int], name: str = "train_step") -> None:
    """Spans of these starts and ends, as the joiner hands them over."""
    spans = []
    for start, end in times:
        ident = (hash((start, end)) % 2**63).to_bytes(8, "big")
        spans.append(Span(b"t" * 16, ident, b"", "trainer", name, start, end))
    host.tap.append(consumer, "trainer", SpanColumns.of(spans))


# --------------------------------------------------------------------------- missing input


def test_missing_configured_job_is_listed_with_remedies() -> None:
    host = Host()
    host.run(1)
    row = host.row()
    assert row.state is TuningState.WAITING
    assert row.decision.reason is DecisionReason.NO_SIGNAL
    assert 'No span of the service "trainer" was received yet' in row.decision.sentence
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in row.decision.sentence


def test_missing_span_name_error_lists_received_names() -> None:
    host = Host()
    host.train(span="trian_step")
    host.run(10)
    row = host.row()
    assert row.decision.sentence.startswith(
        'No span "train_step" of the service "trainer" was received yet; received: "trian_step".'
    )


def test_missing_service_error_lists_sending_services() -> None:
    host = Host()
    host.train(service="unknown_service")
    host.run(10)
    row = host.row()
    assert 'spans come from "unknown_service"' in row.decision.sentence


def test_missing_job_is_logged_once() -> None:
    host = Host()
    host.run(MISSING_AFTER / 1e9 - 5)
    assert host.logged == []
    host.run(MISSING_AFTER / 1e9)
    (line,) = host.logged
    assert line.startswith("trainer/train_step is not tuned. No span of the service")


def test_row_of_a_missing_job_ends_with_its_first_spans() -> None:
    host = Host()
    host.run(1)
    host.train()
    host.run(5)
    (row,) = host.tuner.accounts().rows
    assert row.devices == ("GPU-0",)


# --------------------------------------------------------------------------- work that is none


@pytest.mark.parametrize("work", [None, 0.0, -3.0, math.nan, math.inf, -math.inf, 1e300], ids=repr)
def test_invalid_work_attribute_is_named_and_stops_tuning(work: float | None) -> None:
    host = Host(settings=quick(job=(COUNTED,)))
    host.train(work=lambda _: work)
    host.run(120)
    row = host.row()
    assert row.decision.reason is DecisionReason.BAD_WORK
    assert host.gpus[0].cap == DEFAULT
    assert host.logged == []


def test_few_units_without_work_do_not_matter() -> None:
    def work(generator: Random) -> float | None:
        return None if generator.random() < 0.01 else 512.0

    host = Host(settings=quick(job=(COUNTED,)))
    host.train(work=work)
    host.run(120)
    row = host.row()
    assert row.decision.reason is not DecisionReason.BAD_WORK
    assert row.units > 500


@pytest.mark.slow
def test_work_that_becomes_invalid_releases_the_cap() -> None:
    counts: list[float | None] = [512.0]
    host = Host(settings=quick(job=(COUNTED,)))
    host.train(work=lambda _: counts[-1])
    host.run(HOUR, until=lambda: held(host))
    counts.append(math.nan)
    host.run(60)
    row = host.row()
    assert row.decision.reason is DecisionReason.BAD_WORK
    assert host.gpus[0].cap == DEFAULT


# -------------------------------------------------------------------------- times that cannot be


IMPOSSIBLE: tuple[Callable[[int], tuple[int, int]], ...] = (
    lambda now: (now, now - 10**9),  # ends before it starts
    lambda now: (now, now),  # takes no time
    lambda now: (now + HOUR * 10**9, now + HOUR * 10**9 + 10**8),  # in the future
    lambda now: (now - 10**8, now + HOUR * 10**9),  # ends in the future
    lambda now: (-(10**18), now),  # began before there were computers
)


@pytest.mark.slow
def test_spans_with_impossible_times_do_not_keep_a_job_from_being_tuned() -> None:
    host = Host()
    job = host.train()
    for _ in range(20):
        host.run(1)
        now = host.clock.monotonic()
        send(host, job.consumer, *(of(now) for of in IMPOSSIBLE))
    host.run(HOUR, until=lambda: held(host))
    assert held(host)
    assert 1.0 < host.gpus[0].slowdown < 1.05


# ---------------------------------------------------------------------------------- jobs that rest


def test_short_lived_processes_leave_no_state() -> None:
    host = Host()
    for number in range(120):
        job = host.train()
        host.run(1)
        job.alive = False
        if number > 60:
            assert len(tuning_job(host).ranks) <= 2
            assert len(tuning_job(host).work.units) < 100
    host.run(30)
    row = host.row()
    assert row.state is TuningState.ENDED
    assert host.gpus[0].cap == DEFAULT
    assert len(host.book.decided) < 30


def test_units_of_an_untunable_job_are_not_stored() -> None:
    host = Host(settings=quick(gpus=("7",)))
    host.train()
    host.run(300)
    assert len(tuning_job(host).work.units) < 100


# ------------------------------------------------------------------------------- too many of them


def test_number_of_jobs_of_a_user_is_bounded_and_logged_once() -> None:
    host = Host(settings=quick(job=(TunedJobSettings(span="train_step", kind="steps"),)))
    now = host.clock.monotonic()
    for number in range(1000):
        service = f"service-{number}"
        spans = [Span(b"t" * 16, bytes(8), b"", service, "train_step", now - 10**8, now)]
        host.tap.append(Consumer(5000 + number, 1), service, SpanColumns.of(spans))
    host.run(1)
    assert len(host.tuner.accounts().rows) == MAX_JOBS
    (line,) = host.logged
    assert f"{MAX_JOBS} jobs are known" in line
    spans = [Span(b"t" * 16, bytes(8), b"", "modest", "train_step", now - 10**8, now)]
    host.owners[Consumer(9000, 1)] = Principal(1001)
    host.tap.append(Consumer(9000, 1), "modest", SpanColumns.of(spans))
    host.run(1)
    names = {row.job for row in host.tuner.accounts().rows}
    assert "modest/train_step" in names
    assert len(names) == MAX_JOBS + 1


def test_jobs_that_have_ended_make_room() -> None:
    host = Host(settings=quick(job=(TunedJobSettings(span="train_step", kind="steps"),)))
    for number in range(MAX_JOBS + 5):
        job = host.train(service=f"service-{number}")
        host.run(0.5)
        job.alive = False
    host.run(10)
    host.train(service="late")
    host.run(5)
    assert len(host.tuner.accounts().rows) == MAX_JOBS
    assert host.row("late/train_step") is not None


# ---------------------------------------------------------------------------- whom it may concern


@pytest.mark.parametrize("named", ["training", "unit:training"])
def test_only_jobs_of_the_named_groups_are_tuned(named: str) -> None:
    host = Host(
        2, settings=quick(groups=(named,), job=(TunedJobSettings(span="train_step", kind="steps"),))
    )
    mine, other = host.train("mine", 0), host.train("other", 1)
    host.groups[mine.consumer] = (Group(GroupKind.UNIT, "training"), Group(GroupKind.USER, "ann"))
    host.groups[other.consumer] = (Group(GroupKind.UNIT, "serving"), Group(GroupKind.USER, "ann"))
    host.run(20)
    assert tuning_job(host, "mine/train_step").decision.move is Move.PROBE
    left = tuning_job(host, "other/train_step").decision
    assert left.reason is DecisionReason.NOT_ALLOWED
    assert left.sentence == (
        f"other/train_step is not tuned: process 101 is in none of [autotune] groups ({named})."
    )


@pytest.mark.slow
def test_process_of_another_group_that_joins_a_held_job_ends_its_cap() -> None:
    host = Host(settings=quick(groups=("training",)))
    job = host.train()
    host.groups[job.consumer] = (Group(GroupKind.UNIT, "training"),)
    host.run(HOUR, until=lambda: held(host))
    host.train()
    host.run(3)
    assert tuning_job(host).decision.reason is DecisionReason.NOT_ALLOWED
    assert host.gpus[0].cap == DEFAULT


# ---------------------------------------------------------------------------------- other tuners


@pytest.mark.slow
def test_tuner_does_not_request_a_device_of_another_holder() -> None:
    host = Host()
    other = {CapKey(Knob.GPU_POWER, "GPU-0"): 500_000}
    host.capper.hold("elsewhere/step", other, "it was there first")
    host.train()
    host.run(120)
    decision = tuning_job(host).decision
    assert decision.reason is DecisionReason.HELD
    assert "elsewhere/step holds the cap" in decision.sentence
    assert host.gpus[0].cap == 500_000
    assert len(host.book.decided) == 1
    host.capper.release("elsewhere/step")
    host.run(HOUR, until=lambda: held(host))
    assert held(host)


def test_failed_tick_does_not_renew_the_lease() -> None:
    host = Host()
    assert host.capper is not None
    host.train()
    host.run(HOUR / 3, until=lambda: bool(host.capper and host.capper.holders))
    host.run(2)
    assert host.capper.renewed >= 3

    def fail() -> None:
        raise RuntimeError

    host.tuner._choose_explorer = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        host.tuner.step()
    renewed = host.capper.renewed
    with pytest.raises(RuntimeError):
        host.tuner.step()
    assert host.capper.renewed == renewed


@pytest.mark.slow
def test_refused_lease_is_retried_with_backoff() -> None:
    host = Host()
    assert host.capper is not None
    asked = []

    def refuse(job: str, caps: object, why: str) -> tuple[()]:
        from wattspan.ports import CapsError

        asked.append(host.clock.monotonic())
        raise CapsError("The journal cannot be written: disk full.", "no_journal")

    host.capper.hold = refuse  # type: ignore[method-assign]
    host.train()
    host.run(HOUR / 3)
    assert 3 < len(asked) < 12
    assert asked[-1] - asked[-2] > 80 * 10**9
    decision = tuning_job(host).decision
    assert host.gpus[0].cap == DEFAULT
    assert len(host.book.decided) < 60
    assert decision.reason in {
        DecisionReason.NO_CAPPER,
        DecisionReason.BASELINE,
        DecisionReason.SCREENING,
    }


@pytest.mark.slow
def test_flapping_capper_is_logged_at_a_limited_rate() -> None:
    host = Host()
    assert host.capper is not None
    host.train()
    for _ in range(10):
        host.run(30)
        host.capper.refusal = ("", "No capper answers.")
        host.run(30)
        host.capper.refusal = None
    assert 1 <= len(host.logged) <= 3
    assert 1.0 <= host.gpus[0].slowdown < 1.1


# ------------------------------------------------------------------------------------------- knobs


def test_clock_is_tried_if_no_power_limit_binds() -> None:
    host = Host(settings=quick(knobs=(Knob.GPU_POWER, Knob.GPU_CLOCK)))
    host.capper.clocks = True
    host.gpus[0].draw = MINIMUM // 2
    host.train()
    host.run(300)
    row = host.row()
    capped = [one.decision for one in host.book.decided if one.knob is Knob.GPU_POWER]
    assert capped[-1].reason is DecisionReason.NOT_BINDING
    assert not any(one.caps for one in capped)
    assert row.knob is Knob.GPU_CLOCK
    assert row.passed_knobs == {Knob.GPU_POWER: DecisionReason.NOT_BINDING}


@pytest.mark.parametrize("listed", [False, True])
def test_knob_that_a_board_lacks_or_rejects_gives_way_to_the_next(listed: bool) -> None:
    host = Host(settings=quick(knobs=(Knob.GPU_CLOCK, Knob.GPU_POWER)))
    host.capper.clocks, host.capper.rejects = listed, Knob.GPU_CLOCK
    host.train()
    host.run(HOUR, until=lambda: host.gpus[0].cap < DEFAULT)
    assert host.gpus[0].cap < DEFAULT
    passed = {Knob.GPU_CLOCK: DecisionReason.LOST_DEVICE} if listed else {}
    assert (host.row().knob, host.row().passed_knobs) == (Knob.GPU_POWER, passed)
    host.capper.clocks, host.capper.rejects = True, None
    host.run(10)
    assert host.row().knob is (Knob.GPU_POWER if listed else Knob.GPU_CLOCK)


@pytest.mark.slow
def test_first_actuator_is_retried_after_all_failed() -> None:
    settings = quick(knobs=(Knob.GPU_POWER, Knob.GPU_CLOCK), dwell=60 * 10**9)
    host = Host(settings=settings)
    host.capper.clocks = True
    host.gpus[0].draw = MINIMUM // 2
    host.train()
    host.run(200, until=lambda: tuning_job(host).decision.reason is DecisionReason.INERT)
    assert tuning_job(host).decision.reason is DecisionReason.INERT
    host.gpus[0].draw = 640_000
    host.run(HOUR, until=lambda: held(host))
    row = host.row()
    assert (row.knob, row.state) == (Knob.GPU_POWER, TuningState.HOLDING)
    assert row.passed_knobs == {}


@pytest.mark.slow
def test_job_without_a_gpu_has_its_package_tuned() -> None:
    host = Host(0, packages=1, settings=quick(knobs=(Knob.GPU_POWER, Knob.CPU_POWER)))
    host.compute()
    host.run(HOUR, until=lambda: held(host))
    row = host.row()
    assert row.knob is Knob.CPU_POWER
    assert row.devices == ("intel-rapl:0",)
    assert host.packages[0].cap < 640_000


def test_job_that_computes_before_it_uses_its_gpu_is_tuned_by_the_gpu() -> None:
    host = Host(1, packages=1, settings=quick(knobs=(Knob.GPU_POWER, Knob.CPU_POWER)))
    job = host.compute()
    host.run(10)
    row = host.row()
    assert row.knob is Knob.CPU_POWER
    job.gpu = host.gpus[0]
    host.run(10)
    row = host.row()
    assert (row.knob, row.devices) == (Knob.GPU_POWER, ("GPU-0",))
