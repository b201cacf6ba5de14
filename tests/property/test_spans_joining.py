"""Conservation: spans have the energy of their process, no more and no less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import HwType, Instant, Interval, Microjoules
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.power_model import ENOUGH_STEPS, PowerModel, Segment, Step
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.step_division import StepDivider
from wattspan.spans.values import Outcome, Span, SpanColumns, SpanEnd, SpanEnergy, SpanStart

CPU, GPU, MEMORY = HwType.CPU, HwType.GPU, HwType.MEMORY
KINDS = (CPU, MEMORY, GPU)
NEVER = 2**80


def interval(start: int, end: int) -> Interval:
    return Interval("", Instant(start, 0), Instant(end, 0), Microjoules(0))


class Machine:
    """A process whose energy grows in intervals of 10 ns, with the energy of each interval."""

    def __init__(self, limit: int = 4096) -> None:
        self.profile = EnergyProfile(limit)
        self.spent: list[tuple[int, ...]] = []
        for kind in KINDS:
            self.profile.expect(kind, kind, 0)

    def spend(self, energies: Sequence[int]) -> None:
        at = 10 * len(self.spent)
        self.spent.append(tuple(energies))
        for kind, energy in zip(KINDS, energies, strict=True):
            self.profile.add(kind, kind, interval(at, at + 10), energy, 0)

    def power(self, time: int) -> tuple[Fraction, ...]:
        """Energy of the nanosecond that begins at ``time``."""
        return tuple(Fraction(energy, 10) for energy in self.spent[time // 10])


def divider(*powers: int) -> StepDivider:
    """A divider with the mean powers of the spans' names and outside of spans."""
    model = PowerModel()
    activities = [(GPU, "process"), *((GPU, ("s", name)) for name in "nmo")]
    for number in range(ENOUGH_STEPS):
        for activity, power in zip(activities, powers, strict=True):
            model.learn(Step([Segment(0, 10**8, {activity: 1.0})], power * (1 + number % 3)))
    return StepDivider(model, "process")


def spans(latest: int = 130) -> st.SearchStrategy[Span]:
    """Spans of a small world, often sensible: few ids, so that parents and duplicates happen."""
    times = st.integers(-5, latest)
    return st.builds(
        lambda ident, parent, a, b, straight, weight, name: Span(
            trace=bytes(16),
            id=bytes([ident]) * 8,
            parent=bytes([parent]) * 8 if parent else b"",
            service="s",
            name=name,
            start=min(a, b) if straight else a,
            end=max(a, b) if straight else b,
            weight=weight,
        ),
        st.integers(1, 40),
        st.integers(0, 40),
        times,
        times,
        st.sampled_from([True, True, True, False]),
        st.none(),
        st.sampled_from("nmo"),
    )


dividers = st.none() | st.builds(divider, *[st.sampled_from([0, 1, 1000, 10**8]) for _ in range(4)])


energies = st.tuples(st.integers(0, 50), st.integers(0, 2**40), st.integers(0, 3))


def taken(results: Sequence[SpanEnergy]) -> dict[HwType, int]:
    return {kind: sum(each.exclusive.get(kind, 0) for each in results) for kind in KINDS}


def joined_stretch(results: Sequence[SpanEnergy], machine: Machine) -> tuple[int, int] | None:
    """From the first to the last time with an open span."""
    inside = [
        (max(0, each.span.start), min(machine.profile.watermark, each.span.end))
        for each in results
        if each.outcome not in (Outcome.INVERTED, Outcome.FUTURE, Outcome.DUPLICATE)
    ]
    inside = [(start, end) for start, end in inside if start < end]
    return (min(s for s, _ in inside), max(e for _, e in inside)) if inside else None


