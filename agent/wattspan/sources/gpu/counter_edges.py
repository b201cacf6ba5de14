"""Time of the last move of a GPU's energy counter.

A GPU's energy counter is constant for about 100 ms and then jumps to the energy spent until then.
A value is therefore up to a step old when it is read, and always by about the same time if the
reads are as frequent as the moves: stamped with the time of reading, all energy seems to be spent
that much later. For a span that begins and ends with its load this is the largest error.

``EdgeDetector`` therefore finds the step and the phase of the counter with a few extra reads; a
reading is then stamped with the time at which its value was made. It follows the phase like a
phase-locked loop: a read at the predicted edge shows whether the counter moves earlier or later,
and so the direction of the correction, small at first, and larger while the sign stays the same.

``EdgeSearch`` locates edges by brackets: two reads with different values, between which the counter
moved. Two brackets predict the next edge, which few reads then bisect. The driver's thread reads
several boards, so any read may be late: that makes a bracket wider, and never wrong.
"""

from __future__ import annotations

from collections import deque
from itertools import combinations, pairwise

from wattspan.model import MILLISECOND, SECOND

SEARCH_INTERVAL = 8 * MILLISECOND  # of reads until two edges were seen
FINE_INTERVAL = 4 * MILLISECOND  # where these were near each other
SEARCH_CALLS = 120
"""Reads of one board in one search, at most; half of them are usual, a quarter after a rest."""
SEARCH_DURATION = 2 * SECOND
MAX_HIDDEN = SECOND // 2
"""Edges that a late read hides are counted up to this time: the period is not known well yet."""
SEARCH_RETRY_INTERVAL = 30 * SECOND
"""After a search that found no step, or a short one: the GPU may be of a kind that has none."""
FIRST_RETRY = SECOND
"""After a search that saw moves: a busy host may have delayed its reads. Doubled each time."""

MIN_EDGES = 4  # steps seen
FINE_EDGES = 8
FINE_PERIOD = 30 * MILLISECOND
"""A counter that moves more often is stamped well enough by the time of reading. Of others, two
reads so near to each other hide at most one edge.
"""
TOLERANCE = MILLISECOND  # of the time of an edge, between two of them
NARROW = 4 * MILLISECOND  # width from which a bracket is not bisected further
DELAYS = 4  # last reads, of which the smallest delay is expected of the next
EXACT = 3 * MILLISECOND // 2  # width of the range of the period

CHECK_INTERVAL = SECOND
CORRECTION = MILLISECOND // 2  # the smallest; twice as much for each that was the same way
MAX_CORRECTION = 2 * MILLISECOND
MAX_SAME_DIRECTION = 10  # consecutive corrections, after which the search starts again
EDGE_GUARD = 4 * MILLISECOND
"""So near an edge a reading may be of the step before or of the one after."""
EDGE_DELAY = 9 * MILLISECOND
"""From an edge to the read that replaces an ambiguous one: guard, correction and a late thread."""


