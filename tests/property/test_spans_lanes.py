"""Division among spans where any hardware type is absent, silent or late: exact in each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import HwType, Instant, Interval, Microjoules, StaticBasis
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import Span, SpanColumns, SpanEnd, SpanStart

NEVER = 2**80
STEP = 10  # nanoseconds of an interval
END = 120
KINDS = tuple(HwType)


class Lane(NamedTuple):
    """The energies of one hardware type from an interval on, and their static part if known."""

    since: int
    energies: list[int]
    static: bool

    def spent(self, start: int, end: int) -> float:
        """The microjoules of a period, spread evenly in each interval."""
        return sum(
            energy * max(0, min(end, (at + 1) * STEP) - max(start, at * STEP)) / STEP
            for at, energy in enumerate(self.energies)
            if at >= self.since
        )


def lanes(kind: HwType) -> st.SearchStrategy[Lane | None]:
    count = END // STEP
    energies = st.lists(
        st.sampled_from([0, 1, 7, 10**6, 2**40]), min_size=count, max_size=count
    ) | st.just([0] * count)
    since = st.integers(0, 3) | st.just(0)
    static = st.booleans() if kind is HwType.GPU else st.just(False)
    return st.none() | st.builds(Lane, since, energies, static)


machines = st.fixed_dictionaries({kind: lanes(kind) for kind in KINDS}).map(
    lambda found: {kind: lane for kind, lane in found.items() if lane is not None}
)


def run(profile: EnergyProfile, machine: Mapping[HwType, Lane], number: int) -> None:
    """Add the intervals of one number."""
    for kind, lane in machine.items():
        if number < lane.since:
            continue
        start, energy = number * STEP, lane.energies[number]
        interval = Interval("", Instant(start, 0), Instant(start + STEP, 0), Microjoules(energy))
        static = (energy // 3, StaticBasis.CONFIGURED) if lane.static else None
        profile.add(kind, kind, interval, energy, 0, static)


def some_spans() -> st.SearchStrategy[list[Span]]:
    one = st.builds(
        lambda ident, parent, start, length, weight: Span(
            bytes(16),
            bytes([ident]) * 8,
            bytes([parent]) * 8 if parent else b"",
            "s",
            "n",
            start,
            start + length,
            weight=weight,
        ),
        st.integers(1, 30),
        st.integers(0, 30),
        st.integers(-5, END),
        st.integers(0, 60),
        st.none() | st.integers(1, 1000),
    )
    return st.lists(one, max_size=5)


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(1, END // STEP)),
        st.tuples(st.just("receive"), some_spans()),
        # The usual rhythm of an exporter: a batch is settled while the next one waits.
        st.tuples(st.just("settle"), some_spans(), some_spans()),
        st.tuples(
            st.just("open"),
            st.integers(1, 30),
            st.integers(0, 30),
            st.integers(0, END),
            st.integers(0, 50),
        ),
        st.tuples(st.just("close"), st.integers(1, 30), st.integers(0, END), st.integers(0, 50)),
        st.tuples(st.just("expire"), st.integers(0, END), st.integers(0, END)),
        st.tuples(st.just("outside"), st.integers(0, END)),
    ),
    max_size=24,
)


@given(machines, happenings, st.integers(1, 4), st.booleans())
def test_energies_of_present_lanes_are_conserved_whatever_lanes_are_absent_or_zero(
    machine: dict[HwType, Lane],
    script: Sequence[tuple[object, ...]],
    stretches: int,
    by_cpu: bool,
) -> None:
    profile, process = EnergyProfile(), ProcessSpans(by_cpu=by_cpu, stretches=stretches)
    for kind in machine:
        profile.expect(kind, kind, 0)
    total: dict[HwType, int] = {}
    received: list[SpanColumns] = []
    passed = 0

    def count(energies: Mapping[HwType, int]) -> None:
        for kind, energy in energies.items():
            assert 0 <= energy <= machine[kind].spent(0, END)
            total[kind] = total.get(kind, 0) + energy

    def settle() -> None:
        if received:
            for joined in process.settle(received.pop(0), profile, NEVER, waiting=received):
                count(joined.exclusive)

    for step in [*script, ("run", END // STEP), *[("settle",)] * 2 * len(script)]:
        match step:
            case ("run", int(count_of)):
                for number in range(passed, passed := min(passed + count_of, END // STEP)):
                    run(profile, machine, number)
            case ("receive" | "settle", *batches):
                received.extend(map(SpanColumns.of, batches))  # type: ignore[arg-type]
                if step[0] == "settle":
                    settle()
            case ("open", int(ident), int(parent), int(at), int(cpu)):
                process.open(SpanStart(bytes([ident]) * 8, bytes([parent]) * 8, at, ident % 3, cpu))
            case ("close", int(ident), int(at), int(cpu)):
                process.close(SpanEnd(bytes([ident]) * 8, at, ident % 3, cpu))
            case ("expire", int(opened), int(ended)):
                process.expire(opened, ended)
            case ("outside", int(before)):
                count(process.outside(profile, before))
    process.expire(NEVER, NEVER)
    count(process.outside(profile, NEVER))
    since = process.since
    if since is not None:
        assert total.keys() <= machine.keys()
        for kind, lane in machine.items():
            assert abs(total.get(kind, 0) - lane.spent(since, END)) <= 1
