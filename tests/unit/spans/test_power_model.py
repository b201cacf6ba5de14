"""The mean powers of span names, and the division of a counter step by them."""

from __future__ import annotations

import random

import pytest

from wattspan.spans.power_model import ENOUGH_STEPS, MAX_LINKS, STEP, PowerModel, Segment, Step

A, B, REST = "a", "b", "rest"
WATT = 1e-3  # microjoules per nanosecond


def step(*parts: tuple[str, float], watts: dict[str, float], start: int = 0) -> Step:
    """Consecutive parts of one step; lengths are fractions of ``STEP``."""
    segments, at, energy = [], start, 0.0
    for activity, fraction in parts:
        end = at + round(fraction * STEP)
        segments.append(Segment(at, end, {activity: 1.0}))
        energy += (end - at) * watts[activity] * WATT
        at = end
    return Step(segments, energy)


def trained(model: PowerModel, watts: dict[str, float], *, spread: float = 0.0) -> PowerModel:
    """``model`` after pure steps of each activity; ``spread`` is relative."""
    draw = random.Random(1)
    for _ in range(ENOUGH_STEPS):
        for activity in watts:
            varied = {activity: watts[activity] * draw.uniform(1 - spread, 1 + spread)}
            model.learn(step((activity, 1.0), watts=varied))
    return model


def test_mean_powers_are_learned_from_mixed_steps() -> None:
    draw, model = random.Random(2), PowerModel()
    watts = {A: 300.0, B: 120.0, REST: 10.0}
    for _ in range(300):
        first, second = sorted((draw.uniform(0, 1), draw.uniform(0, 1)))
        parts = (A, first), (B, second - first), (REST, 1 - second)
        model.learn(step(*parts, watts=watts))
    for activity, power in watts.items():
        assert model.power(activity) == pytest.approx(power * WATT, abs=6 * WATT)


def test_changed_power_is_followed() -> None:
    model = trained(PowerModel(), {A: 300.0})
    for _ in range(3000):
        model.learn(step((A, 1.0), watts={A: 100.0}))
    assert model.power(A) == pytest.approx(100 * WATT, rel=0.01)


def test_mean_power_is_unknown_before_enough_steps() -> None:
    model = PowerModel()
    one = step((A, 1.0), watts={A: 300.0})
    assert model.divide([one], range(1), 0.5) is None
    for _ in range(ENOUGH_STEPS - 1):
        model.learn(one)
    assert model.power(A) is None
    model.learn(one)
    assert model.power(A) == pytest.approx(300 * WATT)


