"""Energy by span name: what all spans of one name in one service have spent.

Names are chosen by applications, and some put an identifier into every one, so only so many have
an account; the spans of all others share one. Three rules keep every counter honest, as in
:mod:`wattspan.grouping`: no account ever falls, none is poured into another (which would look
like a burst of power), and one that is let go begins at zero should its name return.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2s
from types import MappingProxyType
from typing import NamedTuple, cast

from wattspan.attribution.top_n import OTHER, STALE_AFTER
from wattspan.model import (
    SECOND,
    Exemplar,
    HwType,
    Instant,
    Microjoules,
    Nanoseconds,
    SpanAccounts,
    SpanRow,
)
from wattspan.spans.values import Outcome, Span, SpanEnergy

MAX_NAME_LENGTH = 128
"""Characters of a service's or a span's name; a longer one is cut and marked with a digest."""

EXEMPLAR_LIFETIME = 15 * SECOND
"""An exemplar is the span of most energy in as long; after that any later one takes its place."""

RANK_EVERY = 10 * SECOND
"""How often, while there is no room, names without an account may take the place of others."""

MIN_LISTED_TIME = 60 * SECOND
"""An account is safe from that for as long."""

RELEASED_ROW_LIFETIME = 60 * SECOND
"""An account that has to go is shown for as long, unchanged: its last joules are scraped."""

_DISPLACEMENT_FACTOR = 2  # a newcomer must have spent this many times as much of late
_MAX_TOKENS = 10**7  # of one span and direction: no context is longer, but a claim may be
_MAX_TOTAL = 2**62  # sums of tokens may become anything: what is shown fits 64 bits

_MEASURED = frozenset({Outcome.JOINED, Outcome.PARTIAL, Outcome.LATE})
"""Spans that count. Of the rest no energy is known, so they would spoil every quotient."""

_NO_ACCOUNTS = SpanAccounts()

SpanKey = tuple[str, str]
"""A service and the name of a span."""


@dataclass(slots=True)
class _TypeTotal:
    """One account's energy of one hardware type, and the span that stands for it."""

    energy: int = 0
    most: int = 0
    end: int = 0
    stale: int = 0
    exemplar: Exemplar | None = None

    def show(self, span: Span, energy: int, wall: int) -> None:
        self.most, self.end, self.stale = energy, span.end, span.end + EXEMPLAR_LIFETIME
        self.exemplar = Exemplar(span.trace.hex(), span.id.hex(), Microjoules(energy), wall)


@dataclass(slots=True)
class _SpanNameAccount:
    """All spans of one name; ``row`` shows them as they are, None when they have changed."""

    since: int
    used: int
    spent: dict[HwType, _TypeTotal] = field(default_factory=dict)
    time: int = 0
    count: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    ranked: int = 0  # the energy there was at the last ranking
    recent: float = 0.0  # spent of late: what was spent before fades at each ranking
    row: SpanRow | None = None

    @property
    def energy(self) -> int:
        return sum(spent.energy for spent in self.spent.values())


class _EvictedAccount(NamedTuple):
    """An account that has to go: its name's spans are counted with all others already."""

    account: _SpanNameAccount
    since: int
    successor: SpanKey


