"""The GPU energy of a process inside the steps of a counter, by the names of its spans.

A profile spreads the energy of a counter step evenly. With the spans in and around the step it is
divided by the mean powers of their names (:mod:`wattspan.spans.power_model`) instead. Only time
whose energy has not been divided among spans is changed, and the energy of each such period stays
the same, to the unit of the profile.

Steps are learned a while after their end, once most spans of their time have been received. Of
*blurred* steps, in which a shared GPU has the energy of other steps too, only sums are learned, and
several of them are divided together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise
from math import hypot
from operator import itemgetter
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND
from wattspan.spans.fair_division import CoveredTime
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.packed_energy import FRACTION
from wattspan.spans.power_model import Activity, PowerModel, Segment, SegmentEnergy, Step
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import Span

LEARN_AFTER = 6 * SECOND
"""The delay after which a step is learned: the usual period of exporters, and a second."""

MAX_RECENT = 1024
"""Spans that are kept until their steps are learned; with more (150 a second) steps are spread
evenly."""

MAX_OPEN = 16
"""Spans in one step; with more of them the step is spread evenly and not learned."""

MAX_SEGMENTS = 12
"""Periods with other activities in one step; with more of them the step is spread evenly."""

# Standard deviations of the stated uncertainty: loads have longer tails than the normal
# distribution.
_SURE = 2.5
_EDGE_TIME = MILLISECOND  # standard deviation of the times of span edges and of steps
_MOST = 3.0  # limit of the deviations that are compared
_PERSISTENCE_MEMORY = 50.0  # steps
_ONE = 1 << 40  # fractions of an energy
_BLUR = 2  # blurred steps at each side of an edge that are divided with its own
_START, _END = itemgetter(0), itemgetter(1)


class _RecentSpan(NamedTuple):
    start: int
    end: int
    activity: tuple[str, str]  # service and name
    id: bytes
    parent: bytes


def _recent_span(span: Span) -> _RecentSpan:
    return _RecentSpan(span.start, span.end, (span.service, span.name), span.id, span.parent)


class StepDivider:
    """Learns from the spans of one process, and divides the energy of its counter steps."""

    def __init__(self, model: PowerModel, process: Hashable) -> None:
        self._model = model
        self._process = process
        self._recent: deque[_RecentSpan] = deque()
        self._later: list[_RecentSpan] = []  # received and not settled
        self._complete_from = -LEARN_AFTER  # spans before this time may be missing
        self._learned: dict[str, int] = {}  # time up to which steps are learned, by board
        self._since: int | None = None
        self._blurred: dict[str, CounterStep] = {}  # consecutive ones as one, by board
        self._deviations: dict[str, tuple[int, float]] = {}  # of the last step, by board
        self._persistence = 0.5  # correlation of the deviations of consecutive steps

    def forget(self) -> None:
        """Remove the process from the model."""
        for board in self._learned:
            self._model.forget((board, self._process))

    def shape(
        self,
        spans: Sequence[Span],
        profile: EnergyProfile,
        covered: CoveredTime,
        *,
        fixed: int | None,
        waiting: Iterable[Span] = (),
    ) -> None:
        """Divide the counter steps at the edges of ``spans``, which are about to be settled.

        The energy up to ``fixed`` has been read and must not change; None: no such time.
        ``waiting`` are received spans that are settled later.
        """
        boards = profile.counter_steps
        self._remember(spans)
        if self._complete_from > profile.watermark - LEARN_AFTER:
            return  # too many spans: nothing can be learned
        self._learn(boards, profile.watermark - LEARN_AFTER)
        self._later = list(map(_recent_span, islice(waiting, MAX_RECENT)))
        edges = sorted({edge for span in spans for edge in (span.start, span.end)})
        for board, steps in boards.items():
            if self._model.power((board, self._process)) is None:
                continue
            for first, last in _windows(steps, edges):
                if steps[first].start >= profile.thinned:
                    self._shape(boards, board, range(first, last + 1), profile, covered, fixed)

    # ----------------------------------------------------------------------------------- learn

    def _remember(self, spans: Sequence[Span]) -> None:
        if self._since is None:
            self._since = min(span.start for span in spans)
        if len(spans) > MAX_RECENT:
            self._complete_from = max(self._complete_from, *(span.end for span in spans))
            return
        self._recent.extend(map(_recent_span, spans))
        while len(self._recent) > MAX_RECENT:
            self._complete_from = max(self._complete_from, self._recent.popleft().end)

    def _learn(self, boards: Mapping[str, Sequence[CounterStep]], until: int) -> None:
        """Learn the steps that ended before ``until``, each one once."""
        since = self._since or 0
        for board, steps in boards.items():
            done = max(self._learned.get(board, since), since)
            for step in steps[bisect_left(steps, done, key=_START) :]:
                if step.end > until:
                    break
                done = step.end
                known = self._known_period(board, step)
                if known is None:
                    continue
                segments = self._segments(board, known.start, known.end, self._recent)
                if segments:
                    deviation = self._model.learn(Step(segments, known.energy))
                    self._compare(board, known, deviation)
            self._learned[board] = done
        oldest = until - 2 * SECOND
        if self._recent and self._recent[0].end < oldest:
            self._recent = deque(span for span in self._recent if span.end >= oldest)

    def _known_period(self, board: str, step: CounterStep) -> CounterStep | None:
        """The step as one with the blurred steps before it; None while more may follow.

        The energy of consecutive blurred steps is that of their time as a whole.
        """
        before = self._blurred.pop(board, None)
        if before is not None and before.end == step.start:
            step = step._replace(start=before.start, energy=before.energy + step.energy)
        if step.blurred and step.end - step.start < SECOND:
            self._blurred[board] = step
            return None
        return step

    def _compare(self, board: str, step: CounterStep, deviation: float) -> None:
        """Estimate the persistence from the deviations of consecutive steps."""
        deviation = max(-_MOST, min(deviation, _MOST))
        at, before = self._deviations.get(board, (0, 0.0))
        if at == step.start:
            found = deviation * before
            self._persistence += (found - self._persistence) / _PERSISTENCE_MEMORY
        self._deviations[board] = step.end, deviation

    def _open(self, start: int, end: int) -> list[_RecentSpan]:
        known = chain(self._recent, self._later)
        return [span for span in known if span.start < end and span.end > start]

    def _segments(
        self, board: str, start: int, end: int, spans: Iterable[_RecentSpan]
    ) -> list[Segment]:
        """The periods with the same leaf spans; empty with too many spans."""
        inside = [span for span in spans if span.start < end and span.end > start]
        if len(inside) > MAX_OPEN:
            return []
        outside: Activity = (board, self._process)
        if not inside:
            return [Segment(start, end, {outside: 1.0})]
        numbers = {span.id: i for i, span in enumerate(inside)}
        edges = {max(start, span.start) for span in inside} | {min(end, s.end) for s in inside}
        found: list[Segment] = []
        for left, right in pairwise(sorted(edges | {start, end})):
            opened = [i for i, span in enumerate(inside) if span.start <= left < span.end]
            parents = {numbers.get(inside[i].parent) for i in opened}
            leaves = [inside[i] for i in opened if i not in parents]
            counts: Counter[Activity] = Counter((board, leaf.activity) for leaf in leaves)
            mix = {activity: n / len(leaves) for activity, n in counts.items()} or {outside: 1.0}
            found.append(Segment(left, right, mix))
        return found

    # ---------------------------------------------------------------------------------- divide

    def _shape(
        self,
        boards: Mapping[str, Sequence[CounterStep]],
        board: str,
        window: range,
        profile: EnergyProfile,
        covered: CoveredTime,
        fixed: int | None,
    ) -> None:
        """Divide the undivided periods of some steps as one; with other boards only whole steps.

        Of several boards only the sum is known inside a step that has been divided in part.
        """
        steps, alone = boards[board], len(boards) == 1
        within = steps[window.start : window.stop]
        begin, stop = within[0].start, within[-1].end
        periods = _undivided(begin, stop, covered, fixed)
        if not alone and periods != [(begin, stop)]:
            return
        first, last = max(0, window.start - 1), min(window.stop, len(steps) - 1)
        spans = self._open(steps[first].start, steps[last].end)
        before, after = [], []
        if steps[first].end == begin:
            before = self._neighbour(board, steps[first], spans)
        if steps[last].start == stop:
            after = self._neighbour(board, steps[last], spans)
        inner = [one.end for one in within[:-1]]
        most = MAX_SEGMENTS + len(inner)
        for start, end in periods:
            marks = [start, *(at for at in inner if start < at < end), end]
            groups = [self._segments(board, *pair, spans) for pair in pairwise(marks)]
            if sum(map(len, groups)) > most:
                groups = [_merged(group) for group in groups]
            segments = list(chain.from_iterable(groups))
            if not all(groups) or len(segments) > most or len(_merged(segments)) < 2:
                continue
            times = [start, *profile.row_times(start, end), *(s.end for s in segments)]
            times = sorted(set(times))
            if alone:
                energies = [high - low for low, high in pairwise(profile.gpu_energies(marks))]
            else:
                energies = [one.energy << FRACTION for one in within]
            own = sum(energies)
            divided = [Step(g, e / (1 << FRACTION)) for g, e in zip(groups, energies, strict=True)]
            parts = self._model.divide(
                [*before, *divided, *after],
                range(len(before), len(before) + len(divided)),
                max(0.0, min(self._persistence, 0.95)),
            )
            if parts is not None:
                sums = _sums(segments, parts, own, times)
                if not alone:
                    sums = _with_others(sums, own, times, profile.gpu_energies(times))
                # The energy of other boards or of other times has a larger error.
                certain = alone and not within[0].blurred
                profile.reshape(times, sums, _errors(segments, parts, times) if certain else ())

    def _neighbour(self, board: str, step: CounterStep, spans: Sequence[_RecentSpan]) -> list[Step]:
        """A step beside the divided one; none if it is blurred or has many changes."""
        if step.blurred:
            return []
        segments = _merged(self._segments(board, step.start, step.end, spans))
        return [Step(segments, step.energy)] if 0 < len(segments) <= MAX_SEGMENTS else []


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """The segments, consecutive ones with the same activities as one."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].mix == segment.mix:
            merged[-1] = merged[-1]._replace(end=segment.end)
        else:
            merged.append(segment)
    return merged


