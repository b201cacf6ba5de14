"""A server whose setting follows its load: lowered when certified, restored at once."""

from __future__ import annotations

import pytest
from testbed.saved_state import saved
from testbed.tracked_server import JOB, TrackedServer, serve, tracking
from testbed.tuned_host import DEFAULT, Host, quick

from wattspan.model import SECOND, Consumer, DecisionReason, Knob, Move, TuningState

PERIOD = 2  # seconds, of the tracked job


def decided(host: Host) -> tuple[Move, DecisionReason]:
    row = host.row(JOB)
    return row.decision.move, row.decision.reason


@saved
def lowered(**more: int) -> tuple[Host, TrackedServer]:
    """A host with a server that holds a lower setting."""
    host = Host(settings=tracking(**more))
    server = serve(host)
    held = Move.HOLD, DecisionReason.CERTIFIED
    host.run(120, until=lambda: host.gpus[0].cap < DEFAULT and decided(host) == held)
    assert host.gpus[0].cap < DEFAULT
    return host, server


def test_setting_is_lowered_once_enough_requests_keep_the_limit() -> None:
    host, server = lowered()
    row = host.row(JOB)
    assert row.state is TuningState.HOLDING
    assert row.applied
    assert row.load.objectives[0].name == "ttft_p90"
    assert 30 <= row.load.objectives[0].requests == row.units <= len(server.latencies)
    assert row.load.objectives[0].misses == sum(one > 0.4 for one in server.latencies) == 0
    assert row.load.bin_bound / 2 < row.load.load <= row.load.bin_bound
    assert f"load {row.load.load:.1f}" in row.decision.sentence


def test_saving_is_that_of_the_energy_per_token() -> None:
    host, _ = lowered(dwell=30 * SECOND)
    host.run(60)
    row = host.row(JOB)
    assert 0.05 < row.saving < 1 - host.gpus[0].cap / 640_000 + 0.1
    assert row.saved > 0


def test_headroom_ends_at_the_load_that_was_certified() -> None:
    host, _ = lowered()
    host.run(30)
    row = host.row(JOB)
    assert row.load.headroom * row.load.load == pytest.approx(row.load.bin_bound)


def test_certified_settings_continue_after_a_restart_of_the_agent() -> None:
    host, _ = lowered()
    host.run(65)  # the evidence is stored every minute
    host.restart()
    host.book.decided.clear()
    host.run(60, until=lambda: bool((row := host.row(JOB)) and row.decision.caps))
    assert decided(host) == (Move.HOLD, DecisionReason.CERTIFIED)
    reasons = {one.decision.reason for one in host.book.decided}
    assert DecisionReason.CERTIFYING not in reasons


@pytest.mark.parametrize("restart", [False, True])
def test_change_of_the_partition_mode_voids_certified_settings(restart: bool) -> None:
    host = Host(settings=tracking())
    host.gpus[0].partition_mode = "SPX"
    serve(host)
    host.run(120, until=lambda: host.gpus[0].cap < DEFAULT and decided(host)[0] is Move.HOLD)
    host.run(65)  # the evidence is stored
    assert host.gpus[0].cap < DEFAULT
    host.gpus[0].partition_mode = "CPX"
    host.run(1)
    assert decided(host) == (Move.DECLINE, DecisionReason.CHANGED)
    assert host.gpus[0].cap == DEFAULT
    if restart:
        host.restart()
    host.book.decided.clear()
    host.run(120, until=lambda: host.gpus[0].cap < DEFAULT)
    applied = [one.decision.reason for one in host.book.decided if one.decision.caps]
    assert applied[0] is DecisionReason.CERTIFYING


def test_rise_of_the_load_restores_the_original_within_a_few_periods() -> None:
    host, server = lowered()
    server.rate *= 4
    host.run(3 * PERIOD, until=lambda: host.gpus[0].cap == DEFAULT)
    assert host.gpus[0].cap == DEFAULT


def test_silence_with_requests_in_flight_restores_the_original() -> None:
    host, server = lowered()
    server.hangs = True
    host.run(20, until=lambda: decided(host)[1] is DecisionReason.PAUSED)
    assert decided(host) == (Move.RELEASE, DecisionReason.PAUSED)
    assert host.gpus[0].cap == DEFAULT


def test_end_of_the_server_restores_the_original() -> None:
    host, server = lowered()
    server.alive = False
    host.run(20)
    row = host.row(JOB)
    assert row.state is TuningState.ENDED
    assert row.decision.reason is DecisionReason.ENDED
    assert host.gpus[0].cap == DEFAULT


def test_next_process_of_an_ended_server_is_tracked_anew() -> None:
    host, server = lowered()
    server.alive = False
    host.run(20)
    host.jobs.remove(server)
    serve(host)
    host.run(120, until=lambda: host.gpus[0].cap < DEFAULT)
    assert host.gpus[0].cap < DEFAULT


def test_stranger_on_the_gpu_of_a_tracked_server_ends_its_cap_at_once() -> None:
    host, _ = lowered()
    host.strangers.append(Consumer(9999, 1))
    host.run(2)
    assert decided(host) == (Move.RELEASE, DecisionReason.SHARED)
    assert host.gpus[0].cap == DEFAULT
    host.strangers.clear()
    host.run(120, until=lambda: host.gpus[0].cap < DEFAULT)
    assert host.gpus[0].cap < DEFAULT


