"""The tuner's thread: its jobs, one at a time, and its reactions to failures."""

from __future__ import annotations

from itertools import pairwise

import pytest
from testbed.tuned_host import DEFAULT, Host, held, held_host, quick

from wattspan.cli.tune.explanation import explain_lines
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import Consumer, DecisionReason, Move, TuningRow, TuningState

HOUR = 3600


def capped(host: Host) -> bool:
    return any(gpu.cap < DEFAULT for gpu in host.gpus)


def test_training_job_ends_up_capped_within_its_budget() -> None:
    host = held_host()
    row = host.row()
    assert row.decision.reason is DecisionReason.CERTIFIED
    assert 1.0 < host.gpus[0].slowdown < 1.05
    assert host.gpus[0].cap < 640_000
    assert row.held_bound <= 0.05
    assert row.committed


@pytest.mark.slow
def test_reported_savings_are_below_true_savings() -> None:
    host = Host()
    job = host.train()
    host.run(900)
    row = host.row()
    truly = job.steps * 640_000 * 0.1 - host.gpus[0].energy / 1000
    assert 0 < row.saved_surely / 1000 < truly * 1.05


def test_held_cap_is_renewed_every_tick() -> None:
    host = held_host()
    before = host.capper.renewed
    standing = []
    host.run(10, until=lambda: standing.append(capped(host)) is not None)
    assert host.capper.renewed - before >= sum(standing) > 5


@pytest.mark.slow
def test_distant_cap_is_reached_in_bounded_steps() -> None:
    host = Host()
    host.capper.largest = 20_000
    host.train()
    host.run(HOUR, until=lambda: held(host))
    row = host.row()
    host.run(10)
    assert host.gpus[0].cap in (DEFAULT, *row.decision.caps.values())
    assert DEFAULT - min(row.decision.caps.values()) > 2 * host.capper.largest


def test_advice_mode_requests_no_lease() -> None:
    host = Host(settings=quick(mode="advise"), capper=False)
    host.train()
    host.run(600)
    row = host.row()
    assert not capped(host)
    assert row.decision.move is Move.DECLINE
    assert row.decision.reason is DecisionReason.ADVICE
    assert "W" in row.decision.sentence


@pytest.mark.slow
def test_job_that_was_found_is_only_advised_on() -> None:
    host = Host(settings=quick(job=()))
    host.train(service="stranger")
    host.run(300)
    row = host.row("stranger/train_step")
    assert row.decision.reason is DecisionReason.NOT_CHOSEN
    assert not row.applied
    assert not capped(host)


def test_discovered_job_is_tuned_if_configured() -> None:
    host = Host(settings=quick(job=(), apply_found=True))
    host.train(service="stranger")
    host.run(600, until=lambda: capped(host))
    assert capped(host)


def test_spans_that_the_configuration_does_not_name_are_no_units_of_a_configured_service() -> None:
    host = Host()
    host.train(span="evaluate")
    host.run(60)
    (row,) = host.tuner.accounts().rows
    assert row.units == 0
    assert row.decision.reason is DecisionReason.NO_SIGNAL


@pytest.mark.slow
def test_only_one_job_of_a_host_explores_at_a_time() -> None:
    job = {"span": "train_step", "kind": "steps"}
    settings = quick(
        job=(TunedJobSettings(service="a", **job), TunedJobSettings(service="b", **job))
    )
    host = Host(2, settings=settings)
    host.train("a", 0)
    host.train("b", 1)
    both = []

    def look() -> bool:
        rows = host.tuner.accounts().rows
        both.append(
            sum(row.state is TuningState.EXPLORING and bool(row.decision.caps) for row in rows)
        )
        return all(row.state is TuningState.HOLDING for row in rows) and len(rows) == 2

    host.run(2 * HOUR, until=look)
    assert max(both) == 1
    assert host.gpus[0].cap < DEFAULT
    assert host.gpus[1].cap < DEFAULT


