"""Caps in force on a job's devices, as the tuner's thread reads them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from testbed.tuning_plant import with_fields

from wattspan.model import (
    SECOND,
    CapKey,
    CapRow,
    HwType,
    Instant,
    Knob,
    KnobState,
    Microjoules,
    Move,
    Snapshot,
)
from wattspan.spans.values import IntervalEnergy
from wattspan.tuning.decisions.blocks import set_level
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import (
    EnergyPoint,
    KnobRange,
    Observation,
    TunerPolicy,
    WorkUnit,
)
from wattspan.tuning.host_view import MAX_STALL, DeviceSampler, DeviceUsers, HostView

ORIGINAL, CAP = 700_000, 600_000
BOARD = KnobRange("gpu:0", ORIGINAL, 200_000)
KEY = CapKey(Knob.GPU_POWER, "gpu:0")
TURN = SECOND // 2


def host(now: int, requested: int) -> HostView:
    at = Instant(now, now)
    row = CapRow(KnobState(KEY, "board", requested=requested))
    return HostView(at, Snapshot(at, 0, "host"), {}, None, None, DeviceUsers(), {KEY: row})


def metered(now: int) -> HostView:
    """A host whose boards' energy is known up to ``now``: a square of the time."""
    energies = SimpleNamespace(settled=lambda: now)

    def device(_: str, start: int, end: int) -> IntervalEnergy:
        seconds = start / SECOND, end / SECOND
        energy = Microjoules(round(100 * (seconds[1] ** 2 - seconds[0] ** 2)))
        return IntervalEnergy({HwType.GPU: energy}, {}, end - start)

    return replace(host(now, ORIGINAL), energies=energies, devices=SimpleNamespace(device=device))


def sampler() -> DeviceSampler:
    return DeviceSampler(Knob.GPU_POWER, (BOARD,), 0, 0)


def test_cap_is_in_force_from_its_readback_step() -> None:
    seen = sampler()
    for now, requested in ((0, ORIGINAL), (TURN, CAP), (2 * TURN, CAP)):
        seen.read_caps(host(now, requested))
    assert (seen.in_force, seen.changed) == ({"gpu:0": CAP}, TURN)
    seen.read_caps(host(3 * TURN, ORIGINAL))
    assert (seen.in_force, seen.changed) == ({}, 3 * TURN)


def test_cap_missing_after_a_stall_counts_as_missing_since_before() -> None:
    seen = sampler()
    seen.read_caps(host(0, CAP))
    seen.read_caps(host(TURN, CAP))
    seen.read_caps(host(TURN + MAX_STALL + 1, ORIGINAL))
    assert (seen.in_force, seen.changed) == ({}, TURN)


def test_cap_in_force_after_a_stall_was_in_force_throughout() -> None:
    seen = sampler()
    seen.read_caps(host(0, CAP))
    seen.read_caps(host(10 * MAX_STALL, CAP))
    assert (seen.in_force, seen.changed) == ({"gpu:0": CAP}, 0)


def test_work_after_an_expired_lease_is_not_charged_to_the_cap() -> None:
    """The agent was stopped for 20 s: its cap was restored while the job continued."""
    lasts, last, end = SECOND // 10, 40 * SECOND, 60 * SECOND
    policy = TunerPolicy(block_units=5, block_time=SECOND, settle_units=0, settle_time=0)
    state = begin(policy, (BOARD,), now=0, remembered=None)
    tape = set_level(state.samples, CAP, 0)
    plan = state.search.plan._replace(level=CAP, blocks=100)
    state = with_fields(state, samples=tape, plan=plan)
    seen = sampler()
    seen.read_caps(host(last, CAP))
    seen.read_caps(host(end, ORIGINAL))
    units = tuple(WorkUnit(at, at + lasts, 1) for at in range(0, end, lasts))
    energy = tuple(EnergyPoint(at, at // 1000) for at in range(0, end + 1, lasts))
    state, decision = step(
        state, Observation(end, units, energy, in_force=seen.in_force, since=seen.changed)
    )
    assert 0 < state.account.levels[CAP].metered <= last
    assert decision.move is not Move.RELEASE, "the cap is requested again"


def test_energy_has_one_point_a_step_at_a_held_setting() -> None:
    seen = sampler()
    assert seen.read_energy(metered(SECOND)) == (EnergyPoint(SECOND, 100),)
    assert seen.read_energy(metered(2 * SECOND)) == (EnergyPoint(2 * SECOND, 400),)
    assert seen.read_energy(metered(2 * SECOND + 1)) == ()


def test_energy_has_points_of_a_tenth_of_a_second_while_settings_are_compared() -> None:
    seen = sampler()
    points = seen.read_energy(metered(SECOND // 2), comparing=True)
    assert [(one.at * 10 // SECOND, one.energy) for one in points] == [
        (1, 1), (2, 4), (3, 9), (4, 16), (5, 25),
    ]  # fmt: skip
    assert len(seen.read_energy(metered(60 * SECOND), comparing=True)) == 64


def test_energy_is_read_of_ten_minutes_at_most() -> None:
    (point,) = sampler().read_energy(metered(601 * SECOND))
    assert point == EnergyPoint(601 * SECOND, 100 * (601**2 - 1))
