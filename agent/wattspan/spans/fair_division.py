"""Time whose energy has been divided, and is never divided again.

A fair queue: the energy of some time, divided among spans as they come and go.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wattspan.spans.profiles import GPU_MASK, SHARE, EnergyProfile, ProfileRows


class CoveredStretch(NamedTuple):
    """A stretch of time, and the process's energy up to its edges, in lanes."""

    start: int
    end: int
    before: int
    after: int


class CoveredTime:
    """The time whose energy has been divided: disjoint stretches, in order, bounded in number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._starts: list[int] = []
        self._stretches: list[CoveredStretch] = []

    def __iter__(self) -> Iterator[CoveredStretch]:
        return iter(self._stretches)

    def inside(self, start: int, end: int) -> list[CoveredStretch]:
        """What is covered of a stretch; the first and the last may reach beyond it."""
        first = max(0, bisect_right(self._starts, start) - 1)
        if first < len(self._stretches) and self._stretches[first].end <= start:
            first += 1
        return self._stretches[first : bisect_left(self._starts, end, first)]

    def around(self, start: int, end: int) -> tuple[int, int | None]:
        """The energy, in lanes, that has been divided before ``start`` and from ``end`` on.

        A thinned profile may say otherwise of these times: what was divided stays so.
        """
        first, last = bisect_right(self._starts, start), bisect_left(self._starts, end)
        before = self._stretches[first - 1].after if first else 0
        return before, self._stretches[last].before if last < len(self._starts) else None

    def add(self, new: CoveredStretch) -> None:
        """Cover a stretch; where it touches others they become one.

        Beyond the limit the shortest time between two stretches is covered too: nobody gets its
        energy, which is the safe side.
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
            i = min(
                range(1, len(stretches)),
                key=lambda i: stretches[i].start - stretches[i - 1].end,
            )
            self._bridge(i)

    def _bridge(self, i: int) -> None:
        left, right = self._stretches[i - 1 : i + 1]
        self._stretches[i - 1 : i + 1] = [
            CoveredStretch(left.start, right.end, left.before, right.after)
        ]
        del self._starts[i]

    def close(self, profile: EnergyProfile, until: int) -> None:
        """Cover all that is left open between the first stretch and ``until``."""
        keep: list[CoveredStretch] = []
        for stretch in self._stretches:
            if keep and keep[-1].end < until:
                last = keep[-1]
                if stretch.start <= until:
                    keep[-1] = CoveredStretch(last.start, stretch.end, last.before, stretch.after)
                    continue
                energy = profile.locate(until)[0]
                if until < profile.thinned:
                    energy = profile.lanes.clamp(energy, last.after, stretch.before)
                keep[-1] = CoveredStretch(last.start, until, last.before, energy)
            keep.append(stretch)
        if keep and keep[-1].end < until:
            energy, last = profile.locate(until)[0], keep[-1]
            if until < profile.thinned:
                energy = profile.lanes.clamp(energy, last.after, energy)
            keep[-1] = CoveredStretch(last.start, until, last.before, energy)
        self._stretches = keep
        self._starts = [stretch.start for stretch in keep]


ONE = 1 << SHARE
NEVER = 1 << 80
BLOCK = 1 << 60  # codes of events: covered time begins,
UNBLOCK = BLOCK + 1  # or ends,
TICK = BLOCK + 2  # or nothing happens but that time passes


