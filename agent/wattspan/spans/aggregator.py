"""Energy by service and span name, in a bounded number of accounts.

Applications choose span names, and some put an identifier into each one. Accounts are divided
fairly among the users of the processes, and names without an account share one. As in
:mod:`wattspan.attribution.top_n`, no account ever falls, none is added to another (which would look
like a burst of power), and a removed one begins at zero if its name returns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter, sub
from types import MappingProxyType
from typing import NamedTuple, cast

from wattspan.attribution.top_n import OTHER, Listing, displacements
from wattspan.model import (
    NO_SPLIT,
    SECOND,
    Exemplar,
    HwType,
    Instant,
    Microjoules,
    Nanoseconds,
    SpanAccounts,
    SpanRow,
    StaticBasis,
    StaticSplit,
)
from wattspan.sharing.fair_pool import FairCache, FairPool, Overflow, SharePath
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.values import Outcome, SpanColumns, SpanEnergy, SpanEnergyColumns
from wattspan.util.text import MAX_LABEL, cut_with_digest

EXEMPLAR_LIFETIME = 15 * SECOND
"""An exemplar is the span with the most energy in this time; any later span may replace it."""

RANK_EVERY = 10 * SECOND
"""The period in which names without an account may displace others."""

_MAX_TOKENS = 10**7  # of one span and direction: more than any context length
_MAX_TOTAL = 2**62  # totals fit in 64 bits

_MEASURED = frozenset({Outcome.JOINED, Outcome.PARTIAL, Outcome.LATE})
"""Outcomes of spans with known energy; others are left out of counts and times."""

_INCOMPLETE = frozenset({Outcome.PARTIAL, Outcome.LATE})
"""Outcomes of spans whose energy is a lower bound."""

_NO_ACCOUNTS = SpanAccounts()

SpanKey = tuple[str, str, str]
"""A service, the name of a span, and the owner of the process."""

_OTHERS: SpanKey = (OTHER, OTHER, "")


@dataclass(slots=True)
class _TypeTotal:
    """The energy of one hardware type in an account, and its exemplar."""

    energy: int = 0
    most: int = 0
    end: int = 0
    stale: int = 0
    exemplar: Exemplar | None = None

    def update_exemplar(
        self, spans: SpanColumns, at: Sequence[int], energies: Sequence[int], to_wall: int
    ) -> None:
        """Take the span with the most energy of those at ``at`` that may replace the exemplar.

        ``to_wall`` is wall-clock time less monotonic time.
        """
        ends = spans.end
        later = [
            (energies[i], i)
            for i in at
            # Prometheus rejects an exemplar that is older than its predecessor.
            if energies[i] and ends[i] > self.end
            if energies[i] > self.most or ends[i] > self.stale
        ]
        if later:
            energy, i = max(later, key=itemgetter(0))
            self.most, self.end, self.stale = energy, ends[i], ends[i] + EXEMPLAR_LIFETIME
            self.exemplar = Exemplar(
                spans.trace[i].hex(), spans.id[i].hex(), Microjoules(energy), ends[i] + to_wall
            )


@dataclass(slots=True)
class _SpanNameAccount:
    """All spans of one name; ``row`` is the current row, None after a change."""

    since: int
    used: int
    spent: dict[HwType, _TypeTotal] = field(default_factory=dict)
    time: int = 0
    count: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    splits: dict[StaticBasis, StaticSplit] = field(default_factory=dict)
    bounded: set[HwType] = field(default_factory=set)
    bounded_count: int = 0
    ranked: int = 0  # energy at the last ranking
    recent: float = 0.0  # energy that decays by half with each ranking
    row: SpanRow | None = None

    @property
    def energy(self) -> int:
        return sum(spent.energy for spent in self.spent.values())


class SpanAggregator:
    """Accounts of at most ``names`` pairs of service and span name, and one of all others.

    For one thread; results of ``accounts`` are immutable.
    """

    def __init__(
        self,
        names: int,
        rows: Iterable[SpanRow] = (),
        outside: Mapping[tuple[str, str, HwType], int] = MappingProxyType({}),
        now: int = 0,
        pools: Pools | None = None,
    ) -> None:
        """``rows`` and ``outside`` are from a checkpoint; ``now`` is monotonic nanoseconds."""
        pools = pools or Pools()
        self._names = names
        self._places: FairPool[SpanKey] = pools.make(PoolName.SPAN_NAMES, names)
        self._services: FairPool[tuple[str, str]] = pools.make(PoolName.SERVICES, 2 * names)
        self._accounts: dict[SpanKey, _SpanNameAccount] = {}
        self._waiting: FairCache[SpanKey, int] = FairCache(FairPool(4 * names, Overflow.REFUSE))
        self._outside = dict(outside)
        self._received = 0
        self._outcomes = {str(outcome): 0 for outcome in Outcome}
        self._released: dict[HwType, int] = {}
        self._ranked = self._now = now
        self._rows: tuple[SpanRow, ...] | None = None
        for row in rows:
            self._accounts[row.key] = _restored(row, now)
            if row.key != _OTHERS and not self._admit(row.key):
                self._release(self._accounts.pop(row.key))
        for service, owner, _ in outside:
            self._services.admit((service, owner), _share(owner))

    @property
    def released(self) -> Mapping[HwType, int]:
        """The energy of removed accounts; with it no energy is missing from the sum."""
        return dict(self._released)

    def add(
        self,
        results: Sequence[SpanEnergy],
        now: Instant,
        owner: str = "",
        baseline_unknown: Mapping[HwType, int] = MappingProxyType({}),
    ) -> None:
        """Add joined spans of a process of ``owner``.

        ``baseline_unknown`` is the monotonic time until which an idle power was unknown, by type.
        """
        batch = SpanEnergyColumns.of(results)
        spans, known, columns = batch.spans, batch.known, batch.exclusive
        self._now, self._rows = now.mono, None
        counts = self._count_outcomes(batch.outcome)
        times = _times(batch, counts)
        tokens = [_tokens(column, counts) for column in (spans.tokens_in, spans.tokens_out)]
        bounded = _bounded(batch, baseline_unknown)
        gpu = list(columns).index(HwType.GPU) if batch.basis else 0
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, named in enumerate(zip(spans.service, spans.name, strict=True)):
            groups[named].append(i)
        for (service, name), at in groups.items():
            sums = _sums(at, counts, times, spans.end, columns)
            if not sums.spans and not any(sums.energy):
                continue
            key = service, name, owner
            account = self._accounts.get(key)
            if account is None:
                account = self._find(key, sum(sums.energy))
            else:
                self._places.touch(key, now.mono)
            account.used, account.row = now.mono, None
            account.count += sums.spans
            account.time += sums.time
            if tokens[0]:
                account.tokens_in += sum(tokens[0][i] for i in at)
            if tokens[1]:
                account.tokens_out += sum(tokens[1][i] for i in at)
            for kind, energy, most in zip(columns, sums.energy, sums.most, strict=True):
                if known is not None and not any(kind in known[i] for i in at):
                    continue
                spent = account.spent.get(kind)
                if spent is None:
                    spent = account.spent[kind] = _TypeTotal()
                spent.energy += energy
                if sums.end > spent.end and (sums.end > spent.stale or most > spent.most):
                    spent.update_exemplar(spans, at, columns[kind], now.wall - now.mono)
            for i in at if bounded else ():
                account.bounded |= bounded.get(i, frozenset())
                account.bounded_count += i in bounded
            if batch.basis:
                _add_splits(account.splits, batch, at, sums.energy[gpu])

    def _count_outcomes(self, outcomes: Sequence[Outcome]) -> Sequence[int]:
        """Count outcomes; 1 for each span that is counted in its account, else 0."""
        found = Counter(outcomes)
        for outcome, count in found.items():
            self._outcomes[outcome] += count
        if found.keys() <= _MEASURED:
            return [1] * len(outcomes)
        return [outcome in _MEASURED for outcome in outcomes]

    def outside(self, service: str, kind: HwType, energy: int, owner: str = "") -> None:
        """Add outside energy of a process of ``service`` and ``owner``."""
        key = shortened_name(service), owner
        if not self._services.admit(key, _share(owner)):
            key = OTHER, ""
        self._outside[*key, kind] = self._outside.get((*key, kind), 0) + energy

    def received(self, spans: int) -> None:
        """Count received spans."""
        self._received += spans

    def outcome(self, outcome: Outcome, spans: int = 1) -> None:
        """Count spans that were not joined."""
        self._outcomes[outcome] += spans

    def accounts(self, others: SpanAccounts = _NO_ACCOUNTS) -> SpanAccounts:
        """All accounts, with the figures of ``others``.

        Only the rows of names that were used since the last call are made anew.
        """
        self._rank()
        if self._rows is None:
            self._rows = tuple(
                account.row or _row(key, account) for key, account in self._accounts.items()
            )
        return replace(
            others,
            rows=self._rows,
            outside={key: Microjoules(energy) for key, energy in self._outside.items()},
            outcomes=dict(self._outcomes),
            received=self._received,
        )

    def _find(self, wanted: SpanKey, energy: int) -> _SpanNameAccount:
        """The account of a shortened or new name; the account of all others for want of room."""
        key = shortened_name(wanted[0]), shortened_name(wanted[1]), wanted[2]
        account = self._accounts.get(key)
        if account is not None:
            return account
        if key == _OTHERS:  # a span whose name is that of all others has theirs
            return self._open(key)
        if self._admit(key):
            return self._open(key)
        # Waiting names are ranked by energy, so that important ones get an account.
        self._waiting.store(key, self._waiting.get(key, 0) + energy, _share(key[2])[0], self._now)
        return self._accounts.get(_OTHERS) or self._open(_OTHERS)

    def _admit(self, key: SpanKey) -> bool:
        """Give a name a place, perhaps that of an owner with more, if its owner's share permits."""
        admission = self._places.admit(key, _share(key[2]), self._now)
        for lost in admission.displaced:
            self._release(self._accounts.pop(lost))
        return bool(admission)

    def _open(self, key: SpanKey) -> _SpanNameAccount:
        account = self._accounts[key] = _SpanNameAccount(self._now, self._now)
        return account

    def _release(self, account: _SpanNameAccount) -> None:
        for kind, spent in account.spent.items():
            self._released[kind] = self._released.get(kind, 0) + spent.energy
        self._rows = None

    def _rank(self) -> None:
        """Let waiting names with the most energy displace their owner's accounts with the least."""
        if self._now - self._ranked < RANK_EVERY:
            return
        self._ranked = self._now
        for account in self._accounts.values():
            energy = account.energy
            account.recent = account.recent / 2 + energy - account.ranked
            account.ranked = energy
        waiting: dict[str, dict[SpanKey, int]] = defaultdict(dict)
        for key, energy in self._waiting.items():
            waiting[key[2]][key] = energy
        self._waiting = FairCache(FairPool(4 * self._names, Overflow.REFUSE))
        for owner, newcomers in waiting.items():
            listed = {
                key: Listing(account.since, account.recent)
                for key, account in self._accounts.items()
                if key[2] == owner and key != _OTHERS
            }
            places = len(listed) + max(0, self._places.left)
            for newcomer, displaced in displacements(listed, newcomers, places, self._now):
                if displaced is not None:
                    self._places.remove(displaced)
                    self._release(self._accounts.pop(displaced))
                self._admit(newcomer)
                self._open(newcomer)