@pytest.mark.slow
@pytest.mark.parametrize("other", ["found", "throttled"])
def test_job_that_cannot_explore_does_not_keep_another_one_from_it(other: str) -> None:
    job = {"span": "train_step", "kind": "steps"}
    configured = (TunedJobSettings(service="trainer", **job),)
    if other == "throttled":
        configured += (TunedJobSettings(service=other, **job),)
    host = Host(2, settings=quick(job=configured))
    host.train(other, 0)
    host.gpus[0].throttling = ("hw_thermal",) if other == "throttled" else ()
    host.run(60)  # it has learned its original setting
    host.train(gpu=1)
    host.run(HOUR, until=lambda: held(host))
    assert held(host)


def test_stranger_on_the_gpu_ends_its_cap_at_once() -> None:
    host = held_host()
    host.strangers.append(Consumer(9999, 1))
    host.run(2)
    row = host.row()
    assert row.decision.reason is DecisionReason.SHARED
    assert not capped(host)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda gpu: setattr(gpu, "mig", True), DecisionReason.MIG),
        (lambda gpu: setattr(gpu, "throttling", ("hw_thermal",)), DecisionReason.THROTTLED),
    ],
)
def test_device_without_evidence_is_released(spoil, reason) -> None:  # type: ignore[no-untyped-def]
    host = held_host()
    spoil(host.gpus[0])
    host.run(2)
    row = host.row()
    assert row.decision.reason is reason
    assert not capped(host)


def divide(host: Host, mode: str) -> TuningRow:
    """Change the partition mode; the state of the job two seconds later."""
    host.gpus[0].partition_mode = mode
    host.run(2)
    row = host.row()
    assert row is not None
    return row


def comparing(host: Host) -> bool:
    row = host.row()
    return row is not None and row.pairs > 2 and capped(host)


def observing(host: Host) -> bool:
    row = host.row()
    return row is not None and row.decision.reason is DecisionReason.BASELINE


def explained(host: Host, row: TuningRow) -> str:
    return "\n".join(explain_lines(row, host.tuner.accounts(), host.clock.now(), None))


def test_held_setting_is_released_when_the_partition_mode_changes() -> None:
    host = held_host("SPX")
    assert capped(host)
    row = divide(host, "CPX")
    assert (row.decision.move, row.decision.reason) == (Move.DECLINE, DecisionReason.CHANGED)
    assert not capped(host)
    sentence = "the partition mode of GPU 0 (GPU-0) has changed from SPX to CPX."
    assert sentence in explained(host, row)


@pytest.mark.exhaustive
def test_work_in_another_partition_mode_is_not_compared() -> None:
    host = Host()
    host.gpus[0].partition_mode = "SPX"
    host.train()
    host.run(HOUR, until=lambda: comparing(host))
    host.gpus[0].slope = 4.0  # lower settings cost more time in the other mode
    row = divide(host, "CPX")
    assert row.decision.reason is DecisionReason.CHANGED
    assert not capped(host)
    assert row.pairs > 2
    units = row.units
    host.run(60, until=lambda: observing(host))
    row = host.row()
    assert (row.units, row.pairs, row.tried) == (units, 0, ())
    host.run(HOUR, until=lambda: held(host))
    assert host.gpus[0].slowdown < 1.05


@pytest.mark.slow
def test_setting_of_another_partition_mode_is_not_recalled() -> None:
    host = held_host("SPX")
    divide(host, "CPX")
    host.book.decided.clear()
    host.run(HOUR, until=lambda: held(host))
    reasons = [one.decision.reason for one in host.book.decided]
    assert DecisionReason.RECERTIFYING not in reasons
    assert reasons[-1] is DecisionReason.CERTIFIED
    assert {one.model for one in host.memory.kept} == {"H100 SPX", "H100 CPX"}


def returned_host() -> Host:
    """A host whose board was lost for three seconds while its setting was held."""
    host = held_host("SPX")
    host.gpus[0].lost = True
    host.run(3)
    host.gpus[0].lost = False
    return host


def test_board_that_was_lost_during_the_change_of_its_partition_mode_is_measured_again() -> None:
    host = returned_host()
    row = divide(host, "QPX")
    assert row.decision.reason is DecisionReason.CHANGED
    assert "from SPX to QPX" in row.decision.sentence
    assert not capped(host)