class FairDivision:
    """Energy divided among numbered spans as time goes on.

    ``gained`` of a number is its part of the virtual account so far: what the account stood at
    whenever it ceased to be a leaf, less what it stood at whenever it became one. The lowest lane
    of the account is a clock that runs only in covered time, where nothing is left to divide.
    """

    def __init__(self) -> None:
        self.gained: list[int] = []
        self.children: list[int] = []  # how many are open now
        self.open: list[bool] = []
        self.parent: list[int] = []  # -1: none
        self.cpu: list[int] = []  # weights: of CPU and memory energy
        self.gpu: list[int] = []  # and of GPU energy
        self.at = -NEVER
        self.energy = 0
        self.passed = 0  # energy of covered time, in lanes, since the beginning
        self._virtual = 0
        self._cpu_weight = self._gpu_weight = 0

    def join(self, count: int) -> int:
        """Make room for ``count`` more spans; the number of the first of them."""
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
    ) -> tuple[list[CoveredStretch], list[tuple[int, int]]]:
        """Let time pass over events: ``codes`` is a span that begins, or ``~`` one that ends.

        ``order`` sorts ``times``. ``beyond``: the energy up to the next covered stretch after them.
        Returns the stretches in which there was a leaf, and for each
        event where the profile has it.
        """
        rows, thinned = profile.rows, profile.thinned
        located: list[tuple[int, int]] = [(0, 0)] * len(times)
        stretches: list[CoveredStretch] = []
        gained, children, opened = self.gained, self.children, self.open
        parents, cpu, gpu = self.parent, self.cpu, self.gpu
        virtual, passed = self._virtual, self.passed
        cpu_weight, gpu_weight = self._cpu_weight, self._gpu_weight
        at, energy = self.at, self.energy
        row, base, slope, begin, edge = -1, 0, 0, 0, -NEVER
        since: tuple[int, int] | None = None
        blocked, caps = False, iter(covered)
        cap = next(caps, None)
        ceiling = cap.before if cap else beyond
        place = (energy, 0)
        for event in order:
            time, code = times[event], codes[event]
            if time > at:
                if time >= edge:
                    row, base, slope, begin, edge = _row(rows, time, row)
                now = base + slope * (time - begin)
                place = now, row
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
                            gpu_flow = flow & GPU_MASK
                            virtual += (flow - gpu_flow) * (ONE // cpu_weight)
                            virtual += gpu_flow * (ONE // gpu_weight)
                    if since is None:
                        since = at, energy
                elif since is not None:
                    stretches.append(CoveredStretch(since[0], at, since[1], energy))
                    since = None
                at, energy = time, now
            located[event] = place
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
                blocked, ceiling = True, cap.after
            elif code == UNBLOCK and cap is not None:
                blocked, energy = False, cap.after
                cap = next(caps, None)
                ceiling = cap.before if cap else beyond
        if since is not None:
            stretches.append(CoveredStretch(since[0], at, since[1], energy))
        self._virtual, self.passed = virtual, passed
        self._cpu_weight, self._gpu_weight = cpu_weight, gpu_weight
        self.at, self.energy = at, energy
        return stretches, located

    def leave(self, span: int) -> None:
        """End a span where time stands now."""
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
        """Forget all but ``spans``, which are numbered anew in their order."""
        number = {old: new for new, old in enumerate(spans)}
        self.parent = [number.get(self.parent[span], -1) for span in spans]
        for values in (self.gained, self.children, self.cpu, self.gpu):
            values[:] = [values[span] for span in spans]
        self.open = [self.open[span] for span in spans]

    def share(self, span: int) -> int:
        """What a closed span got, in lanes: microjoules times 2**104."""
        gained, cpu, gpu = self.gained[span], self.cpu[span], self.gpu[span]
        if cpu == gpu:
            return gained * cpu
        of_gpu = gained & GPU_MASK
        return (gained - of_gpu) * cpu + of_gpu * gpu


def _row(rows: ProfileRows, time: int, row: int) -> tuple[int, int, int, int, int]:
    """The row ``time`` lies in, as ``run`` needs it, at or after ``row``."""
    times = rows.times
    row = bisect_right(times, time, max(0, row)) - 1
    edge = times[row + 1] if row + 1 < len(times) else NEVER
    return row, rows.energy[row], rows.slope[row], times[row], edge


def exclude_covered_time(
    times: list[int], codes: list[int], covered: Sequence[CoveredStretch], first: int, last: int
) -> None:
    """Add to events those at which covered time begins and ends."""
    for stretch in covered:
        times.append(max(first, stretch.start))
        codes.append(BLOCK)
        if stretch.end <= last:
            times.append(stretch.end)
            codes.append(UNBLOCK)
