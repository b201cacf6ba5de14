"""The time in which an engine works, from its counters: a page does not show it.

It is that of the work by the times of intervals that were busy throughout: an interval takes longer
than its work only if the engine waited. An engine that waits often has times by the latencies of
its requests. Engines on common boards take turns, so that the times of their work add up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from operator import mul
from typing import NamedTuple

from wattspan.util.linear_systems import non_negative_solution

_TIMES = 120  # intervals that the rates of work are learned from
_LEARN_EVERY = 12
_FEWEST = 15
_BUSY = 0.6  # the part of the intervals that is taken to be the busiest
_ROUNDS = 8
_LOADED = 0.7  # of the intervals have requests at both ends
_THROUGHOUT = 0.93  # of the time: the work of an interval without a pause
_RIDGE = 1e-6


class WorkTimes(NamedTuple):
    """Seconds of an iteration without prompts, and those by prompt, prompt token, decode token."""

    iteration: float
    prompt: float
    prefill: float
    decode: float


def time_of(times: Sequence[float], work: Sequence[float]) -> float:
    return float(sum(map(mul, times, work)))


class PhaseTimes(NamedTuple):
    """Requests in an interval: seconds in decode, and of ``finished`` ones in prefill."""

    decode: float
    prefill: float
    finished: float


class BusyTime:
    """The busy seconds of intervals, by the times of their work.

    They are those of the busiest intervals while the engine has requests at most readings, else
    those by the latencies of its requests.
    """

    def __init__(self, engines: int = 1) -> None:
        self._known: deque[tuple[float, Sequence[float]]] = deque(maxlen=_TIMES)
        self._loaded: deque[bool] = deque(maxlen=_TIMES)
        self._latencies: deque[Sequence[float]] = deque(maxlen=_TIMES)
        self._learned: Sequence[float] | None = None
        self._added = 0
        self.times: Sequence[float] = (0.0,) * (engines * len(WorkTimes._fields))
        """Those of the last interval with work, as the work is."""

    def of(
        self,
        seconds: float,
        work: Sequence[float],
        running: Sequence[float],
        requests: PhaseTimes | None = None,
    ) -> float | None:
        """The busy part of an interval with ``work``, which is learned; None if it is not known.

        ``work`` is counted as `WorkTimes` is, of one engine after the other. ``running`` are the
        requests at the ends of the interval, ``requests`` those in it, if the page of a single
        engine shows them.
        """
        loaded = all(running)
        self._loaded.append(loaded)
        if requests is not None:
            self._latencies.append((seconds, *work, *requests))
        if loaded and any(work):
            self._known.append((seconds, work))
            self._added += 1
            if len(self._known) >= _FEWEST and (
                self._learned is None or not self._added % _LEARN_EVERY
            ):
                self._learn()
        if not any(work):
            return 0.0
        mostly = sum(self._loaded) >= _LOADED * len(self._loaded)
        times = self._learned if mostly else self._by_latencies()
        if times is None:
            return None
        self.times, needed = times, time_of(times, work)
        return seconds if loaded and needed > _THROUGHOUT * seconds else min(seconds, needed)

    def _by_latencies(self) -> Sequence[float] | None:
        """The times by the latencies of requests; None before there are enough.

        While a prompt is computed, the requests in decode wait: as many as on average.
        """
        if len(self._latencies) < _FEWEST:
            return None
        sums = [sum(column) for column in zip(*self._latencies, strict=True)]
        seconds, _, prompts, prefill, decode, waited, computed, finished = sums
        if not min(prefill, decode, waited, computed, finished):
            return None
        computed *= prompts / finished
        iteration = waited / decode * max(0.0, 1 - computed / seconds)
        return WorkTimes(iteration, 0.0, computed / prefill, 0.0)

    def _learn(self) -> None:
        """The times of the busiest intervals: those with the least time beyond their work."""
        busiest: Iterable[tuple[float, Sequence[float]]] = self._known
        count = max(_FEWEST * 2 // 3, round(_BUSY * len(self._known)))
        for _ in range(_ROUNDS):
            times = _fitted(busiest)
            beyond = sorted(
                (seconds - time_of(times, work), i) for i, (seconds, work) in enumerate(self._known)
            )
            busiest = [self._known[i] for _, i in beyond[:count]]
        times = _fitted(busiest)
        # Among these are more whose work was counted in excess: all that were busy throughout.
        known = ((seconds, work, time_of(times, work)) for seconds, work in self._known)
        whole = [(one, work) for one, work, needed in known if needed > _THROUGHOUT * one]
        self._learned = _fitted(whole) if whole else times


def _fitted(equations: Iterable[tuple[float, Sequence[float]]]) -> list[float]:
    """The non-negative rates with the least squares of the rest of the times."""
    times, works = zip(*equations, strict=True)
    columns = [*zip(*works, strict=True)]
    size = range(len(columns))
    matrix = [[sum(map(mul, one, other)) for other in columns] for one in columns]
    scales = [sqrt(matrix[i][i]) or 1.0 for i in size]
    scaled = [
        [matrix[i][j] / scales[i] / scales[j] + _RIDGE * (i == j) for j in size] for i in size
    ]
    rights = [sum(map(mul, columns[i], times)) / scales[i] for i in size]
    found = non_negative_solution(scaled, rights)
    return [each / scale for each, scale in zip(found, scales, strict=True)]
