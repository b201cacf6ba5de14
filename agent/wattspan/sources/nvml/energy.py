"""Energy of a GPU: its counter, when that counter last moved, and the integral of its power.

``EnergyMeter`` chooses the counter where there is one, else power integrated by the trapezoid rule
over samples stamped when they were read.

A GPU's energy counter is constant for about 100 ms and then jumps to the energy spent until then.
A value is therefore up to a step old when it is read, and always by about the same time if the
reads are as frequent as the moves: stamped with the time of reading, all energy seems to be spent
that much later. For a span that begins and ends with its load this is the largest error.

``EdgeDetector`` therefore finds the step and the phase of the counter with a few extra reads; a
reading is then stamped with the time at which its value was made. It follows the phase like a
phase-locked loop: a read at the predicted edge shows whether the counter moves earlier or later,
and so the direction of the correction, small at first, and larger while the sign stays the same.

``CallInterval`` makes an expensive call less often.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from wattspan.model import MILLISECOND, SECOND, Instant, Microjoules
from wattspan.ports import Clock

MAX_DUTY_DIVISOR = 50  # a call that takes long is not repeated before 50 times as long has passed
MAX_CALL_INTERVAL = 30 * SECOND
HANG_THRESHOLD, HANG_BACKOFF = 2 * SECOND, 5 * SECOND
"""A call that took longer did hang: its duration does not predict the cost of the next call."""
COST_SAMPLES = 3
"""Calls: where other work keeps the caller from the CPU, any may seem to have taken long. Only one
that takes long every time is expensive."""


class CallInterval:
    """Schedule of one kind of call: every ``period``, or less often if the call is expensive.

    On some drivers a list of processes takes milliseconds under a lock that all users of all GPUs
    share. A sample that comes early by up to a twentieth of the period is on time: otherwise the
    jitter of a timer would delay the call by a whole period.

    Used as a context manager around the calls, it measures their cost.
    """

    def __init__(self, period: int, clock: Clock, longest: int = MAX_CALL_INTERVAL) -> None:
        self._period = period
        self._longest = longest
        self._clock = clock
        self._due: int | None = None
        self._began = self._asked = 0
        self._costs: deque[int] = deque([0] * COST_SAMPLES, maxlen=COST_SAMPLES)

    def begin(self, now: int, *, forced: bool = False) -> bool:
        """True if the call is due at ``now``, or ``forced``."""
        if forced or self._due is None:
            self._due = now
        elif now < self._due - self._period // 20:
            return False
        self._began = now
        return True

    def __enter__(self) -> None:
        self._asked = self._clock.monotonic()

    def __exit__(self, *_: object) -> None:
        self._costs.append(self._clock.monotonic() - self._asked)
        cost = min(self._costs)
        due = self._began if self._due is None else self._due
        most = HANG_BACKOFF if cost > HANG_THRESHOLD else MAX_CALL_INTERVAL
        rest = min(cost * MAX_DUTY_DIVISOR, max(min(most, self._longest), self._period))
        self._due = max(due + self._period, self._began + rest)
        if self._due <= self._began:  # turns were missed: they are not made up for
            self._due = self._began + self._period


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
        self._phase = 0  # the time of one of its edges
        self._last: tuple[int, int] | None = None  # time and value of the last read
        self._seen: list[int] = []  # edges, while searching
        self._search_until: int | None = None
        self._search_again = 0
        self._plan: list[int] = []  # reads of the next check: inside a step, and at its end
        self._looked = 0  # when the last check was
        self._pause = 0  # until the next; the longer, the less there was to correct
        self._direction = 0  # of the last corrections: how many, negative for earlier

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
        if now < self._search_until:
            return now if self._last is None else self._last[0] + SEARCH_INTERVAL
        self._search_until, self._search_again = None, now + SEARCH_RETRY_INTERVAL
        self._conclude(now)
        return None

    def _conclude(self, now: int) -> None:
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
        self.step = self.period = (edges[-1] - edges[0]) // sum(steps)
        self._phase, self._plan, self._pause, self._direction = edges[-1], [], 0, 0

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


MAX_GAP = 2 * SECOND
"""Over a longer period without a sample, the power is unknown."""


class PowerIntegral:
    """Ever-increasing microjoules from milliwatts, and a counter's energy over the same periods.

    Sums are kept in half milliwatt-nanoseconds (5e-13 J), so that nothing is lost to rounding.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int, int | None] | None = None  # mono, milliwatts, microjoules
        self._halves = 0
        self._counted = 0
        self._compared_halves = 0

    def feed(self, at: Instant, power: int, counter: int | None) -> bool:
        """Add one sample, with the value of the energy counter at that time, if there is one.

        False if the time since the last sample is too long: the integral then does not grow over
        it, and the caller must report a gap.
        """
        last, self._last = self._last, (at.mono, power, counter)
        if last is None:
            return True
        since, before, counter_before = last
        elapsed = at.mono - since
        if not 0 < elapsed <= MAX_GAP:
            return elapsed <= 0
        halves = (before + power) * elapsed
        self._halves += halves
        if counter is not None and counter_before is not None and counter >= counter_before:
            self._compared_halves += halves
            self._counted += counter - counter_before
        return True

    @property
    def energy(self) -> Microjoules:
        """All that was integrated."""
        return Microjoules(self._halves // 2_000_000)

    @property
    def compared(self) -> tuple[Microjoules, Microjoules] | None:
        """Integrated and counted energy over the same periods; None before the first."""
        if not self._compared_halves and not self._counted:
            return None
        return Microjoules(self._compared_halves // 2_000_000), Microjoules(self._counted)


FROZEN_AFTER = 5 * SECOND
FROZEN_POWER = 1_000_000  # uJ: a counter that missed a whole joule does not count


class CounterPeriod:
    """The interval of a counter's moves, from the times at which moves were observed.

    A reader cannot observe a finer step than its own interval, so the result is an upper bound.
    100 ms, the step of most GPUs, is assumed until enough moves were observed.
    """

    START = 100 * MILLISECOND
    ENOUGH = 9
    _GRAIN = 5 * MILLISECOND

    def __init__(self) -> None:
        self._gaps: deque[int] = deque(maxlen=2 * self.ENOUGH + 1)
        self._moves = 0
        self._moved_at: int | None = None
        self._last: int | None = None
        self.resolution = self.START

    def observe(self, mono: int, counter: int) -> None:
        last, self._last = self._last, counter
        if last is None or counter == last:
            return
        if self._moved_at is not None:
            self._gaps.append(mono - self._moved_at)
            self._moves += 1
            if self._moves % self.ENOUGH == 0:
                self._settle()
        self._moved_at = mono

    def _settle(self) -> None:
        typical = sorted(self._gaps)[len(self._gaps) // 2]
        rounded = max(self._GRAIN, round(typical / self._GRAIN) * self._GRAIN)
        # Small changes do not redefine the domain.
        if abs(rounded - self.resolution) * 5 > self.resolution:
            self.resolution = rounded


class EnergyMeter:
    """Chooses between counter and integral, and changes ``epoch`` whenever the choice changes."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.integral = PowerIntegral()
        self.step = CounterPeriod()
        self.derived: bool | None = None  # None: nothing was read yet
        self.frozen = False
        self._moved: tuple[int, int, int] | None = None  # counter, when it moved, integral then

    def read(
        self, at: Instant, counter: Microjoules | None, power: int | None, *, refused: bool
    ) -> Microjoules | None:
        """The energy up to ``at`` from the values read then, or None if it is unknown.

        ``refused``: there is no counter. After a single failure the next value of a counter is
        awaited.
        """
        bridged = power is None or self.integral.feed(at, power, counter)
        if counter is not None:
            self.step.observe(at.mono, counter)
            self._check_frozen(at, counter)
        if counter is not None and not self.frozen:
            self._choose(derived=False)
            return counter
        if power is None or not (refused or self.frozen):
            return None
        self._choose(derived=True)
        if not bridged:
            self.epoch += 1
        return self.integral.energy

    def _choose(self, *, derived: bool) -> None:
        if self.derived is not None and self.derived != derived:
            self.epoch += 1
        self.derived = derived

    def _check_frozen(self, at: Instant, counter: int) -> None:
        """Some stacks have a counter that answers and never moves."""
        if self._moved is None or self._moved[0] != counter:
            self._moved = (counter, at.mono, self.integral.energy)
            self.frozen = False
            return
        _, since, integral = self._moved
        missed = self.integral.energy - integral
        self.frozen = at.mono - since >= FROZEN_AFTER and missed >= FROZEN_POWER
