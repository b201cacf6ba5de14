"""The processes that announce spans on the side channel, by principal and span id.

A span id is no secret: it is in the headers of outgoing requests. An announcement therefore counts
only among the spans that the kernel proves to come from the same principal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wattspan.model import SECOND, Consumer, Principal
from wattspan.spans.values import Outcome
from wattspan.spans.weights import GenerationalCache

if TYPE_CHECKING:
    from wattspan.ingest.identity_verification import IdentityResolver, SpanIdentity
    from wattspan.ingest.side_channel import ProcessRecords

MAX_ANNOUNCERS = 64
"""Remembered processes that announce spans with one id, besides the first: ranks of a host."""

MAX_PRINCIPALS = 256
"""Remembered principals; beyond it, one of the owner with the most is forgotten."""

CHECK_EVERY = SECOND // 4
"""A process that announces is checked for another principal this often."""


class _Connected(NamedTuple):
    consumer: Consumer
    checked_at: int


class _PrincipalAnnouncers:
    """The announcers of one principal."""

    def __init__(self, limit: int, awaits: Callable[[bytes, Consumer], bool]) -> None:
        self.first: GenerationalCache[Consumer] = GenerationalCache(limit, keep=awaits)
        self._others: GenerationalCache[tuple[Consumer, ...]] = GenerationalCache(limit // 4)

    def bound(self, limit: int) -> None:
        self.first.bound(limit)
        self._others.bound(limit // 4)

    def add(self, span: bytes, consumer: Consumer) -> None:
        first = self.first.get(span)
        if first is None:
            self.first[span] = consumer
        elif first != consumer:
            others = self._others.get(span) or ()
            if len(others) < MAX_ANNOUNCERS and consumer not in others:
                self._others[span] = (*others, consumer)

    def age(self, now: int, keep: int) -> None:
        self.first.age(now, keep)
        self._others.age(now, keep)

    def sender(self, span: bytes, claimed: Consumer | Outcome) -> Consumer | None:
        """The announcer of a span; None if it was not announced.

        Ranks of a training job seed their random numbers alike and have spans with the same ids.
        The claim of a process that announced the span too is true; otherwise the first counts.
        """
        first = self.first.get(span)
        if first is None or first == claimed:
            return first
        if isinstance(claimed, Consumer) and claimed in (self._others.get(span) or ()):
            return claimed
        return first


class SpanAnnouncers:
    """Remembers the announcers of spans. For one thread.

    ``limit`` is the number of remembered spans, which all principals share. ``awaits`` is true
    while a process waits for a span, whose announcer is not forgotten. ``conflicts`` counts the
    requests with spans that another principal announced.
    """

    def __init__(
        self, limit: int, resolver: IdentityResolver, awaits: Callable[[bytes, Consumer], bool]
    ) -> None:
        self._limit, self._resolver, self._awaits = limit, resolver, awaits
        self._connected: dict[tuple[int, Principal], _Connected] = {}
        self._of: dict[
            Principal, _PrincipalAnnouncers
        ] = {}  # in the order of their first announcement
        self.conflicts = 0

    def __len__(self) -> int:
        """The number of remembered spans."""
        return sum(len(one.first) for one in self._of.values())

    def process(self, report: ProcessRecords, now: int) -> Consumer | None:
        """The process of a report, which may have ended since.

        None for a process that has changed its principal since it connected, as by exec of a
        setuid program: another process may still write to its ring.
        """
        if report.principal is None:
            return None
        key = report.pid, report.principal
        known = self._connected.pop(key, None)
        if known is not None and not report.gone and now - known.checked_at < CHECK_EVERY:
            self._connected[key] = known
            return known.consumer
        found = self._resolver.announcer(report.pid, report.principal)
        if found is None and known is not None:
            found = known.consumer  # until all of its records are read
        if found is None or isinstance(found, Outcome):
            return None
        if not report.gone:
            self._connected[key] = _Connected(found, now)
        return found

    def add(self, span: bytes, principal: Principal, consumer: Consumer) -> None:
        """Remember that a process of ``principal`` has announced a span."""
        of = self._of.get(principal)
        if of is None:
            if len(self._of) >= MAX_PRINCIPALS:
                del self._of[self._displaced()]
            of = self._of[principal] = _PrincipalAnnouncers(self._limit, self._awaits)
            self._share()
        of.add(span, consumer)

    def age(self, now: int, keep: int) -> None:
        """Forget spans that were announced longer than ``keep`` ago."""
        for principal, of in list(self._of.items()):
            of.age(now, keep)
            if not len(of.first):
                del self._of[principal]
                self._share()

    def _displaced(self) -> Principal:
        """The oldest principal of the owner with the most."""
        held = Counter(one.path[0] for one in self._of)
        return max(self._of, key=lambda one: held[one.path[0]])

    def _share(self) -> None:
        """Divide the room among owners, and the part of each among its containers."""
        owners = Counter(one.path[0] for one in self._of)
        for principal, of in self._of.items():
            of.bound(max(2, self._limit // len(owners) // owners[principal.path[0]]))

    def senders(
        self, spans: Sequence[bytes], identity: SpanIdentity
    ) -> Sequence[Consumer | Outcome] | Consumer | Outcome:
        """The process of each of ``spans``, or the one process of all of them.

        By the announcements of the principal that the kernel proves for the request, else by
        ``identity``. A request of a forwarder is of no principal itself: there the announcement
        of any principal counts, unless two contradict each other.
        """
        claimed, _, sender = identity
        if sender.forwards:
            return _one([self._forwarded(span, identity) for span in spans])
        own = self._of.get(sender.principal) if sender.principal is not None else None
        if own is None or own.first.isdisjoint(spans):
            return self._without_own(spans, identity)
        return _one([found or claimed for found in (own.sender(s, claimed) for s in spans)])

    def _without_own(
        self, spans: Sequence[bytes], identity: SpanIdentity
    ) -> Sequence[Consumer | Outcome] | Consumer | Outcome:
        """The senders of spans that the principal of the request has not announced."""
        claimed, _, sender = identity
        others = [of for of in self._of.values() if not of.first.isdisjoint(spans)]
        if not others:
            return claimed
        found: list[Consumer | Outcome] = []
        allowed: dict[Consumer, bool | None] = {}
        conflict = False
        for span in spans:
            announcers = [one for of in others if (one := of.sender(span, claimed)) is not None]
            for one in announcers:
                # Root's worker, which has dropped its privileges, on the connection of root.
                if one not in allowed:
                    allowed[one] = self._resolver.may_announce(sender, one)
            workers = [one for one in announcers if allowed[one]]
            conflict = conflict or any(allowed[one] is False for one in announcers)
            unread = any(allowed[one] is None for one in announcers)
            found.append(workers[0] if workers else Outcome.UNKNOWN_PROCESS if unread else claimed)
        self.conflicts += conflict
        return _one(found)

    def _forwarded(self, span: bytes, identity: SpanIdentity) -> Consumer | Outcome:
        claimed = identity.found
        announcers = {one for of in self._of.values() if (one := of.sender(span, claimed))}
        if not announcers or claimed in announcers:
            return claimed
        if len(announcers) == 1 and not isinstance(claimed, Consumer):
            return next(iter(announcers))
        self.conflicts += 1
        return Outcome.NOT_BELIEVED


def _one(
    found: Sequence[Consumer | Outcome],
) -> Sequence[Consumer | Outcome] | Consumer | Outcome:
    """The one sender of all, else ``found``."""
    first = found[0]
    return first if all(one == first for one in found) else found
