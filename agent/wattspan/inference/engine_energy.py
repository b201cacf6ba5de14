"""Joules per token of a serving engine, from its counters and the GPU energy of its processes.

Between two readings of its page an engine has counted tokens, and its processes have used energy.
The energy of all tokens together is their quotient over a window of a minute at least. It includes
the energy of an engine that waits for requests. It is exact up to the edges of the window: the
page is read within some milliseconds, the counter of a board has steps, and an engine has begun
tokens that it has not counted. Where counters move when a request finishes, a window holds twenty
times the mean duration of a request at least.

The energy of prompts and of generated tokens is divided by learned coefficients, as that of single
requests is (:mod:`wattspan.inference.token_power`), where an engine counts its iterations: energy
by prompt tokens, generated tokens, iterations and busy time. What an iteration's requests have in
common is divided equally among them. A page does not show the busy time. It is that of the work by
the rates of intervals that were busy throughout: an interval takes longer than its work only if the
engine waited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, inf, sqrt
from typing import NamedTuple

from wattspan.inference.engine_metrics import Figure, Moves, Progress
from wattspan.inference.token_power import TokenPowerModel, TokenWork
from wattspan.model import SECOND, Microjoules
from wattspan.util.linear_systems import non_negative_solution

WINDOW = 60 * SECOND
LONGEST_WINDOW = 3600 * SECOND
"""Of counters that move when a request finishes; without enough requests in it, no figure."""

DURATIONS = 20
"""Mean durations of a request in a window of such counters."""

LONGEST_INTERVAL = 11 * SECOND
"""Longer ones mix too much work to learn from: more than 10 s and the delays of a reading."""

MAX_DOUBT = 0.5
"""A figure with a larger uncertainty, of the figure, is not published."""

_SURE = 2.5  # standard deviations of the stated uncertainty, as of single requests
_LEAST_DOUBT = 0.02  # of the output's energy: the model is simpler than an engine
_EDGE = 0.5  # of the energy of a counter's step in which a window begins or ends
_TIMES = 120  # intervals that the rates of work are learned from
_LEARN_EVERY = 12
_FEWEST = 15
_BUSY = 0.6  # the part of the intervals that is taken to be the busiest
_ROUNDS = 8
_LOADED = 0.7  # of the intervals have requests at both ends
_THROUGHOUT = 0.93  # of the time: the work of an interval without a pause
_RIDGE = 1e-6


class EngineInterval(NamedTuple):
    """The time between two readings, and the energy in it.

    ``edges`` are half-widths in microjoules: what the start and the end may be off. ``doubt`` is
    that of the whole, by the division of a board's energy and by its idle power.
    """

    start: int
    end: int
    energy: Microjoules
    edges: tuple[float, float]
    progress: Progress
    doubt: float = 0.0


class Estimate(NamedTuple):
    """A figure in microjoules and the half-width of its 95 % range."""

    value: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The figures of a window. ``tokens`` is by type: ``all``, and ``input`` and ``output``.

    ``idle`` is the part of the energy while the engine waited for requests; None if unknown.
    ``start`` is the begin of the window.
    """

    tokens: Mapping[str, Estimate] = field(default_factory=dict)
    request: Estimate | None = None
    idle: float | None = None
    start: int = 0


