"""Several ranks make one step, and waiting ranks may be slower."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import pytest

from wattspan.model import SECOND
from wattspan.tuning.decisions.ranks import (
    SLACK_CHANGE_STEPS,
    STEPS,
    Lockstep,
    RankWaits,
    SynchronousStep,
    propose_rank_settings,
    remaining_slack,
    slack_changed,
)
from wattspan.tuning.decisions.values import KnobRange, WorkUnit

MS = SECOND // 1000


def units(rank: int, steps: range, compute: int | None = None, shift: int = 0) -> list[WorkUnit]:
    """A step of 90 ms each 100 ms; a rank may be some time behind."""
    return [
        WorkUnit(step * 100 * MS + shift, step * 100 * MS + 90 * MS + shift, 8, rank, compute)
        for step in steps
    ]


# --------------------------------------------------------------------------------------- steps


def test_step_is_as_long_as_the_slowest_rank_and_does_the_work_of_all() -> None:
    slow = WorkUnit(5 * MS, 95 * MS, 8, rank=1, compute=70 * MS)
    _, steps = Lockstep().add([WorkUnit(0, 90 * MS, 8, rank=0, compute=50 * MS), slow])
    assert steps == (SynchronousStep(0, 95 * MS, 16, {0: 50 * MS, 1: 70 * MS}),)
    assert steps[0].unit == WorkUnit(0, 95 * MS, 16)


def test_step_needs_units() -> None:
    assert Lockstep().add([]) == (Lockstep(), ())


def test_single_rank_makes_its_own_steps() -> None:
    _, steps = Lockstep().add(units(0, range(3), compute=50 * MS))
    assert [step.unit for step in steps] == [
        unit._replace(compute=None) for unit in units(0, range(3))
    ]
    assert not any(step.compute for step in steps)


def test_ranks_may_be_reported_in_sequence() -> None:
    both, steps = Lockstep().add([*units(0, range(1)), *units(1, range(1))])
    assert len(steps) == 1
    waits, steps = both.add(units(0, range(1, 51)))
    assert steps == ()
    done, steps = waits.add(units(1, range(1, 51), shift=3 * MS))
    assert len(steps) == 50
    assert all(step.end - step.start == 93 * MS for step in steps)
    assert all(not queue for queue in done.queues.values())


def test_steps_never_overlap_though_ranks_run_ahead() -> None:
    ahead = [WorkUnit(step * 100 * MS, step * 100 * MS + 98 * MS, 1, 0) for step in range(5)]
    behind = [
        WorkUnit(step * 100 * MS + 20 * MS, step * 100 * MS + 118 * MS, 1, 1) for step in range(5)
    ]
    _, steps = Lockstep().add([*ahead, *behind])
    assert len(steps) == 5
    assert all(first.end <= second.start for first, second in pairwise(steps))
    assert steps[-1].end - steps[0].start == 518 * MS


@pytest.mark.parametrize("lost", [0, 7, 19])
@pytest.mark.parametrize("shift", [2, -9], ids=["behind", "ahead"])
def test_step_with_a_lost_unit_is_omitted(lost: int, shift: int) -> None:
    """A rank that is ahead begins its next step before the other one ends this."""
    first = [WorkUnit(step * 100 * MS, step * 100 * MS + 98 * MS, 1, 0) for step in range(21)]
    second = [unit._replace(rank=1, start=unit.start + shift * MS) for unit in first]
    del second[lost]
    gathered, steps = Lockstep().add([*first[:20], *second[:19]])
    _, more = gathered.add([*first[20:], *second[19:]])
    whole = [round(step.end / (100 * MS)) - 1 for step in (*steps, *more)]
    assert whole == [number for number in range(21) if number != lost]


def test_missing_rank_is_waited_for_within_a_bound() -> None:
    both, steps = Lockstep().add([*units(0, range(10)), *units(1, range(10))])
    assert len(steps) == 10
    waits, steps = both.add(units(0, range(10, 70)))
    assert steps == ()
    alone, steps = waits.add(units(0, range(70, 80)))
    assert [step.work for step in steps] == [8.0] * 70
    assert set(alone.queues) == {0}
    _, steps = alone.add([*units(0, range(80, 90)), *units(1, range(80, 90))])
    assert [step.work for step in steps] == [16.0] * 10


def test_stored_units_of_a_rank_are_bounded() -> None:
    lockstep, _ = Lockstep().add([*units(0, range(1)), *units(1, range(1))])
    most = 0
    for turn in range(1, 500):
        lockstep, _ = lockstep.add(units(0, range(turn, turn + 1)))
        most = max(most, *(len(queue) for queue in lockstep.queues.values()))
    assert most <= 64


def test_partial_compute_spans_give_no_slack() -> None:
    _, steps = Lockstep().add([*units(0, range(1), compute=50 * MS), *units(1, range(1))])
    assert steps[0].compute == {}


# --------------------------------------------------------------------------------------- slack


def waited(
    computes: Mapping[int, float], steps: int = STEPS, noise: float = 0.0, seed: int = 1
) -> RankWaits:
    """Ranks that compute so many parts of a step of 100 ms on average."""
    chance = random.Random(seed)
    waiting = RankWaits()
    for number in range(steps):
        compute = {
            rank: round(part * (1 + noise * chance.gauss()) * 100 * MS)
            for rank, part in computes.items()
        }
        waiting = waiting.add(
            SynchronousStep(number * 100 * MS, (number + 1) * 100 * MS, 1, compute)
        )
    return waiting


def test_slack_is_the_wait_for_the_critical_rank() -> None:
    waiting = waited({0: 0.9, 1: 0.7, 2: 0.85})
    assert waiting.critical == 0
    assert waiting.slack(0) == 0
    assert waiting.slack(1) == pytest.approx(0.2)
    assert waiting.slack(2) == pytest.approx(0.05)


def test_critical_rank_is_unknown_without_steps() -> None:
    assert RankWaits().critical is None


def test_alternating_slowest_ranks_have_no_slack() -> None:
    """Eight equal ranks with 5 % of noise: in every step somebody waits 7 % for the slowest."""
    waiting = waited(dict.fromkeys(range(8), 0.9), steps=400, noise=0.05)
    assert max(waiting.slack(rank, 2.0) for rank in range(8)) < 0.01


def test_slack_is_its_lower_bound() -> None:
    waiting = waited({0: 0.9, 1: 0.8}, steps=50, noise=0.1)
    assert 0 < waiting.slack(1, 2.0) < waiting.slack(1)


def test_present_counts_for_more_than_the_past() -> None:
    waiting = waited({0: 0.9, 1: 0.7}, steps=2000)
    assert waiting.steps <= 2 * STEPS
    for _ in range(1000):
        waiting = waiting.add(SynchronousStep(0, 100 * MS, 1, {0: 70 * MS, 1: 90 * MS}))
    assert waiting.critical == 1


def test_other_ranks_are_another_job() -> None:
    waiting = waited({0: 0.9, 1: 0.7}).add(SynchronousStep(0, 100 * MS, 1, {0: 1, 1: 1, 2: 1}))
    assert waiting.steps == 1


@pytest.mark.parametrize(
    "step", [SynchronousStep(0, 100, 1, {}), SynchronousStep(100, 100, 1, {0: 1, 1: 2})]
)
def test_empty_step_has_no_effect(step: SynchronousStep) -> None:
    waiting = waited({0: 0.9, 1: 0.7})
    assert waiting.add(step) is waiting


# ----------------------------------------------------------------------------------- proposals

RANGES = [KnobRange(f"gpu{rank}", 300_000, 180_000, 5_000, rank) for rank in range(3)]
UNIFORM = dict.fromkeys(("gpu0", "gpu1", "gpu2"), 270_000)


def curve(setting: int) -> float:
    """A twentieth longer for each 30 W."""
    return 1 + 0.05 * (300_000 - setting) / 30_000


def test_waiting_rank_may_use_most_of_its_slack() -> None:
    waiting = waited({0: 0.9, 1: 0.8, 2: 0.89})
    settings = propose_rank_settings(UNIFORM, RANGES, waiting, curve)
    assert settings["gpu0"] == settings["gpu2"] == 270_000
    longer = curve(settings["gpu1"]) / curve(270_000) - 1
    assert 0.05 < longer <= 0.6 * 0.1
    assert curve(settings["gpu1"] - 5_000) / curve(270_000) - 1 > 0.6 * 0.1


def test_rank_with_little_slack_keeps_the_common_setting() -> None:
    assert (
        propose_rank_settings(UNIFORM, RANGES, waited({0: 0.9, 1: 0.86, 2: 0.86}), curve) == UNIFORM
    )


def test_rank_setting_is_at_least_its_floor() -> None:
    settings = propose_rank_settings(UNIFORM, RANGES, waited({0: 1.0, 1: 0.1, 2: 0.1}), curve)
    assert settings == {"gpu0": 270_000, "gpu1": 180_000, "gpu2": 180_000}


def test_few_steps_lower_no_rank() -> None:
    waiting = waited({0: 0.9, 1: 0.5, 2: 0.5}, steps=STEPS - 1)
    assert propose_rank_settings(UNIFORM, RANGES, waiting, curve) == UNIFORM


def test_unknown_devices_keep_their_setting() -> None:
    waiting = waited({0: 0.9, 1: 0.5})
    levels = {"gpu0": 270_000, "gpu2": 270_000}
    assert propose_rank_settings(levels, RANGES, waiting, curve) == levels


def test_equal_ranks_stay_equal() -> None:
    waiting = waited(dict.fromkeys(range(3), 0.9), steps=300, noise=0.05)
    assert propose_rank_settings(UNIFORM, RANGES, waiting, curve) == UNIFORM


# ------------------------------------------------------------------------------------- release

THEN = waited({0: 0.9, 1: 0.8, 2: 0.89})
LEFT = remaining_slack(
    UNIFORM, propose_rank_settings(UNIFORM, RANGES, THEN, curve), RANGES, THEN, curve
)


def test_remaining_slack_is_reported_by_rank() -> None:
    assert set(LEFT) == {1}
    assert LEFT[1] == pytest.approx(0.1 - 0.0556, abs=0.001)
    one_device = remaining_slack({"gpu1": 270_000}, {"gpu1": 255_000}, RANGES, THEN, curve)
    assert set(one_device) == {1}


def test_settings_hold_while_waits_match() -> None:
    assert not slack_changed(waited({0: 0.9, 1: 0.855, 2: 0.89}), 0, LEFT)
    assert not slack_changed(waited({0: 0.9, 1: 0.87, 2: 0.89}), 0, LEFT)


def test_lowered_rank_with_half_its_slack_is_released() -> None:
    assert slack_changed(waited({0: 0.9, 1: 0.88, 2: 0.89}, steps=SLACK_CHANGE_STEPS), 0, LEFT)


def test_another_critical_rank_releases_all() -> None:
    assert slack_changed(waited({0: 0.85, 1: 0.8, 2: 0.89}, noise=0.01), 0, LEFT)
    assert not slack_changed(waited({0: 0.889, 1: 0.8, 2: 0.89}, noise=0.05), 0, LEFT)


def test_other_ranks_release_all() -> None:
    assert slack_changed(waited({0: 0.9, 2: 0.89}), 0, LEFT)


def test_few_steps_give_no_verdict() -> None:
    assert not slack_changed(
        waited({0: 0.5, 1: 0.9, 2: 0.5}, steps=SLACK_CHANGE_STEPS - 1), 0, LEFT
    )
    assert not slack_changed(RankWaits(), 0, LEFT)
