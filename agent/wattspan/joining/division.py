"""A fair queue: the energy of some time, divided among spans as they come and go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from wattspan.joining.covered import Stretch
from wattspan.profiles import GPU_MASK, SHARE, EnergyProfile, Rows

ONE = 1 << SHARE
NEVER = 1 << 80
BLOCK = 1 << 60  # codes of events: covered time begins,
UNBLOCK = BLOCK + 1  # or ends,
TICK = BLOCK + 2  # or nothing happens but that time passes


class Division:
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
        covered: Sequence[Stretch],
        beyond: int | None,
    ) -> tuple[list[Stretch], list[tuple[int, int]]]:
        """Let time pass over events: ``codes`` is a span that begins, or ``~`` one that ends.

        ``order`` sorts ``times``. ``beyond``: the energy up to the next covered stretch after them.
        Returns the stretches in which there was a leaf, and for each
        event where the profile has it.
        """
        rows, thinned = profile.rows, profile.thinned
        located: list[tuple[int, int]] = [(0, 0)] * len(times)
        stretches: list[Stretch] = []
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
                    stretches.append(Stretch(since[0], at, since[1], energy))
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
            stretches.append(Stretch(since[0], at, since[1], energy))
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


def _row(rows: Rows, time: int, row: int) -> tuple[int, int, int, int, int]:
    """The row ``time`` lies in, as ``run`` needs it, at or after ``row``."""
    times = rows.times
    row = bisect_right(times, time, max(0, row)) - 1
    edge = times[row + 1] if row + 1 < len(times) else NEVER
    return row, rows.energy[row], rows.slope[row], times[row], edge


def bar(
    times: list[int], codes: list[int], covered: Sequence[Stretch], first: int, last: int
) -> None:
    """Add to events those at which covered time begins and ends."""
    for stretch in covered:
        times.append(max(first, stretch.start))
        codes.append(BLOCK)
        if stretch.end <= last:
            times.append(stretch.end)
            codes.append(UNBLOCK)
