"""Division of energy among spans by weighted fair queueing, and the time that has been divided.

Covered time is time whose energy has been divided; it is never divided again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from wattspan.spans.packed_energy import CLOCK_MASK, GPU_LANES_MASK, SHARE, ProfileRows
from wattspan.spans.profiles import EnergyProfile


class CoveredStretch(NamedTuple):
    """A covered period, and the process's packed energy up to its edges."""

    start: int
    end: int
    before: int
    after: int


class CoveredTime:
    """All covered time: disjoint stretches in order, at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._starts: list[int] = []
        self._stretches: list[CoveredStretch] = []

    def __iter__(self) -> Iterator[CoveredStretch]:
        return iter(self._stretches)

    def inside(self, start: int, end: int) -> list[CoveredStretch]:
        """The covered parts of a period; the first and the last may reach beyond it."""
        first = max(0, bisect_right(self._starts, start) - 1)
        if first < len(self._stretches) and self._stretches[first].end <= start:
            first += 1
        return self._stretches[first : bisect_left(self._starts, end, first)]

    def around(self, start: int, end: int) -> tuple[int, int | None]:
        """The packed energy that is divided before ``start`` and, if any, from ``end`` on.

        A thinned profile may differ at these times; the divided energy stays the same.
        """
        first, last = bisect_right(self._starts, start), bisect_left(self._starts, end)
        before = self._stretches[first - 1].after if first else 0
        return before, self._stretches[last].before if last < len(self._starts) else None

    def add(self, new: CoveredStretch) -> None:
        """Cover a stretch; adjacent stretches become one.

        Beyond the limit the shortest times between stretches are covered as well; their energy is
        given to no span, never to two.
        """
        starts, stretches = self._starts, self._stretches
        first = max(0, bisect_left(starts, new.start) - 1)
        if first < len(stretches) and stretches[first].end < new.start:
            first += 1
        last = bisect_right(starts, new.end, first)
        if first < last:
            left, right = stretches[first], stretches[last - 1]
            if left.start <= new.start:
                new = new._replace(start=left.start, before=left.before)
            if right.end >= new.end:
                new = new._replace(end=right.end, after=right.after)
        starts[first:last] = [new.start]
        stretches[first:last] = [new]
        if len(stretches) > self._limit:
            self._thin()

    def _thin(self) -> None:
        """Free a quarter of the limit, so that an addition costs few steps on average."""
        gaps = [right.start - left.end for left, right in pairwise(self._stretches)]
        surplus = len(self._stretches) - (self._limit - self._limit // 4)
        closed = set(sorted(range(len(gaps)), key=gaps.__getitem__)[:surplus])
        first, *others = self._stretches
        kept = [first]
        for i, stretch in enumerate(others):
            if i in closed:
                kept[-1] = kept[-1]._replace(end=stretch.end, after=stretch.after)
            else:
                kept.append(stretch)
        self._stretches[:] = kept
        self._starts[:] = [stretch.start for stretch in kept]

    def close(self, profile: EnergyProfile, until: int) -> None:
        """Cover all time between the first stretch and ``until``."""
        inside = bisect_right(self._starts, until)
        if not inside:
            return
        first, last = self._stretches[0], self._stretches[inside - 1]
        end, energy = last.end, last.after
        if end < until:
            end, energy = until, profile.locate(until)[0]
            if until < profile.thinned:
                beyond = self._stretches[inside].before if inside < len(self._starts) else energy
                energy = profile.lanes.clamp(energy, last.after, beyond)
        self._stretches[:inside] = [CoveredStretch(first.start, end, first.before, energy)]
        self._starts[:inside] = [first.start]


ONE = 1 << SHARE
NEVER = 1 << 80
BLOCK = 1 << 60  # codes of events: covered time begins
UNBLOCK = BLOCK + 1  # covered time ends
TICK = BLOCK + 2  # time passes


class FairDivision:
    """Division of energy among numbered spans as time passes.

    A *virtual account* grows by the energy divided by the weight of all leaf spans. ``gained`` of a
    span is the growth of the account while it was a leaf: the account at each end as a leaf less
    the account at each beginning. The lowest lane of the account is a clock that runs only in
    covered time, in which no energy is divided.
    """

    def __init__(self) -> None:
        self.gained: list[int] = []
        self.children: list[int] = []  # number of open ones
        self.open: list[bool] = []
        self.parent: list[int] = []  # -1: none
        self.cpu: list[int] = []  # weights for CPU and memory energy
        self.gpu: list[int] = []  # weights for GPU energy
        self.at = -NEVER
        self.energy = 0
        self.passed = 0  # packed energy of covered time since the beginning
        self.clocked = False  # True once time was covered: the clock of the account may have run
        self._virtual = 0
        self._cpu_weight = self._gpu_weight = 0

    def join(self, count: int) -> int:
        """Add ``count`` spans; returns the number of the first."""
        first = len(self.gained)
        self.gained += [0] * count
        self.children += [0] * count
        self.open += [False] * count
        self.parent += [-1] * count
        self.cpu += [1] * count
        self.gpu += [1] * count
        return first

    def run(
        self,
        profile: EnergyProfile,
        times: Sequence[int],
        codes: Sequence[int],
        order: Sequence[int],
        covered: Sequence[CoveredStretch],
        beyond: int | None,
        located: list[tuple[int, int]] | None = None,
    ) -> list[CoveredStretch]:
        """Process events: a code is the number of a span that begins, or ``~`` of one that ends.

        ``order`` sorts ``times``. ``beyond`` is the packed energy up to the next covered stretch
        after the events. Returns the stretches with a leaf span. ``located`` is as long as
        ``times`` and receives the location of each event in the profile.
        """
        self.clocked = self.clocked or bool(covered)
        rows, thinned = profile.rows, profile.thinned
        stretches: list[CoveredStretch] = []
        gained, children, opened = self.gained, self.children, self.open
        parents, cpu, gpu = self.parent, self.cpu, self.gpu
        virtual, passed = self._virtual, self.passed
        cpu_weight, gpu_weight = self._cpu_weight, self._gpu_weight
        at, energy = self.at, self.energy
        row, base, slope, begin, edge = -1, 0, 0, 0, -NEVER
        # Where the power of the row alone counts, the energy up to an event is computed when asked.
        linear = stale = False
        since: tuple[int, int] | None = None
        blocked, caps = False, iter(covered)
        cap = next(caps, None)
        ceiling = cap.before if cap else beyond
        location = (energy, 0)
        for event in order:
            time, code = times[event], codes[event]
            if linear and at < time < edge and cpu_weight == gpu_weight:
                if cpu_weight:
                    if since is None:
                        since = at, (base + slope * (at - begin))
                    virtual += slope * ((time - at) * (ONE // cpu_weight))
                elif since is not None:
                    stretches.append(
                        CoveredStretch(since[0], at, since[1], base + slope * (at - begin))
                    )
                    since = None
                at, stale = time, True
            elif time > at:
                if stale:
                    energy, stale = base + slope * (at - begin), False
                if time >= edge:
                    row, base, slope, begin, edge = _row(rows, time, row)
                now = base + slope * (time - begin)
                location = now, row
                if time < thinned:
                    now = profile.lanes.clamp(now, energy, now if ceiling is None else ceiling)
                if cpu_weight:
                    if blocked:
                        virtual += time - at
                        passed += now - energy
                    else:
                        flow = now - energy
                        if cpu_weight == gpu_weight:
                            virtual += flow * (ONE // cpu_weight)
                        else:
                            gpu_flow = flow & GPU_LANES_MASK
                            virtual += (flow - gpu_flow) * (ONE // cpu_weight)
                            virtual += gpu_flow * (ONE // gpu_weight)
                    if since is None:
                        since = at, energy
                elif since is not None:
                    stretches.append(CoveredStretch(since[0], at, since[1], energy))
                    since = None
                at, energy = time, now
                linear = located is None and not blocked and time >= thinned
            if located is not None:
                located[event] = location
            if code < 0:
                span = ~code
                opened[span] = False
                if not children[span]:
                    gained[span] += virtual
                    cpu_weight -= cpu[span]
                    gpu_weight -= gpu[span]
                parent = parents[span]
                if parent >= 0:
                    children[parent] -= 1
                    if not children[parent] and opened[parent]:
                        gained[parent] -= virtual
                        cpu_weight += cpu[parent]
                        gpu_weight += gpu[parent]
            elif code < BLOCK:
                parent = parents[code]
                if parent >= 0:
                    if not children[parent] and opened[parent]:
                        gained[parent] += virtual
                        cpu_weight -= cpu[parent]
                        gpu_weight -= gpu[parent]
                    children[parent] += 1
                opened[code] = True
                if not children[code]:
                    gained[code] -= virtual
                    cpu_weight += cpu[code]
                    gpu_weight += gpu[code]
            elif code == BLOCK and cap is not None:
                blocked, ceiling, linear = True, cap.after, False
            elif code == UNBLOCK and cap is not None:
                blocked, energy, linear, stale = False, cap.after, False, False
                cap = next(caps, None)
                ceiling = cap.before if cap else beyond
        if stale:
            energy = base + slope * (at - begin)
        if since is not None:
            stretches.append(CoveredStretch(since[0], at, since[1], energy))
        self._virtual, self.passed = virtual, passed
        self._cpu_weight, self._gpu_weight = cpu_weight, gpu_weight
        self.at, self.energy = at, energy
        return stretches

    def leave(self, span: int) -> None:
        """End a span at the present time."""
        self.open[span] = False
        if not self.children[span]:
            self.gained[span] += self._virtual
            self._cpu_weight -= self.cpu[span]
            self._gpu_weight -= self.gpu[span]
        parent = self.parent[span]
        if parent >= 0:
            self.children[parent] -= 1
            if not self.children[parent] and self.open[parent]:
                self.gained[parent] -= self._virtual
                self._cpu_weight += self.cpu[parent]
                self._gpu_weight += self.gpu[parent]

    def keep(self, spans: Sequence[int]) -> None:
        """Remove all but ``spans``, which are renumbered in their order."""
        number = {old: new for new, old in enumerate(spans)}
        self.parent = [number.get(self.parent[span], -1) for span in spans]
        for values in (self.gained, self.children, self.cpu, self.gpu):
            values[:] = [values[span] for span in spans]
        self.open = [self.open[span] for span in spans]

    def share(self, span: int) -> int:
        """The packed share of a closed span, energies only: microjoules times 2**104."""
        gained = self.gained[span] - self.taken(span)
        cpu, gpu = self.cpu[span], self.gpu[span]
        if cpu == gpu:
            return gained * cpu
        of_gpu = gained & GPU_LANES_MASK
        return (gained - of_gpu) * cpu + of_gpu * gpu

    def taken(self, span: int) -> int:
        """The nanoseconds of covered time in which a closed span was a leaf."""
        return self.gained[span] & CLOCK_MASK


def _row(rows: ProfileRows, time: int, row: int) -> tuple[int, int, int, int, int]:
    """The row of ``time`` as ``run`` needs it, at or after ``row``."""
    times = rows.times
    row = bisect_right(times, time, max(0, row)) - 1
    edge = times[row + 1] if row + 1 < len(times) else NEVER
    return row, rows.energy[row], rows.slope[row], times[row], edge


def exclude_covered_time(
    times: list[int], codes: list[int], covered: Sequence[CoveredStretch], first: int, last: int
) -> None:
    """Add the events at which covered time begins and ends."""
    for stretch in covered:
        times.append(max(first, stretch.start))
        codes.append(BLOCK)
        if stretch.end <= last:
            times.append(stretch.end)
            codes.append(UNBLOCK)
