"""Joules per token of a serving engine, from its counters and the GPU energy of its processes.

Between two readings of its page an engine has counted tokens, and its processes have used energy.
The energy of all tokens together is their quotient over a window of a minute at least. It includes
the energy of an engine that waits for requests. It is exact up to the edges of the window: the
page is read within some milliseconds, the counter of a board has steps, and an engine has begun
tokens that it has not counted. Where counters move when a request finishes, a window holds twenty
times the mean duration of a request at least.

The energy of prompts and of generated tokens is divided by learned coefficients, as that of single
requests is (:mod:`wattspan.inference.token_power`), where an engine counts its iterations: energy
by iterations, prompts, their tokens, generated tokens and time. They are learned from differences
between intervals, as the power of the same work drifts. Engines on the same boards are divided by
the work of all of them, and so are the models of a page that counts the iterations of each and
has its boards alone.

The common part of an iteration is divided equally among its requests: the energy of an
iteration without tokens, and the active power for the time that its tokens take. A page tells what
a prompt token adds to an iteration, not how much of that is active power, since the time of tokens
and their number are proportional. It is not less than the power while the engine waits for
requests, and not more than that of an iteration without tokens, which reads the weights besides.
The middle is taken, and the half of that range is part of the uncertainty. An engine that computes
prompts in passes of their own does not need it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import hypot, inf, isfinite, sqrt
from typing import NamedTuple

from wattspan.inference.busy_time import BusyTime, PhaseTimes, WorkTimes, time_of
from wattspan.inference.engine_metrics import EnginePage, Figure, Moves, Progress
from wattspan.inference.token_power import Place, TokenPowerModel, TokenWork
from wattspan.model import SECOND, Microjoules

WINDOW = 60 * SECOND
LONGEST_WINDOW = 3600 * SECOND
"""Of counters that move when a request finishes; without enough requests in it, no figure."""

_REFRESHED = 5 * SECOND
"""Figures of a window are as old at most if an engine is read more often."""

DURATIONS = 20
"""Mean durations of a request in a window of such counters."""

LONGEST_INTERVAL = 11 * SECOND
"""Longer ones mix too much work to learn from: more than 10 s and the delays of a reading."""

MAX_DOUBT = 0.5
"""A figure with a larger uncertainty, of the figure, is not published."""

MOST_MODELS = 4
"""Models of a page among which its energy is divided: each one makes the regression larger."""

LEARNED_TOGETHER = 900 * SECOND
"""The least time to learn from for figures of engines beside others.

Their times of work are those of 120 intervals, and depend on each other under load. In emulations
of 10 to 25 minutes, earlier ranges were up to six times too narrow.
"""

_COUNTED = (Figure.ITERATIONS, Figure.PROMPTS, Figure.COMPUTED, Figure.OUTPUT)
"""The work by which energy is divided."""

_SURE = 2.5  # standard deviations of the stated uncertainty, as of single requests
_LEAST_DOUBT = 0.02  # of what the model divides: it is simpler than an engine
_DRIFT, _PAST = 0.9, 4  # the part of the mean of so many intervals that is subtracted
_LITTLE = 0.01  # of an interval: shorter waiting is an error of the times
_IDLE_MEMORY, _IDLE_ENOUGH = 600.0, 10.0  # seconds of waiting
_EDGE = 0.5  # of the energy of a counter's step in which a window begins or ends


class EngineInterval(NamedTuple):
    """The time between two readings, and the energy in it.

    ``edges`` are half-widths in microjoules: what the start and the end may be off. ``doubt`` is
    that of the whole, by the division of a board's energy and by its idle power.

    ``beside`` are other engines on the same boards by label, with their work. Then ``energy`` is
    by the division of the boards, ``common`` that of all these engines, and ``edges`` and
    ``doubt`` are those of ``common``.
    """

    start: int
    end: int
    energy: Microjoules
    edges: tuple[float, float]
    progress: Progress
    doubt: float = 0.0
    beside: tuple[tuple[str, Progress], ...] = ()
    common: Microjoules | None = None


class Estimate(NamedTuple):
    """A figure in microjoules and the half-width of its 95 % range."""

    value: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The figures of a window. ``tokens`` is by type: ``all``, and ``input`` and ``output``.

    ``idle`` is the part of the energy while the engine waited for requests; None if unknown. With
    engines beside, it is known of one that waited all the time. ``start`` is the begin of the
    window.
    """

    tokens: Mapping[str, Estimate] = field(default_factory=dict)
    request: Estimate | None = None
    idle: float | None = None
    start: int = 0


