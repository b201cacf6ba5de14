"""The search for the moves of any counter, by a thread that may be late at any read."""

from bisect import bisect_right
from itertools import accumulate, cycle

from hypothesis import assume, example, given
from hypothesis import strategies as st

from wattspan.model import MILLISECOND, SECOND
from wattspan.sources.gpu.counter_edges import (
    EDGE_GUARD,
    SEARCH_CALLS,
    SEARCH_DURATION,
    EdgeDetector,
)

START = 100 * SECOND
milliseconds = st.floats(0, 1).map(lambda part: round(part * MILLISECOND))
delays = st.lists(
    st.one_of(milliseconds, milliseconds, st.integers(0, 70 * MILLISECOND)), min_size=1, max_size=40
)


class Reader:
    """Reads a counter that moves at ``edges``, each time late by the next one of ``delays``."""

    def __init__(self, edges: list[int], delays: list[int]) -> None:
        self.detector, self.edges = EdgeDetector(), edges
        self.late = cycle(delays)
        self.now = START
        self.searches: list[int] = []  # the reads of each search

    def edge(self) -> int:
        return self.edges[bisect_right(self.edges, self.now) - 1]

    def run(self, seconds: float) -> None:
        """Until the phase is known, ``seconds`` at most."""
        detector, sample, end = self.detector, self.now, self.now + seconds * SECOND
        while self.now < end and detector.period is None:
            found = detector.searching
            due = detector.next_read(self.now)
            if detector.searching and not found:
                self.searches.append(0)
            if self.now >= sample or (due is not None and due <= self.now):
                detector.observe(self.now, self.edge())
                if detector.searching:
                    self.searches[-1] += 1
                sample += 100 * MILLISECOND if self.now >= sample else 0
            due = detector.next_read(self.now)
            wake = sample if due is None else min(sample, due)
            self.now = max(self.now + MILLISECOND, wake) + next(self.late)


@given(gaps=st.lists(st.integers(1, 300 * MILLISECOND), min_size=1, max_size=50), late=delays)
def test_reads_of_a_search_are_bounded_for_any_counter(gaps: list[int], late: list[int]) -> None:
    """Reads of one search, and the searches of half a minute; a new search waits."""
    count = 32 * SECOND * len(gaps) // sum(gaps) + 1
    if count > 100_000:
        gaps, count = [max(one, MILLISECOND) for one in gaps], 33_000
    repeated = [gap for gap, _ in zip(cycle(gaps), range(count), strict=False)]
    reader = Reader([*accumulate(repeated, initial=START - SECOND)], late)
    reader.run(30)
    assert all(reads <= SEARCH_CALLS for reads in reader.searches)
    assert len(reader.searches) <= 5


@given(
    period=st.integers(31 * MILLISECOND, 250 * MILLISECOND),
    before=st.sampled_from([1, 2, 3, 4, 5, 1.5, 0.5]),
    phase=st.integers(0, 250 * MILLISECOND),
    late=delays,
)
@example(period=31 * MILLISECOND, before=1.5, phase=18 * MILLISECOND, late=[0])
@example(period=31 * MILLISECOND, before=2, phase=0, late=[2_000_001])
def test_phase_that_was_found_is_the_phase(
    period: int, before: float, phase: int, late: list[int]
) -> None:
    """Also after a rest, if the counter has another step then."""
    earlier = round(before * period)
    assume(earlier > 30 * MILLISECOND)
    first = [*range(START - 2 * SECOND, START + 10 * SECOND, earlier)]
    reader = Reader([*first, *range(first[-1] + phase + 1, START + 30 * SECOND, period)], late)
    reader.run(8)
    reader.detector.forget()
    reader.now = START + 11 * SECOND
    reader.run(10)
    found = reader.detector.period
    if found is None:
        return
    assert abs(found - period) <= 2 * MILLISECOND
    reader.now += period
    made = reader.detector.moved_at(reader.now)
    if made is not None:
        assert abs(made - reader.edge()) <= EDGE_GUARD + MILLISECOND


@given(
    period=st.integers(40 * MILLISECOND, 150 * MILLISECOND),
    phase=st.integers(0, 150 * MILLISECOND),
    late=st.lists(milliseconds, min_size=1, max_size=20),
)
def test_phase_is_found_in_one_search_by_a_punctual_thread(
    period: int, phase: int, late: list[int]
) -> None:
    edges = [*range(START - 2 * SECOND + phase, START + 20 * SECOND, period)]
    reader = Reader(edges, late)
    reader.run(SEARCH_DURATION // SECOND + 1)
    assert reader.detector.period is not None
    assert len(reader.searches) == 1
