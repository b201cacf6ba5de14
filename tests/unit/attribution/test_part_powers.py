"""The powers of equal use in the parts of a device, by regression on the energy of the whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from wattspan.attribution.ledger import attribute
from wattspan.attribution.parts import (
    MAX_PARTS,
    PartPowers,
    PowerOfUse,
    merge_parts,
    usage_of_parts,
)
from wattspan.model import (
    SECOND,
    Consumer,
    Instant,
    Interval,
    Microjoules,
    PartUsage,
    Usage,
)

STEP = SECOND // 10
MEAN = 400_000  # mW of the whole device in use, for a ratio of 1
UNKNOWN = PowerOfUse(1.0, 0.4)
Law = Callable[[Sequence[float]], float]


def usage(uses: Sequence[float], spread: float = 2.5, first_pid: int = 1) -> Usage:
    """The use of a tenth of a second: parts of the device's time."""
    parts = [
        PartUsage(
            f"part-{number}",
            1,
            {user: round(use * STEP)} if use else {},
            present=frozenset([user]),
            spread=spread,
        )
        for number, use in enumerate(uses)
        for user in (Consumer(first_pid + number, 1),)
    ]
    return usage_of_parts(Usage("gpu", Instant(0, 0), Instant(STEP, 0), {}), parts, len(parts))


class Device:
    """A device whose law gives the power in milliwatts for the use of its parts."""

    def __init__(self, law: Law, parts: int = 3, seed: int = 1) -> None:
        self.law, self.parts = law, parts
        self.chance = random.Random(seed)
        self.powers = PartPowers()
        self.first_pid = 1

    def run(
        self, seconds: float, uses: Sequence[float] | None = None, spread: float = 2.5
    ) -> Usage:
        """Run with random uses that change each second, or with ``uses``; the last usage."""
        now: Sequence[float] = ()
        for step in range(round(seconds * 10)):
            if step % 10 == 0:
                now = uses or [self.chance.random() / self.parts for _ in range(self.parts)]
            last = usage(now, spread, self.first_pid)
            self.powers.learn(round(self.law(now) * STEP / 1e6), STEP, last)
        return last

    def found(self, last: Usage) -> list[PowerOfUse | None]:
        return [self.powers.power(part) for part in last.parts[: self.parts]]


def linear(*ratios: float) -> Law:
    return lambda uses: MEAN * sum(r * use for r, use in zip(ratios, uses, strict=True))


def ratios(found: Sequence[PowerOfUse | None]) -> list[float]:
    """The powers in relation to that of the first part."""
    assert found[0] is not None
    return [one.ratio / found[0].ratio for one in found if one is not None]


def test_powers_of_independent_uses_are_found() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    found = device.found(device.run(60))
    assert ratios(found) == pytest.approx([1.0, 0.45, 0.8], rel=0.01)
    assert all(one is not None and one.deviation < 0.02 for one in found)


@pytest.mark.slow
def test_stated_deviation_contains_the_power_of_noisy_work() -> None:
    inside = 0
    for seed in range(20):
        chance = random.Random(seed)
        truth = [chance.uniform(0.5, 1.5) for _ in range(3)]
        law = linear(*truth)

        def noisy(uses: Sequence[float], law: Law = law, chance: random.Random = chance) -> float:
            return law(uses) * chance.gauss(1.0, 0.15)

        device = Device(noisy, seed=seed)
        last = device.run(60)
        mean = device.powers._mean / MEAN
        for one, true in zip(device.found(last), truth, strict=True):
            inside += abs(one.ratio - true / mean) <= 2 * one.deviation
    assert inside >= 0.9 * 60


def test_differences_within_their_uncertainty_are_not_used() -> None:
    """Work of one kind is divided by its use alone, whatever the noise of the power."""
    found: list[PowerOfUse | None] = []
    for seed in range(20):
        chance, law = random.Random(seed), linear(1.0, 1.0, 1.0)

        def noisy(uses: Sequence[float], law: Law = law, chance: random.Random = chance) -> float:
            return law(uses) * chance.gauss(1.0, 0.15)

        device = Device(noisy, seed=seed)
        found += device.found(device.run(30))
    plain = [one for one in found if one is not None and one.ratio == 1.0]
    assert len(plain) >= 0.85 * len(found)
    assert all(one.deviation > 0 for one in plain)


def test_steady_uses_leave_the_mean_power_and_the_doubt_of_the_prior() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    found = device.found(device.run(60, (0.3, 0.2, 0.1)))
    assert ratios(found) == pytest.approx([1.0, 1.0, 1.0])
    assert all(one is not None and one.deviation > 0.2 for one in found)


def test_powers_are_unknown_before_enough_windows() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    last = device.run(8)
    assert device.found(last) == [None, None, None]
    assert device.powers.weighed(last) is last


def test_other_users_of_a_part_have_unknown_work() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    device.run(30)
    device.first_pid = 2  # the users of part 0 are now others, as are those of the other parts
    assert device.found(usage((0.1, 0.1, 0.1), first_pid=2)) == [UNKNOWN] * 3
    assert ratios(device.found(device.run(60))) == pytest.approx([1.0, 0.45, 0.8], rel=0.02)


def test_changed_work_is_learned_anew() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    device.run(30)
    device.law = linear(0.4, 0.45, 0.8)
    last = device.run(4)
    assert device.found(last) == [None, None, None]
    assert ratios(device.found(device.run(20))) == pytest.approx([1.0, 1.125, 2.0], rel=0.02)