class _IntervalWork(NamedTuple):
    """The work of an interval, by label of the engine; "" is this one. Empty if it is unknown.

    ``attention`` is the number of prompts: what one costs beyond its tokens.
    """

    works: Mapping[str, TokenWork]


_UNKNOWN = _IntervalWork({})


def _counts(progress: Progress) -> tuple[float, float, float, float] | None:
    """Iterations without prompts, prompts, their tokens, and decode tokens, as `WorkTimes` is.

    None if the page lacks some of them.
    """
    found, page = progress.figures, progress.page
    if any(figure not in found for figure in _COUNTED):
        return None
    iterations, prompts, prefill, output = (found[figure] for figure in _COUNTED)
    output = found.get(Figure.DECODED, output)
    if page.mixed:
        iterations = max(0.0, iterations - prompts)
    # The first token is the result of prefill.
    return iterations, prompts, prefill, max(0.0, output - prompts) if page.first else output


class EngineEnergy:
    """The figures of one engine from its intervals, which are consecutive but for ``skip``."""

    def __init__(self) -> None:
        self._window: deque[tuple[EngineInterval, _IntervalWork]] = deque()
        self._model = TokenPowerModel()
        self._busy = BusyTime()
        self._labels: tuple[str, ...] = ("",)  # of the engines on its boards
        self._idle_energy = self._idle_time = 0.0  # while the engine waited
        self._learned_time = 0.0
        self._before: deque[tuple[Mapping[str, TokenWork], float, float]] = deque(maxlen=_PAST)
        self._prompts = self._prompt_tokens = 0.0  # of all intervals
        self._shown = 0, EngineFigures()  # the newest figures, and the end of their window

    def skip(self) -> None:
        """Begin a new window: the last interval's energy or counts are unknown."""
        self._shown = 0, EngineFigures()
        self._window.clear()
        self._before.clear()

    def restart(self) -> None:
        """Begin to learn anew as well: the engine is another one, or on other boards."""
        self.skip()
        self._model, self._busy = TokenPowerModel(), BusyTime(len(self._labels))
        self._idle_energy = self._idle_time = self._learned_time = 0.0

    def add(self, interval: EngineInterval) -> None:
        """Add the next interval."""
        work = self._learned(interval)
        if self._window and self._window[-1][0].end != interval.start:
            self.skip()
        self._window.append((interval, work))
        most = LONGEST_WINDOW if interval.progress.page.moves is Moves.FINISH else WINDOW
        while len(self._window) > 1 and interval.end - self._window[1][0].start >= most:
            self._window.popleft()
        self._prompts += interval.progress.figures.get(Figure.PROMPTS, 0.0)
        self._prompt_tokens += interval.progress.tokens.get("input", 0.0)

    def _learned(self, interval: EngineInterval) -> _IntervalWork:
        """The work of an interval, from which the model learns if all of it is known."""
        engines = {"": interval.progress, **dict(interval.beside)}
        if tuple(engines) != self._labels:
            self._labels = tuple(engines)
            self.restart()
        length = interval.end - interval.start
        known = ((label, _counts(one)) for label, one in engines.items())
        counts = {label: each for label, each in known if each is not None}
        if len(counts) < len(engines) or length > LONGEST_INTERVAL:
            return _UNKNOWN
        requests = None
        found, wanted = interval.progress.figures, (Figure.DECODE, Figure.PREFILL, Figure.REQUESTS)
        if len(engines) == 1 and all(one in found for one in wanted):
            requests = PhaseTimes(*(found[one] for one in wanted))
        ends = [one.running or (0.0, 0.0) for one in engines.values()]
        running = [sum(each) for each in zip(*ends, strict=True)]
        work = tuple(chain.from_iterable(counts.values()))
        busy = self._busy.of(length / SECOND, work, running, requests)
        if busy is None:
            return _UNKNOWN
        needed = time_of(self._busy.times, work)
        works = {}
        for label, (iterations, prompts, prefill, decode) in counts.items():
            part = time_of(self._times(label), counts[label]) / needed if needed else 0.0
            works[label] = TokenWork(prefill, prompts, decode, 0.0, iterations, part * busy)
        self._learn(works, _common(interval), length)
        return _IntervalWork(works)

    def _learn(self, works: Mapping[str, TokenWork], energy: float, length: int) -> None:
        """Learn from the difference to the mean of the intervals before.

        The power of the same work drifts by some percent in minutes, as the load does.
        """
        seconds = length / SECOND
        self._learned_time += length
        row = {
            label: work._replace(active=0.0 if label else seconds) for label, work in works.items()
        }
        waited = seconds - sum(work.active for work in works.values())
        if waited > _LITTLE * seconds and (waited == seconds or self._is_learned(works)):
            kept = max(0.0, 1 - waited / _IDLE_MEMORY)
            self._idle_energy = self._idle_energy * kept + energy - sum(self._of_works(works))
            self._idle_time = self._idle_time * kept + waited
        if waited < seconds and self._before:
            kept = _DRIFT * seconds / sum(time for *_, time in self._before)
            past = {
                label: [kept * sum(each) for each in zip(*rows, strict=True)]
                for label in row
                for rows in [[before[label] for before, *_ in self._before]]
            }
            changes = {
                label: TokenWork(*(a - b for a, b in zip(work, past[label], strict=True)))
                for label, work in row.items()
            }
            before = kept * sum(each for _, each, _ in self._before)
            self._model.learn(changes, energy - before, length)
        self._before.append((row, energy, seconds))

    def _times(self, label: str) -> WorkTimes:
        at = self._labels.index(label) * len(WorkTimes._fields)
        return WorkTimes(*self._busy.times[at : at + len(WorkTimes._fields)])

    def _idle_of(self, interval: EngineInterval, work: _IntervalWork) -> float | None:
        """The energy of an interval while the engine waited; None if it is not known."""
        progress = interval.progress
        moved = any(count for count in progress.figures.values())
        if not moved and Figure.OUTPUT in progress.figures and progress.running == (0.0, 0.0):
            return float(interval.energy)
        if not work.works or interval.beside:
            return None
        waited = _waited([interval], work.works)
        if waited and not self._rested:
            return None
        return min(float(interval.energy), self._idle_power * waited)

    # ----------------------------------------------------------------------------------- answers

    def figures(self) -> EngineFigures:
        """Those of the newest window that is long enough; without any that is not known.

        Those of an engine that is read each second are some seconds old.
        """
        end = self._window[-1][0].end if self._window else 0
        if not self._shown[1].tokens or end - self._shown[0] >= _REFRESHED:
            self._shown = end, self._newest()
        return self._shown[1]

    def _newest(self) -> EngineFigures:
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
        whole, active = self._energies(window)
        sums: dict[str, float] = {}
        for each in intervals:
            for way, count in each.progress.tokens.items():
                sums[way] = sums.get(way, 0.0) + count
        # Requests at both edges: what is begun and not counted, or counted and begun before, has
        # the mean and the deviation of whole requests at least.
        begun = abs(edges[1] - edges[0]) + 2 * sqrt(sum(edges))
        found, total = {}, sum(sums.values())
        if {"input", "output"} <= sums.keys() and total > 0:
            late = self._late(intervals, sums, begun / requests if requests else 0.0, edges)
            found["all"] = _quotient(whole, total, sum(late.values()))
            if active is not None and min(sums["input"], sums["output"]):
                found |= self._divided(window, active, sums, late)
        request = _quotient(whole, requests, begun) if requests else None
        idle = [self._idle_of(*each) for each in window]
        waited = [each for each in idle if each is not None]
        known = len(waited) == len(idle) and whole.value > 0 and isfinite(whole.uncertainty)
        return EngineFigures(
            {way: one for way, one in found.items() if one.uncertainty <= MAX_DOUBT * one.value},
            request if request and request.uncertainty <= MAX_DOUBT * request.value else None,
            (min(1.0, sum(waited) / whole.value) if self._alone else 1.0) if known else None,
            intervals[0].start,
        )

    def _energies(
        self, window: Sequence[tuple[EngineInterval, _IntervalWork]]
    ) -> tuple[Estimate, Estimate | None]:
        """The energy of a window, and that of its work; None before the model is learned.

        Engines on the same boards have the parts of their work, and equal parts of the rest.
        """
        intervals = [interval for interval, _ in window]
        common = float(sum(map(_common, intervals)))
        doubt = hypot(intervals[0].edges[0], intervals[-1].edges[1])
        doubt += sum(each.doubt for each in intervals)  # in one direction
        measured = Estimate(common, doubt if self._alone else inf)
        works = _sums(window)
        sure = self._alone or self._learned_time >= LEARNED_TOGETHER
        if not works or not sure or not self._is_learned(works):
            return measured, None
        own, *others = self._of_works(works)
        modelled = own + sum(others)
        waited, unsure = _waited(intervals, works), 0.0
        idle = self._idle_power * waited
        if not self._rested:  # between none and the mean power
            seconds = sum(each.end - each.start for each in intervals) / SECOND
            idle = unsure = common * waited / seconds / 2
        if common <= idle or modelled <= 0:
            return measured, None
        part = own / modelled
        error = self._error(works, part) * (common - idle) / modelled
        active = Estimate((common - idle) * part, doubt + unsure + error)
        if self._alone:
            return measured, active
        rest = idle / len(works)
        return Estimate(active.value + rest, active.uncertainty + idle - rest), active

    def _error(self, works: Mapping[str, TokenWork], part: float) -> float:
        """The half-width of this engine's energy if it is ``part`` of that of all ``works``."""
        if len(works) == 1:
            return 0.0
        rest: dict[Place, TokenWork] = {
            label: TokenWork(*(amount * ((not label) - part) for amount in work))
            for label, work in works.items()
        }
        least = _LEAST_DOUBT * self._of_works(works)[0]
        return hypot(least, _SURE * sqrt(self._model.variance(rest)))

    def _late(
        self,
        intervals: Sequence[EngineInterval],
        tokens: Mapping[str, float],
        begun: float,
        edges: tuple[float, float],
    ) -> dict[str, float]:
        """By type, the tokens that are computed in a window and counted before or after it.

        ``begun`` is the part of its requests that are.
        """
        page = intervals[-1].progress.page
        if page.moves is Moves.FINISH:
            return {way: begun * count for way, count in tokens.items()}
        prompts = sum(each.progress.figures.get(Figure.PROMPTS, 0.0) for each in intervals)
        # A prompt is computed in parts, and perhaps counted at its end.
        late = tokens["input"] / prompts if prompts else 0.0
        if page.moves is Moves.LOG_INTERVAL:
            lag = page.lag * sqrt(sum(each**2 for each in edges))
            return {"input": late, "output": hypot(lag, _SURE * sqrt(2) * _late_tokens(intervals))}
        if not prompts and any(edges):
            known = self._prompt_tokens / self._prompts if self._prompts else inf
            late = min(known, sum(tokens.values()))
        return {"input": late, "output": 0.0}

    def _divided(
        self,
        window: Sequence[tuple[EngineInterval, _IntervalWork]],
        active: Estimate,
        tokens: Mapping[str, float],
        late: Mapping[str, float],
    ) -> dict[str, Estimate]:
        """The energy of an input and an output token, of the energy of a window's work."""
        whole = _sums(window)[""]
        modelled = self._model.coefficients("").of(whole)
        if not whole.iterations or not self._times("").iteration or modelled <= 0:
            return {}
        page = window[-1][0].progress.page
        part = self._prompt_part(whole, modelled, page)
        found = {}
        for way, one in (("input", part.value), ("output", 1 - part.value)):
            least = _LEAST_DOUBT * (1 - part.value)
            spread = hypot(active.value * hypot(part.uncertainty, least), active.uncertainty)
            found[way] = _quotient(Estimate(active.value * one, spread), tokens[way], late[way])
        return found

    def _prompt_part(self, whole: TokenWork, modelled: float, page: EnginePage) -> Estimate:
        """The part of prompts in the ``modelled`` microjoules of the ``whole`` work."""
        rates, times, prompts = self._model.coefficients(""), self._times(""), whole.attention
        iteration = rates.iterations + rates.active * times.iteration
        time = times.prompt * prompts + times.prefill * whole.prefill  # of iterations with prompts
        energy = rates.attention * prompts + rates.prefill * whole.prefill + rates.active * time
        iterations = others = unsure = 0.0
        if page.mixed:
            decode = whole.decode / (whole.iterations + prompts)
            shared = decode / (1 + decode)  # part of the requests in an iteration with a prompt
            power = self._active_power(((iteration, times.iteration), (energy, time)))
            # The active power of their time, and the rest of an iteration without prompts.
            longer = time - times.iteration * prompts
            others = shared * min(energy, power.value * longer + iteration * prompts)
            unsure = shared * power.uncertainty * abs(longer)
            # The active power follows from the energy of an iteration.
            iterations = -shared * (time / times.iteration + prompts) / 2
        value = (energy - others) / modelled
        active = time + times.iteration * iterations
        own = TokenWork(whole.prefill, prompts, 0.0, 0.0, iterations, active)
        # The energy of the whole is measured: only the error of the part counts.
        rest = TokenWork(*(each - value * all_ for each, all_ in zip(own, whole, strict=True)))
        error = _SURE * sqrt(self._model.variance({"": rest}))
        return Estimate(min(1.0, value), (unsure + error) / modelled)

    def _active_power(self, bounds: Iterable[tuple[float, float]]) -> Estimate:
        """The middle of the possible active powers, in microjoules a second.

        ``bounds`` are energies of work that takes so many seconds.
        """
        most = min((energy / time for energy, time in bounds if time > 0), default=0.0)
        least = min(most, self._idle_power)
        return Estimate((most + least) / 2, (most - least) / 2)

    def _is_learned(self, labels: Iterable[str]) -> bool:
        return all(isfinite(self._model.error(label)) for label in labels)

    def _of_works(self, works: Mapping[str, TokenWork]) -> list[float]:
        """The learned energies of works in microjoules, of this engine first."""
        return [self._model.coefficients(label).of(work) for label, work in works.items()]

    @property
    def _alone(self) -> bool:
        """True if the energy of all intervals is this engine's."""
        return len(self._labels) == 1

    @property
    def _rested(self) -> bool:
        """True if the power while the engine waits is known."""
        return self._idle_time >= _IDLE_ENOUGH

    @property
    def _idle_power(self) -> float:
        """Microjoules a second while the engine waits; 0 if it is not known."""
        return max(0.0, self._idle_energy / self._idle_time) if self._rested else 0.0


