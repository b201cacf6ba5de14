"""The tokens of requests to language models, and their energy, in a bounded number of accounts.

Applications choose service names and clients may choose model names. The pairs of each user have
accounts of their own up to the user's share, the others share one. An account that a user loses,
or that is not used for a day, is added to the shared one; if its pair returns, it begins at zero.

The energy of some requests is unknown, and none is divided by their tokens: an application that
calls a model elsewhere has tokens and no energy of them, and so has an engine while no process of
it is known to use a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

from wattspan.attribution.top_n import OTHER
from wattspan.inference.division import DivisionMethod, RequestEnergy
from wattspan.inference.requests import InferenceRequest
from wattspan.model import (
    REQUEST_ENERGY_BOUNDS,
    HostRequests,
    HwType,
    InferenceRow,
    Microjoules,
    ModelEnum,
    UnmeteredRow,
)
from wattspan.sharing.fair_pool import FairPool, RestoredPlaces, SharePath
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.aggregator import shortened_name

_Account = Counter[tuple[str, str | int]]  # by figure, and its direction, method or bucket
_Key = TypeVar("_Key", bound=Hashable)
_ModelKey = tuple[str, str, str]  # service, model, and the label of the owner
_RoleKey = tuple[str, str, str, str]  # the same, and the role


class _BoundedAccounts(Generic[_Key]):
    """Accounts in the places of a pool; those of keys without a place share one.

    ``shared`` returns the key of the shared account of a key. Sums over all accounts never fall.
    """

    def __init__(
        self,
        accounts: Mapping[_Key, _Account],
        shared: Callable[[_Key], _Key],
        pool: FairPool[_Key],
        now: int,
    ) -> None:
        self._accounts, self._shared = dict(accounts), shared
        own = [key for key in accounts if key != shared(key)]
        self._places: RestoredPlaces[_Key] = RestoredPlaces(pool, own, now)
        for key in own:
            if key not in self._places:
                self._fold(key)

    def __iter__(self) -> Iterator[tuple[_Key, _Account]]:
        return iter(self._accounts.items())

    def open(self, key: _Key, owner: SharePath, now: int) -> None:
        """Open the account of ``owner``, if its share permits it, or use it again."""
        if key == self._shared(key):
            return
        admission = self._places.claim(key, owner, now)
        for displaced in admission.displaced:
            self._fold(displaced)
        if admission:
            self._accounts.setdefault(key, Counter())

    def of(self, key: _Key) -> _Account:
        """The account of a key, or the shared one."""
        if key in self._accounts:
            return self._accounts[key]
        return self._accounts.setdefault(self._shared(key), Counter())

    def _fold(self, key: _Key) -> None:
        self._accounts.setdefault(self._shared(key), Counter()).update(self._accounts.pop(key))


class InferenceAccounts:
    """Totals of requests with energy, which continue from the ``rows`` of an earlier run."""

    def __init__(
        self,
        rows: Iterable[InferenceRow] = (),
        pool: FairPool[_ModelKey] | None = None,
        now: int = 0,
    ) -> None:
        pool = Pools().make(PoolName.INFERENCE_ACCOUNTS) if pool is None else pool
        accounts = {row.key: _restored(row) for row in rows}
        self._accounts = _BoundedAccounts(accounts, lambda _: (OTHER, OTHER, ""), pool, now)

    def open(self, request: InferenceRequest, owner: SharePath, now: int) -> None:
        """Open the account of a request of ``owner``, if its share permits it, or use it again."""
        self._accounts.open(_key(request), owner, now)

    def add(self, results: Iterable[RequestEnergy]) -> None:
        """Add requests with their final energy."""
        for result in results:
            request = result.request
            account = self._accounts.of(_key(request))
            account["energy", "input"] += result.input
            account["energy", "output"] += result.output
            account["tokens", "input"] += request.context
            account["tokens", "output"] += request.generated
            account["requests", str(result.method)] += 1
            account["bucket", bisect_left(REQUEST_ENERGY_BOUNDS, result.energy)] += 1
            if result.host.known:
                _add_host(account, result)

    def rows(self) -> tuple[InferenceRow, ...]:
        """One row for each account."""
        return tuple(
            InferenceRow(
                service,
                model,
                {way: Microjoules(account["energy", way]) for way in ("input", "output")},
                {way: account["tokens", way] for way in ("input", "output")},
                _requests(account),
                _buckets(account, "bucket"),
                owner,
                _host_requests(account),
            )
            for (service, model, owner), account in self._accounts
        )


def _key(request: InferenceRequest) -> _ModelKey:
    return shortened_name(request.service), shortened_name(request.model), request.owner


def _requests(account: _Account) -> dict[str, int]:
    """The requests by method; an older release may have had others."""
    found = (str(method) for figure, method in account if figure == "requests")
    methods = dict.fromkeys([*map(str, DivisionMethod), *found])
    return {method: account["requests", method] for method in methods}


def _add_host(account: _Account, result: RequestEnergy) -> None:
    """Add a request whose energy on the whole host is known."""
    parts = {HwType.GPU.value: result.energy, **result.host.energy}
    for part, energy in parts.items():
        account["host energy", part] += energy
        account["part requests", part] += 1
        account["part output", part] += result.request.generated
    account["host tokens", "input"] += result.request.context
    account["host tokens", "output"] += result.request.generated
    account["host requests", ""] += 1
    account["host bucket", bisect_left(REQUEST_ENERGY_BOUNDS, sum(parts.values()))] += 1


def _host_requests(account: _Account) -> HostRequests:
    """Those of an account; parts that it has never had are missing."""
    if not account["host requests", ""]:
        return HostRequests()
    parts = sorted(str(part) for figure, part in account if figure == "host energy")
    return HostRequests(
        {part: Microjoules(account["host energy", part]) for part in parts},
        {way: account["host tokens", way] for way in ("input", "output")},
        account["host requests", ""],
        _buckets(account, "host bucket"),
        {part: (account["part requests", part], account["part output", part]) for part in parts},
    )


def _buckets(account: _Account, figure: str) -> tuple[int, ...]:
    """The cumulative counts of a histogram of energies."""
    return tuple(accumulate(account[figure, at] for at in range(len(REQUEST_ENERGY_BOUNDS))))


def _restored(row: InferenceRow) -> _Account:
    """The account of an earlier run; an older release may have had other buckets."""
    account: _Account = Counter()
    for name in ("energy", "tokens", "requests"):
        figures: Mapping[str, int] = getattr(row, name)
        account.update({(name, each): count for each, count in figures.items()})
    for name in ("energy", "tokens"):
        figures = getattr(row.host, name)
        account.update({(f"host {name}", each): count for each, count in figures.items()})
    for part, (requests, output) in row.host.counts.items():
        account["part requests", part], account["part output", part] = requests, output
    account["host requests", ""] = row.host.requests
    for name, buckets in (("bucket", row.buckets), ("host bucket", row.host.buckets)):
        if len(buckets) == len(REQUEST_ENERGY_BOUNDS):
            counts = (after - before for before, after in pairwise((0, *buckets)))
            account.update({(name, at): count for at, count in enumerate(counts)})
    return account


class UnmeteredRole(ModelEnum):
    """The part that the sender has in a request."""

    CLIENT = "client"  # it calls a model elsewhere
    ENGINE = "engine"  # an engine without known energy of a GPU for it


class UnmeteredAccounts:
    """Totals of requests without energy, which continue from the ``rows`` of an earlier run."""

    def __init__(
        self,
        rows: Iterable[UnmeteredRow] = (),
        pool: FairPool[_RoleKey] | None = None,
        now: int = 0,
    ) -> None:
        pool = Pools().make(PoolName.UNMETERED_ACCOUNTS) if pool is None else pool
        accounts: dict[_RoleKey, _Account] = {
            row.key: _unmetered(row.requests, row.tokens) for row in rows
        }
        self._accounts = _BoundedAccounts(
            accounts, lambda key: (OTHER, OTHER, "", key[-1]), pool, now
        )

    def add(
        self, request: InferenceRequest, role: UnmeteredRole, owner: SharePath, now: int
    ) -> None:
        """Count a request of ``owner``."""
        key = *_key(request), role.value
        self._accounts.open(key, owner, now)
        tokens = {"input": request.context, "output": request.generated}
        self._accounts.of(key).update(_unmetered(1, tokens))

    def rows(self) -> tuple[UnmeteredRow, ...]:
        """One row for each account."""
        return tuple(
            UnmeteredRow(
                service,
                model,
                role,
                account["requests", ""],
                {way: account["tokens", way] for way in ("input", "output")},
                owner,
            )
            for (service, model, owner, role), account in self._accounts
        )


def _unmetered(requests: int, tokens: Mapping[str, int]) -> _Account:
    return Counter({("requests", ""): requests, **{("tokens", w): n for w, n in tokens.items()}})
