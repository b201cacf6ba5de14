"""Time of the last move of a GPU's energy counter.

A GPU's energy counter is constant for about 100 ms and then jumps to the energy spent until then.
A value is therefore up to a step old when it is read, and always by about the same time if the
reads are as frequent as the moves: stamped with the time of reading, all energy seems to be spent
that much later. For a span that begins and ends with its load this is the largest error.

``EdgeDetector`` therefore finds the step and the phase of the counter with a few extra reads; a
reading is then stamped with the time at which its value was made. It follows the phase like a
phase-locked loop: a read at the predicted edge shows whether the counter moves earlier or later,
and so the direction of the correction, small at first, and larger while the sign stays the same.
After a time without reads, two edges show that the step is the one known before: a quarter of the
reads of a search.
"""

from __future__ import annotations

from itertools import pairwise

from wattspan.model import MILLISECOND, SECOND

SEARCH_INTERVAL = 4 * MILLISECOND
SEARCH_DURATION = 600 * MILLISECOND
SEARCH_RETRY_INTERVAL = 30 * SECOND
"""After a search that found no regular step: the GPU may be of a kind that has none."""

MIN_EDGES = 4  # steps seen
FINE_PERIOD = 30 * MILLISECOND
"""A counter that moves more often is stamped well enough by the time of reading."""

CHECK_INTERVAL = SECOND
CORRECTION = MILLISECOND // 2  # the smallest; twice as much for each that was the same way
MAX_CORRECTION = 2 * MILLISECOND
MAX_SAME_DIRECTION = 10  # consecutive corrections, after which the search starts again
EDGE_GUARD = 4 * MILLISECOND
"""So near an edge a reading may be of the step before or of the one after."""


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
        self._seen: list[int] = []  # edges, while searching
        self._search_until: int | None = None
        self._search_again = 0
        self._plan: list[int] = []  # reads of the next check: inside a step, and at its end
        self._looked = 0  # when the last check was
        self._pause = 0  # until the next; the longer, the less there was to correct
        self._direction = 0  # of the last corrections: how many, negative for earlier

    def forget(self) -> None:
        """Search for the phase again when it is next wanted. The step is the same."""
        self._known, self.period = self.period or self._known, None
        self._last, self._plan = None, []
        self._search_until, self._search_again = None, 0

    def observe(self, mono: int, counter: int) -> None:
        """Record the value at ``mono``; reads are in the order of time."""
        last, self._last = self._last, (mono, counter)
        while self._plan and mono >= self._plan[0]:
            self._looked = self._plan.pop(0)
        if last is None:
            return
        before, value = last
        if self.period is not None:
            self._check(before, mono, self.period, moved=counter != value)
        elif counter != value and mono - before <= 3 * SEARCH_INTERVAL:
            self._seen.append((before + mono) // 2)

    def next_read(self, now: int) -> int | None:
        """The time of the most informative next read, if one is useful before the regular ones."""
        if self.period is None:
            return self._search(now)
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

    # ------------------------------------------------------------------------------ searching

    def _search(self, now: int) -> int | None:
        if self._search_until is None:
            if now < self._search_again:
                return None
            self._seen.clear()
            self._search_until = now + SEARCH_DURATION
        known, edges = self._known, self._seen[-2:]
        if known and edges and abs(edges[-1] - edges[0] - known) <= 2 * SEARCH_INTERVAL:
            self._follow(known, edges[-1])
            return None
        if now < self._search_until:
            return now if self._last is None else self._last[0] + SEARCH_INTERVAL
        self._search_until, self._search_again = None, now + SEARCH_RETRY_INTERVAL
        self._conclude()
        return None

    def _conclude(self) -> None:
        """Derive step and phase from the edges of the search, if they were regular."""
        edges = self._seen
        if len(edges) < MIN_EDGES:
            return
        gaps = [late - early for early, late in pairwise(edges)]
        self.step = typical = sorted(gaps)[len(gaps) // 2]
        steps = [max(1, round(gap / typical)) for gap in gaps]
        uneven = max(abs(gap - n * typical) for gap, n in zip(gaps, steps, strict=True))
        if typical < FINE_PERIOD or uneven > 3 * SEARCH_INTERVAL:
            return
        self.step = (edges[-1] - edges[0]) // sum(steps)
        self._follow(self.step, edges[-1])

    def _follow(self, period: int, edge: int) -> None:
        self._known, self._search_until = None, None
        self.period, self._phase = period, edge
        self._plan, self._pause, self._direction = [], 0, 0

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
