"""Powers over a second, of steps that are a little shorter or longer and change in length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.attribution.top_n import POWER_WINDOW, AveragePower, AveragePowers
from wattspan.model import MILLISECOND, SECOND, HwType, energy_at, fills

COARSE = [950 * MILLISECOND, 1050 * MILLISECOND, SECOND]
steps = st.lists(st.sampled_from([MILLISECOND, 95 * MILLISECOND, 105 * MILLISECOND, *COARSE]))


@pytest.mark.parametrize("step", [95 * MILLISECOND, 105 * MILLISECOND, *COARSE])
def test_window_is_filled_by_the_number_of_steps_that_is_nearest_to_it(step: int) -> None:
    number = next(n for n in range(1, 20) if fills(SECOND, n * step, step))
    assert number == min(range(1, 20), key=lambda n: abs(n * step - SECOND))


@given(durations=steps, powers=st.lists(st.integers(1, 300_000), min_size=1))
def test_average_power_is_of_whole_windows_at_any_interval(
    durations: list[int], powers: list[int]
) -> None:
    average, energy, duration, shown = AveragePower(), 0, 0, None
    for number, step in enumerate(durations):
        spent = energy_at(powers[number % len(powers)], step)
        average.add(spent, step)
        energy, duration = energy + spent, duration + step
        if not average.duration:  # the window is full
            assert 2 * (POWER_WINDOW - duration) <= step
            shown, energy, duration = energy * 1_000_000 // duration, 0, 0
        assert step not in COARSE or not duration, "a step of a second is a window"
        assert (average.power, duration < POWER_WINDOW) == (shown, True)


@given(durations=steps)
def test_powers_of_accounts_are_known_at_each_step_of_a_second(durations: list[int]) -> None:
    powers, now, energy = AveragePowers[str](), 0, 0
    powers.update(HwType.CPU, now, {"a": energy})
    for step in durations:
        now, energy = now + step, energy + step // 1000
        powers.update(HwType.CPU, now, {"a": energy})
        if step in COARSE:
            assert powers.of("a") == {HwType.CPU: 1_000}