def test_board_lost_in_one_partition_mode_is_held() -> None:
    host = returned_host()
    assert divide(host, "SPX").decision.reason is not DecisionReason.CHANGED


def test_foreign_write_is_not_overwritten() -> None:
    host = held_host()
    host.capper.foreign.add("GPU-0")
    host.gpus[0].cap = 500_000
    host.run(5)
    row = host.row()
    assert row.decision.reason is DecisionReason.FOREIGN_WRITER
    assert host.gpus[0].cap == 500_000


def test_missing_capper_gives_advice_and_one_log_line() -> None:
    host = Host()
    host.capper.refusal = ("", "No capper answers at /run/wattspan/capper.sock.")
    host.train()
    host.run(300)
    row = host.row()
    assert row.decision.move is Move.DECLINE
    assert not row.applied
    assert len(host.logged) == 1
    assert host.tuner.accounts().capper.answers is False


@pytest.mark.slow
def test_lost_capper_means_original_limits_and_advice() -> None:
    host = held_host()
    host.capper.refusal = ("", "No capper answers.")
    host.capper.lapse()
    host.run(5)
    row = host.row()
    assert not row.applied
    assert not row.decision.caps
    host.capper.refusal = None
    host.run(HOUR, until=lambda: held(host))
    assert capped(host)


def test_no_permission_to_write_is_advice_only() -> None:
    host = Host()
    host.capper.refusal = ("no_permission", "Setting limits needs CAP_SYS_ADMIN.")
    host.train()
    host.run(120)
    assert len(host.logged) == 1
    assert not capped(host)


def test_cap_of_an_ended_job_is_released() -> None:
    host = held_host()
    (job,) = host.jobs
    job.alive = False
    host.run(15)
    row = host.row()
    assert row.state is TuningState.ENDED
    assert not capped(host)


def test_cap_of_a_job_whose_process_cannot_be_read_stays() -> None:
    host = held_host()
    host.identify = lambda pid: None  # type: ignore[method-assign]
    host.has_ended = lambda consumer: False  # type: ignore[method-assign]
    host.run(15)
    assert host.row().state is not TuningState.ENDED
    assert capped(host)


def test_returning_job_starts_with_its_certified_setting() -> None:
    host = held_host()
    (job,) = host.jobs
    first = host.row()
    job.alive = False
    host.run(15)
    host.train()
    host.run(300, until=lambda: capped(host))
    again = host.row()
    assert again.decision.move is Move.PROBE
    (was,), (now,) = first.decision.caps.values(), again.decision.caps.values()
    assert abs(was - now) <= 1000


def test_unconfigured_gpu_is_not_tuned() -> None:
    host = Host(2, settings=quick(gpus=("1",)))
    host.train(gpu=0)
    host.run(120)
    row = host.row()
    assert row.decision.reason is DecisionReason.NOT_ALLOWED
    assert "GPU-0" in row.decision.sentence


def test_stop_releases_every_lease() -> None:
    host = held_host()
    host.tuner.finish()
    assert not capped(host)
    assert host.capper.closed


def test_every_change_of_mind_is_written_down_once() -> None:
    host = held_host()
    decided = [one.decision.same_as for one in host.book.decided]
    assert len(decided) >= 3
    assert all(first != second for first, second in pairwise(decided))


@pytest.mark.exhaustive
def test_job_with_only_a_span_name_ends_capped() -> None:
    host = Host(settings=AutotuneSettings(mode="apply", job=(TunedJobSettings(span="train_step"),)))
    job = host.train()
    began = host.clock.monotonic()
    host.run(HOUR, until=lambda: held(host))
    row = host.row()
    assert row.decision.reason is DecisionReason.CERTIFIED
    assert 420_000 <= host.gpus[0].cap < 640_000
    host.run(HOUR / 6)
    took = (host.clock.monotonic() - began) / 1e9
    free = job.steps * job.step
    assert took / free - 1 <= 0.05
    assert host.gpus[0].energy / 1e6 < 0.98 * free * 640
