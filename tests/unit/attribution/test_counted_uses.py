"""Uses by performance counters: what they tell, what is learned of them, and broken ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

import pytest
from testbed.simulated_host import PACKAGE

from wattspan.attribution.consumer_powers import LARGEST_RATIO
from wattspan.attribution.counted_uses import CountedUses, credible
from wattspan.attribution.division import split
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.attribution.power_regression import NormalPrior
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Counts,
    HwType,
    Instant,
    Interval,
    Microjoules,
    Milliwatts,
    Payer,
    PayerInfo,
    Principal,
    Reading,
    Tick,
    Usage,
)

IDLE = 30.0
AT_REST = NormalPrior(IDLE, 0.5)
A, B, C = (Consumer(number, 1) for number in (1, 2, 3))
GIGAHERTZ = 2.0


def counts(seconds: float, clock: float = 1.0, retired: float = 1.5, misses: float = 0.0) -> Counts:
    """The counters of so much CPU time, with a clock relative to the reference clock."""
    time = round(seconds * SECOND)
    cycles = round(time * GIGAHERTZ * clock)
    reference = round(time * GIGAHERTZ)
    return Counts(time, cycles, reference, round(cycles * retired), round(time * misses))


def usage(
    uses: Mapping[Payer, float], counted: Mapping[Payer, Counts] | None, at: int = 0
) -> Usage:
    """The use of a second, in CPUs."""
    spent = {payer: round(use * SECOND) for payer, use in uses.items()}
    start, end = Instant(at, 0), Instant(at + SECOND, 0)
    return Usage("cpu:0", start, end, spent, capacity=16 * SECOND, counts=counted)


GOOD = counts(1.0)


@pytest.mark.parametrize(
    ("broken", "believed"),
    [
        ({}, True),
        ({"time": 2 * SECOND // 7}, True),  # multiplexed
        ({"time": SECOND // 7}, False),
        ({"time": 0}, False),
        ({"time": 5 * SECOND}, False),
        ({"cycles": 0}, False),
        ({"cycles": 11 * SECOND, "reference": 11 * SECOND}, False),
        ({"cycles": 21 * GOOD.reference}, False),
        ({"cycles": GOOD.reference // 30}, False),
        ({"reference": 0}, False),
        ({"instructions": 0}, False),  # stopped
        ({"instructions": 20 * GOOD.cycles}, False),
        ({"instructions": 2**64}, False),
        ({"instructions": -1}, False),
        ({"misses": -1}, False),
        ({"misses": 2 * SECOND}, False),
        ({"misses": 0}, True),
    ],
)
def test_counts_that_cannot_be_right_are_missing(broken: dict[str, int], believed: bool) -> None:
    given = GOOD._replace(**broken)
    assert credible(int(SECOND), given) is believed
    uses = CountedUses()
    found = uses.counted(usage({A: 1, B: 1}, {A: given, B: counts(1.0, clock=1.2)}))
    assert (A in found.terms) is believed
    assert found.clocked.spent[B] == round(SECOND * 1.2**2.5)
    if not believed:
        assert found.clocked.spent[A] == found.clocked.spent[B]


def test_short_time_of_a_tick_is_believed() -> None:
    assert credible(4 * MILLISECOND, counts(0.011))


def test_use_is_cpu_time_without_counters() -> None:
    uses, plain = CountedUses(), usage({A: 1, B: 2}, None)
    assert uses.counted(plain).clocked is plain
    assert not uses.counters.recent
    few = usage({A: 0.4, B: 1}, {A: counts(0.4)})
    assert uses.counted(few).clocked is few
    assert uses.counted(usage({A: 1}, {})).terms == {}
    assert not uses.counters.recent


def test_payer_without_counts_has_the_mean_use_of_a_cpu_second() -> None:
    both = {A: counts(2, clock=1.2), B: counts(1, clock=1.1)}
    given = replace(usage({A: 2, B: 1, C: 1}, both), unclaimed=SECOND, metered=5 * SECOND)
    found = CountedUses().counted(given).clocked
    mean = (2 * 1.2**2.5 + 1.1**2.5) / 3
    assert found.spent[C] == found.unclaimed == round(mean * SECOND)
    assert found.load / found.capacity == pytest.approx(5 / 16)  # type: ignore[operator]


def test_clock_far_from_the_others_is_bounded() -> None:
    both = {A: counts(0.1, clock=4.5), B: counts(1.0)}
    found = CountedUses().counted(usage({A: 0.1, B: 1.0}, both)).clocked.spent
    assert 1 < found[A] / found[B] * 10 <= LARGEST_RATIO


def test_counters_stay_the_method_for_a_minute_without_them() -> None:
    uses = CountedUses()
    uses.counted(usage({A: 1}, {A: counts(1, clock=1.2)}))
    for _ in range(59):
        kept = uses.counted(usage({A: 1, B: 1}, None))
    assert uses.counters.recent
    assert (kept.terms.keys(), kept.counted) == ({A}, False)
    assert kept.clocked.spent == dict.fromkeys((A, B), round(SECOND * 1.2**2.5))
    plain = usage({A: 1}, None)
    assert uses.counted(plain).clocked is plain
    assert not uses.counters.recent


Law = Callable[[Payer, Counts], float]
"""The watts of a payer with the counters of a second."""


def _seen(now: Mapping[Payer, Counts], absent: Set[Payer], at: int) -> Usage:
    seen = {payer: one for payer, one in now.items() if payer not in absent}
    return usage({payer: one.time / SECOND for payer, one in now.items()}, seen, at)


class Package:
    """A package of processes with counters, and their learned uses."""

    def __init__(self, law: Law, seed: int = 1) -> None:
        self.law, self.uses, self.chance = law, CountedUses(), random.Random(seed)
        self.at = 0

    def run(
        self,
        seconds: int,
        second: Callable[[], Mapping[Payer, Counts]],
        absent: Set[Payer] = frozenset(),
    ) -> None:
        for _ in range(seconds):
            now = second()
            power = IDLE + sum(self.law(payer, one) for payer, one in now.items())
            energy = Microjoules(round((power + self.chance.gauss(0, 0.1)) * 1e6))
            given = _seen(now, absent, self.at)
            self.at += SECOND
            interval = Interval("p", Instant(0, 0), Instant(SECOND, 0), energy)
            counted = self.uses.counted(given)
            self.uses.learn(interval, counted, lambda _: None, AT_REST)

    def shares(
        self, now: Mapping[Payer, Counts], absent: Set[Payer] = frozenset()
    ) -> tuple[list[float], list[float]]:
        """The parts of active energy of payers, and their stated errors; some without counts."""
        divided = self.uses.divided(self.uses.counted(_seen(now, absent, self.at)))
        active = 10**9
        parts = split(active, list(divided.usage.spent.values()))
        doubts = divided.doubts(active, zip(divided.usage.spent, parts, strict=True))
        return [part / active for part in parts], [doubt / active for doubt in doubts]


def test_coefficients_without_variation_leave_the_use_as_it_is() -> None:
    package = Package(lambda _, one: 5.0 * one.time / SECOND)
    package.run(
        40, lambda: {one: counts(package.chance.uniform(0.2, 1), misses=0.01) for one in (A, B)}
    )
    shares, _ = package.shares({A: counts(1), B: counts(1)})
    assert shares == pytest.approx([0.5, 0.5], rel=0.01)


def test_memory_traffic_is_charged_to_those_who_cause_it() -> None:
    def law(_: Payer, one: Counts) -> float:
        return 4.0 * one.time / SECOND + 20.0 * one.misses / SECOND

    package = Package(law)
    package.run(
        60,
        lambda: {
            A: counts(package.chance.uniform(0.2, 1), misses=package.chance.uniform(0.0, 0.2)),
            B: counts(package.chance.uniform(0.2, 1)),
        },
    )
    now = {A: counts(1, misses=0.2), B: counts(1)}
    true = law(A, now[A]) / (law(A, now[A]) + law(B, now[B]))
    shares, errors = package.shares(now)
    assert shares[0] == pytest.approx(true, rel=0.03)
    assert errors[0] < 0.5


def test_clock_and_learned_costs_are_told_apart() -> None:
    """The clock changes for all at once; each has a cost of its own, and one never varies."""
    costs: dict[Payer, float] = {A: 4.0, B: 10.0, C: 6.0}

    def law(payer: Payer, one: Counts) -> float:
        return costs[payer] * one.time / SECOND * (one.cycles / one.reference) ** 2.2

    package = Package(law)

    def second() -> dict[Payer, Counts]:
        clock, chance = package.chance.uniform(1.0, 1.3), package.chance
        times = {A: 0.8, B: chance.uniform(0.3, 1.0), C: chance.uniform(0.1, 1.0)}
        return {payer: counts(time, clock) for payer, time in times.items()}

    package.run(90, second)
    now = second()
    true = [law(payer, one) for payer, one in now.items()]
    shares, errors = package.shares(now)
    for share, each, error in zip(shares, true, errors, strict=True):
        assert share == pytest.approx(each / sum(true), rel=0.06)
        assert abs(share - each / sum(true)) <= error


@pytest.mark.parametrize("absent", [{B}, {A, B}], ids=["of one", "of all"])
def test_payer_whose_counts_are_absent_for_a_while_keeps_its_last_clock(absent: set[Payer]) -> None:
    package = Package(lambda _, one: 5.0 * one.time / SECOND * (one.cycles / one.reference) ** 2.5)
    clocks: dict[Payer, float] = {A: 1.2, B: 0.8}

    def second() -> dict[Payer, Counts]:
        uniform = package.chance.uniform
        return {one: counts(uniform(0.2, 1), clock) for one, clock in clocks.items()}

    package.run(60, second)
    now = {one: counts(1, clock) for one, clock in clocks.items()}
    true = [package.law(payer, one) for payer, one in now.items()]
    shares, errors = package.shares(now, absent)
    for share, each, error in zip(shares, true, errors, strict=True):
        assert share == pytest.approx(each / sum(true), rel=0.05)
        assert abs(share - each / sum(true)) <= error


def test_costs_are_less_certain_after_counters_were_absent_and_not_forgotten() -> None:
    costs: dict[Payer, float] = {A: 4.0, B: 10.0}
    package = Package(lambda payer, one: costs[payer] * one.time / SECOND)

    def second() -> dict[Payer, Counts]:
        return {one: counts(package.chance.uniform(0.2, 1)) for one in costs}

    now = {one: counts(1) for one in costs}
    package.run(90, second)
    (before, _), (error, _) = package.shares(now)
    for absent, least, most in ((100, 1.01, 0.05), (400, 1.01, 0.05), (1000, 2, 0.45)):
        package.run(absent, second, {A, B})
        assert not package.uses.counters.recent
        (share, _), (wider, _) = package.shares(now)
        assert package.uses.counters.recent
        assert abs(share - 4 / 14) <= wider
        assert wider > least * error
        assert abs(share - before) < most
        package.run(30, second)


def test_counters_of_thousands_of_ended_payers_are_forgotten() -> None:
    uses, many = CountedUses(), [Consumer(number, 1) for number in range(10, 2011)]
    uses.counted(usage(dict.fromkeys([A, *many], 0.001), dict.fromkeys([A, *many], counts(0.001))))
    uses.counted(usage({A: 1.0}, {A: counts(1.0)}))
    assert uses.counted(usage({A: 1.0, many[0]: 1.0}, {})).terms.keys() == {A}


@pytest.mark.parametrize("common", [0.0, 0.2], ids=["steady clocks", "a clock that all share"])
def test_payers_that_are_never_counted_are_not_mistaken_for_the_mix_of_the_others(
    common: float,
) -> None:
    package = Package(lambda _, one: 5.0 * one.time / SECOND * (one.cycles / one.reference) ** 2.5)
    clocks: dict[Payer, float] = {A: 1.3, B: 0.7, C: 0.9, Consumer(4, 1): 1.1}
    absent: Set[Payer] = {C, Consumer(4, 1)}

    def second() -> dict[Payer, Counts]:
        uniform = package.chance.uniform
        change = uniform(1 - common, 1 + common)
        return {one: counts(uniform(0.4, 1), clock * change) for one, clock in clocks.items()}

    package.run(60, second, absent)
    for _ in range(10):
        now = second()
        true = [package.law(payer, one) for payer, one in now.items()]
        shares, errors = package.shares(now, absent)
        for share, each, error in zip(shares, true, errors, strict=True):
            assert share == pytest.approx(each / sum(true), rel=0.15)
            assert abs(share - each / sum(true)) <= error


def test_payer_without_counts_has_the_clock_that_a_neighbour_moves_by_its_work() -> None:
    uses = CountedUses()
    for second in range(40):
        working: dict[Payer, float] = {B: 4.0} if second % 4 < 2 else {}
        clock = 0.9 if working else 1.2
        counted = {payer: counts(use, clock) for payer, use in ({A: 1.0} | working).items()}
        found = uses.counted(usage({A: 1.0, C: 1.0} | working, counted))
        assert found.clocked.spent[C] == pytest.approx(clock**2.5 * SECOND, rel=0.01)


@pytest.mark.parametrize("clocks", [(0.7, 1, 1), (1, 0.7, 0.7), (1, 0.7, 1), (0.8, 1, 0.9)])
@pytest.mark.parametrize("times", [1, 3, 60])
def test_payer_that_leaves_and_returns_leaves_no_trace(
    clocks: tuple[float, ...], times: int
) -> None:
    """The steady payer tells the clock; the use of one without counts stays among those seen."""
    uses, seen = CountedUses(), set[float]()
    for second in range(10 * times):
        phase = second % 10
        working: dict[Payer, float] = {B: 8.0} if phase < 3 else {}
        counted = {A: counts(1.0)} | {one: counts(8.0, clocks[phase]) for one in working}
        found = uses.counted(usage({A: 1.0, C: 1.0} | working, counted))
        seen.add(found.clocked.spent[C] / SECOND)
    assert 0.7**2.5 <= min(seen) <= max(seen) <= (1 / 0.7) ** 2.5
    assert 0.7**2.5 <= found.clocked.spent[C] / SECOND <= 1.1
    powers = uses.powers
    shares = [(A, Microjoules(1_000_000)), (C, Microjoules(1_000_000))]
    if found.terms and powers.terms:
        errors = found.doubts(powers)(2_000_000, shares)
        assert errors[1] >= min(2_000_000, found.moved * 1_000_000)


def test_programs_that_retire_more_do_not_draw_more_for_that() -> None:
    """Only changes of a payer tell its siblings: programs differ for other reasons."""
    package = Package(lambda _, one: 5.0 * one.time / SECOND)
    retired = {A: 0.5, B: 3.0}
    package.run(
        60,
        lambda: {
            one: counts(package.chance.uniform(0.2, 1), retired=each)
            for one, each in retired.items()
        },
    )
    shares, _ = package.shares({one: counts(1, retired=each) for one, each in retired.items()})
    assert shares == pytest.approx([0.5, 0.5], rel=0.01)


def test_any_two_uses_differ_by_the_largest_ratio_at_most() -> None:
    """With counters and costs that both make one more expensive."""
    costs: dict[Payer, float] = {A: 1.0, B: 40.0}
    package = Package(lambda payer, one: costs[payer] * one.time / SECOND)

    def second() -> dict[Payer, Counts]:
        uniform = package.chance.uniform
        return {A: counts(uniform(0.2, 1), 0.5), B: counts(uniform(0.2, 1), 1.5, misses=0.3)}

    package.run(60, second)
    shares, _ = package.shares({A: counts(1, 0.5), B: counts(1, 1.5, misses=0.9)})
    assert 4 < shares[1] / shares[0] <= LARGEST_RATIO * 1.001


def test_user_who_imitates_the_cost_of_misses_moves_nobody_beyond_the_stated_error() -> None:
    """His power rises with his misses for another reason; a neighbour's misses cost nothing."""
    package = Package(
        lambda payer, one: 4 * one.time / SECOND + (40 * one.misses / SECOND if payer == A else 0)
    )

    def second() -> dict[Payer, Counts]:
        uniform = package.chance.uniform
        return {
            A: counts(uniform(0.4, 1), misses=uniform(0, 0.2)),
            B: counts(uniform(0.4, 1), misses=0.05),
            C: counts(uniform(0.4, 1)),
        }

    package.run(90, second)
    now = {A: counts(0.5), B: counts(0.5, misses=0.05), C: counts(0.5)}
    shares, errors = package.shares(now)
    for place in (1, 2):
        assert abs(shares[place] - 1 / 3) <= errors[place]


