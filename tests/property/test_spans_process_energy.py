"""Merging shares when they are wanted yields the energy that merging each step at once does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import Domain, HwType, Instant, Interval, Microjoules, Provenance
from wattspan.spans.process_energy import DomainStep, DomainSteps, ProcessEnergy, append_share
from wattspan.spans.profiles import EnergyProfile

MS = 10**6
TICK = 100 * MS


def domain(name: str, kind: HwType, resolution: int = 0) -> Domain:
    return Domain(
        name, kind, name, "fake", Provenance.MEASURED, resource=name, resolution=resolution
    )


DOMAINS = (
    domain("cpu0", HwType.CPU, MS),
    domain("cpu1", HwType.CPU, 20 * MS),
    domain("dram", HwType.MEMORY, MS),
    domain("gpu0", HwType.GPU, 100 * MS),
    domain("gpu1", HwType.GPU),
)


class Settled(NamedTuple):
    """A settled step of one domain, and the payer's share of it; ``merge`` afterwards."""

    domain: Domain
    step: DomainStep
    own: int
    merge: bool


class Host(NamedTuple):
    """A mostly idle payer: the energies of its bursts by tick, merges after some steps."""

    ticks: int
    bursts: dict[int, int]
    merges: set[tuple[int, int]]  # number of a domain, tick
    gaps: set[tuple[int, int]]  # number of a domain, tick
    late: int  # number of a domain whose steps end earlier
    lag: int

    def steps(self) -> Iterator[Settled]:
        for tick in range(self.ticks):
            for number, one in enumerate(DOMAINS):
                if (number, tick) in self.gaps:
                    continue
                start = (1000 + tick) * TICK - self.lag * MS * (number == self.late)
                own = self.bursts.get(tick, 0) * (7 + number) % 2_000_000
                energy = Microjoules(own + 1_000_000)
                edges = Instant(start, 0), Instant(start + TICK, 0)
                step = DomainStep.of(one, Interval(one.id, *edges, energy), own + 900_000, 100.0)
                yield Settled(one, step, own, (number, tick) in self.merges)


TICKS, NUMBERS = st.integers(0, 119), st.integers(0, len(DOMAINS) - 1)
HOSTS = st.builds(
    Host,
    st.integers(1, 120),
    st.dictionaries(TICKS, st.integers(1, 2_000_000), max_size=6),
    st.sets(st.tuples(NUMBERS, TICKS), max_size=6),
    st.sets(st.tuples(NUMBERS, TICKS), max_size=3),
    NUMBERS,
    st.integers(0, 10),
)


@pytest.mark.slow
@given(HOSTS)
def test_merge_on_demand_equals_merge_at_each_step(host: Host) -> None:
    history = list(host.steps())
    at_once, energy = EnergyProfile(), ProcessEnergy()
    domains = {one.id: DomainSteps(one) for one in DOMAINS}
    for one in DOMAINS:
        at_once.expect(one.id, one.hw_type, 1000 * TICK - 10 * MS)
        energy.begin(one, 1000 * TICK - 10 * MS, expected=True)
    merged = 0
    for one, step, own, merge in history:
        append_share(at_once, one, step, own)
        at_once.merge()
        domains[one.id].add(step)
        if own:
            energy.add(one.id, step.end, own)
        if merge:
            merged += energy.merge(domains)
    merged += energy.merge(domains)
    lazy = energy.profile
    assert merged <= len(history)
    # Idle steps of one domain may reach beyond those of another: more is known at once.
    assert at_once.watermark <= lazy.watermark <= at_once.watermark + TICK
    assert lazy.horizon == at_once.horizon
    known = [step.end for _, step, _, _ in history if step.end <= at_once.watermark]
    for until in known:
        mine, other = lazy.between(0, until), at_once.between(0, until)
        assert mine.covered == other.covered
        assert mine.energy.keys() == other.energy.keys()
        for kind, spent in mine.energy.items():
            # Steps of different domains overlap; each cut rounds down.
            assert abs(spent - other.energy[kind]) <= len(DOMAINS)
    whole, other = (each.between(0, at_once.watermark) for each in (lazy, at_once))
    assert whole.energy == other.energy
