"""The energy and the tokens of requests to language models, in a bounded number of accounts.

Applications choose service names and clients may choose model names. The pairs of each user have
accounts of their own up to the user's share, the others share one. An account that a user loses,
or that is not used for a day, is added to the shared one; if its pair returns, it begins at zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import add

from wattspan.attribution.top_n import OTHER
from wattspan.model import REQUEST_ENERGY_BOUNDS, InferenceRow, Microjoules
from wattspan.sharing.fair_pool import FairPool, RestoredPlaces, SharePath
from wattspan.sharing.pools import POOL_RULES, PoolName, Pools
from wattspan.spans.aggregator import shortened_name
from wattspan.spans.inference_requests import InferenceRequest
from wattspan.spans.request_division import DivisionMethod, RequestEnergy

MAX_ACCOUNTS = POOL_RULES[PoolName.INFERENCE_ACCOUNTS].limit
"""Services and models of owners with an account of their own."""

_OTHERS = OTHER, OTHER, ""


_Key = tuple[str, str, str]  # service, model, and the label of the owner


@dataclass(slots=True)
class _InferenceAccount:
    input: int = 0
    output: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DivisionMethod, 0))
    counts: list[int] = field(default_factory=lambda: [0] * len(REQUEST_ENERGY_BOUNDS))

    def add(self, other: _InferenceAccount) -> None:
        self.input += other.input
        self.output += other.output
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out
        for method, count in other.requests.items():
            self.requests[method] = self.requests.get(method, 0) + count
        self.counts = list(map(add, self.counts, other.counts))


class InferenceAccounts:
    """Totals, which continue from the ``rows`` of an earlier run. Sums over all rows never fall."""

    def __init__(
        self,
        rows: Iterable[InferenceRow] = (),
        pool: FairPool[_Key] | None = None,
        now: int = 0,
    ) -> None:
        self._accounts = {row.key: _account(row) for row in rows}
        own = [key for key in self._accounts if key != _OTHERS]
        if pool is None:
            pool = Pools().make(PoolName.INFERENCE_ACCOUNTS)
        self._places: RestoredPlaces[_Key] = RestoredPlaces(pool, own, now)
        for key in own:
            if key not in self._places:
                self._fold(key)

    def open(self, request: InferenceRequest, owner: SharePath, now: int) -> None:
        """Open the account of a request of ``owner``, if its share permits it, or use it again."""
        key = _key(request)
        if key == _OTHERS:
            return
        admission = self._places.claim(key, owner, now)
        for displaced in admission.displaced:
            self._fold(displaced)
        if admission:
            self._accounts.setdefault(key, _InferenceAccount())

    def _fold(self, key: _Key) -> None:
        """Add an account to the shared one."""
        self._accounts.setdefault(_OTHERS, _InferenceAccount()).add(self._accounts.pop(key))

    def add(self, results: Iterable[RequestEnergy]) -> None:
        """Add requests with their final energy."""
        for result in results:
            request = result.request
            account = self._account(_key(request))
            account.input += result.input
            account.output += result.output
            account.tokens_in += request.context
            account.tokens_out += request.generated
            account.requests[result.method] += 1
            bound = bisect_left(REQUEST_ENERGY_BOUNDS, result.energy)
            if bound < len(account.counts):
                account.counts[bound] += 1

    def _account(self, key: _Key) -> _InferenceAccount:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts.setdefault(_OTHERS, _InferenceAccount())
        return account

    def rows(self) -> tuple[InferenceRow, ...]:
        """One row for each account."""
        return tuple(_row(key, account) for key, account in self._accounts.items())


def _key(request: InferenceRequest) -> _Key:
    return shortened_name(request.service), shortened_name(request.model), request.owner


def _account(row: InferenceRow) -> _InferenceAccount:
    """The account of an earlier run; an older release may have had other methods or buckets."""
    account = _InferenceAccount(
        row.energy.get("input", 0),
        row.energy.get("output", 0),
        row.tokens.get("input", 0),
        row.tokens.get("output", 0),
    )
    for method, count in row.requests.items():
        account.requests[method] = count
    if len(row.buckets) == len(account.counts):
        account.counts = [after - before for before, after in pairwise((0, *row.buckets))]
    return account


def _row(key: _Key, account: _InferenceAccount) -> InferenceRow:
    total, buckets = 0, []
    for count in account.counts:
        total += count
        buckets.append(total)
    return InferenceRow(
        key[0],
        key[1],
        {"input": Microjoules(account.input), "output": Microjoules(account.output)},
        {"input": account.tokens_in, "output": account.tokens_out},
        {str(method): count for method, count in account.requests.items()},
        tuple(buckets),
        key[2],
    )