def _late_tokens(intervals: Sequence[EngineInterval]) -> float:
    """The standard deviation of generated tokens that are not counted at the end of an interval.

    One interval lacks what the next one has, so neighbours' deviations from the mean pace have the
    negative of its square as covariance.
    """
    figures = [each.progress.figures for each in intervals]
    paces = [
        found.get(Figure.ITERATIONS, float(each.end - each.start))
        for found, each in zip(figures, intervals, strict=True)
    ]
    if not any(paces):
        return 0.0
    counts = [found.get(Figure.DECODED, found.get(Figure.OUTPUT, 0.0)) for found in figures]
    mean = sum(counts) / sum(paces)
    rests = [count - mean * pace for count, pace in zip(counts, paces, strict=True)]
    neighbours = [one * other for one, other in pairwise(rests)]
    return sqrt(max(0.0, -sum(neighbours) / max(1, len(neighbours))))


def _waited(intervals: Iterable[EngineInterval], works: Mapping[str, TokenWork]) -> float:
    """The seconds of intervals beyond the ``works`` in them."""
    seconds = sum(each.end - each.start for each in intervals) / SECOND
    return max(0.0, seconds - sum(each.active for each in works.values()))


def _common(interval: EngineInterval) -> Microjoules:
    """The energy of this engine and those beside it."""
    return interval.energy if interval.common is None else interval.common