def test_power_that_does_not_add_up_has_no_parts() -> None:
    """A board at its limit draws the same for any use."""
    device = Device(lambda _: 0.6 * MEAN)
    assert device.found(device.run(60)) == [None, None, None]


def test_error_of_the_idle_power_is_no_power_of_use() -> None:
    true = linear(1.0, 0.45, 0.8)
    device = Device(lambda uses: true(uses) + 0.03 * MEAN)
    assert ratios(device.found(device.run(90))) == pytest.approx([1.0, 0.45, 0.8], rel=0.02)


@pytest.mark.parametrize("spread", [1.0, math.inf])
def test_use_that_is_an_assumption_or_tells_energy_teaches_nothing(spread: float) -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    last = device.run(30, spread=spread)
    assert device.found(last) == [None, None, None]
    device.run(30)
    assert device.powers.weighed(last) is last


def test_time_without_use_or_energy_teaches_nothing() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    device.run(30, (0.0, 0.0, 0.0))
    assert device.powers._keys == []
    device.law = lambda _: 0.0
    assert device.found(device.run(30)) == [None, None, None]


def test_use_known_for_longer_periods_than_energy_does_not_bias_the_powers() -> None:
    """A window ends where the use is steady: inside of a period with a change it would be wrong."""
    truth, device, chance = linear(1.0, 0.45, 0.8), PartPowers(), random.Random(2)
    steps: list[list[float]] = []
    while len(steps) < 900:
        steps += [[chance.random() / 3 for _ in range(3)]] * 13
    for step in range(0, 900, 2):
        pair = steps[step : step + 2]
        mean = usage([sum(each) / 2 for each in zip(*pair, strict=True)])
        for now in pair:
            device.learn(round(truth(now) * STEP / 1e6), STEP, mean)
    found = [device.power(part) for part in mean.parts[:3]]
    assert ratios(found) == pytest.approx([1.0, 0.45, 0.8], rel=0.02)


def test_use_that_is_never_steady_is_learned_in_longer_windows() -> None:
    truth, device, chance = linear(1.0, 0.45, 0.8), PartPowers(), random.Random(3)
    for _ in range(600):
        now = [chance.random() / 3 for _ in range(3)]
        device.learn(round(truth(now) * STEP / 1e6), STEP, usage(now))
    found = [device.power(part) for part in usage(now).parts[:3]]
    assert ratios(found) == pytest.approx([1.0, 0.45, 0.8], rel=0.02)


def test_number_of_parts_is_bounded() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    for first in range(1, 60, 3):
        device.first_pid = first
        last = device.run(2)
    assert len(device.powers._keys) == MAX_PARTS
    assert all(one not in {None, UNKNOWN} for one in device.found(last))


# ---------------------------------------------------------------------------------- division


def test_energy_is_divided_by_the_powers_and_conserved() -> None:
    truth = linear(1.0, 0.45, 0.8)
    device = Device(truth)
    device.run(60)
    last = usage((0.2, 0.3, 0.0))
    energy = Microjoules(round(truth((0.2, 0.3, 0.0)) * STEP / 1e6))
    interval = Interval("gpu", Instant(0, 0), Instant(STEP, 0), energy)
    plain, learned = attribute(interval, last), attribute(interval, device.powers.weighed(last))
    assert sum(share.energy for share in learned.shares) == energy
    first = round(MEAN * 0.2 * STEP / 1e6)
    assert plain.shares[0].energy == pytest.approx(0.4 * energy, rel=0.001)
    assert learned.shares[0].energy == pytest.approx(first, rel=0.01)
    for share, doubt, wide in zip(learned.shares, learned.doubts, plain.doubts, strict=True):
        assert doubt < 0.1 * share.energy < wide


def test_only_user_of_a_device_is_not_in_doubt() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    device.run(60)
    interval = Interval("gpu", Instant(0, 0), Instant(STEP, 0), Microjoules(1000))
    assert attribute(interval, device.powers.weighed(usage((0.2, 0.0, 0.0)))).doubts == ()


def test_doubt_is_never_more_than_that_of_any_work() -> None:
    device = Device(linear(1.0, 0.45, 0.8))
    last = device.run(12, (0.3, 0.001, 0.001))
    weighed = device.powers.weighed(last)
    assert weighed is not last
    assert all(part.spread <= 2.5 for part in weighed.parts)
    assert any(part.spread == 2.5 for part in weighed.parts)


def test_parts_count_by_their_overlap_and_undivided_use_is_of_the_rest() -> None:
    user, other, times = Consumer(1, 1), Consumer(2, 1), (Instant(0, 0), Instant(100, 0))
    part = PartUsage("a", 3, {user: 40}, 20, frozenset([user]), 2.5, users_guessed=True)
    divided = usage_of_parts(Usage("gpu", *times, {}), [part], 7)
    whole = Usage("gpu", *times, {other: 30}, 6, present=frozenset([other]))
    assert merge_parts([(whole, 50), (whole, 100)]) == ()
    assert merge_parts([(divided, 50), (divided, 100), (whole, 100)]) == (
        PartUsage("", 4 * 150 + 7 * 100, {other: 30}, 6, frozenset([other])),
        PartUsage("a", 3 * 150, {user: 60}, 30, frozenset([user]), 2.5, users_guessed=True),
    )
