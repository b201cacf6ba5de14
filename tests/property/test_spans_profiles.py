"""Answers of profiles add up, never change, and use bounded memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import HwType, Instant, Interval, Microjoules
from wattspan.spans.profiles import EnergyProfile

DOMAINS = {
    "package-0": HwType.CPU,
    "package-1": HwType.CPU,
    "dram": HwType.MEMORY,
    "gpu": HwType.GPU,
}
MS = 1_000_000
END = 10**18

told = st.tuples(
    st.sampled_from(list(DOMAINS)),
    st.sampled_from([0, 0, 0, 0, 3, 500, 9000]),  # a hole before it, ms
    st.integers(1, 400),  # ms
    st.integers(0, 10**7),
    st.sampled_from([0, 1, 10**4, 10**7]),
)
sampled = st.tuples(st.integers(1, 300), st.integers(-5, 300))  # ms, CPU ms
happenings = st.lists(told | sampled, max_size=80)


class Teller:
    """Feeds a profile with consecutive intervals of domains."""

    def __init__(self, profile: EnergyProfile, *, expected: bool) -> None:
        self.profile = profile
        self.at = dict.fromkeys(DOMAINS, 5 * MS)
        self.energy = dict.fromkeys(HwType, 0)
        self.clock = (0, 0)
        if expected:
            for domain, kind in DOMAINS.items():
                profile.expect(domain, kind, 5 * MS)

    def tell(self, what: tuple[object, ...]) -> None:
        match what:
            case (str(domain), int(hole), int(length), int(energy), int(noise)):
                start = self.at[domain] + hole * MS
                end = self.at[domain] = start + length * MS
                interval = Interval(domain, Instant(start, 0), Instant(end, 0), Microjoules(0))
                self.profile.add(domain, DOMAINS[domain], interval, energy, noise)
                self.energy[DOMAINS[domain]] += energy
            case (int(later), int(cpu)):
                mono, spent = self.clock
                self.clock = mono + later * MS, spent + cpu * MS
                self.profile.sample(*self.clock)


@given(happenings, st.booleans())
def test_energy_is_answered_once_or_counted_as_lost(
    script: list[tuple[object, ...]], expected: bool
) -> None:
    profile = EnergyProfile()
    teller = Teller(profile, expected=expected)
    for what in script:
        teller.tell(what)
    profile.finish()
    answer = profile.between(0, END)
    assert sum(answer.energy.values()) + profile.lost == sum(teller.energy.values())
    assert all(energy <= teller.energy[kind] for kind, energy in answer.energy.items())
    assert answer.covered <= max(0, profile.watermark - profile.horizon)


@given(happenings, st.lists(st.integers(0, 20_000 * MS), min_size=2, max_size=6))
def test_answers_for_neighbouring_periods_add_up(
    script: list[tuple[object, ...]], cuts: list[int]
) -> None:
    profile = EnergyProfile()
    teller = Teller(profile, expected=True)
    for what in script:
        teller.tell(what)
    cuts.sort()
    whole = profile.between(cuts[0], cuts[-1])
    parts = [profile.between(a, b) for a, b in pairwise(cuts)]
    for kind, energy in whole.energy.items():
        assert sum(part.energy.get(kind, 0) for part in parts) == energy
        assert all(part.energy.get(kind, 0) >= 0 for part in parts)
        assert all(part.uncertainty.get(kind, 0) >= 0 for part in parts)
    assert sum(part.covered for part in parts) == whole.covered


@given(happenings, st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=5))
def test_answers_never_change(
    script: list[tuple[object, ...]], stretches: list[tuple[int, int]]
) -> None:
    profile = EnergyProfile()
    teller = Teller(profile, expected=True)
    answers: dict[tuple[int, int], dict[HwType, Microjoules]] = {}
    watermark = 0
    for what in script:
        teller.tell(what)
        assert profile.watermark >= watermark
        watermark = profile.watermark
        for start, end in stretches:
            if start < end and end * MS <= watermark:
                energy = dict(profile.between(start * MS, end * MS).energy)
                assert answers.setdefault((start, end), energy) == energy


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10**7)), min_size=1, max_size=300))
def test_thinning_keeps_the_sum_and_adds_uncertainty(intervals: list[tuple[int, int]]) -> None:
    small, large = EnergyProfile(16), EnergyProfile(10**6)
    at, edges = 0, [0]
    for length, energy in intervals:
        end = at + length * MS
        interval = Interval("c", Instant(at, 0), Instant(end, 0), Microjoules(0))
        for profile in (small, large):
            profile.add("c", HwType.CPU, interval, energy, 0)
        at = end
        edges.append(at)
    assert len(small.rows.times) <= 16
    assert small.between(0, at).energy == large.between(0, at).energy
    for start, end in zip(edges, edges[7:], strict=False):
        thin, fine = small.between(start, end), large.between(start, end)
        off = abs(thin.energy[HwType.CPU] - fine.energy[HwType.CPU])
        assert off <= 1.5 * thin.uncertainty[HwType.CPU] + 1  # two edges, in quadrature
    if small.thinned >= 0:
        since = min((edge for edge in edges if edge >= small.thinned), default=at)
        assert small.between(since, at).energy == large.between(since, at).energy
