"""The progress of decode in an engine with continuous batching, as a clock.

Each iteration of an engine generates one token for every request in decode, but an iteration that
also computes prompts takes longer. Between its first and its last token a request therefore does
not generate evenly: all requests of the engine slow down together while prompts are computed. The
duration of a decode phase is

    decode tokens * iteration time + prefill time * prefill tokens of all requests in the phase

with coefficients from the spans of recent requests, by least squares with exponential forgetting.
The clock's rate is the part of the time that is left for decode: one, less the prefill time of the
prompt tokens computed at that instant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise

from wattspan.model import SECOND
from wattspan.spans.inference_requests import InferenceRequest

_MEMORY = 1000.0  # requests to which older ones fade
_FEWEST_TOKENS = 16  # of a decode phase that is learned from
_LEAST_RATE = 0.1  # of the clock: the last part of the time is never all prefill


class DecodeProgress:
    """The clock of one engine, from the requests that are known."""

    def __init__(self) -> None:
        self._tokens = self._both = self._prompts = 0.0  # the normal matrix
        self._right = [0.0, 0.0]
        self._times: Sequence[int] = ()
        self._progress: Sequence[float] = ()
        self._computed: Sequence[float] = ()

    @property
    def prefill_time(self) -> float:
        """Nanoseconds by which a prompt token delays decode; 0 before it is known."""
        determinant = self._tokens * self._prompts - self._both**2
        if determinant <= 1e-6 * self._tokens * self._prompts:
            return 0.0
        found = self._tokens * self._right[1] - self._both * self._right[0]
        return max(0.0, found / determinant)

    def update(self, requests: Iterable[InferenceRequest]) -> None:
        """Set the clock by all known requests that are not settled."""
        changes = [
            (at, sign * each.prefill / (each.first - each.start))
            for each in requests
            if each.known_phases and each.first > each.start
            for at, sign in ((each.start, 1), (each.first, -1))
        ]
        changes.sort()
        times = [at for at, _ in changes]
        rates = list(accumulate(change for _, change in changes))  # tokens a nanosecond
        lengths = [right - left for left, right in pairwise(times)]
        taken = self.prefill_time
        parts = zip(rates, lengths, strict=False)
        grown = (max(_LEAST_RATE, 1.0 - taken * max(0.0, r)) * length for r, length in parts)
        self._times = times
        self._progress = list(accumulate(chain([0.0], grown))) if times else []
        parts = zip(rates, lengths, strict=False)
        self._computed = list(accumulate(chain([0.0], (r * length for r, length in parts))))

    def learn(self, requests: Iterable[InferenceRequest]) -> None:
        """Add settled requests, with the clock as it was when they were."""
        for each in requests:
            if not each.known_phases or each.decode < _FEWEST_TOKENS:
                continue
            tokens, time = float(each.decode), each.end - each.first
            prompts = self._prefill_until(each.end) - self._prefill_until(each.first)
            # A deviation of a duration is in proportion to it.
            weight = 1.0 / (time / SECOND) ** 2 if time else 0.0
            kept = 1.0 - 1.0 / _MEMORY
            self._tokens = self._tokens * kept + weight * tokens * tokens
            self._both = self._both * kept + weight * tokens * prompts
            self._prompts = self._prompts * kept + weight * prompts * prompts
            self._right = [
                self._right[0] * kept + weight * tokens * time,
                self._right[1] * kept + weight * prompts * time,
            ]

    def at(self, time: int) -> float:
        """The clock at ``time``, in nanoseconds of decode without prefill."""
        times = self._times
        i = bisect_right(times, time)
        if i == 0:
            return float(time - times[0]) if times else float(time)
        if i == len(times):
            return self._progress[-1] + time - times[-1]
        part = (time - times[i - 1]) / (times[i] - times[i - 1])
        return self._progress[i - 1] + part * (self._progress[i] - self._progress[i - 1])

    def _prefill_until(self, time: int) -> float:
        """The prompt tokens computed before ``time``."""
        times = self._times
        i = bisect_right(times, time)
        if i == 0:
            return 0.0
        if i == len(times):
            return self._computed[-1]
        part = (time - times[i - 1]) / (times[i] - times[i - 1])
        return self._computed[i - 1] + part * (self._computed[i] - self._computed[i - 1])
