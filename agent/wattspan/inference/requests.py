"""Requests to language models: their phases on the timeline, and their work in a period.

An engine reports a request by one span when it has ended, with token counts and latencies. The
request waits in a queue, then its prompt is computed (*prefill*) up to the first generated token,
then the other tokens are generated (*decode*), each of which reads the whole context. Tokens of the
prompt that the engine has in its cache cost no prefill, but are context.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter
from typing import NamedTuple

from wattspan.inference.token_power import NO_WORK, TokenWork
from wattspan.model import SECOND
from wattspan.spans.values import InferenceDetails, Period
from wattspan.util.linear_systems import non_negative_solution

MAX_ACTIVE = 4096
"""Active requests of one step, max-min fair by engine; further ones have no energy of it."""


class InferenceRequest(NamedTuple):
    """A request on the monotonic clock: prefill from ``start``, decode from ``first`` to ``end``.

    ``prefill`` and ``decode`` are the tokens computed in each phase, ``context`` is the length of
    the prompt, cached tokens included, and ``generated`` are all generated tokens. ``known_phases``
    is False where latencies are missing; then both phases are the whole span.
    """

    id: bytes
    model: str
    start: int
    first: int
    end: int
    prefill: int
    decode: int
    context: int
    known_phases: bool = True
    service: str = ""
    generated: int = 0
    owner: str = ""  # the label of the principal of its process

    @property
    def cost_model(self) -> str:
        """The name under which the energy of its tokens is learned.

        The service where no model is known: it serves one as a rule.
        """
        return self.model or self.service

    @classmethod
    def of(
        cls,
        ident: bytes,
        start: int,
        end: int,
        tokens: tuple[int, int],
        details: InferenceDetails,
        *,
        service: str = "",
    ) -> InferenceRequest:
        """The request of a span with ``tokens`` of input and output.

        Contradictory latencies are limited to the span.
        """
        prompt, generated = max(0, tokens[0]), max(0, tokens[1])
        computed = max(0, prompt - max(0, details.cached))
        phases = _phases(start, end, details)
        began, first = phases or (min(start + max(0, details.queue or 0), end),) * 2
        return cls(
            ident,
            details.model,
            began,
            first,
            end,
            computed,
            max(0, generated - 1),  # the first token is the result of prefill
            prompt,
            phases is not None,
            service,
            generated,
        )

    def work(
        self, start: int, end: int, progress: Callable[[int], float]
    ) -> tuple[float, float, float, float]:
        """Tokens and context of prefill, tokens and context of decode in a period.

        Prompt tokens are spread evenly over their phase, decode tokens by the clock ``progress``.
        Those of a phase without duration belong to the period with its instant, which begins before
        it and does not end before it.
        """
        until = self.first if self.known_phases else self.end
        part = _part(start, end, self.start, until)
        before = _part(self.start, start, self.start, until) if start > self.start else 0.0
        prefill, cached = self.prefill * part, self.context - self.prefill
        attention = prefill * (cached + self.prefill * (before + part / 2))
        if not self.decode or end <= self.first or start >= self.end:
            return prefill, attention, 0.0, 0.0
        first = progress(self.first)
        length = progress(self.end) - first
        before = (progress(start) - first) / length if start > self.first else 0.0
        part = ((progress(end) - first) / length if end < self.end else 1.0) - before
        decode = self.decode * part
        return (
            prefill,
            attention,
            decode,
            decode * (self.context + 1 + self.decode * (before + part / 2)),
        )


def _phases(start: int, end: int, details: InferenceDetails) -> tuple[int, int] | None:
    """The begin of prefill and the time of the first token; None if they are not known."""
    _, _, queue, first_token, prefill, decode = details
    if first_token is not None:
        first = start + first_token
    elif queue is not None and prefill is not None:
        first = start + queue + prefill
    elif decode is not None:
        first = end - decode
    else:
        return None
    if queue is not None:
        began = start + queue
    elif prefill is not None:
        began = first - prefill
    else:
        began = start
    first = max(start, min(first, end))
    return max(start, min(began, first)), first


def _part(start: int, end: int, begin: int, until: int) -> float:
    """The part of the phase from ``begin`` to ``until`` that lies in a period."""
    if until == begin:
        return float(start < begin <= end)
    return max(0, min(end, until) - max(start, begin)) / (until - begin)


def work_in(
    engines: Sequence[tuple[Sequence[InferenceRequest], Callable[[int], float]]],
    start: int,
    end: int,
) -> list[list[TokenWork]]:
    """The work of each request of each engine in a period.

    Active time is divided equally among engines with active requests at every instant, and among
    the requests of each; iterations are divided equally among the requests in decode. With the
    requests of an engine comes the clock of its decode.
    """
    # At each time: the engine, and the growth of its active requests and of those in decode.
    changes: dict[int, list[tuple[int, int, int]]] = {start: [], end: []}
    for i, (requests, _) in enumerate(engines):
        for one in requests:
            until = min(end, one.end)
            for begin, active, decoding in ((one.start, 1, 0), (one.first, 0, 1)):
                if (since := max(start, begin)) < until:
                    changes.setdefault(since, []).append((i, active, decoding))
                    changes.setdefault(until, []).append((i, -active, -decoding))
    # Equal parts of one request since `start`, if it was active, or in decode, all the time.
    counts, sums = [[0, 0] for _ in engines], [(0.0, 0.0)] * len(engines)
    parts = [{start: (0.0, 0.0)} for _ in engines]
    for left, right in pairwise(sorted(changes)):
        for i, active, decoding in changes[left]:
            counts[i][0] += active
            counts[i][1] += decoding
        sharing = sum(running > 0 for running, _ in counts)
        for i, (running, generating) in enumerate(counts):
            own, shared = sums[i]
            if running:
                own += (right - left) / sharing / running
            if generating:
                shared += (right - left) / generating
            sums[i] = parts[i][right] = own, shared
    return [
        [_work(one, progress, of_engine, start, end) for one in requests]
        for (requests, progress), of_engine in zip(engines, parts, strict=True)
    ]


def _work(
    request: InferenceRequest,
    progress: Callable[[int], float],
    parts: Mapping[int, tuple[float, float]],
    start: int,
    end: int,
) -> TokenWork:
    """The work of one request, with the equal parts of one of its engine up to each edge."""
    begin, until = max(start, request.start), min(end, request.end)
    if until < begin:
        return NO_WORK
    prefill, attention, decode, context = request.work(start, end, progress)
    active = (parts[until][0] - parts[begin][0]) / SECOND if until > begin else 0.0
    begin = max(start, request.first)
    shared = (parts[until][1] - parts[begin][1]) / (until - begin) if until > begin else 0.0
    return TokenWork(prefill, attention, decode, context, decode * shared, active)


_MEMORY = 1000.0  # requests to which older ones fade
_FEWEST_TOKENS = 16  # of a decode phase that is learned from
_LEAST_RATE = 0.1  # of the clock: the last part of the time is never all prefill
_MOST_DELAY = 0.9
_RIDGE = 1e-6  # of the diagonal: makes the system solvable
_SIZE = 3


class DecodeProgress:
    """The progress of decode in one engine with continuous batching, as a clock.

    Each iteration of an engine generates one token for every request in decode, but an iteration
    that also computes prompts takes longer, and so do iterations on a GPU that another engine uses,
    too. Between its first and its last token a request therefore does not generate evenly: all
    requests of the engine slow down together. The duration of a decode phase is

        decode tokens * iteration time + prefill time * prefill tokens of all requests in the phase
        + delay * time in the phase in which other engines are active

    with coefficients from the spans of recent requests, by least squares with exponential
    forgetting. The clock's rate is the part of the time that is left for decode: one, less the
    prefill time of the prompt tokens computed at that instant, and less the delay beside other
    engines.
    """

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
        return _interpolated(self._times, sums, time)


class ActiveClock:
    """The equal parts that the active requests of one engine have in its time.

    In a period, the ``MAX_ACTIVE`` requests that began first have parts. ``excluded`` are the
    identities of the others.
    """

    def __init__(self, requests: Iterable[InferenceRequest]) -> None:
        lasting = (each for each in requests if each.end > each.start)
        self._requests = sorted(lasting, key=attrgetter("start"))
        self._ends = list(accumulate((each.end for each in self._requests), max))
        self.excluded: set[int] = set()
        changes = Counter[int]()
        for each in self._requests:
            changes[each.start] += 1
            changes[each.end] -= 1
        self._times = sorted(changes)
        counts = list(accumulate(changes[at] for at in self._times))[:-1]
        lengths = [right - left for left, right in pairwise(self._times)]
        pairs = list(zip(lengths, counts, strict=True))
        # Nanoseconds of one request that is active since the first time, and of any request.
        self._sums = list(accumulate((one / n if n else 0.0 for one, n in pairs), initial=0.0))
        self._active = list(accumulate((one if n else 0 for one, n in pairs), initial=0))

    def parts(self, start: int, end: int) -> list[tuple[InferenceRequest, float]]:
        """The requests that are active in a period, with their nanoseconds of it.

        The sum is the time with active requests.
        """
        first = bisect_right(self._ends, start)  # those before have ended
        last = bisect_left(self._requests, end, key=attrgetter("start"))
        inside = [each for each in self._requests[first:last] if each.end > start]
        found = [
            (each, self._at(min(end, each.end)) - self._at(max(start, each.start)))
            for each in inside[:MAX_ACTIVE]
        ]
        if len(inside) > MAX_ACTIVE:
            self.excluded.update(map(id, inside[MAX_ACTIVE:]))
            before, after = (_interpolated(self._times, self._active, at) for at in (start, end))
            scale = (after - before) / sum(part for _, part in found)
            found = [(each, part * scale) for each, part in found]
        return found

    def _at(self, time: int) -> float:
        return _interpolated(self._times, self._sums, time)


def _interpolated(times: Sequence[int], sums: Sequence[float], time: int) -> float:
    """A cumulative quantity at ``time``, constant outside of the known times."""
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