class EdgeSearch:
    """Plans and observes the reads of one search. ``known`` is the step before it was forgotten.

    ``next_read`` is the time of the next read.
    """

    def __init__(self, now: int, known: int | None = None) -> None:
        self.next_read = now
        self._moved = False
        self._known = known
        self._brackets: list[tuple[int, int]] = []  # of consecutive edges
        self._base = 0  # a read after this time is later than the edge of the last bracket
        self._low, self._high = 0, SEARCH_DURATION  # the range of the period
        self._expected: tuple[int, int] | None = None  # the next bracket, once a step is known
        self._until = now + SEARCH_DURATION
        self._calls = 0
        self._last = now  # the time of the last read
        self._delays: deque[int] = deque(maxlen=DELAYS)  # of planned reads: others are read before

    @property
    def may_succeed(self) -> bool:
        """True if another search may find a step: the counter moves, and not often."""
        return self._moved and not self._seems_fine

    @property
    def ended(self) -> bool:
        """True if the search used up its reads or its time."""
        return self._calls >= SEARCH_CALLS or self._last >= self._until

    def observe(self, before: int, mono: int, *, moved: bool) -> None:
        """Add two consecutive reads, between which the counter ``moved`` or did not."""
        self._calls, self._last = self._calls + 1, mono
        if mono >= self.next_read:
            self._delays.append(mono - self.next_read)
        self._moved |= moved
        self._locate(before, mono, moved=moved)
        self._expect()
        self.next_read = self._plan()

    def found(self) -> tuple[int, int] | None:
        """The period and an edge, once both are known within ``EDGE_GUARD``."""
        if len(self._brackets) < (2 if self._known else MIN_EDGES) or self._seems_fine:
            return None
        early, late = self._brackets[-1]
        if late - early > 2 * (EDGE_GUARD - TOLERANCE) or self._high - self._low > EXACT:
            return None
        return (self._low + self._high) // 2, (early + late) // 2

    def fine_step(self) -> int | None:
        """The step of a counter that moves often, once it is known."""
        if not self._seems_fine or len(self._brackets) < FINE_EDGES:
            return None
        edges = [sum(one) // 2 for one in self._brackets]
        gaps = sorted(late - early for early, late in pairwise(edges))
        return gaps[len(gaps) // 2]

    @property
    def _seems_fine(self) -> bool:
        brackets = self._brackets
        return len(brackets) > 1 and brackets[1][1] - brackets[0][0] < FINE_PERIOD + SEARCH_INTERVAL

    def _locate(self, before: int, mono: int, *, moved: bool) -> None:
        """Find the bracket of an edge, or that none can be told."""
        narrow = moved and mono - before <= FINE_PERIOD
        if self._expected is None:
            if moved:
                self._brackets = [*self._brackets, (before, mono)] if narrow else []
            return
        first, last = self._expected
        begin = first - NARROW if self._known else before
        late = mono >= first and (mono >= first + self._low or before < self._base)
        if late and self._low >= FINE_PERIOD and mono - first <= MAX_HIDDEN:
            hidden: tuple[int, int] | None = self._expected
            while hidden is not None and hidden[0] <= mono:
                self._brackets.append(hidden)
                self._expect()
                hidden = self._expected
            self._base = self._brackets[-1][1]
        elif moved and not late and begin <= before < last and first < mono:
            self._brackets.append((max(before, first), min(mono, last)))
            self._base = mono
        elif moved or mono > last:  # the steps are not those expected
            self._known, self._brackets = None, [(before, mono)] if narrow else []

    def _expect(self) -> None:
        """Derive the range of the period, and the next bracket, from all brackets."""
        brackets, count = self._brackets, len(self._brackets)
        low, high = 0, SEARCH_DURATION
        if self._known:
            low, high = self._known - TOLERANCE, self._known + TOLERANCE
        for (i, (early, late)), (j, (begin, end)) in combinations(enumerate(brackets), 2):
            low = max(low, (begin - late - TOLERANCE) // (j - i))
            high = min(high, (end - early + TOLERANCE) // (j - i))
        if low > high:  # the steps are not regular
            self._known, self._brackets = None, brackets[-1:]
            count, low, high = 1, 0, SEARCH_DURATION
        self._low, self._high, self._expected = low, high, None
        if (count > 1 or (count and self._known)) and not self._seems_fine:
            first = max(one[0] + (count - i) * low for i, one in enumerate(brackets))
            last = min(one[1] + (count - i) * high for i, one in enumerate(brackets))
            self._expected = first - TOLERANCE, max(first, last) + TOLERANCE

    def _plan(self) -> int:
        if self._expected is None:
            return self._last + (FINE_INTERVAL if self._seems_fine else SEARCH_INTERVAL)
        first, last = self._expected
        if self._last < self._base:
            return self._base
        if self._known and self._last < first - NARROW:  # another step than the known one moves now
            return first - NARROW // 2
        first = max(first, self._last)
        best = last if last - first <= NARROW else (first + last) // 2
        return max(self._last, best - min(self._delays, default=0))


class EdgeDetector:
    """Phase of one counter: observes every read, plans reads, and computes the last move.

    ``step`` is the interval of the counter's moves, None if it is unknown; ``period`` is the same
    while its edges are followed.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.period: int | None = None
        self._known: int | None = None  # the period before it was forgotten
        self._phase = 0  # the time of one of its edges
        self._last: tuple[int, int] | None = None  # time and value of the last read
        self._search: EdgeSearch | None = None
        self._search_again = 0
        self._retry: int = FIRST_RETRY
        self._plan: list[int] = []  # reads of the next check: inside a step, and at its end
        self._looked = 0  # when the last check was
        self._pause = 0  # until the next; the longer, the less there was to correct
        self._direction = 0  # of the last corrections: how many, negative for earlier

    def forget(self) -> None:
        """Search for the phase again when it is next wanted. The step is the same."""
        self._known, self.period = self.period or self._known, None
        self._last, self._plan = None, []
        self._search, self._search_again = None, 0

    @property
    def searching(self) -> bool:
        """True while a search reads the counter."""
        return self._search is not None

    def observe(self, mono: int, counter: int) -> None:
        """Record the value at ``mono``; reads are in the order of time."""
        last, self._last = self._last, (mono, counter)
        while self._plan and mono >= self._plan[0]:
            self._looked = self._plan.pop(0)
        if last is None:
            return
        before, value = last
        if self._search is not None:
            self._search.observe(before, mono, moved=counter != value)
            self._conclude(self._search, mono)
        elif self.period is not None:
            self._check(before, mono, self.period, moved=counter != value)

    def next_read(self, now: int) -> int | None:
        """The time of the most informative next read, if one is useful before the regular ones."""
        if self.period is None:
            if self._search is None:
                if now < self._search_again:
                    return None
                self._search = EdgeSearch(now, self._known)
            return self._search.next_read
        if not self._plan:
            after = max(now + self.period // 2, self._looked + self._pause)
            edge = self._edge_after(after, self.period)
            self._plan = [edge - self.period // 3, edge]
        return self._plan[0]

    def moved_at(self, mono: int) -> int | None:
        """The time at which the value read at ``mono`` was made.

        None if the step is unknown, or if an edge is so near that the value could be of either
        side.
        """
        if self.period is None:
            return None
        after = self._edge_after(mono, self.period)
        edge = after - self.period
        return None if min(mono - edge, after - mono) <= EDGE_GUARD else edge

    def clear_after(self, mono: int) -> int | None:
        """The time after the edge near ``mono`` from which a value is that of the new step."""
        if self.period is None:
            return None
        return self._edge_after(mono - EDGE_GUARD - 1, self.period) + EDGE_DELAY

    # ------------------------------------------------------------------------------ searching

    def _conclude(self, search: EdgeSearch, now: int) -> None:
        """End a search that found step and phase, or whose reads are used up."""
        if (found := search.found()) is not None:
            self.step, edge = found
            self._follow(self.step, edge)
        elif search.ended or search.fine_step() is not None:
            self.step = search.fine_step() or self.step
            self._search, self._known = None, None
            again = self._retry if search.may_succeed else SEARCH_RETRY_INTERVAL
            self._search_again = now + again
            self._retry = min(2 * self._retry, SEARCH_RETRY_INTERVAL)

    def _follow(self, period: int, edge: int) -> None:
        self._known, self._search = None, None
        self.period, self._phase = period, edge
        self._plan, self._pause, self._direction = [], 0, 0
        self._retry = FIRST_RETRY

    # ------------------------------------------------------------------------------ following

    def _edge_after(self, mono: int, period: int) -> int:
        """The first edge after ``mono``, as predicted."""
        return mono + period - (mono - self._phase) % period

    def _check(self, before: int, mono: int, period: int, *, moved: bool) -> None:
        """Correct the phase: ``moved`` shows whether the counter moved between two reads."""
        edge = self._edge_after(mono - period // 2, period)  # the nearest
        late = mono - edge
        if not edge - period + EDGE_GUARD <= before < edge - EDGE_GUARD or abs(late) > period // 3:
            return  # other edges may have been in between
        if abs(late) < MILLISECOND or moved == (late < 0):  # near, or not as predicted
            self._correct(edge, late, -1 if moved else 1, period)
        elif abs(late) <= EDGE_GUARD // 2:  # as predicted
            self._pause = min(self._pause + period // 4, CHECK_INTERVAL)

    def _correct(self, edge: int, late: int, way: int, period: int) -> None:
        self._direction = self._direction + way if self._direction * way > 0 else way
        if abs(self._direction) > MAX_SAME_DIRECTION:
            self.period, self._search_again = None, 0
            return
        further = late if late * way > 0 else 0  # it is at least so far off
        shift = further + way * min(CORRECTION << (abs(self._direction) - 1), MAX_CORRECTION)
        cycles = max(1, (edge - self._phase + period // 2) // period)
        self.period = period + shift // ((2 if cycles > 4 else 8) * cycles)
        self._phase = edge + shift
        if abs(self._direction) > 2:
            self._pause //= 2
        else:
            self._pause = min(self._pause + period // 4, CHECK_INTERVAL)
