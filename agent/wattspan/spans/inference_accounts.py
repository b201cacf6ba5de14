"""The energy and the tokens of requests to language models, in a bounded number of accounts.

Applications choose service names and clients may choose model names. The first pairs have an
account of their own, the others share one; no account ever falls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from wattspan.attribution.top_n import OTHER
from wattspan.model import REQUEST_ENERGY_BOUNDS, InferenceRow, Microjoules
from wattspan.spans.aggregator import shortened_name
from wattspan.spans.request_division import DivisionMethod, RequestEnergy

MAX_ACCOUNTS = 64
"""Pairs of service and model with an account of their own."""


@dataclass(slots=True)
class _InferenceAccount:
    input: int = 0
    output: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DivisionMethod, 0))
    counts: list[int] = field(default_factory=lambda: [0] * len(REQUEST_ENERGY_BOUNDS))


class InferenceAccounts:
    """Totals, which continue from the ``rows`` of an earlier run."""

    def __init__(self, rows: Iterable[InferenceRow] = ()) -> None:
        self._accounts = {(row.service, row.model): _account(row) for row in rows}

    def add(self, results: Iterable[RequestEnergy]) -> None:
        """Add requests with their final energy."""
        for result in results:
            request = result.request
            account = self._account(shortened_name(request.service), shortened_name(request.model))
            account.input += result.input
            account.output += result.output
            account.tokens_in += request.context
            account.tokens_out += request.generated
            account.requests[result.method] += 1
            bound = bisect_left(REQUEST_ENERGY_BOUNDS, result.energy)
            if bound < len(account.counts):
                account.counts[bound] += 1

    def _account(self, service: str, model: str) -> _InferenceAccount:
        key = service, model
        if key not in self._accounts:
            named = len(self._accounts) - ((OTHER, OTHER) in self._accounts)
            if named >= MAX_ACCOUNTS:
                key = OTHER, OTHER
            self._accounts.setdefault(key, _InferenceAccount())
        return self._accounts[key]

    def rows(self) -> tuple[InferenceRow, ...]:
        """One row for each account."""
        return tuple(
            _row(service, model, account) for (service, model), account in self._accounts.items()
        )


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


def _row(service: str, model: str, account: _InferenceAccount) -> InferenceRow:
    total, buckets = 0, []
    for count in account.counts:
        total += count
        buckets.append(total)
    return InferenceRow(
        service,
        model,
        {"input": Microjoules(account.input), "output": Microjoules(account.output)},
        {"input": account.tokens_in, "output": account.tokens_out},
        {str(method): count for method, count in account.requests.items()},
        tuple(buckets),
    )