def test_setting_that_another_program_overwrites_is_released() -> None:
    host, _ = lowered()
    host.capper.foreign.add(host.gpus[0].device)
    host.run(2)
    assert decided(host) == (Move.RELEASE, DecisionReason.FOREIGN_WRITER)


def test_evidence_survives_a_capper_that_did_not_answer() -> None:
    host, _ = lowered()
    low = host.gpus[0].cap
    before = host.row(JOB)
    host.capper.refusal = "", "The capper does not answer."
    host.run(5)
    host.capper.lapse()
    assert decided(host)[0] is Move.DECLINE
    host.capper.refusal = None
    held = Move.HOLD, DecisionReason.CERTIFIED
    host.run(13, until=lambda: host.gpus[0].cap == low)  # less than a second certification takes
    assert host.gpus[0].cap == low
    assert decided(host) == held
    after = host.row(JOB)
    assert after.units > before.units
    assert after.committed == before.committed


def test_setting_that_never_comes_into_force_is_released() -> None:
    host = Host(settings=tracking())
    host.capper.largest = 0  # accepts a limit, and never writes it
    serve(host)
    host.run(120, until=lambda: decided(host)[1] is DecisionReason.FOREIGN_WRITER)
    assert decided(host) == (Move.RELEASE, DecisionReason.FOREIGN_WRITER)


def test_server_that_does_not_announce_its_requests_keeps_the_original() -> None:
    host = Host(settings=tracking())
    serve(host, announces=False)
    host.run(60)
    row = host.row(JOB)
    assert decided(host) == (Move.DECLINE, DecisionReason.NO_SIGNAL)
    assert "announced" in row.decision.sentence
    assert row.state is TuningState.WAITING
    assert not any(one.decision.caps for one in host.book.decided)


def test_loss_of_announcements_restores_the_original() -> None:
    host, server = lowered()
    server.announces = False
    host.run(60, until=lambda: decided(host)[1] is DecisionReason.NO_SIGNAL)
    assert host.gpus[0].cap == DEFAULT


def test_server_that_reports_no_latency_keeps_the_original() -> None:
    host = Host(settings=tracking())
    serve(host, reports=False)
    host.run(60)
    row = host.row(JOB)
    assert decided(host) == (Move.DECLINE, DecisionReason.NO_SIGNAL)
    assert '"ttft"' in row.decision.sentence
    assert "set `ttft` of the job" in row.decision.sentence


def test_tracking_in_advice_mode_writes_no_limit() -> None:
    host = Host(settings=tracking(mode="advise"), capper=False)
    serve(host)
    host.run(60)
    row = host.row(JOB)
    assert decided(host) == (Move.DECLINE, DecisionReason.ADVICE)
    assert "track the load, now " in row.decision.sentence
    assert host.gpus[0].cap == DEFAULT


def test_tracked_server_uses_clocks_where_they_are_a_knob() -> None:
    host = Host(settings=tracking(knobs=(Knob.GPU_POWER, Knob.GPU_CLOCK)))
    host.capper.clocks = True
    serve(host)
    host.run(120, until=lambda: bool(host.capper and host.capper.clocked))
    row = host.row(JOB)
    assert row.knob is Knob.GPU_CLOCK
    assert host.capper.clocked["GPU-0"] < 1980
    assert "MHz" in row.decision.sentence


def test_knob_without_a_lower_setting_is_not_tracked() -> None:
    host = Host(settings=tracking(floor=0.95))
    serve(host)
    host.run(20)
    row = host.row(JOB)
    assert decided(host) == (Move.DECLINE, DecisionReason.NO_ROOM)
    assert "`floor`" in row.decision.sentence


def test_change_of_the_partition_mode_without_evidence_is_reported() -> None:
    host = Host(settings=tracking(floor=0.95))
    host.gpus[0].partition_mode = "SPX"
    serve(host)
    host.run(20)
    assert decided(host) == (Move.DECLINE, DecisionReason.NO_ROOM)
    host.gpus[0].partition_mode = "CPX"
    host.run(2)
    assert decided(host) == (Move.DECLINE, DecisionReason.CHANGED)
    assert host.evidence.kept == {}
    host.run(20)
    assert decided(host) == (Move.DECLINE, DecisionReason.NO_ROOM)


def test_load_of_a_server_without_a_device_is_the_number_in_flight() -> None:
    host = Host(settings=tracking(knobs=(Knob.CPU_POWER,)))
    server = serve(host)
    host.run(30)
    row = host.row(JOB)
    assert row.load.headroom is None
    assert row.load.objectives[0].requests == 0
    assert row.load.objectives[0].miss_ratio is None
    assert row.load.load == len(server.active) > 0
    assert row.decision.reason is DecisionReason.NO_DEVICE


def test_job_of_training_explores_beside_a_tracked_server() -> None:
    host = Host(2, settings=tracking(job=(*tracking().job, *quick().job)))
    serve(host)
    host.train(gpu=1)
    host.run(900, until=lambda: host.gpus[1].cap < DEFAULT and host.gpus[0].cap < DEFAULT)
    assert host.gpus[0].cap < DEFAULT
    assert host.gpus[1].cap < DEFAULT