@given(
    st.lists(energies, min_size=1, max_size=12),
    st.lists(st.lists(spans(), max_size=12), max_size=5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    dividers,
)
def test_exclusive_and_outside_energies_add_up_to_the_process(
    spent: list[tuple[int, ...]],
    batches: list[list[Span]],
    by_cpu: bool,
    forgetful: bool,
    received: bool,
    steps: StepDivider | None,
) -> None:
    machine = Machine()
    for interval in spent:
        machine.spend(interval)
    process = ProcessSpans(by_cpu=by_cpu, steps=steps)
    results: list[SpanEnergy] = []
    for number, batch in enumerate(batches, start=1):
        later = [SpanColumns.of(each) for each in batches[number:]] if received else []
        settled = process.settle(batch, machine.profile, 125, waiting=later)
        for at, energies in enumerate(machine.spent):
            within = machine.profile.between(10 * at, 10 * at + 10).energy
            assert within == dict(zip(KINDS, energies, strict=True))
        assert [each.span for each in settled] == batch
        results += settled
        if forgetful:  # a repeated identifier is unknown and receives no energy twice
            process.forget_half()
            process.forget_half()
            assert process.remembered == 0
    for each in results:
        assert all(energy >= 0 for energy in each.exclusive.values())
        assert 0 <= each.inclusive.covered <= max(0, each.span.end - each.span.start)
    stretch = joined_stretch(results, machine)
    outside = process.outside(machine.profile, NEVER)
    if stretch is None:
        assert not any(taken(results).values())
        assert not any(outside.values())
        return
    whole = machine.profile.between(stretch[0], machine.profile.watermark).energy
    assert {k: v + outside[k] for k, v in taken(results).items()} == whole
    assert all(energy >= 0 for energy in outside.values())


def reference(
    machine: Machine, batches: Sequence[Sequence[Span]], weight: Callable[[Span], int]
) -> dict[bytes, tuple[Fraction, ...]]:
    """The same rule, nanosecond by nanosecond, in exact fractions."""
    end = 10 * len(machine.spent)
    covered = [False] * end
    shares: dict[bytes, tuple[Fraction, ...]] = {}
    for batch in batches:
        valid = [s for s in batch if s.start <= s.end and s.id not in shares]
        valid = list({s.id: s for s in reversed(valid)}.values())[::-1]
        place = {span.id: span for span in valid}

        def parent_of(span: Span, place: dict[bytes, Span] = place) -> Span | None:
            above = place.get(span.parent)
            return above if above is not None and above.start < span.start else None

        for span in valid:
            shares[span.id] = (Fraction(0),) * len(KINDS)
        for time in range(end):
            active = [s for s in valid if s.start <= time < s.end]
            busy = {above.id for s in active if (above := parent_of(s)) is not None}
            leaves = [s for s in active if s.id not in busy]
            if not leaves or covered[time]:
                continue
            covered[time] = True
            total = sum(map(weight, leaves))
            for leaf in leaves:
                shares[leaf.id] = tuple(
                    old + power * weight(leaf) / total
                    for old, power in zip(shares[leaf.id], machine.power(time), strict=True)
                )
    return shares


@given(
    st.lists(energies, min_size=1, max_size=12),
    st.lists(st.lists(spans(120), max_size=10), max_size=4),
    st.dictionaries(st.integers(1, 40), st.integers(1, 1000), max_size=40),
)
def test_joining_equals_the_rule_at_every_nanosecond(
    spent: list[tuple[int, ...]], batches: list[list[Span]], weights: dict[int, int]
) -> None:
    machine = Machine()
    for each in spent:
        machine.spend(each)
    # Ties are broken by age, so that the reference need not know of circles.
    batches = [
        [s._replace(parent=b"" if s.parent == s.id else s.parent) for s in batch]
        for batch in batches
    ]
    if weights:
        batches = [[s._replace(weight=weights.get(s.id[0], 7)) for s in b] for b in batches]
    known = {s.id: s for batch in batches for s in batch}
    batches = [
        [
            s._replace(parent=b"") if (p := known.get(s.parent)) and p.start >= s.start else s
            for s in batch
        ]
        for batch in batches
    ]
    process = ProcessSpans()
    expected = reference(machine, batches, lambda span: span.weight or 1)
    for batch in batches:
        for joined in process.settle(batch, machine.profile, NEVER):
            if joined.outcome in (Outcome.INVERTED, Outcome.DUPLICATE):
                continue
            for kind, share in zip(KINDS, expected[joined.span.id], strict=True):
                assert abs(joined.exclusive.get(kind, 0) - share) < 1 + Fraction(1, 1000)


@given(
    st.lists(energies, min_size=12, max_size=12),
    st.lists(st.tuples(st.integers(0, 119), st.integers(1, 60), st.integers(0, 20)), max_size=20),
    st.lists(st.integers(0, 20), max_size=4),
    st.booleans(),
)
def test_received_spans_share_as_if_all_were_settled_together(
    spent: list[tuple[int, ...]],
    times: list[tuple[int, int, int]],
    cuts: list[int],
    inclusive: bool,
) -> None:
    machine = Machine()
    for each in spent:
        machine.spend(each)
    begins = {ident: start for ident, (start, _, _) in enumerate(times, start=1)}
    spans = [
        Span(
            bytes(16),
            bytes([ident]) * 8,
            bytes([parent]) * 8 if begins.get(parent, start) < start else b"",
            "s",
            "n",
            start,
            min(120, start + length),
        )
        for ident, (start, length, parent) in enumerate(times, start=1)
    ]
    spans.sort(key=lambda span: span.end)  # as a batch exporter sends them
    edges = [0, *sorted(cuts), len(spans)]
    batches = [SpanColumns.of(spans[a:b]) for a, b in pairwise(edges)]
    process, expected = ProcessSpans(), reference(machine, [spans], lambda span: 1)
    for number, batch in enumerate(batches, start=1):
        for joined in process.settle(
            batch, machine.profile, NEVER, inclusive=inclusive, waiting=batches[number:]
        ):
            assert joined.outcome is Outcome.JOINED
            for kind, share in zip(KINDS, expected[joined.span.id], strict=True):
                assert abs(joined.exclusive[kind] - share) < 1 + Fraction(1, 1000)
            if inclusive:
                alone = machine.profile.between(joined.span.start, joined.span.end)
                assert joined.inclusive == alone


@given(st.lists(energies, min_size=3, max_size=12), st.integers(1, 64), st.integers(0, 20))
def test_equal_spans_have_equal_energy(
    spent: list[tuple[int, ...]], count: int, start: int
) -> None:
    machine = Machine()
    for each in spent:
        machine.spend(each)
    batch = [Span(bytes(16), i.to_bytes(8, "big"), b"", "s", "n", start, 27) for i in range(count)]
    first, *others = ProcessSpans().settle(batch, machine.profile, NEVER)
    assert all(each.exclusive == first.exclusive for each in others)
    whole = machine.profile.between(start, 27).energy
    for kind in KINDS:
        assert whole[kind] - count <= count * first.exclusive[kind] <= whole[kind]


@given(
    st.lists(energies, min_size=12, max_size=12),
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=12),
    st.lists(st.integers(0, 12), max_size=12),
)
def test_exclusive_energies_of_a_tree_are_within_its_inclusive_energy(
    spent: list[tuple[int, ...]], times: list[tuple[int, int]], parents: list[int]
) -> None:
    machine = Machine()
    for each in spent:
        machine.spend(each)
    batch = [Span(bytes(16), bytes([99]) * 8, b"", "s", "root", 0, 120)]
    for i, (one, other) in enumerate(times):
        above = batch[min(parents[i] if i < len(parents) else 0, len(batch) - 1)]
        start = max(above.start, min(one, other))
        end = max(start, min(above.end, max(one, other)))
        batch.append(Span(bytes(16), bytes([i + 1]) * 8, above.id, "s", "n", start, end))
    results = {each.span.id: each for each in ProcessSpans().settle(batch, machine.profile, NEVER)}

    def below(ident: bytes, kind: HwType) -> int:
        return results[ident].exclusive[kind] + sum(
            below(span.id, kind) for span in batch if span.parent == ident
        )

    for kind in KINDS:
        # The root alone is sure to be by itself: others overlap their siblings
        assert below(batch[0].id, kind) <= results[batch[0].id].inclusive.energy[kind]


