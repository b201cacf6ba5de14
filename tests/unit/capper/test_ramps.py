"""Ramps: the host's power limits change no faster than declared, except after a fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.capper_bench import Bench, W

from wattspan.capper.planner import ImposedLimits, OperatorLimits
from wattspan.model import SECOND, CapKey, Knob
from wattspan.sharing.power_budget import RampAllowance, ramp_parts

RAMP = 40 * W
A, B, C = (CapKey(Knob.GPU_POWER, f"gpu:{letter}") for letter in "abc")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, limits=OperatorLimits(0.0, 0, 1.0, ramp=RAMP))


def test_limit_goes_down_within_the_ramp(bench: Bench) -> None:
    bench.hold(550 * W)
    assert bench.stands[0] == 610 * W
    bench.turn(0.5)
    assert bench.stands[0] == 590 * W
    bench.turn(5)  # nothing is made up for
    assert bench.stands[0] == 550 * W


def test_turns_that_were_missed_are_not_made_up_for(bench: Bench) -> None:
    bench.hold(300 * W)
    bench.clock.advance(5)
    bench.manager.renew(1)
    bench.turn()
    assert bench.stands[0] == 570 * W


def test_devices_share_the_ramp_of_their_host(bench: Bench) -> None:
    bench.hold(550 * W, 0, 1)
    assert bench.stands == [630 * W, 630 * W]


def test_limits_that_go_down_leave_the_ramp_upwards(bench: Bench) -> None:
    bench.hold(610 * W, 0)
    bench.turn(1)
    bench.hold(610 * W, 1, holder=2, job="other")
    bench.hold(640 * W, 0)
    assert bench.stands == [640 * W, 610 * W]


def test_raised_limit_goes_up_within_the_ramp(bench: Bench) -> None:
    bench.hold(610 * W)
    bench.turn(1)
    bench.manager.impose(ImposedLimits(fixed={bench.key(): 500 * W}))
    for expected in (570, 530, 500):
        bench.turn(1)
        assert bench.stands[0] == expected * W
        bench.manager.renew(1)
    bench.manager.impose(ImposedLimits(fixed={bench.key(): 600 * W}))
    for expected in (540, 580, 600):
        bench.turn(1)
        assert bench.stands[0] == expected * W
        bench.manager.renew(1)


def test_lifted_limit_goes_up_to_the_original_within_the_ramp(bench: Bench) -> None:
    bench.manager.impose(ImposedLimits(fixed={bench.key(): 560 * W}))
    for expected in (610, 570, 560):
        bench.turn(1)
        assert bench.stands[0] == expected * W
    bench.manager.impose(ImposedLimits())
    bench.turn(1)
    assert bench.stands[0] == 600 * W
    assert [event.why for event in bench.events][-1].startswith("towards its original limit")
    bench.turn(1)
    assert bench.on_disk
    bench.turn(1)
    assert bench.stands[0] == 650 * W
    assert not bench.on_disk


def held(bench: Bench) -> None:
    """550 W on the first board, well below what one step can make up for."""
    bench.hold(450 * W)
    for _ in range(6):
        bench.turn(1)
        bench.manager.renew(1)
    assert bench.stands[0] == 450 * W


def test_expired_lease_is_restored_at_once(bench: Bench) -> None:
    held(bench)
    bench.turn(11)
    assert bench.stands[0] == 650 * W


def test_lost_tuner_is_restored_at_once(bench: Bench) -> None:
    held(bench)
    bench.manager.release(1)
    assert bench.stands[0] == 650 * W


def test_ending_capper_restores_at_once(bench: Bench) -> None:
    held(bench)
    assert bench.manager.stop() == ()
    assert bench.stands[0] == 650 * W


def test_next_capper_restores_at_once(bench: Bench) -> None:
    held(bench)
    bench.crash()
    assert bench.stands[0] == 650 * W


def test_restore_that_fails_at_first_is_not_ramped_later(bench: Bench) -> None:
    held(bench)
    bench.board().inert = True
    bench.manager.release(1)
    bench.board().inert = False
    bench.turn(60)
    assert bench.stands[0] == 650 * W


def test_cap_after_a_fault_is_ramped_again(bench: Bench) -> None:
    held(bench)
    bench.manager.release(1)
    bench.turn(1)
    bench.hold(500 * W)
    assert bench.stands[0] == 610 * W


def test_clock_is_locked_at_once(tmp_path: Path) -> None:
    limits = OperatorLimits(0.0, 0, 1.0, ramp=1 * W)
    bench = Bench(tmp_path, knob=Knob.GPU_CLOCK, limits=limits)
    bench.hold(300 * W)
    assert bench.stands[0] == 300 * W


def test_ramp_that_is_configured_away_applies_no_longer(bench: Bench) -> None:
    bench.hold(450 * W)
    bench.manager.reconfigure(OperatorLimits(0.0, 0, 1.0))
    bench.turn(1)
    assert bench.stands[0] == 450 * W


def test_allowance_is_a_second_of_the_rate_at_most() -> None:
    allowance = RampAllowance.full(RAMP, 0).used(-30 * W).used(50 * W)
    assert allowance == (0, 0, 10 * W)
    assert allowance.advanced(RAMP, SECOND // 2) == (SECOND // 2, 20 * W, 30 * W)
    assert allowance.advanced(RAMP, 9 * SECOND) == (9 * SECOND, 40 * W, 40 * W)
    assert allowance.advanced(RAMP, -SECOND) == (-SECOND, 0, 10 * W)


def test_parts_are_in_proportion_and_in_whole_watts() -> None:
    assert ramp_parts({A: 100 * W, B: 50 * W}, 30 * W) == {A: 20 * W, B: 10 * W}
    assert ramp_parts({A: 100 * W, B: 100 * W}, 5 * W) == {A: 3 * W, B: 2 * W}


def test_ramp_below_a_watt_for_each_device_moves_one_of_them() -> None:
    assert ramp_parts({A: 10 * W, B: 9 * W, C: 9 * W}, 1 * W) == {A: 1 * W, B: 0, C: 0}


def test_fraction_of_a_watt_is_a_complete_change_or_none() -> None:
    assert ramp_parts({A: 1_500}, 1 * W) == {A: 1 * W}
    assert ramp_parts({A: 500}, 1 * W) == {A: 500}
    assert ramp_parts({}, 1 * W) == {}