class _Sums(NamedTuple):
    """Sums over some spans of one name; ``energy`` and ``most`` by hardware type."""

    spans: int
    time: int
    end: int  # the latest
    energy: Sequence[int]
    most: Sequence[int]  # of one span


def _sums(
    at: Sequence[int],
    counts: Sequence[int],
    times: Sequence[int],
    ends: Sequence[int],
    energies: Mapping[HwType, Sequence[int]],
) -> _Sums:
    """Sums over the spans at these positions."""
    if len(at) == 1:
        (only,) = at
        energy = [column[only] for column in energies.values()]
        return _Sums(counts[only], times[only], ends[only], energy, energy)
    pick = itemgetter(*at)
    chosen = [pick(column) for column in energies.values()]
    energy, most = list(map(sum, chosen)), list(map(max, chosen))
    return _Sums(sum(pick(counts)), sum(pick(times)), max(pick(ends)), energy, most)


def _bounded(
    batch: SpanEnergyColumns, baseline_unknown: Mapping[HwType, int]
) -> dict[int, frozenset[HwType]]:
    """The types of which the energy is a lower bound, by the position of each such span."""
    unknown = {kind: end for kind, end in baseline_unknown.items() if kind in batch.exclusive}
    until, starts = max(unknown.values(), default=0), batch.spans.start
    if min(starts, default=until) >= until and _INCOMPLETE.isdisjoint(batch.outcome):
        return {}
    found: dict[int, frozenset[HwType]] = {}
    for i, (start, outcome) in enumerate(zip(starts, batch.outcome, strict=True)):
        if outcome in _INCOMPLETE:
            found[i] = frozenset(batch.exclusive)
        elif start < until and outcome is Outcome.JOINED:
            found[i] = frozenset(kind for kind, end in unknown.items() if start < end)
    return found