# -------------------------------------------------------------------------- as things happen


@st.composite
def happenings(draw: st.DrawFn) -> list[tuple[object, ...]]:
    """Events of a process in any order."""
    times = st.integers(0, 400)
    idents = st.integers(1, 15)
    step = st.one_of(
        st.tuples(st.just("spend"), st.lists(energies, min_size=1, max_size=4)),
        st.tuples(st.just("open"), idents, st.integers(0, 15), times, st.integers(0, 50)),
        st.tuples(st.just("close"), idents, times, st.integers(0, 50)),
        st.tuples(st.just("settle"), st.lists(spans(400), max_size=5)),
        st.tuples(st.just("expire"), times, times),
        st.tuples(st.just("outside"), times),
    )
    return draw(st.lists(step, max_size=40))


@given(
    happenings(),
    st.integers(1, 6),
    st.sampled_from([16, 4096]),
    st.booleans(),
    dividers,
    st.sampled_from([0, 0, 25, 60]),
)
def test_conservation_holds_for_generated_events(
    script: list[tuple[object, ...]],
    stretches: int,
    limit: int,
    weighed: bool,
    steps: StepDivider | None,
    begin: int,
) -> None:
    """Of a returned process, with a ``begin``, a fraction of a microjoule may be lost there."""
    machine = Machine(limit)
    machine.spend((7, 7, 7))
    process = ProcessSpans(stretches=stretches, ids=24, announced=8, steps=steps, begin=begin)
    total = dict.fromkeys(KINDS, 0)
    first: int | None = None

    def count(energy: dict[HwType, Microjoules]) -> None:
        for kind, value in energy.items():
            assert value >= 0
            total[kind] += value

    for step in script:
        match step:
            case ("spend", many):
                for each in many:  # type: ignore[attr-defined]
                    machine.spend(each)
            case ("open", ident, parent, at, cpu):
                process.open(
                    SpanStart(bytes([ident]) * 8, bytes([parent]) * 8, at, ident % 3, cpu)  # type: ignore[list-item,arg-type,operator]
                )
            case ("close", ident, at, cpu):
                process.close(SpanEnd(bytes([ident]) * 8, at, ident % 3, cpu))  # type: ignore[list-item,arg-type,operator]
            case ("settle", batch):
                if weighed:
                    batch = [s._replace(weight=s.id[0]) for s in batch]  # type: ignore[attr-defined]
                for each in process.settle(batch, machine.profile, NEVER):  # type: ignore[arg-type]
                    count(dict(each.exclusive))
            case ("expire", opened, ended):
                process.expire(opened, ended)  # type: ignore[arg-type]
            case ("outside", before):
                count(process.outside(machine.profile, before))  # type: ignore[arg-type]
        first = process.since if process.since is None else max(process.since, begin)
        spent = machine.profile.between(
            machine.profile.watermark if first is None else first, machine.profile.watermark
        )
        for kind in KINDS:
            assert total[kind] <= sum(energy[KINDS.index(kind)] for energy in machine.spent)
            if limit > 16:
                assert total[kind] <= spent.energy.get(kind, 0)
    process.expire(NEVER, NEVER)
    count(process.outside(machine.profile, NEVER))
    if first is not None and limit > 16:
        whole = machine.profile.between(first, machine.profile.watermark).energy
        assert all(0 <= whole[kind] - total[kind] <= (begin > 0) for kind in KINDS)
