"""The spans of a trace whose tokens count: the innermost ones that have them.

An agent's span repeats the sum of the tokens of the calls in it, and the spans of an application, a
gateway and an engine repeat the tokens of one request. A span with tokens counts unless one in it
has tokens, too: by the links from spans to their parents, which may come from several processes of
one principal. A tool or an agent that is the child of a call makes calls of its own: then both
count. Links may be missing, because spans are sampled or not instrumented: then a span *encloses*
another one if it lasts at least as long and their roles tell who called whom.

A library and a client of a provider may both be instrumented, and the client's span not be linked
to the library's. In one process, a span of a call then repeats one within its time of another
instrumentation and with the same tokens and model; each call is repeated by one span at most.

Traces belong to principals. A known trace id in the span of another principal changes nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import compress, islice
from operator import attrgetter, or_
from typing import NamedTuple

from wattspan.sharing.fair_pool import share_path
from wattspan.spans.values import TOKENS, Span, SpanColumns, TokenRole
from wattspan.spans.weights import GenerationalCache

MAX_SPANS = 65_536
"""Spans that are remembered, 20 MB; beyond it the owner with most loses its oldest traces.

Owners are users and pods, and in each its containers, as in `wattspan.sharing.fair_pool`.
"""

_MAX_COMPARED = 256  # spans with tokens of one trace that are compared without links
_MAX_DEPTH = 64
_MAX_EQUAL_CALLS, _MAX_CALLS = 64, 512  # of a process with the same tokens; numbers of tokens
_VERSION = re.compile(r"(?:[-@:](?:v?[0-9]|latest|preview).*)?")


class SpanPlace(NamedTuple):
    """The identity of a span in its trace."""

    trace: bytes
    id: bytes


class _CountedSpan(NamedTuple):
    role: TokenRole
    start: int
    end: int


@dataclass(slots=True)
class _Trace:
    parents: dict[bytes, bytes] = field(default_factory=dict)
    # Ids, known or not, of spans around tokens; False where only its tools and agents have them.
    outer: dict[bytes, bool] = field(default_factory=dict)
    steps: set[bytes] = field(default_factory=set)  # ids of tools and agents without tokens
    counted: dict[bytes, _CountedSpan] = field(default_factory=dict)  # with tokens
    rooted: set[bytes] = field(default_factory=set)  # ids with known ancestors

    def mark(self, ident: bytes) -> list[bytes]:
        """Note that ``ident`` has tokens, or is around them; returns the spans now repeated."""
        found: list[bytes] = []
        above = self.parents.get(ident, b"")
        while above and self.outer.get(above, -1) < (ident not in self.steps):
            self.outer[above] = ident not in self.steps
            if above in self.counted and self.is_repeated(above):
                found.append(above)
            ident, above = above, self.parents.get(above, b"")
        return found

    def is_repeated(self, ident: bytes) -> bool:
        """True if links or equal calls show that spans inside of this one have its tokens.

        A call has tokens of its own where those inside of it are in its tools or agents.
        """
        direct, own = self.outer.get(ident), self.counted.get(ident)
        return bool(direct) or (
            direct is False and not (own is not None and own.role.is_model_call)
        )

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

    def is_inner(self, ident: bytes) -> bool:
        """True if a known ancestor of a span is a call with tokens."""
        return any(
            one in self.counted and self.counted[one].role is not TokenRole.AGGREGATE
            for one in islice(self.ancestors(ident), _MAX_DEPTH)
        )

    def ancestors(self, ident: bytes) -> Iterator[bytes]:
        """The ids of the ancestors of a span up to the first unknown one, or b"" above a root."""
        above = self.parents.get(ident)
        while above is not None:
            yield above
            above = self.parents.get(above)

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


@dataclass(slots=True, eq=False)
class _TokenCall:
    """A call: its innermost span, and the instrumentations with a span of it, one each."""

    span: Span
    scopes: set[str]


@dataclass(slots=True)
class _OwnTraces:
    """The traces of one principal, the one without spans for longest first."""

    traces: dict[bytes, _Trace] = field(default_factory=dict)
    spans: int = 0

    def trace(self, trace: bytes) -> _Trace:
        found = self.traces.pop(trace, None) or _Trace()
        self.traces[trace] = found
        return found

    def repeats(self, outer: Span, inner: Span) -> bool:
        """True if a call is the same as one within its time, by all but links.

        Two spans of one instrumentation are two calls, and so are those in different requests.
        """
        trace, inside = self.traces.get(outer.trace), self.traces.get(inner.trace)
        same = "scope" if outer.scope and inner.scope else "name"
        if (
            getattr(outer, same) == getattr(inner, same)
            or not (outer.start < inner.start and inner.end < outer.end)
            or trace is None
            or trace.is_repeated(outer.id)
            or (inside is not None and inside.is_inner(inner.id))
        ):
            return False
        around = list(islice(trace.ancestors(outer.id), _MAX_DEPTH))
        is_near = inner.trace == outer.trace and (inner.parent in around or around[-1:] != [b""])
        models = sorted(each.inference.model for each in (outer, inner) if each.inference)
        return (is_near or not inner.parent) and bool(
            models[1].startswith(models[0]) and _VERSION.fullmatch(models[1], len(models[0]))
        )

    def repeated(self, span: Span) -> SpanPlace:
        """The place of a span, whose tokens are those of another one from now on."""
        self.traces[span.trace].outer[span.id] = True
        return SpanPlace(span.trace, span.id)

    def forget(self) -> int:
        """Forget the oldest trace; returns the number of its spans."""
        count = len(self.traces.pop(next(iter(self.traces))).parents)
        self.spans -= count
        return count


class TokenTraces:
    """Remembers the recent spans with tokens, and those around them. For one thread."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, _OwnTraces] = {}
        self._spans = 0
        self._calls = GenerationalCache[list[_TokenCall]](_MAX_CALLS)  # by process and tokens

    def add(self, owner: Hashable, spans: SpanColumns, sender: Hashable = None) -> set[SpanPlace]:
        """Add spans of a process of a principal; returns those that repeat tokens of others."""
        own = self._owners.get(owner) or _OwnTraces()
        if not (own.traces or spans.tokens_in or spans.tokens_out or any(spans.inference)):
            return set()
        tokens, roles = zip(*map(spans.full, TOKENS), strict=True), spans.full("role")
        has_tokens = [bool(read or written) for read, written in tokens]
        wanted = set(
            compress(spans.trace, map(or_, has_tokens, map(bool, spans.full("inference"))))
        )
        wanted.update(own.traces.keys() & spans.trace)
        found: set[SpanPlace] = set()
        if not wanted:
            return found
        self._owners[owner] = own
        by_trace: dict[bytes, list[int]] = {}
        calls: list[Span] = []
        for i, trace in enumerate(spans.trace):
            if trace in wanted:
                by_trace.setdefault(trace, []).append(i)
        for trace, at in by_trace.items():
            known = own.trace(trace)
            before = len(known.parents)
            for i in at:
                ident, parent = spans.id[i], spans.parent[i]
                # The first parent counts: a span that is sent with ever new ones has one outer one.
                known.parents.setdefault(ident, b"" if parent == ident else parent)
                if has_tokens[i]:
                    if ident not in known.counted and roles[i].is_model_call and spans.inference:
                        calls.append(spans[i])
                    place = _CountedSpan(roles[i], spans.start[i], spans.end[i])
                    known.counted.setdefault(ident, place)
                elif roles[i] is TokenRole.AGGREGATE:
                    known.steps.add(ident)
            own.spans += len(known.parents) - before
            self._spans += len(known.parents) - before
            for i in at:
                if has_tokens[i] or spans.id[i] in known.outer:
                    found.update(SpanPlace(trace, one) for one in known.mark(spans.id[i]))
        for call in sorted(calls, key=attrgetter("end")):
            key = owner, sender, call.tokens_in, call.tokens_out
            found.update(self._repeated(own, call, key) if call.inference else ())
        self._bound()
        return found

    def _repeated(self, own: _OwnTraces, span: Span, key: Hashable) -> Iterator[SpanPlace]:
        """The places of a new span and of an earlier one where they repeat a call without links.

        A span with a choice takes the call that suits the fewest others.
        """
        calls = self._calls[key] = self._calls.get(key) or []
        scope, start = span.scope or span.name, attrgetter("span.start")
        fits = (c for c in calls if scope not in c.scopes and own.repeats(span, c.span))
        call = min(fits, key=start, default=None)
        if call is not None:
            yield own.repeated(span)
        else:
            calls.append(call := _TokenCall(span, set()))
        call.scopes.add(scope)
        apart = (c for c in calls if c.scopes.isdisjoint(call.scopes))
        around = max((c for c in apart if own.repeats(c.span, span)), key=start, default=None)
        if around is not None:
            yield own.repeated(around.span)
            call.scopes |= around.scopes
            calls.remove(around)
        del calls[:-_MAX_EQUAL_CALLS]

    def _bound(self) -> None:
        """Forget traces of the user or pod with most spans, there of the principal with most."""
        while self._spans > MAX_SPANS:
            shares: dict[Hashable, int] = {}
            for owner, own in self._owners.items():
                share = share_path(owner)[0]
                shares[share] = shares.get(share, 0) + own.spans
            largest = max(shares, key=lambda share: shares[share])
            loser = max(
                (owner for owner in self._owners if share_path(owner)[0] == largest),
                key=lambda owner: self._owners[owner].spans,
            )
            surplus = self._spans - MAX_SPANS
            while surplus > 0 and self._owners[loser].traces:
                freed = self._owners[loser].forget()
                self._spans -= freed
                surplus -= freed
            if not self._owners[loser].traces:
                del self._owners[loser]

    def is_repeated(self, owner: Hashable, place: SpanPlace) -> bool:
        """True if spans inside of the one at ``place`` have its tokens, as far as is known now."""
        trace = self._trace(owner, place)
        return trace is not None and (trace.is_repeated(place.id) or trace.encloses(place.id))

    def has_inner(self, owner: Hashable, place: SpanPlace) -> bool:
        """True if links or equal calls show that spans inside of this one have its tokens."""
        trace = self._trace(owner, place)
        return trace is not None and trace.is_repeated(place.id)

    def has_outer(self, owner: Hashable, place: SpanPlace) -> bool:
        """True if links show a call with tokens around the one at ``place``."""
        trace = self._trace(owner, place)
        return trace is not None and trace.is_inner(place.id)

    def _trace(self, owner: Hashable, place: SpanPlace) -> _Trace | None:
        own = self._owners.get(owner)
        return None if own is None else own.traces.get(place.trace)


