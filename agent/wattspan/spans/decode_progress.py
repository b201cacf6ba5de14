"""The progress of decode in an engine with continuous batching, as a clock.

Each iteration of an engine generates one token for every request in decode, but an iteration that
also computes prompts takes longer, and so do iterations on a GPU that another engine uses, too.
Between its first and its last token a request therefore does not generate evenly: all requests of
the engine slow down together. The duration of a decode phase is

    decode tokens * iteration time + prefill time * prefill tokens of all requests in the phase
    + delay * time in the phase in which other engines are active

with coefficients from the spans of recent requests, by least squares with exponential forgetting.
The clock's rate is the part of the time that is left for decode: one, less the prefill time of the
prompt tokens computed at that instant, and less the delay beside other engines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from operator import itemgetter

from wattspan.model import SECOND
from wattspan.spans.inference_requests import InferenceRequest
from wattspan.util.linear_systems import non_negative_solution

Period = tuple[int, int]

_MEMORY = 1000.0  # requests to which older ones fade
_FEWEST_TOKENS = 16  # of a decode phase that is learned from
_LEAST_RATE = 0.1  # of the clock: the last part of the time is never all prefill
_MOST_DELAY = 0.9
_RIDGE = 1e-6  # of the diagonal: makes the system solvable
_SIZE = 3


class DecodeProgress:
    """The clock of one engine, from the requests that are known."""

    def __init__(self) -> None:
        self._normal = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._right = [0.0] * _SIZE
        self._solution: Sequence[float] = [0.0] * _SIZE
        self._times: Sequence[int] = ()
        # Cumulative, at the times: the clock, prompt tokens, nanoseconds beside other engines.
        self._progress: Sequence[float] = ()
        self._computed: Sequence[float] = ()
        self._shared: Sequence[float] = ()

    @property
    def prefill_time(self) -> float:
        """Nanoseconds by which a prompt token delays decode; 0 before it is known."""
        return self._solution[1]

    @property
    def delay(self) -> float:
        """The part of the time beside other engines that is lost to decode, 0 to 0.9."""
        return min(_MOST_DELAY, self._solution[2])

    def update(self, requests: Iterable[InferenceRequest], others: Iterable[Period] = ()) -> None:
        """Set the clock by all known requests that are not settled.

        ``others`` are the periods in which other engines on the same boards are active, disjoint.
        """
        changes = [
            (at, sign * each.prefill / (each.first - each.start), 0)
            for each in requests
            if each.known_phases and each.first > each.start
            for at, sign in ((each.start, 1), (each.first, -1))
        ]
        changes += [
            (at, 0.0, sign) for start, end in others for at, sign in ((start, 1), (end, -1))
        ]
        changes.sort(key=itemgetter(0))
        times = [at for at, *_ in changes]
        lengths = [right - left for left, right in pairwise(times)]
        # Prompt tokens a nanosecond, and 1 beside other engines, from each time on.
        rates = list(accumulate(rate for _, rate, _ in changes))[:-1]
        shared = list(accumulate(other for _, _, other in changes))[:-1]
        taken, delay = self.prefill_time, self.delay
        clock = [
            max(_LEAST_RATE, 1.0 - taken * max(0.0, rate) - delay * other)
            for rate, other in zip(rates, shared, strict=True)
        ]
        self._times = times
        self._progress, self._computed, self._shared = (
            list(accumulate(chain([0.0], (a * b for a, b in zip(each, lengths, strict=True)))))
            for each in (clock, rates, shared)
        )

    def learn(self, requests: Iterable[InferenceRequest]) -> None:
        """Add settled requests, with the clock as it was when they were."""
        known = False
        for each in requests:
            if not each.known_phases or each.decode < _FEWEST_TOKENS or each.end == each.first:
                continue
            known = True
            time = each.end - each.first
            prompts, beside = (
                self._at(sums, each.end) - self._at(sums, each.first)
                for sums in (self._computed, self._shared)
            )
            # A deviation of a duration is in proportion to it.
            weight, kept = 1.0 / (time / SECOND) ** 2, 1.0 - 1.0 / _MEMORY
            row = (float(each.decode), prompts, beside)
            for i, one in enumerate(row):
                self._right[i] = self._right[i] * kept + weight * one * time
                for j, other in enumerate(row):
                    self._normal[i][j] = self._normal[i][j] * kept + weight * one * other
        if known:
            self._solution = _scaled_solution(self._normal, self._right)

    def at(self, time: int) -> float:
        """The clock at ``time``, in nanoseconds of decode without prefill."""
        times = self._times
        if not times or time < times[0]:
            return float(time - times[0]) if times else float(time)
        if time >= times[-1]:
            return self._progress[-1] + time - times[-1]
        return self._at(self._progress, time)

    def _at(self, sums: Sequence[float], time: int) -> float:
        """A cumulative quantity at ``time``, constant outside of the known times."""
        times = self._times
        i = bisect_right(times, time)
        if i in (0, len(times)):
            return sums[max(0, i - 1)] if times else 0.0
        part = (time - times[i - 1]) / (times[i] - times[i - 1])
        return sums[i - 1] + part * (sums[i] - sums[i - 1])


def _scaled_solution(normal: Sequence[Sequence[float]], rights: Sequence[float]) -> list[float]:
    """The non-negative solution of equations whose variables have different scales."""
    scales = [row[i] ** 0.5 or 1.0 for i, row in enumerate(normal)]
    matrix = [
        [1.0 + _RIDGE if i == j else each / scale / scales[j] for j, each in enumerate(row)]
        for i, (row, scale) in enumerate(zip(normal, scales, strict=True))
    ]
    scaled = [right / scale for right, scale in zip(rights, scales, strict=True)]
    found = non_negative_solution(matrix, scaled)
    return [each / scale for each, scale in zip(found, scales, strict=True)]
