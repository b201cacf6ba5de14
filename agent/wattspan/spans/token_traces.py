"""The spans of a trace whose tokens count: the innermost ones that have them.

An agent's span repeats the sum of the tokens of the calls in it, and the spans of an application, a
gateway and an engine repeat the tokens of one request. A span with tokens counts unless one in it
has tokens, too: by the links from spans to their parents, which may come from several processes of
one principal. Links may be missing, because spans are sampled or not instrumented: then a span
*encloses* another one if it lasts at least as long and their roles tell who called whom.

Traces belong to principals. A known trace id in the span of another principal changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import NamedTuple

from wattspan.sharing.fair_pool import share_path
from wattspan.spans.inference_requests import SpanRole
from wattspan.spans.values import SpanColumns

MAX_OWNERS = 32
"""Users and pods with traces; beyond it the traces of the one without spans for longest go."""

MAX_SPANS = 16_384
"""Spans that are remembered for one user or pod; beyond it the oldest traces are forgotten."""

_MAX_COMPARED = 256  # spans with tokens of one trace that are compared without links
_MAX_DEPTH = 64


class SpanPlace(NamedTuple):
    """The identity of a span in its trace."""

    trace: bytes
    id: bytes


class _CountedSpan(NamedTuple):
    role: SpanRole
    start: int
    end: int


@dataclass(slots=True)
class _Trace:
    parents: dict[bytes, bytes] = field(default_factory=dict)
    outer: set[bytes] = field(default_factory=set)  # ids, known or not, of spans around tokens
    counted: dict[bytes, _CountedSpan] = field(default_factory=dict)  # with tokens
    rooted: set[bytes] = field(default_factory=set)  # ids with known ancestors

    def mark(self, ident: bytes) -> list[bytes]:
        """Note that ``ident`` has tokens, or is around them; returns the spans now repeated."""
        found: list[bytes] = []
        above = self.parents.get(ident, b"")
        while above and above not in self.outer:
            self.outer.add(above)
            if above in self.counted:
                found.append(above)
            above = self.parents.get(above, b"")
        return found

    def encloses(self, ident: bytes) -> bool:
        """True if a span with tokens encloses another one whose ancestors are not all known."""
        own = self.counted.get(ident)
        if own is None:
            return False
        return any(
            own.start <= other.start
            and other.end <= own.end
            and own.role.encloses(other.role)
            and not self._is_rooted(one)
            for one, other in islice(self.counted.items(), _MAX_COMPARED)
        )

    def _is_rooted(self, ident: bytes) -> bool:
        """True if all ancestors of a span are known."""
        path: list[bytes] = []
        above: bytes | None = ident
        while above and above not in self.rooted and len(path) < _MAX_DEPTH:
            path.append(above)
            above = self.parents.get(above)
        if above is None or (above and above not in self.rooted):
            return False
        self.rooted.update(path)
        return True


@dataclass(slots=True)
class _OwnTraces:
    """The traces of one user or pod, the one without spans for longest first."""

    traces: dict[tuple[Hashable, bytes], _Trace] = field(default_factory=dict)
    spans: int = 0

    def trace(self, key: tuple[Hashable, bytes]) -> _Trace:
        found = self.traces.pop(key, None) or _Trace()
        self.traces[key] = found
        return found

    def bound(self) -> None:
        while self.spans > MAX_SPANS:
            oldest = next(iter(self.traces))
            self.spans -= len(self.traces.pop(oldest).parents)


class TokenTraces:
    """Remembers the recent spans with tokens, and those around them. For one thread."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, _OwnTraces] = {}

    def add(self, owner: Hashable, spans: SpanColumns, roles: Sequence[SpanRole]) -> set[SpanPlace]:
        """Add received spans of a principal; returns the earlier ones that repeat their tokens."""
        has_tokens = [bool(a or b) for a, b in zip(spans.tokens_in, spans.tokens_out, strict=True)]
        share = share_path(owner)[0]
        own = self._owners.pop(share, None)
        if own is None:
            if not any(has_tokens):
                return set()
            own = _OwnTraces()
            if len(self._owners) >= MAX_OWNERS:
                del self._owners[next(iter(self._owners))]
        self._owners[share] = own
        wanted = set(compress(spans.trace, has_tokens))
        wanted.update(one for one in set(spans.trace) if (owner, one) in own.traces)
        found: set[SpanPlace] = set()
        if not wanted:
            return found
        by_trace: dict[bytes, list[int]] = {}
        for i, trace in enumerate(spans.trace):
            if trace in wanted:
                by_trace.setdefault(trace, []).append(i)
        for trace, at in by_trace.items():
            known = own.trace((owner, trace))
            before = len(known.parents)
            for i in at:
                ident, parent = spans.id[i], spans.parent[i]
                known.parents[ident] = b"" if parent == ident else parent
                if has_tokens[i]:
                    place = _CountedSpan(roles[i], spans.start[i], spans.end[i])
                    known.counted.setdefault(ident, place)
            own.spans += len(known.parents) - before
            for i in at:
                if has_tokens[i] or spans.id[i] in known.outer:
                    found.update(SpanPlace(trace, one) for one in known.mark(spans.id[i]))
        own.bound()
        return found

    def is_repeated(self, owner: Hashable, place: SpanPlace) -> bool:
        """True if spans inside of the one at ``place`` have its tokens, as far as is known now."""
        trace = self._trace(owner, place)
        return trace is not None and (place.id in trace.outer or trace.encloses(place.id))

    def has_inner(self, owner: Hashable, place: SpanPlace) -> bool:
        """True if links show that spans inside of the one at ``place`` have its tokens."""
        trace = self._trace(owner, place)
        return trace is not None and place.id in trace.outer

    def _trace(self, owner: Hashable, place: SpanPlace) -> _Trace | None:
        own = self._owners.get(share_path(owner)[0])
        return None if own is None else own.traces.get((owner, place.trace))
