"""Learned weights of consumers: who has one, what they move, and what is stated."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from wattspan.attribution.consumer_powers import (
    LARGEST_RATIO,
    MAX_CONSUMERS,
    STATED,
    ConsumerPowers,
)
from wattspan.attribution.division import split
from wattspan.attribution.power_regression import DIFFERENCE, NormalPrior
from wattspan.model import SECOND, Consumer, Instant, Payer, Principal, Usage

CPUS = 16
IDLE = 30.0
AT_REST = NormalPrior(IDLE, 0.5)


def process(number: int) -> Consumer:
    return Consumer(number, 1)


def usage(uses: Mapping[Payer, float], unclaimed: float = 0.0, cpus: int | None = CPUS) -> Usage:
    """The use of one second, in CPUs."""
    spent = {payer: round(use * SECOND) for payer, use in uses.items()}
    capacity = None if cpus is None else cpus * SECOND
    return Usage(
        "cpu:0", Instant(0, 0), Instant(SECOND, 0), spent, round(unclaimed * SECOND), capacity
    )


class Package:
    """A package whose processes cost ``costs`` watts for a busy CPU."""

    def __init__(
        self,
        costs: Mapping[Payer, float],
        *,
        idle: NormalPrior | None = AT_REST,
        owners: Callable[[Payer], Principal | None] = lambda _: None,
        seed: int = 1,
    ) -> None:
        self.costs, self.idle, self.owners = dict(costs), idle, owners
        self.chance = random.Random(seed)
        self.powers = ConsumerPowers()
        self.last = usage({})

    def run(
        self,
        seconds: int,
        uses: Callable[[], Mapping[Payer, float]] | None = None,
        cpus: int | None = CPUS,
    ) -> None:
        """Run for some seconds with ``uses``, by default independent ones of 0.1 to 1 CPU."""
        for _ in range(seconds):
            now = uses() if uses else {one: self.chance.uniform(0.1, 1) for one in self.costs}
            power = IDLE + sum(self.costs[one] * use for one, use in now.items())
            self.last = usage(now, cpus=cpus)
            energy = max(0.0, power + self.chance.gauss(0, 0.2))
            self.powers.learn(round(energy * 1e6), SECOND, self.last, self.owners, self.idle)

    def shares(self, uses: Mapping[Payer, float]) -> tuple[dict[Payer, float], dict[Payer, float]]:
        """The parts of the active energy of processes with these uses, and their stated errors."""
        found = self.powers.weighed(usage(uses))
        active = 10**9
        parts = split(active, list(found.spent.values()))
        doubts = self.powers.doubts(active, zip(found.spent, parts, strict=True))
        payers = list(found.spent)
        return (
            {one: part / active for one, part in zip(payers, parts, strict=True)},
            {one: doubt / active for one, doubt in zip(payers, doubts, strict=True)},
        )


A, B, C = process(1), process(2), process(3)
TWO = {A: 9.0, B: 22.5}


def test_cpu_time_is_weighed_by_learned_powers() -> None:
    package = Package(TWO)
    package.run(60)
    shares, errors = package.shares({A: 0.5, B: 0.5})
    assert package.powers.learned
    assert shares[A] == pytest.approx(9.0 / 31.5, rel=0.02)
    assert errors[A] < 0.08
    assert abs(shares[A] - 9.0 / 31.5) <= errors[A]


def test_nothing_is_weighed_before_enough_windows() -> None:
    package = Package(TWO)
    package.run(5)
    shares, errors = package.shares({A: 0.5, B: 0.5})
    assert not package.powers.learned
    assert package.powers.weighed(package.last) is package.last
    assert package.powers.idle is None
    assert shares[A] == 0.5
    assert errors[A] >= 0.21


def test_uncertainty_is_that_of_the_prior_without_windows() -> None:
    powers = ConsumerPowers()
    assert powers.doubts(1_000_000, [(A, 1000)]) == [1000 * STATED * DIFFERENCE]
    assert powers.idle is None


def test_sole_consumer_has_no_error() -> None:
    assert ConsumerPowers().doubts(1_000_000, [(A, 1_000_000)]) == [0]


def test_equal_powers_leave_cpu_time_as_it_is() -> None:
    package = Package(dict.fromkeys((A, B, C), 15.0))
    package.run(60)
    assert package.powers.weighed(package.last) is package.last


def test_steady_processes_keep_the_common_power_and_contain_the_truth() -> None:
    package = Package({A: 9.0, B: 22.5, C: 14.0})
    uses = {A: 0.5, B: 0.5, C: 0.5}
    package.run(60, lambda: uses)
    shares, errors = package.shares(uses)
    assert shares == pytest.approx(dict.fromkeys(uses, 1 / 3), rel=0.01)
    for one, cost in package.costs.items():
        assert abs(shares[one] - cost / 45.5) <= errors[one]


def test_errors_of_the_clock_of_the_kernel_teach_nothing() -> None:
    """A steady use varies by its ticks of 4 ms; that must not look like load without power."""
    package = Package({A: 20.0, B: 20.0}, idle=None)

    def ticking() -> dict[Payer, float]:
        return {one: 0.7 + package.chance.uniform(-0.002, 0.002) for one in (A, B)}

    package.run(90, ticking)
    found = package.powers.idle
    assert found is not None
    assert abs(found.idle - IDLE * 1e3) <= found.half_width


def test_idle_power_is_found_with_the_powers() -> None:
    package = Package(TWO, idle=None)
    package.run(60)
    found = package.powers.idle
    assert found is not None
    assert found.idle == pytest.approx(IDLE * 1e3, rel=0.02)
    assert found.active == pytest.approx(17e3, rel=0.2)
    assert found.half_width >= 0.07 * found.active  # power of the first busy CPU is not seen


def test_copied_load_gives_no_power_to_a_neighbour_beyond_its_stated_error() -> None:
    """The hostile copy of a load is not told from it: both have the common power, and say so."""
    package = Package({A: 10.0, B: 25.0, C: 15.0})

    def copied() -> dict[Payer, float]:
        load = package.chance.uniform(0.1, 1)
        return {A: load, B: load, C: package.chance.uniform(0.1, 1)}

    package.run(60, copied)
    shares, errors = package.shares({A: 0.5, B: 0.5, C: 0.5})
    for one, cost in package.costs.items():
        assert abs(shares[one] - cost / 50.0) <= errors[one]
    assert errors[C] < 0.08  # the other one is known


def test_ratio_of_two_weights_is_bounded() -> None:
    package = Package({A: 1.0, B: 60.0})
    package.run(90)
    shares, _ = package.shares({A: 0.5, B: 0.5})
    assert shares[A] * LARGEST_RATIO >= shares[B] * 0.999


def test_small_processes_are_grouped_by_owner_only() -> None:
    """Two users run short processes of different work; each has one weight."""
    users = Principal(1), Principal(2)
    package = Package({}, owners=lambda payer: users[payer.pid % 2])  # type: ignore[union-attr]
    number, latest = 0, [A, B]

    def short() -> dict[Payer, float]:
        nonlocal number
        uses: dict[Payer, float] = {}
        for user, cost in ((0, 8.0), (1, 24.0)):
            for _ in range(package.chance.randrange(1, 8)):
                number += 2
                uses[process(number + user)] = 0.2
                latest[user] = process(number + user)
                package.costs[process(number + user)] = cost
        return uses

    package.run(60, short)
    first, second = latest
    shares, errors = package.shares({first: 0.5, second: 0.5})
    assert shares[second] / shares[first] == pytest.approx(3.0, rel=0.1)
    assert errors[first] > 0.15  # one of several may differ from their mean
    newest: dict[Payer, float] = {process(number + 2): 0.5, process(number + 3): 0.5}
    package.powers.learn(10**7, SECOND // 10, usage(newest), package.owners, AT_REST)
    cheap, dear = package.powers.weighed(usage(newest)).spent.values()
    assert dear / cheap == pytest.approx(3.0, rel=0.1), "before the end of a window"


def test_unknown_processes_keep_the_common_power() -> None:
    package = Package(TWO)
    package.run(60)
    shares, errors = package.shares({A: 0.5, B: 0.5, C: 0.5})
    assert 9.0 / 31.5 * 2 / 3 < shares[C] < 22.5 / 31.5 * 2 / 3
    assert errors[C] > 0.1


def test_largest_consumers_have_the_rows() -> None:
    small = [process(100 + number) for number in range(MAX_CONSUMERS)]
    package = Package(dict.fromkeys(small, 15.0) | TWO)
    package.run(30, lambda: dict.fromkeys(small, 0.05))
    package.run(
        60,
        lambda: {
            one: 0.05 if one in small else package.chance.uniform(0.1, 1) for one in package.costs
        },
    )
    shares, _ = package.shares({A: 0.5, B: 0.5})
    assert shares[B] / shares[A] == pytest.approx(2.5, rel=0.1)


def test_processes_of_one_user_leave_rows_to_others() -> None:
    """A user with more large processes than there are rows keeps no victim from its own weight."""
    flood = [process(100 + number) for number in range(2 * MAX_CONSUMERS)]

    def owner(payer: Payer) -> Principal | None:
        return Principal(1000 if payer in TWO else 1001, f"c{payer.pid}")  # type: ignore[union-attr]

    package = Package(dict.fromkeys(flood, 15.0) | TWO, owners=owner)
    flooding = dict.fromkeys(flood, 0.4)
    package.run(30, lambda: flooding)
    varying = package.chance.uniform
    package.run(60, lambda: flooding | {one: varying(0.1, 0.6) for one in TWO})
    shares, _ = package.shares({A: 0.5, B: 0.5})
    assert shares[B] / shares[A] == pytest.approx(2.5, rel=0.15)


def test_powers_count_as_learned_until_a_minute_after_the_last_weights() -> None:
    package = Package(TWO)
    assert not package.powers.stated
    package.run(60)
    assert package.powers.stated
    package.costs.update({A: 15.0, B: 15.0})
    package.run(300)
    assert not package.powers.learned
    assert not package.powers.stated


def test_faded_powers_are_less_certain_and_forgotten_in_the_end() -> None:
    package = Package(TWO)
    package.run(60)
    uses, widths = {A: 0.5, B: 0.5}, []
    for seconds in (0, 30, 500):
        package.powers.fade(seconds)
        shares, errors = package.shares(uses)
        widths.append(errors[A])
        assert shares[A] == pytest.approx(9.0 / 31.5, abs=0.05)
        assert abs(shares[A] - 9.0 / 31.5) <= errors[A]
    assert widths == sorted(set(widths))
    package.powers.fade(1e6)
    assert package.shares(uses)[0][A] == 0.5
    assert not package.powers.learned


def test_many_processes_are_forgotten() -> None:
    package = Package({})

    def crowd() -> dict[Payer, float]:
        crowded: dict[Payer, float] = {
            process(package.chance.randrange(10**6)): 0.001 for _ in range(1500)
        }
        package.costs.update(dict.fromkeys(crowded, 10.0))
        return crowded

    package.run(4, crowd)
    assert len(package.powers._uses) < 4000
    assert package.powers._uses.keys() == package.powers._ages.keys()


def test_short_intervals_make_one_window() -> None:
    powers, chance = ConsumerPowers(), random.Random(1)
    uses: list[float] = []
    for step in range(600):
        if step % 10 == 0:
            uses = [chance.uniform(0.1, 1), chance.uniform(0.1, 1)]
        spent: dict[Payer, int] = {A: round(uses[0] * SECOND // 5), B: round(uses[1] * SECOND // 5)}
        longer = Usage("cpu:0", Instant(0, 0), Instant(SECOND // 5, 0), spent)  # twice as long
        power = IDLE + 9.0 * uses[0] + 22.5 * uses[1]
        powers.learn(round(power * 1e5), SECOND // 10, longer, lambda _: None, AT_REST)
    found = powers.weighed(usage({A: 0.5, B: 0.5}, cpus=None)).spent
    assert found[B] / found[A] == pytest.approx(2.5, rel=0.02)


def test_package_without_use_teaches_nothing() -> None:
    package = Package({})
    package.run(20)
    assert not package.powers.learned
    assert package.powers.idle is None
    assert package.powers.doubts(1000, [(A, 10)]) == [10]


def test_package_whose_power_falls_with_load_has_no_weights() -> None:
    package = Package({A: -5.0, B: -1.0})
    package.run(60)
    assert not package.powers.learned


@pytest.mark.parametrize("known", [True, False])
def test_least_energies_while_the_idle_power_is_unknown(known: bool) -> None:
    """The energy of steady processes may be idle; that of a varying one is known."""
    steady = [process(10 + number) for number in range(4)]
    costs: dict[Payer, float] = dict(TWO) | dict.fromkeys(steady, 20.0)
    package = Package(costs, idle=AT_REST if known else None)

    def uses() -> Mapping[Payer, float]:
        return dict.fromkeys(steady, 0.9) | {
            A: package.chance.uniform(0.1, 1),
            B: package.chance.uniform(0.1, 1),
        }

    package.run(60, uses)
    now = usage(dict.fromkeys(costs, 0.9))
    likely, least = package.powers.weighed(now), package.powers.weighed(now, surely=True)
    assert least.busy == pytest.approx(likely.busy, abs=10)
    assert all(least.spent[one] <= likely.spent[one] + 1 for one in costs)
    assert least.spent[A] > 0.9 * likely.spent[A]
    for one in steady:
        assert (least.spent[one] > 0.9 * likely.spent[one]) is known
    doubts = package.powers.doubts(10**6, [(steady[0], 1000)], surely=True)
    assert doubts >= package.powers.doubts(10**6, [(steady[0], 1000)])