class SpanAggregator:
    """Accounts for at most ``names`` pairs of service and span name, and one for all others.

    Not to be used by two threads at once; what ``accounts`` returns may go anywhere.
    """

    def __init__(
        self,
        names: int,
        rows: Iterable[SpanRow] = (),
        outside: Mapping[tuple[str, HwType], int] = MappingProxyType({}),
        now: int = 0,
    ) -> None:
        """``rows`` and ``outside`` are from an earlier life, ``now`` is monotonic nanoseconds."""
        self._names = names
        self._accounts = {(row.service, row.name): _restored(row, now) for row in rows}
        self._leaving: dict[SpanKey, _EvictedAccount] = {}
        self._waiting: dict[SpanKey, int] = {}
        self._outside = dict(outside)
        self._services = {service for service, _ in outside}
        self._received = 0
        self._outcomes = {str(outcome): 0 for outcome in Outcome}
        self._released: dict[HwType, int] = {}
        self._ranked = self._swept = self._now = now
        self._shown: SpanAccounts | None = None
        self._rows: tuple[SpanRow, ...] | None = None

    @property
    def released(self) -> Mapping[HwType, int]:
        """The energy of accounts that were let go: with it, no joule is ever missing."""
        return dict(self._released)

    # ------------------------------------------------------------------------------ being told

    def add(self, results: Sequence[SpanEnergy], now: Instant) -> None:
        """Count spans that were joined with their energy."""
        accounts, joined = self._accounts, Outcome.JOINED
        mono, to_wall = now.mono, now.wall - now.mono
        self._now = mono
        others = 0
        for span, exclusive, inclusive, outcome in results:
            measured = outcome is joined
            if not measured:
                others += 1
                self._outcomes[outcome] += 1
                measured = outcome in _MEASURED
                if not measured and not any(exclusive.values()):
                    continue
            _, _, _, service, name, start, end, _, _, _, tokens_in, tokens_out = span
            account = accounts.get((service, name))
            if account is None:
                account = self._find(service, name, exclusive)
            account.used = mono
            account.row = None
            of_kind = account.spent
            for kind, energy in exclusive.items():
                try:
                    spent = of_kind[kind]
                except KeyError:
                    spent = of_kind[kind] = _TypeTotal()
                spent.energy += energy
                # Later ends only: Prometheus refuses an exemplar older than the one it has.
                if (energy > spent.most or end > spent.stale) and end > spent.end and energy:
                    spent.show(span, energy, end + to_wall)
            if measured:
                account.count += 1
                length = end - start
                if outcome is not joined:
                    length = min(length, inclusive.covered)
                if length > 0:
                    account.time += length
                if tokens_in > 0:
                    account.tokens_in += min(_MAX_TOKENS, tokens_in)
                if tokens_out > 0:
                    account.tokens_out += min(_MAX_TOKENS, tokens_out)
        self._outcomes[joined] += len(results) - others
        self._rows = self._shown = None

    def outside(self, service: str, kind: HwType, energy: int) -> None:
        """Count what a process of ``service`` spent while none of its spans was open."""
        service = shortened_name(service)
        if service not in self._services:
            # A service is never let go: there are few, and each was believed to be a process.
            if len(self._services) >= self._names:
                service = OTHER
            self._services.add(service)
        self._outside[service, kind] = self._outside.get((service, kind), 0) + energy
        self._shown = None

    def received(self, spans: int) -> None:
        """Count spans that a receiver has taken."""
        self._received += spans

    def outcome(self, outcome: Outcome, spans: int = 1) -> None:
        """Count spans that never were joined."""
        self._outcomes[outcome] += spans
        self._shown = None

    # --------------------------------------------------------------------------------- showing

    def accounts(self, others: SpanAccounts = _NO_ACCOUNTS) -> SpanAccounts:
        """Everything as it stands, with the figures that others keep; the same while nothing moves.

        Only the rows of names that were used since are made anew.
        """
        self._part()
        self._rank()
        if self._rows is None:
            leaving = ((key, one.account) for key, one in self._leaving.items())
            self._rows = tuple(
                account.row or _show(key, account)
                for key, account in (*self._accounts.items(), *leaving)
            )
        last = self._shown
        shown = replace(
            others,
            rows=self._rows,
            outside=(
                {key: Microjoules(energy) for key, energy in self._outside.items()}
                if last is None
                else last.outside
            ),
            outcomes=dict(self._outcomes) if last is None else last.outcomes,
            received=self._received,
        )
        if last is None or shown != last:
            self._shown = shown
            return shown
        return last

    # ------------------------------------------------------------------------------- few names

    def _find(self, service: str, name: str, exclusive: Mapping[HwType, int]) -> _SpanNameAccount:
        """The account of a name that has none as it is spelled; perhaps that of all others."""
        key = shortened_name(service), shortened_name(name)
        account = self._accounts.get(key)
        if account is not None:
            return account
        room = self._has_room() or (self._let_go() and self._has_room())
        if room and key not in self._leaving:
            return self._open(key)
        # So that a name that matters can be told from those that are used once.
        if key in self._waiting or len(self._waiting) < 4 * self._names:
            self._waiting[key] = self._waiting.get(key, 0) + sum(exclusive.values())
        other = OTHER, OTHER
        return self._accounts.get(other) or self._open(other)

    def _has_room(self) -> bool:
        named = len(self._accounts) - ((OTHER, OTHER) in self._accounts)
        return named + len(self._leaving) < self._names

    def _open(self, key: SpanKey) -> _SpanNameAccount:
        account = self._accounts[key] = _SpanNameAccount(self._now, self._now)
        return account

    def _let_go(self) -> bool:
        """Let go of accounts that were not used for long; looked for once a second at most."""
        if self._now - self._swept < SECOND:
            return False
        self._swept = self._now
        stale = [key for key, one in self._accounts.items() if self._now - one.used >= STALE_AFTER]
        for key in stale:
            self._release(self._accounts.pop(key))
        return bool(stale)

    def _release(self, account: _SpanNameAccount) -> None:
        for kind, spent in account.spent.items():
            self._released[kind] = self._released.get(kind, 0) + spent.energy
        self._rows = self._shown = None

    def _part(self) -> None:
        """Let go of accounts that have lingered; their successors begin."""
        over = [
            key
            for key, one in self._leaving.items()
            if self._now - one.since >= RELEASED_ROW_LIFETIME
        ]
        for key in over:
            account, _, successor = self._leaving.pop(key)
            self._release(account)
            if successor not in self._accounts:
                self._open(successor)

    def _rank(self) -> None:
        """While names wait for room: let those that spend most take the place of the least."""
        if self._now - self._ranked < RANK_EVERY:
            return
        self._ranked = self._now
        for account in self._accounts.values():
            energy = account.energy
            account.recent = account.recent / 2 + energy - account.ranked
            account.ranked = energy
        settled = sorted(
            (account.recent, key)
            for key, account in self._accounts.items()
            if key != (OTHER, OTHER) and self._now - account.since >= MIN_LISTED_TIME
        )
        expected = {one.successor for one in self._leaving.values()}
        waiting = sorted(
            (
                (spent, key)
                for key, spent in self._waiting.items()
                if key not in expected and key not in self._leaving
            ),
            reverse=True,
        )
        for (spent, newcomer), (recent, least) in zip(waiting, settled, strict=False):
            if spent <= _DISPLACEMENT_FACTOR * recent:
                break
            self._leaving[least] = _EvictedAccount(self._accounts.pop(least), self._now, newcomer)
        self._waiting = {}


def shortened_name(name: str) -> str:
    """``name``, or as much of it as there is room for, told apart by a digest of the whole."""
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = blake2s(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{name[: MAX_NAME_LENGTH - 9]}~{digest}"


def _restored(row: SpanRow, now: int) -> _SpanNameAccount:
    spent = {kind: _TypeTotal(energy) for kind, energy in row.energy.items()}
    account = _SpanNameAccount(now, now, spent, row.time, row.count)
    account.tokens_in = row.tokens.get("input", 0)
    account.tokens_out = row.tokens.get("output", 0)
    account.ranked = account.energy
    return account


def _show(key: SpanKey, account: _SpanNameAccount) -> SpanRow:
    tokens = {"input": account.tokens_in, "output": account.tokens_out}
    spent = account.spent.items()
    account.row = SpanRow(
        key[0],
        key[1],
        cast("dict[HwType, Microjoules]", {kind: one.energy for kind, one in spent}),
        Nanoseconds(min(account.time, _MAX_TOTAL)),
        account.count,
        {way: min(count, _MAX_TOTAL) for way, count in tokens.items() if count},
        {kind: one.exemplar for kind, one in spent if one.exemplar is not None},
    )
    return account.row
