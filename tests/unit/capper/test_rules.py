"""The capper's arithmetic: how far a knob may be turned, whose a setting is, when a lease ends."""

from __future__ import annotations

import pytest
from testbed.capper_bench import W, entry

from wattspan.capper.leases import CapGrant, LeaseRegistry
from wattspan.capper.ownership import SettingOwner, setting_owner
from wattspan.capper.planner import CapBounds, OperatorLimits, WriteCause, cap_bounds, limit_step
from wattspan.model import SECOND, CapKey, Instant, Knob, KnobState

KEY = CapKey(Knob.GPU_POWER, "gpu0")
BOARD = KnobState(KEY, "GPU 0", 200 * W, 700 * W, 700 * W, 650 * W, 650 * W)
CLOCK = KnobState(CapKey(Knob.GPU_CLOCK, "gpu0"), "GPU 0", 210, 1980, 1980)


# -------------------------------------------------------------------------------------- bounds


def test_tuner_stays_above_the_operators_floor_and_below_the_original() -> None:
    allowed = cap_bounds(BOARD, 650 * W, OperatorLimits(floor=0.6), tuned=True)
    assert allowed == CapBounds(420 * W, 650 * W)
    assert [allowed.clamp(v * W) for v in (100, 500, 900)] == [420 * W, 500 * W, 650 * W]


def test_operator_limit_may_reach_the_hardware_minimum() -> None:
    assert cap_bounds(BOARD, 650 * W, OperatorLimits(floor=0.6), tuned=False) == CapBounds(
        200 * W, 650 * W
    )


def test_cap_never_goes_below_the_watt_floor() -> None:
    rules = OperatorLimits(floor=0.1, floor_watts=300)
    for tuned in (True, False):
        assert cap_bounds(BOARD, 650 * W, rules, tuned=tuned) == CapBounds(300 * W, 650 * W)


def test_original_below_the_floor_leaves_no_room_and_is_never_exceeded() -> None:
    allowed = cap_bounds(BOARD, 300 * W, OperatorLimits(floor=0.6), tuned=True)
    assert allowed == CapBounds(300 * W, 300 * W)


def test_floor_is_rounded_up_to_whole_watts() -> None:
    odd = KnobState(KEY, "GPU 0", 0, 333_333, 400 * W)
    allowed = cap_bounds(odd, 400 * W, OperatorLimits(floor=0.1), tuned=True)
    assert allowed.lowest == 34 * W


def test_write_without_an_original_is_rejected() -> None:
    unknown = KnobState(KEY, "GPU 0", 200 * W, 700 * W)
    assert cap_bounds(unknown, None, OperatorLimits(), tuned=True) is None


def test_clock_may_go_up_to_its_highest_and_knows_no_watts() -> None:
    rules = OperatorLimits(floor=0.5, floor_watts=300)
    assert cap_bounds(CLOCK, None, rules, tuned=True) == CapBounds(990, 1980)


def test_way_down_is_cut_into_steps_and_the_way_up_is_not() -> None:
    rules = OperatorLimits(largest_step=0.25)
    assert limit_step(BOARD, 700 * W, 300 * W, rules) == 525 * W
    assert limit_step(BOARD, 525 * W, 300 * W, rules) == 350 * W
    assert limit_step(BOARD, 300 * W, 650 * W, rules) == 650 * W


# ------------------------------------------------------------------------------- whose it is


@pytest.mark.parametrize(
    ("fields", "stands", "whose"),
    [
        ({}, 500 * W, SettingOwner.OURS),
        ({}, 650 * W, SettingOwner.ORIGINAL),
        ({}, 400 * W, SettingOwner.FOREIGN),
        ({}, 499_999, SettingOwner.FOREIGN),  # after the readback it equals the original
        ({}, None, SettingOwner.UNKNOWN),
        ({"written": False}, 500 * W, SettingOwner.OURS),
        ({"written": False}, 499_875, SettingOwner.OURS),  # the device rounds down to its unit
        ({"written": False}, 500_125, SettingOwner.FOREIGN),
        ({"written": False}, 650 * W, SettingOwner.ORIGINAL),  # the write never arrived
        ({"written": False, "before": 550 * W}, 550 * W, SettingOwner.OURS),
        ({"before": None}, 550 * W, SettingOwner.FOREIGN),
        ({"original": 649_999}, 649_500, SettingOwner.ORIGINAL),
    ],
)
def test_limit_owner_is_classified(
    fields: dict[str, object], stands: int | None, whose: SettingOwner
) -> None:
    state = KnobState(KEY, "GPU 0", requested=stands)
    assert setting_owner(entry(**fields), state) is whose


def test_unreadable_clock_lock_is_assumed_ours() -> None:
    locked = entry(knob=Knob.GPU_CLOCK, original=None, value=1410)
    assert setting_owner(locked, CLOCK) is SettingOwner.OURS


# --------------------------------------------------------------------------------------- leases

OTHER = CapKey(Knob.GPU_POWER, "gpu1")


def grant(job: str, *keys: CapKey) -> CapGrant:
    caps = dict.fromkeys(keys, 500 * W)
    return CapGrant(1, WriteCause(job, "why"), Instant(0, 0), caps, caps)


def test_unrenewed_lease_expires_as_a_whole() -> None:
    leases = LeaseRegistry(10 * SECOND)
    leases.grant(grant("a", KEY), length=0, now=0)
    leases.grant(grant("b", OTHER), length=0, now=4 * SECOND)
    leases.renew(1, 9 * SECOND)
    assert leases.expire(18 * SECOND) == {}
    assert [cause.job for cause in leases.expire(19 * SECOND).values()] == ["a", "b"]
    assert leases.limits() == {}


def test_expired_lease_cannot_be_renewed() -> None:
    leases = LeaseRegistry(10 * SECOND)
    leases.grant(grant("a", KEY), length=0, now=0)
    leases.expire(10 * SECOND)
    leases.renew(1, 10 * SECOND)
    assert leases.holding(KEY) is None


def test_lease_is_never_longer_than_the_configured_one() -> None:
    leases = LeaseRegistry(10 * SECOND)
    leases.grant(grant("a", KEY), length=3600 * SECOND, now=0)
    assert leases.next_expiry == 10 * SECOND
    leases.grant(grant("a", KEY), length=2 * SECOND, now=0)
    assert leases.next_expiry == 2 * SECOND


def test_release_of_one_job_leaves_the_other_its_limits() -> None:
    leases = LeaseRegistry(10 * SECOND)
    leases.grant(grant("a", KEY), length=0, now=0)
    leases.grant(grant("b", OTHER), length=0, now=0)
    assert [cause.job for cause in leases.release(1, "a").values()] == ["a"]
    assert leases.limits().keys() == {OTHER}
    assert leases.release(2) == {}


def test_foreign_knob_is_dropped_from_every_lease() -> None:
    leases = LeaseRegistry(10 * SECOND)
    leases.grant(grant("a", KEY, OTHER), length=0, now=0)
    leases.drop([KEY])
    assert leases.limits().keys() == {OTHER}
    assert leases.grants(1).keys() == {"a"}