PREFILL_STAGES = frozenset(("prefill_forward", "chunked_prefill"))
"""The names of SGLang's spans in which a prompt is computed."""

MAX_TRACES = 32_768
_MAX_STAGES = 64  # of one trace; further ones are ignored
_MAX_START = 1 << 63  # of an array of 64-bit integers, a quarter of the memory of a tuple of them


class PrefillStages:
    """The begin of prefill in recent traces, by the stage spans of an engine.

    SGLang reports a request by one span with token counts and latencies, whose prefill includes the
    wait in the scheduler's queue. The processes of its scheduler report the stages of the request
    by further spans of the same trace, one set for each rank; those of prefill begin when it is
    scheduled. A known trace id in spans of another principal adds none.
    """

    def __init__(self) -> None:
        self._starts: GenerationalCache[array[int]] = GenerationalCache(MAX_TRACES)

    def add(self, owner: Hashable, spans: SpanColumns) -> None:
        """Add the stages of prefill among received spans of a principal."""
        if PREFILL_STAGES.isdisjoint(spans.name):
            return
        for trace, name, start in zip(spans.trace, spans.name, spans.start, strict=True):
            if name in PREFILL_STAGES and 0 <= start < _MAX_START:
                known = self._starts.get((owner, trace)) or array("q")
                if len(known) < _MAX_STAGES:
                    known.append(start)
                    self._starts[owner, trace] = known

    def begin(self, owner: Hashable, trace: bytes, start: int, until: int) -> int | None:
        """The begin of the first stage of a trace from ``start`` to ``until``; None for none."""
        return min(
            (each for each in self._starts.get((owner, trace)) or () if start <= each <= until),
            default=None,
        )