def _add_splits(
    splits: dict[StaticBasis, StaticSplit], batch: SpanEnergyColumns, at: Sequence[int], gpu: int
) -> None:
    """Add the static and dynamic parts of the spans at these positions, of ``gpu`` energy."""
    basis = batch.basis[at[0]]
    sums: dict[StaticBasis | None, tuple[int, int]] = {
        basis: (sum(batch.static[i] or 0 for i in at), gpu)
    }
    if any(batch.basis[i] is not basis for i in at):
        sums = {}
        for i in at:
            static, whole = sums.get(batch.basis[i], (0, 0))
            whole += batch.exclusive[HwType.GPU][i]
            sums[batch.basis[i]] = static + (batch.static[i] or 0), whole
    for known, (static, whole) in sums.items():
        if known is not None:
            splits[known] = splits.get(known, NO_SPLIT).plus(static, whole - static)


def _times(batch: SpanEnergyColumns, counts: Sequence[int]) -> list[int]:
    """The nanoseconds of each counted span, of which energy is known."""
    lengths = list(map(sub, batch.spans.end, batch.spans.start))
    if all(counts) and batch.inclusive.covered == lengths:
        return lengths
    return [
        count * max(0, length if outcome is Outcome.JOINED else min(length, covered))
        for count, length, outcome, covered in zip(
            counts, lengths, batch.outcome, batch.inclusive.covered, strict=True
        )
    ]


