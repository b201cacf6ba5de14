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


PAYERS, SECONDS = "abcd", 24


def _joules(payer: str, second: int) -> int:
    """The energy of a process in a step: one digit of a number of base four."""
    return 4 ** (PAYERS.index(payer) * SECONDS + second)


class _Engines:
    """Engines that read in each turn all steps of their processes again, those before included."""

    def __init__(self, members: dict[str, frozenset[str]]) -> None:
        self.division = RequestDivision(lambda _: TokenPowerModel())
        self.members, self.seconds = members, 0
        self._shares = Counter[str]()

    def forget(self, engine: str) -> frozenset[str]:
        self.division.forget(engine)
        return self.members.pop(engine)

    def merge(self, engine: str, into: str) -> None:
        self.division.merge(engine, into)
        self.members[into] |= self.members.pop(engine)

    def turn(self, hold: int, requests: list[tuple[int, int]], silent: str = "") -> None:
        """Read one more step, and receive requests, each from and to a number of seconds ago.

        The engine ``silent`` reads none: it has no GPU.
        """
        self.seconds += 1
        now = self.seconds * SECOND
        for (first, last), engine in zip(requests, self.members, strict=False):
            times = now - first * SECOND, now - min(first, last) * SECOND
            one = InferenceRequest.of(b"r" * 8, *times, (10, 20), InferenceDetails("m"))
            self.division.add([one], now, engine=engine)
        for engine, members in self.members.items():
            self.division.assign(engine, frozenset(), None, members)
        for engine, members in self.members.items():
            if engine == silent:
                continue
            steps = [
                CounterStep(
                    i * SECOND, (i + 1) * SECOND, sum(_joules(one, i) for one in members), False
                )
                for i in range(min(self.seconds, SECONDS))
            ]
            self.division.add_host_steps(engine, dict.fromkeys(COUNTERS[1:3], steps), 0)
        self._settle(now - hold * SECOND)

    def _settle(self, now: int) -> None:
        settled = self.division.settle(now)
        self._shares.update(settled.host_idle)
        for each in settled.requests:
            self._shares.update(each.host.energy)

    def counts(self) -> list[set[int]]:
        """The numbers of divisions that steps have had, for CPU and memory."""
        self._settle(1000 * SECOND)
        wholes, digits = (
            map(self._shares.__getitem__, ("cpu", "memory")),
            range(len(PAYERS) * SECONDS),
        )
        return [{whole >> 2 * digit & 3 for digit in digits} for whole in wholes]


_holds = st.sampled_from([0, 3, 9, 40])  # with the longest, no step is divided before the end
_ages = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3)
_places = st.tuples(*[st.sampled_from(["x", "y", "z", ""])] * len(PAYERS))


@given(
    turns=st.lists(
        st.tuples(_places, st.booleans(), _holds, _ages, st.sampled_from("xyz-")), max_size=SECONDS
    ),
    restarted=st.sets(st.integers(0, SECONDS)),
)
def test_no_joule_of_a_process_is_divided_twice_wherever_it_goes(
    turns: list[tuple[tuple[str, ...], bool, int, list[tuple[int, int]], str]], restarted: set[int]
) -> None:
    engines = _Engines({"x": frozenset(PAYERS)})
    engines.turn(40, [])
    for number, (places, merges, hold, ages, silent) in enumerate(turns):
        former = {*engines.members}
        if number in restarted:
            for engine, own in engines.members.items():
                engines.division.restart_host(engine, own, ())
        for engine in sorted(former - {*places}):
            others = [one for one in engines.members if one != engine]
            if merges and others:
                engines.merge(engine, others[0])
            else:
                engines.forget(engine)
        engines.members = {
            engine: frozenset(
                payer for payer, place in zip(PAYERS, places, strict=True) if place == engine
            )
            for engine in sorted({*places} - {""})
        }
        engines.turn(hold, ages, silent)
    assert all(counts <= {0, 1} for counts in engines.counts())


_choices = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["forget", "part", "move", "merge", "early"]), _choices, _ages),
        min_size=SECONDS,
        max_size=SECONDS,
    ),
    hold=_holds,
)
def test_each_joule_of_a_process_that_has_an_engine_is_divided_once(
    turns: list[tuple[str, tuple[int, int], list[tuple[int, int]]]], hold: int
) -> None:
    engines = _Engines({"x": frozenset("ab"), "y": frozenset("c"), "z": frozenset("d")})
    engines.turn(hold, [])
    for number, (change, (first, second), ages) in enumerate(turns):
        names = sorted(engines.members)
        one, other = (names[choice % len(names)] for choice in (first, first + 1 + second))
        own = sorted(engines.members[one])
        if change == "forget":
            gone = engines.forget(one)
            engines.turn(hold, ages)
            engines.members[one] = gone  # with the next request
        elif change == "early":
            engines.division.restart_host(one, engines.members[one], ())
        elif change == "merge" and one != other:
            engines.merge(one, other)
        elif len(own) > 1 and one != other:
            name = other if change == "move" else f"{number}"
            engines.members[one] -= {own[0]}
            engines.members[name] = engines.members.get(name, frozenset()) | {own[0]}
        engines.turn(hold, ages)
    for _ in range(2):
        engines.turn(hold, [])
    assert engines.counts() == [{1}, {1}]
