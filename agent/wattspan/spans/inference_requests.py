"""Requests to language models: their phases on the timeline, and their work in a period.

An engine reports a request by one span when it has ended, with token counts and latencies. The
request waits in a queue, then its prompt is computed (*prefill*) up to the first generated token,
then the other tokens are generated (*decode*), each of which reads the whole context. Tokens of the
prompt that the engine has in its cache cost no prefill, but are context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from wattspan.model import SECOND
from wattspan.spans.token_power import NO_WORK, TokenWork
from wattspan.spans.values import InferenceDetails


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