def test_steps_that_are_learned_as_one_count_by_the_time_of_the_activity() -> None:
    model = PowerModel()
    energy = 2 * 10**8 * 300 * WATT
    joined = Step(
        [Segment(0, 2 * 10**8, {A: 1.0}), Segment(2 * 10**8, 8 * 10**8, {REST: 1.0})], energy
    )
    for _ in range(ENOUGH_STEPS // 3):
        model.learn(joined)
    assert model.power(A) is None
    assert model.power(REST) is not None
    model.learn(joined)
    assert model.power(A) is not None


def test_least_recently_used_activities_are_removed() -> None:
    model = PowerModel(limit=2)
    for activity in (A, B, REST):
        model.learn(step((activity, 1.0), watts={activity: 100.0}))
    assert len(model) == 2
    trained(model, {A: 100.0, B: 50.0})
    model.learn(step((A, 0.5), (B, 0.5), watts={A: 100.0, B: 50.0}))
    assert (model.power(A), model.power(B)) == pytest.approx((100 * WATT, 50 * WATT))
    model.forget(A)
    model.forget(A)
    assert len(model) == 1
    model.learn(step((B, 1.0), watts={B: 50.0}))
    assert model.power(B) == pytest.approx(50 * WATT)


def test_number_of_common_steps_is_bounded() -> None:
    model, many = PowerModel(), [f"a{i}" for i in range(2 * MAX_LINKS)]
    watts = {REST: 10.0, **dict.fromkeys(many, 300.0)}
    draw = random.Random(4)
    for _ in range(ENOUGH_STEPS):
        for one in many:
            part = draw.uniform(0.2, 0.8)
            model.learn(step((REST, part), (one, 1 - part), watts=watts))
    assert [model.power(one) for one in many] == pytest.approx([300 * WATT] * len(many), rel=0.25)
    assert max(map(model.links, [REST, *many])) == MAX_LINKS


def test_energy_of_a_step_follows_the_mean_powers() -> None:
    model = trained(PowerModel(), {A: 300.0, REST: 0.0}, spread=0.3)
    divided = step((REST, 0.6), (A, 0.4), watts={A: 200.0, REST: 0.0})
    parts = model.divide([divided], range(1), 0.5)
    rest, span = parts
    assert rest.energy + span.energy == pytest.approx(divided.energy)
    assert span.energy == pytest.approx(divided.energy, rel=0.01)
    assert rest.before == 0
    assert span.before == pytest.approx(span.inside, abs=1e-4 * divided.energy)
    assert span.inside < 0.02 * divided.energy


def test_residual_goes_to_the_activity_that_varies() -> None:
    model = PowerModel()
    draw = random.Random(3)
    for _ in range(ENOUGH_STEPS):
        model.learn(step((A, 1.0), watts={A: draw.uniform(100, 300)}))
        model.learn(step((B, 1.0), watts={B: draw.uniform(195, 205)}))
    divided = step((A, 0.5), (B, 0.5), watts={A: 280.0, B: 200.0})
    parts = model.divide([divided], range(1), 0.0)
    assert parts is not None
    assert parts[1].energy == pytest.approx(0.5 * STEP * 200 * WATT, rel=0.05)


def test_neighbouring_steps_show_the_present_power() -> None:
    model = trained(PowerModel(), {A: 200.0, B: 200.0}, spread=0.8)
    before = step((A, 1.0), watts={A: 350.0}, start=-STEP)
    divided = step((A, 0.5), (B, 0.5), watts={A: 200.0, B: 200.0})
    after = step((B, 1.0), watts={B: 50.0}, start=STEP)
    alone = model.divide([divided], range(1), 0.7)
    among = model.divide([before, divided, after], range(1, 2), 0.7)
    assert alone is not None
    assert among is not None
    assert alone[0].energy == pytest.approx(alone[1].energy, rel=0.05)
    assert among[0].energy > 1.3 * among[1].energy
    assert sum(part.energy for part in among) == pytest.approx(divided.energy)
    assert among[1].before < alone[1].before


def test_parts_are_never_negative() -> None:
    model = trained(PowerModel(), {A: 300.0, B: 100.0}, spread=0.5)
    parts = model.divide([step((A, 0.5), (B, 0.5), watts={A: 1.0, B: 0.0})], range(1), 0.5)
    assert parts is not None
    assert min(part.energy for part in parts) >= 0


def test_step_without_energy_or_power_is_not_divided() -> None:
    model = trained(PowerModel(), {A: 0.0})
    assert model.divide([step((A, 1.0), watts={A: 0.0})], range(1), 0.5) is None
    model = trained(PowerModel(), {A: 300.0}, spread=0.5)
    assert model.divide([step((A, 1.0), watts={A: 0.0})], range(1), 0.5) is None


def test_deviation_of_a_step_is_in_standard_deviations() -> None:
    model = trained(PowerModel(), {A: 300.0}, spread=0.3)
    usual = model.learn(step((A, 1.0), watts={A: 300.0}))
    high = model.learn(step((A, 1.0), watts={A: 600.0}))
    assert abs(usual) < 0.5
    assert high > 3
    assert PowerModel().learn(step((A, 1.0), watts={A: 0.0})) == 0