class Host:
    """The ledger beside a package whose processes have counters from some time on."""

    def __init__(self) -> None:
        self.ledger = Ledger(LedgerSettings(idle_powers={HwType.CPU: Milliwatts(30_000)}))
        self.chance, self.at, self.energy = random.Random(1), 1000 * SECOND, 0.0
        infos = tuple(PayerInfo(one, "work", principal=Principal(one.pid)) for one in (A, B))
        self._apply(Tick(Instant(self.at, 0), {"rapl": (PACKAGE,)}, (self._reading(),), infos))

    def _reading(self) -> Reading:
        return Reading(PACKAGE.id, Instant(self.at, 0), Microjoules(round(self.energy * 1e6)))

    def _apply(self, tick: Tick) -> list[Attribution]:
        return self.ledger.apply(tick)

    def run(self, seconds: int, *, counted: bool, covered: float = 1.0) -> list[Attribution]:
        found: list[Attribution] = []
        for _ in range(seconds):
            now = {one: counts(self.chance.uniform(0.2, 1), clock=1.2) for one in (A, B)}
            self.energy += IDLE + sum(5.0 * one.time / SECOND for one in now.values())
            start, self.at = Instant(self.at + round((1 - covered) * SECOND), 0), self.at + SECOND
            used = usage({payer: one.time / SECOND for payer, one in now.items()}, None)
            used = replace(used, start=start, end=Instant(self.at, 0))
            used = replace(used, counts=now if counted else None)
            tick = Tick(Instant(self.at, 0), {}, (self._reading(),), (), (used,))
            found += self._apply(tick)
        return found

    @property
    def method(self) -> str:
        return self.ledger.snapshot(Instant(self.at, 0), "host").account(PACKAGE.id).method


def test_method_of_a_package_is_that_of_its_counters() -> None:
    host = Host()
    host.run(30, counted=False)
    assert host.method == "cpu-time"
    host.run(1, counted=True)
    assert host.method == "counters"
    host.run(30, counted=False)
    assert host.method == "counters"
    host.run(31, counted=False)
    assert host.method == "cpu-time"


def test_first_counters_of_a_part_of_an_interval_are_used() -> None:
    """Their cost is learned from whole intervals only."""
    host = Host()
    (found,) = host.run(1, counted=True, covered=0.5)
    used = sum(share.energy for share in found.shares)
    assert 0 < used < found.interval.energy - IDLE * 1e6
    assert used + found.idle + found.unattributed == found.interval.energy


def test_change_between_counters_and_cpu_time_keeps_the_division() -> None:
    host = Host()
    for counted in (False, True, False, True):
        for one in host.run(70, counted=counted)[5:]:
            used = sum(share.energy for share in one.shares)
            assert used + one.idle + one.unattributed == one.interval.energy
            assert used == pytest.approx(one.interval.energy - IDLE * 1e6, rel=0.35)