def _sums(
    segments: Sequence[Segment], parts: Sequence[SegmentEnergy], energy: int, times: Sequence[int]
) -> list[int]:
    """The energy up to each time; ``energy`` is the whole, the unit is the profile's."""
    scale = sum(part.energy for part in parts)
    fractions = [0, *(round(each / scale * _ONE) for each in accumulate(p.energy for p in parts))]
    fractions[-1] = _ONE
    sums, i = [], 0
    for time in times:
        while time > segments[i].end:
            i += 1
        start, end, _ = segments[i]
        part = fractions[i] + (fractions[i + 1] - fractions[i]) * (time - start) // (end - start)
        sums.append(energy * part // _ONE)
    return sums


def _with_others(
    sums: Sequence[int], energy: int, times: Sequence[int], known: Sequence[int]
) -> list[int]:
    """The energy of all boards up to each time, after a change of that of one board."""
    start, length, total = times[0], times[-1] - times[0], known[-1] - known[0]
    moved = [
        all_boards - known[0] + changed - energy * (time - start) // length
        for time, all_boards, changed in zip(times, known, sums, strict=True)
    ]
    between = accumulate(moved[1:-1], max, initial=0)
    return [*(min(total, each) for each in between), total]


def _errors(
    segments: Sequence[Segment], parts: Sequence[SegmentEnergy], times: Sequence[int]
) -> list[tuple[float, float]]:
    """The uncertainties of a period that begins in each row, and of one inside it."""
    errors, i = [], 0
    for time in times[:-1]:
        while time >= segments[i].end:
            i += 1
        part, (start, end, _) = parts[i], segments[i]
        most = max(p.energy / (s.end - s.start) for p, s in zip(parts, segments, strict=True))
        errors.append(
            (
                _SURE * hypot(part.before, _EDGE_TIME * most),
                _SURE * hypot(part.inside, _EDGE_TIME * most) / (end - start),
            )
        )
    return errors


def _windows(steps: Sequence[CounterStep], edges: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last number of the steps that are divided as one, for all edges.

    Each step is divided alone, except for blurred ones: a part of the energy of a load is in the
    steps around it. With too many edges blurred steps are divided alone, too.
    """
    windows: list[tuple[int, int, list[int]]] = []
    for number in _steps_at(steps, edges):
        first = last = number
        low, high = max(0, number - _BLUR), min(len(steps) - 1, number + _BLUR)
        while first > low and _blur_into(steps, first - 1):
            first -= 1
        while last < high and _blur_into(steps, last):
            last += 1
        if windows:
            begin, end, numbers = windows[-1]
            if first <= end and steps[last].end - steps[begin].start <= SECOND:
                windows[-1] = begin, last, [*numbers, number]
                continue
            first = max(first, end + 1)
        windows.append((min(first, number), last, [number]))
    for first, last, numbers in windows:
        inside = bisect_left(edges, steps[last].end) - bisect_right(edges, steps[first].start)
        if inside < MAX_SEGMENTS:
            yield first, last
        else:
            yield from ((number, number) for number in numbers)


def _blur_into(steps: Sequence[CounterStep], number: int) -> bool:
    """True if a step and the next one are blurred, without a gap between them."""
    one, other = steps[number : number + 2]
    return one.blurred and other.blurred and one.end == other.start


def _steps_at(steps: Sequence[CounterStep], edges: Sequence[int]) -> Iterator[int]:
    """The numbers of the steps with an edge inside; both are in order of time."""
    at = 0
    for number in range(bisect_right(steps, edges[0], key=_END), len(steps)):
        at = bisect_right(edges, steps[number].start, at)
        if at == len(edges):
            return
        if edges[at] < steps[number].end:
            yield number


def _undivided(
    start: int, end: int, covered: CoveredTime, fixed: int | None
) -> list[tuple[int, int]]:
    """The parts of a period that are not covered, separated at ``fixed``."""
    free, at = [], start
    for stretch in covered.inside(start, end):
        if stretch.start > at:
            free.append((at, stretch.start))
        at = max(at, stretch.end)
    if at < end:
        free.append((at, end))
    if fixed is None:
        return free
    return [
        part
        for low, high in free
        for part in ([(low, fixed), (fixed, high)] if low < fixed < high else [(low, high)])
    ]
