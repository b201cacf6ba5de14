"""No microjoule of a counter is created or lost: requests, the engine alone, and the rest."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from wattspan.inference.division import RequestDivision
from wattspan.inference.engine_totals import CounterEnergy, ProcessStep
from wattspan.inference.host_energy import HostCounter
from wattspan.inference.requests import InferenceRequest
from wattspan.inference.token_power import TokenPowerModel
from wattspan.model import MILLISECOND, SECOND
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.values import InferenceDetails

COUNTERS = (
    HostCounter("package-0", "cpu"),
    HostCounter("package-1", "cpu"),
    HostCounter("dram", "memory"),
    HostCounter("gpu", "idle"),
)


@st.composite
def _requests(draw: st.DrawFn) -> tuple[InferenceRequest, str, int, bool]:
    """A request, its engine, the time of its receipt, and True to withdraw it a moment later."""
    start = draw(st.integers(0, 20 * SECOND))
    end = start + draw(st.integers(0, 10 * SECOND))
    ident = draw(st.binary(min_size=8, max_size=8))
    request = InferenceRequest.of(ident, start, end, (10, 20), InferenceDetails("m"))
    received = end + draw(st.integers(0, 30 * SECOND))
    return request, draw(st.sampled_from("xyz")), received, draw(st.booleans())


@given(
    received=st.lists(_requests(), max_size=20),
    energies=st.lists(st.integers(0, 10**8), min_size=1, max_size=40),
    length=st.integers(1, 400 * MILLISECOND),
    pace=st.integers(SECOND // 3, 9 * SECOND),
    merged=st.integers(0, 160 * SECOND),
    lost=st.lists(st.sampled_from(COUNTERS), max_size=2),
)
def test_requests_and_engine_have_the_energy_of_each_part(
    received: list[tuple[InferenceRequest, str, int, bool]],
    energies: list[int],
    length: int,
    pace: int,
    merged: int,
    lost: list[HostCounter],
) -> None:
    steps = {
        counter: [
            CounterStep(i * length, (i + 1) * length, energy + number, energy % 7 == 0)
            for i, energy in enumerate(energies)
        ]
        for number, counter in enumerate(COUNTERS)
        if counter not in lost
    }
    division = RequestDivision(lambda _: TokenPowerModel())
    for engine in "xyz":
        division.assign(engine, frozenset())
    found, idle, engines = [], Counter[str](), "xyz"
    for now in range(0, 80 * SECOND, pace):
        if now >= merged and "z" in engines:
            division.merge("z", "y")
            engines = "xy"
        for request, sender, at, withdrawn in received:
            if now - pace < at <= now:
                division.add([request], at, engine=sender if sender in engines else "y")
            if withdrawn and now - 3 * pace < at <= now - 2 * pace:
                division.withdraw([request])
        for engine in engines:
            new = {
                counter: [step for step in own if step.end <= now] for counter, own in steps.items()
            }
            division.add_host_steps(engine, new, 0)
        settled = division.settle(now - 2 * SECOND)
        found += settled.requests
        idle.update(settled.host_idle)
    last = division.settle(200 * SECOND)
    idle.update(last.host_idle)

    assert division.waiting == 0
    shares = Counter[str](idle)
    for each in (*found, *last.requests):
        shares.update(each.host.energy)
        assert min(each.host.energy.values(), default=0) >= 0
        assert not each.host.known or "cpu" in each.host.energy
    known = Counter[str]()
    for counter, own in steps.items():
        known[counter.part] += sum(step.energy for step in own)
    # Both engines read all steps; a part of another one has read some of them before.
    assert all(2 * whole <= shares[part] <= 3 * whole for part, whole in known.items())
    if "z" in engines or merged == 0:
        assert shares == Counter({part: len(engines) * whole for part, whole in known.items()})


@given(
    energies=st.lists(st.integers(0, 10**9), min_size=1, max_size=40),
    length=st.integers(1, 400 * MILLISECOND),
    edges=st.lists(st.floats(0, 1), max_size=20),
)
def test_periods_between_readings_have_the_energy_of_the_counter(
    energies: list[int], length: int, edges: list[float]
) -> None:
    end = len(energies) * length
    counter = CounterEnergy()
    counter.add(
        ProcessStep(i * length, (i + 1) * length, energy) for i, energy in enumerate(energies)
    )
    times = [0, *sorted(round(edge * end) for edge in edges), end]
    periods = [counter.between(*each) for each in pairwise(times)]
    assert sum(energy for energy, *_ in periods) == sum(energies)
    assert all(energy >= 0 for energy, *_ in periods)
    assert sum(missing for *_, missing in periods) == 0