def _tokens(tokens: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The tokens of each counted span; empty if no span has any."""
    if not any(tokens):
        return []
    return [
        count * max(0, min(_MAX_TOKENS, each)) for each, count in zip(tokens, counts, strict=True)
    ]


def _share(owner: str) -> SharePath:
    """The levels of fair shares of the owner of a process: its user or pod, then its container."""
    user, container, _ = owner.partition("/")
    return (user, owner) if container else (owner,)


def shortened_name(name: str) -> str:
    """``name`` as a label; a cut name ends with a digest of the whole."""
    return cut_with_digest(name, MAX_LABEL)


def _restored(row: SpanRow, now: int) -> _SpanNameAccount:
    spent = {kind: _TypeTotal(energy) for kind, energy in row.energy.items()}
    account = _SpanNameAccount(now, now, spent, row.time, row.count)
    account.tokens_in = row.tokens.get("input", 0)
    account.tokens_out = row.tokens.get("output", 0)
    account.splits = dict(row.splits)
    account.bounded, account.bounded_count = set(row.bounded), row.bounded_count
    account.ranked = account.energy
    return account


def _row(key: SpanKey, account: _SpanNameAccount) -> SpanRow:
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
        dict(account.splits),
        key[2],
        frozenset(account.bounded),
        min(account.bounded_count, _MAX_TOTAL),
    )
    return account.row
