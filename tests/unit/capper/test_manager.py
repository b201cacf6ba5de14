"""Limit of a device with several holders and with failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.capper_bench import Bench, W

from wattspan.capper.planner import ImposedLimits, OperatorLimits
from wattspan.capper.protocol import RefusalReason
from wattspan.model import CapKey, Knob, Trouble
from wattspan.ports import ActuatorError, CapsError
from wattspan.util.unix_sockets import PeerCredentials


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def refusal(bench: Bench, value: int, *numbers: int, holder: int = 1, job: str = "job") -> str:
    with pytest.raises(CapsError) as refused:
        bench.hold(value, *numbers, holder=holder, job=job)
    return refused.value.refusal


# ---------------------------------------------------------------------------------------- hold


def test_lease_is_applied_and_journaled(bench: Bench) -> None:
    bench.hold(500 * W)
    assert bench.stands == [500 * W, 650 * W]
    (told,) = bench.on_disk.values()
    assert (told["original"], told["value"], told["written"]) == (650 * W, 500 * W, True)
    row = bench.manager.rows()[0]
    assert (row.holder, row.wanted, row.original, row.why) == ("job", 500 * W, 650 * W, "why")
    assert row.expires == bench.clock.monotonic() + 10 * 10**9


def test_write_takes_three_reads_of_its_device(bench: Bench) -> None:
    bench.actuator.reads = 0
    bench.hold(500 * W)
    assert bench.actuator.reads == 3
    bench.manager.release(1)
    assert bench.actuator.reads == 6
    assert bench.actuator.written == [("gpu0", 500 * W), ("gpu0", 650 * W)]


def test_device_missing_from_a_new_lease_is_restored(bench: Bench) -> None:
    bench.hold(500 * W, 0, 1)
    bench.hold(550 * W, 1)
    assert bench.stands == [650 * W, 550 * W]


def test_original_above_a_lowered_maximum_is_restored_in_two_parts(bench: Bench) -> None:
    board = bench.board()

    def check(key: CapKey, value: int | None) -> None:
        if (value or 0) > board.maximum:
            raise ActuatorError("The range is 200 W to 550 W.", Trouble.MALFORMED)

    bench.actuator.watch = check
    bench.hold(500 * W)
    board.maximum = 550 * W
    bench.manager.release(1)
    assert board.stands == 550 * W
    bench.start()  # after a kill
    assert [error.refusal for error in bench.manager.stop()] == [RefusalReason.NOT_HONOURED]
    assert board.stands == 550 * W
    board.maximum = 700 * W
    assert bench.manager.stop() == ()
    assert (board.stands, bench.on_disk) == (650 * W, {})


def test_empty_lease_restores_every_device(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.manager.hold(1, "job", {}, "why")
    assert bench.stands == [650 * W, 650 * W]
    assert bench.on_disk == {}


def test_cap_at_or_above_the_original_is_not_written(bench: Bench) -> None:
    bench.hold(700 * W)
    assert bench.actuator.written == []
    assert bench.on_disk == {}


def test_way_down_takes_several_askings(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=OperatorLimits(0.3, 0, 0.2))
    for stands in (510, 370, 300, 300):
        bench.hold(300 * W)
        assert bench.board().stands == stands * W
    assert bench.manager.rows()[0].wanted == 300 * W


def test_device_has_one_lease_holder(bench: Bench) -> None:
    bench.hold(500 * W)
    assert refusal(bench, 550 * W, holder=2, job="other") == RefusalReason.HELD
    bench.manager.release(1)
    bench.hold(550 * W, holder=2, job="other")
    assert bench.stands[0] == 550 * W


def test_hold_that_cannot_be_had_whole_is_not_had_at_all(bench: Bench) -> None:
    bench.board(1).locked = True
    assert refusal(bench, 500 * W, 0, 1) == RefusalReason.LOCKED
    assert bench.stands == [650 * W, 650 * W]
    assert bench.on_disk == {}


@pytest.mark.parametrize(
    ("fault", "word"),
    [(Trouble.RETRY, RefusalReason.LOST), (Trouble.DENIED, RefusalReason.NO_PERMISSION)],
)
def test_device_failure_is_returned_with_its_message(
    bench: Bench, fault: Trouble, word: RefusalReason
) -> None:
    bench.board().fault = fault
    assert refusal(bench, 500 * W) == word
    assert bench.manager.rows()[0].usable is False


def test_refusing_device_is_retried_after_backoff(bench: Bench) -> None:
    bench.board().locked = True
    seen: list[int | None] = []
    bench.actuator.watch = lambda key, value: seen.append(value)
    for _ in range(20):
        assert refusal(bench, 500 * W) == RefusalReason.LOCKED
    assert len(seen) == 1
    bench.clock.advance(60)
    assert bench.manager.rows()[0].usable is True  # unknown result, so that the write is retried
    assert refusal(bench, 500 * W) == RefusalReason.LOCKED
    assert len(seen) == 2
    assert bench.deeds().count("fail") == 1


def test_unchanged_device_is_reported_as_not_enforcing(bench: Bench) -> None:
    bench.board().inert = True
    assert refusal(bench, 500 * W) == RefusalReason.NOT_HONOURED
    assert bench.on_disk == {}


def test_write_that_fails_and_arrives_is_known_to_have_arrived(bench: Bench) -> None:
    bench.board().late = True
    bench.hold(500 * W)
    bench.manager.release(1)
    assert bench.stands[0] == 650 * W
    assert bench.on_disk == {}


def test_device_that_rounds_down_is_given_back(bench: Bench) -> None:
    bench.board().unit = 125
    bench.hold(500_100)
    assert bench.stands[0] == 500_000
    bench.turn(1)
    assert bench.actuator.written == [("gpu0", 500_100)]  # and not at each turn
    assert bench.manager.rows()[0].foreign is False
    bench.manager.release(1)
    assert bench.stands[0] == 650 * W


def test_unknown_devices_and_senseless_caps_are_refused(bench: Bench) -> None:
    assert refusal(bench, 500 * W, 7) == RefusalReason.UNKNOWN_DEVICE
    assert refusal(bench, 0) == RefusalReason.MALFORMED
    assert bench.actuator.written == []


def test_only_devices_that_are_named_may_be_tuned(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tunable=("1",))
    assert refusal(bench, 500 * W, 0) == RefusalReason.NOT_ALLOWED
    bench.hold(500 * W, 1)
    assert bench.stands == [650 * W, 500 * W]


def test_cap_that_cannot_be_journaled_is_not_applied(bench: Bench) -> None:
    bench.journal.full = True
    assert refusal(bench, 500 * W) == RefusalReason.NO_JOURNAL
    assert bench.actuator.written == []


def test_full_disk_does_not_prevent_restoring(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.journal.full = True
    assert refusal(bench, 450 * W) == RefusalReason.NO_JOURNAL
    assert bench.stands[0] == 650 * W


def test_lease_on_slow_devices_responds_before_completion(bench: Bench) -> None:
    bench.actuator.after = lambda key: bench.clock.advance(1) and None
    bench.hold(500 * W, 0, 1)
    assert bench.stands == [500 * W, 650 * W]
    bench.turn()
    assert bench.stands == [500 * W, 500 * W]


# ------------------------------------------------------------------------------- leases and ends


def test_cap_lapses_with_its_lease(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.turn(9.9)
    assert bench.stands[0] == 500 * W
    bench.turn(0.1)
    assert bench.stands[0] == 650 * W
    assert bench.on_disk == {}


def test_renewed_cap_stays_in_force(bench: Bench) -> None:
    bench.hold(500 * W)
    for _ in range(5):
        bench.manager.renew(1)
        bench.turn(9)
    assert bench.stands[0] == 500 * W


def test_crash_recovery_never_raises_an_imposed_limit(bench: Bench) -> None:
    imposed = ImposedLimits(fixed={bench.key(): 500 * W})
    bench.manager.impose(imposed)
    bench.turn()
    bench.start()
    bench.manager.impose(imposed)
    bench.actuator.written.clear()
    bench.turn()
    assert bench.stands[0] == 500 * W
    assert bench.actuator.written == []


def test_lost_device_is_restored_on_return(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().fault = Trouble.RETRY
    bench.manager.release(1)
    assert "gpu0" in bench.on_disk
    bench.board().fault = None
    bench.turn(60)
    assert bench.stands[0] == 650 * W
    assert bench.on_disk == {}


def test_restore_reports_unrestored_devices(bench: Bench) -> None:
    bench.hold(500 * W, 0, 1)
    bench.board(1).fault = Trouble.RETRY
    (trouble,) = bench.manager.restore()
    assert trouble.device == "gpu1"
    assert bench.stands[0] == 650 * W
    assert set(bench.on_disk) == {"gpu1"}


def test_audit_log_has_holder_limit_and_end_reason(bench: Bench) -> None:
    def held() -> None:
        bench.manager.hold(
            1, "job", {bench.key(): 500 * W}, "3 % slower", peer=PeerCredentials(42, 1000)
        )

    held()
    bench.turn(10)
    held()
    bench.manager.release(1, why="its holder has gone")
    held()
    bench.manager.restore()
    told = [(str(e.deed), e.old, e.new, e.why, e.job) for e in bench.events]
    down, up = (650 * W, 500 * W), (500 * W, 650 * W)
    assert told == [
        ("write", *down, "3 % slower", "job"),
        ("restore", *up, "its lease lapsed", "job"),
        ("write", *down, "3 % slower", "job"),
        ("restore", *up, "its holder has gone", "job"),
        ("write", *down, "3 % slower", "job"),
        ("restore", *up, "everything is given back", ""),
    ]
    assert (bench.events[0].pid, bench.events[0].uid) == (42, 1000)
    assert (bench.events[3].pid, bench.events[3].uid) == (42, 1000)


# ------------------------------------------------------------------------------ foreign writers


def test_foreign_value_is_adopted_and_its_knob_left_alone(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().stands = 333 * W
    bench.turn(1)
    row = bench.manager.rows()[0]
    assert (row.foreign, row.holder) == (True, "")
    assert refusal(bench, 450 * W) == RefusalReason.FOREIGN
    assert bench.manager.restore() == ()
    assert bench.stands[0] == 333 * W


def test_frozen_knob_is_frozen_for_the_next_capper_too(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().stands = 333 * W
    bench.turn(1)
    bench.crash()
    assert refusal(bench, 300 * W) == RefusalReason.FOREIGN
    assert bench.stands[0] == 333 * W


def test_foreign_write_during_downtime_is_kept(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().stands = 333 * W
    bench.crash()
    assert bench.stands[0] == 333 * W
    assert bench.manager.rows()[0].foreign is True


def test_concurrent_foreign_write_is_kept(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.journal.meanwhile = lambda: setattr(bench.board(), "stands", 333 * W)
    assert refusal(bench, 450 * W) == RefusalReason.FOREIGN
    assert bench.stands[0] == 333 * W


def test_externally_restored_original_is_confirmed_after_a_minute(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().stands = 650 * W
    bench.turn(1)
    assert bench.manager.rows()[0].foreign is True
    bench.turn(59)
    assert refusal(bench, 500 * W) == RefusalReason.FOREIGN
    bench.turn(2)
    bench.hold(500 * W)
    assert bench.stands[0] == 500 * W


def test_foreign_value_stays_foreign_over_time(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().stands = 333 * W
    for _ in range(10):
        bench.turn(3600)
        assert bench.manager.rows()[0].foreign is True
    assert refusal(bench, 300 * W) == RefusalReason.FOREIGN


def test_each_time_somebody_interferes_calm_must_last_longer(bench: Bench) -> None:
    for calm in (60, 120, 240):
        bench.hold(500 * W)
        bench.board().stands = 650 * W
        bench.turn(1)
        bench.turn(calm - 1)
        assert bench.manager.rows()[0].foreign is True
        bench.turn(1)
        assert bench.manager.rows()[0].foreign is False


def test_driver_that_was_reloaded_leaves_its_default_as_the_original(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().stands = 700 * W
    bench.turn(1)
    bench.turn(60)
    bench.hold(500 * W)
    bench.manager.release(1)
    assert bench.stands[0] == 700 * W


def test_root_accepts_a_foreign_limit(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().stands = 600 * W
    bench.turn(1)
    assert bench.manager.accept() == 1
    bench.hold(450 * W)
    bench.manager.release(1)
    assert bench.stands[0] == 600 * W


# ------------------------------------------------------------------------- fixed caps and budget


def test_minimum_of_tuner_operator_and_budget_is_applied(bench: Bench) -> None:
    key = bench.key()
    bench.hold(550 * W)
    for imposed, stands, holder in (
        (ImposedLimits(fixed={key: 500 * W}), 500, "job"),
        (ImposedLimits(shares={key: 480 * W}, limit=2000 * W), 480, "job"),
        (ImposedLimits(fixed={key: 600 * W}), 550, "job"),
    ):
        bench.manager.impose(imposed)
        bench.turn()
        assert bench.stands[0] == stands * W
        assert bench.manager.rows()[0].holder == holder


def test_imposed_limit_outlives_leases(bench: Bench) -> None:
    bench.manager.impose(ImposedLimits(fixed={bench.key(): 500 * W}))
    bench.hold(450 * W)
    bench.turn(11)
    assert bench.stands[0] == 500 * W
    assert bench.manager.rows()[0].holder == "operator"


def test_limit_rises_only_after_its_power_is_released(bench: Bench) -> None:
    one, two = bench.key(0), bench.key(1)
    bench.manager.impose(ImposedLimits(shares={one: 600 * W, two: 300 * W}, limit=900 * W))
    bench.turn()
    assert bench.stands == [600 * W, 300 * W]
    bench.board(0).fault = Trouble.RETRY
    bench.manager.impose(ImposedLimits(shares={one: 300 * W, two: 600 * W}, limit=900 * W))
    bench.turn()
    assert bench.stands == [600 * W, 300 * W]
    bench.board(0).fault = None
    bench.turn(5)
    assert bench.stands == [300 * W, 600 * W]


def test_unenforced_device_releases_no_power(bench: Bench) -> None:
    one, two = bench.key(0), bench.key(1)
    bench.manager.impose(ImposedLimits(shares={one: 600 * W, two: 300 * W}, limit=900 * W))
    bench.turn()
    bench.board(0).obeys = 600 * W
    bench.manager.impose(ImposedLimits(shares={one: 300 * W, two: 600 * W}, limit=900 * W))
    bench.turn()
    assert bench.stands == [300 * W, 300 * W]
    bench.board(0).obeys = None
    bench.turn(1)
    assert bench.stands == [300 * W, 600 * W]


def test_cap_that_is_shown_and_not_obeyed_is_taken_back(bench: Bench) -> None:
    bench.hold(500 * W)
    bench.board().obeys = 650 * W
    bench.turn(1)
    assert bench.stands[0] == 500 * W
    bench.manager.renew(1)
    bench.turn(6)
    assert bench.stands[0] == 650 * W
    row = bench.manager.rows()[0]
    assert row.usable is False
    assert "the cap has no effect" in row.trouble


def test_restore_lifts_imposed_limits(bench: Bench) -> None:
    bench.manager.impose(ImposedLimits(fixed={bench.key(): 500 * W}))
    bench.turn()
    assert bench.manager.restore() == ()
    bench.turn(1)
    assert bench.stands[0] == 650 * W


def test_requested_restore_stops_further_writes(bench: Bench) -> None:
    bench.manager.restore()
    assert refusal(bench, 500 * W) == RefusalReason.NOT_ALLOWED
    bench.manager.hold(1, "job", {}, "nothing is always had")
    assert bench.actuator.written == []


def test_only_knobs_that_are_named_may_be_tuned(tmp_path: Path) -> None:
    bench = Bench(tmp_path, knobs=(Knob.CPU_POWER,))
    assert refusal(bench, 500 * W) == RefusalReason.NOT_ALLOWED


# --------------------------------------------------------------------------------------- clocks


def test_locked_clock_without_original_is_reset(tmp_path: Path) -> None:
    bench = Bench(tmp_path, knob=Knob.GPU_CLOCK, limits=OperatorLimits(0.3, 0, 1.0))
    board = bench.board()
    board.minimum, board.default, board.maximum, board.stands = 210, 1980, 1980, 1980
    bench.start()
    bench.hold(1410)
    assert board.stands == 1410
    assert bench.on_disk["gpu0"]["original"] is None
    bench.crash()
    assert bench.actuator.written == [("gpu0", 1410), ("gpu0", None)]
    assert board.stands == 1980
    assert bench.on_disk == {}