def _sums(window: Sequence[tuple[EngineInterval, _IntervalWork]]) -> dict[str, TokenWork]:
    """The work of a window by label; empty if some of it is unknown."""
    works = [work.works for _, work in window]
    return {
        label: TokenWork(*(sum(each) for each in zip(*(one[label] for one in works), strict=True)))
        for label in (works[0] if all(works) else ())
    }


def _quotient(energy: Estimate, count: float, late: float) -> Estimate:
    """Energy for each of ``count``, which may be off by ``late``."""
    value, doubt = energy.value / count, energy.uncertainty
    if not energy.value:
        return Estimate(0.0, inf)  # tokens cost energy: how much is unknown
    return Estimate(value, hypot(doubt, energy.value * late / count) / count)


def by_model(interval: EngineInterval) -> Iterator[tuple[str, EngineInterval]]:
    """The interval of each model of a page, if it has several; they are engines on common boards.

    None of them if some of the work is not counted or names no model, if there are more than
    ``MOST_MODELS``, or beside other engines: the models would have more than the page's energy.
    """
    whole, models = interval.progress, interval.progress.models
    counts = [[one.figures.get(each) for each in _COUNTED] for one in (whole, *models)]
    if interval.beside or not 1 < len(models) <= MOST_MODELS or any(None in one for one in counts):
        return
    page, *parts = ([count or 0.0 for count in one] for one in counts)
    if any(abs(sum(each) - all_) >= 1 for all_, *each in zip(page, *parts, strict=True)):
        return
    part = Microjoules(interval.energy // len(models))
    for own in models:
        others = tuple((f"model {one.model}", one) for one in models if one is not own)
        yield (
            own.model,
            interval._replace(
                energy=part, progress=own, beside=others, common=Microjoules(interval.energy)
            ),
        )


def edge_doubt(step: Microjoules, length: int, reading: int) -> float:
    """The half-width of the energy at an edge of a window, in microjoules.

    The energy of a counter's ``step`` of ``length`` nanoseconds is placed evenly in it, and the
    page was read at some moment of ``reading`` nanoseconds.
    """
    return step * (_EDGE + reading / 2 / length) if length > 0 else 0.0