class BusyTime:
    """The busy seconds of intervals, by the rates of their work.

    They are learned while the engine has requests at most readings.
    """

    def __init__(self) -> None:
        self._known: deque[tuple[float, Sequence[float]]] = deque(maxlen=_TIMES)
        self._loaded: deque[bool] = deque(maxlen=_TIMES)
        self._rates: Sequence[float] = ()
        self._added = 0

    def of(self, seconds: float, work: Sequence[float], running: Sequence[float]) -> float | None:
        """The busy part of an interval with ``work``, which is learned; None if it is not known.

        ``running`` are the requests at its ends.
        """
        loaded = all(running)
        self._loaded.append(loaded)
        if loaded and any(work):
            self._known.append((seconds, work))
            self._added += 1
            if len(self._known) >= _FEWEST and (not self._rates or not self._added % _LEARN_EVERY):
                self._learn()
        if not any(work):
            return 0.0
        if not self._rates or sum(self._loaded) < _LOADED * len(self._loaded):
            return None
        needed = sum(rate * each for rate, each in zip(self._rates, work, strict=True))
        return seconds if loaded and needed > _THROUGHOUT * seconds else min(seconds, needed)

    def _learn(self) -> None:
        """The rates of the busiest intervals: those with the least time beyond their work."""
        busiest: Iterable[tuple[float, Sequence[float]]] = self._known
        count = max(_FEWEST * 2 // 3, round(_BUSY * len(self._known)))
        for _ in range(_ROUNDS):
            rates = _fitted(busiest)
            beyond = sorted(
                (seconds - sum(a * b for a, b in zip(rates, work, strict=True)), i)
                for i, (seconds, work) in enumerate(self._known)
            )
            busiest = [self._known[i] for _, i in beyond[:count]]
        self._rates = _fitted(busiest)


def _fitted(equations: Iterable[tuple[float, Sequence[float]]]) -> list[float]:
    """The non-negative rates with the least squares of the rest of the times."""
    rows = list(equations)
    size = range(len(rows[0][1]))
    matrix = [[sum(work[i] * work[j] for _, work in rows) for j in size] for i in size]
    scales = [sqrt(matrix[i][i]) or 1.0 for i in size]
    scaled = [
        [matrix[i][j] / scales[i] / scales[j] + _RIDGE * (i == j) for j in size] for i in size
    ]
    rights = [sum(work[i] * time for time, work in rows) / scales[i] for i in size]
    found = non_negative_solution(scaled, rights)
    return [each / scale for each, scale in zip(found, scales, strict=True)]


class _IntervalWork(NamedTuple):
    """The work of an interval; ``busy`` is None if it is not known."""

    tokens: TokenWork | None
    prompts: float = 0.0


class EngineEnergy:
    """The figures of one engine from its intervals, which are consecutive but for ``skip``."""

    def __init__(self) -> None:
        self._window: deque[tuple[EngineInterval, _IntervalWork]] = deque()
        self._model = TokenPowerModel()
        self._busy = BusyTime()
        self.energy = 0
        """Microjoules of all intervals."""
        self.tokens: dict[str, float] = {}
        self.requests: float | None = None
        self._prompts = 0.0

    def skip(self) -> None:
        """Begin a new window: the last interval's energy or counts are unknown."""
        self._window.clear()

    def restart(self) -> None:
        """Begin to learn anew as well: the engine is another one, or on other boards."""
        self.skip()
        self._model, self._busy = TokenPowerModel(), BusyTime()

    def add(self, interval: EngineInterval) -> None:
        """Add the next interval."""
        work = self._learned(interval)
        if self._window and self._window[-1][0].end != interval.start:
            self.skip()
        self._window.append((interval, work))
        most = LONGEST_WINDOW if interval.progress.page.moves is Moves.FINISH else WINDOW
        while len(self._window) > 1 and interval.end - self._window[1][0].start >= most:
            self._window.popleft()
        self.energy += interval.energy
        self._prompts += interval.progress.figures.get(Figure.PROMPTS, 0.0)
        for way, count in interval.progress.tokens.items():
            self.tokens[way] = self.tokens.get(way, 0.0) + count
        if Figure.REQUESTS in interval.progress.figures:
            self.requests = (self.requests or 0.0) + interval.progress.figures[Figure.REQUESTS]

    def _learned(self, interval: EngineInterval) -> _IntervalWork:
        """The work of an interval, from which the model learns if all of it is known."""
        found = interval.progress.figures
        wanted = (Figure.COMPUTED, Figure.OUTPUT, Figure.ITERATIONS, Figure.PROMPTS)
        length = interval.end - interval.start
        if any(figure not in found for figure in wanted) or length > LONGEST_INTERVAL:
            return _IntervalWork(None)
        prefill, output, iterations, prompts = (found[figure] for figure in wanted)
        decode = max(0.0, output - prompts)  # the first token is the result of prefill
        busy = self._busy.of(
            length / SECOND, (iterations, prefill, decode), interval.progress.running or (0.0, 0.0)
        )
        if busy is None:
            return _IntervalWork(None)
        work = TokenWork(prefill, 0.0, decode, 0.0, iterations, busy)
        self._model.learn({"": work}, interval.energy, length)
        return _IntervalWork(work, prompts)

    def _idle_of(self, interval: EngineInterval, work: _IntervalWork) -> float | None:
        """The energy of an interval while the engine waited; None if it is not known."""
        progress = interval.progress
        moved = any(count for count in progress.figures.values())
        if not moved and Figure.OUTPUT in progress.figures and progress.running == (0.0, 0.0):
            return float(interval.energy)
        if work.tokens is None:
            return None
        waited = max(0.0, (interval.end - interval.start) / SECOND - work.tokens.active)
        if waited and not self._model.idle_power:
            return None
        return min(float(interval.energy), self._model.idle_power * waited)

    # ----------------------------------------------------------------------------------- answers

    def figures(self) -> EngineFigures:
        """The figures of the newest window that is long enough; without any that is not known."""
        window: deque[tuple[EngineInterval, _IntervalWork]] = deque()
        requests = load = last = 0.0
        for one in reversed(self._window):
            progress = one[0].progress
            finish = progress.page.moves is Moves.FINISH
            counted = Figure.REQUESTS in progress.page.series
            if progress.running is None:
                break  # what of its requests is counted is not known
            if finish and not counted and not window and progress.running[1]:
                continue  # nor is it here: an earlier end
            last = last if window else progress.running[1]
            window.appendleft(one)
            load += sum(progress.running)
            requests += progress.figures.get(Figure.REQUESTS, 0.0)
            if window[-1][0].end - window[0][0].start < WINDOW:
                continue
            edges, mean = (progress.running[0], last), load / 2 / len(window)
            if not (finish and any(edges)) or requests >= DURATIONS * max(1.0, mean):
                return self._figures(window, requests, edges)
        return EngineFigures()

    def _figures(
        self,
        window: Sequence[tuple[EngineInterval, _IntervalWork]],
        requests: float,
        edges: tuple[float, float],
    ) -> EngineFigures:
        """The figures of a window with ``requests``, of which ``edges`` run at its ends."""
        intervals = [interval for interval, _ in window]
        page = intervals[-1].progress.page
        energy = float(sum(each.energy for each in intervals))
        doubt = hypot(intervals[0].edges[0], intervals[-1].edges[1])
        doubt += sum(each.doubt for each in intervals)  # in one direction
        sums: dict[str, float] = {}
        for each in intervals:
            for way, count in each.progress.tokens.items():
                sums[way] = sums.get(way, 0.0) + count
        # Requests at both edges: what is begun and not counted, or counted and begun before, has
        # the mean and the deviation of whole requests at least.
        begun = abs(edges[1] - edges[0]) + 2 * sqrt(sum(edges))
        found, total = {}, sum(sums.values())
        if {"input", "output"} <= sums.keys() and total > 0:
            prompts = sum(each.progress.figures.get(Figure.PROMPTS, 0.0) for each in intervals)
            # A prompt is computed in parts, and perhaps counted at its end.
            late = sums["input"] / prompts if prompts else 0.0
            if not prompts and any(edges):
                late = self.tokens["input"] / self._prompts if self._prompts else total
            if page.moves is Moves.LOG_INTERVAL:
                late = page.lag * sqrt(sum(each**2 for each in edges))
            elif page.moves is Moves.FINISH:
                late = begun * total / requests if requests else 0.0
            found["all"] = _quotient(energy, doubt, total, late)
            found |= self._divided(window, energy, doubt, sums)
        request = _quotient(energy, doubt, requests, begun) if requests else None
        idle = [self._idle_of(*each) for each in window]
        waited = [each for each in idle if each is not None]
        known = len(waited) == len(idle) and energy > 0
        return EngineFigures(
            {way: one for way, one in found.items() if one.uncertainty <= MAX_DOUBT * one.value},
            request if request and request.uncertainty <= MAX_DOUBT * request.value else None,
            min(1.0, sum(waited) / energy) if known else None,
            intervals[0].start,
        )

    def _divided(
        self,
        window: Sequence[tuple[EngineInterval, _IntervalWork]],
        energy: float,
        doubt: float,
        tokens: Mapping[str, float],
    ) -> dict[str, Estimate]:
        """The energy of an input and an output token; none if the model is not identified."""
        works = [work.tokens for _, work in window if work.tokens is not None]
        if len(works) < len(window) or not self._model.identified([""]):
            return {}
        whole = TokenWork(*(sum(column) for column in zip(*works, strict=True)))
        if not whole.iterations or not min(tokens["input"], tokens["output"]):
            return {}
        waited = sum(each.end - each.start for each, _ in window) / SECOND - whole.active
        active = energy - min(energy, self._model.idle_power * max(0.0, waited))
        rates = self._model.coefficients("")
        prompts = sum(work.prompts for _, work in window)
        # An iteration that computes a prompt shares with it and with those in decode.
        share = prompts / whole.iterations / (1 + whole.decode / whole.iterations)
        common = rates.iterations * whole.iterations + rates.active * whole.active
        own = rates.prefill * whole.prefill
        modelled = own + rates.decode * whole.decode + common
        if modelled <= 0 or active <= 0:
            return {}
        prompt = active * (own + min(1.0, share) * common) / modelled
        rest = active - prompt
        spread = _SURE * sqrt(self._model.variance({"": TokenWork(whole.prefill, *(0.0,) * 5)}))
        spread = sqrt(spread**2 + (_LEAST_DOUBT * rest) ** 2 + doubt**2)
        return {
            way: Estimate(part / tokens[way], spread / tokens[way])
            for way, part in (("input", prompt), ("output", rest))
        }


def _quotient(energy: float, doubt: float, count: float, late: float) -> Estimate:
    """Energy for each of ``count``, which may be off by ``late``."""
    value = energy / count
    if not energy:
        return Estimate(0.0, inf)  # tokens cost energy: how much is unknown
    return Estimate(value, value * sqrt((doubt / energy) ** 2 + (late / count) ** 2))


def edge_doubt(step: Microjoules, length: int, reading: int) -> float:
    """The half-width of the energy at an edge of a window, in microjoules.

    The energy of a counter's ``step`` of ``length`` nanoseconds is placed evenly in it, and the
    page was read at some moment of ``reading`` nanoseconds.
    """
    return step * (_EDGE + reading / 2 / length) if length > 0 else 0.0
