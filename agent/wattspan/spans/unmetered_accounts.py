"""Requests to language models whose energy is unknown, in a bounded number of accounts.

An application that calls a model elsewhere has tokens and no energy of them. So has an engine while
no process of it is known to use a GPU. No energy is divided by these tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wattspan.attribution.top_n import OTHER
from wattspan.model import ModelEnum, UnmeteredRow
from wattspan.sharing.fair_pool import FairPool, RestoredPlaces, SharePath
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.aggregator import shortened_name
from wattspan.spans.inference_requests import InferenceRequest

_Key = tuple[str, str, str, str]  # service, model, owner, role


class UnmeteredRole(ModelEnum):
    """The part that the sender has in a request."""

    CLIENT = "client"  # it calls a model elsewhere
    ENGINE = "engine"  # an engine without known energy of a GPU for it


@dataclass(slots=True)
class _UnmeteredAccount:
    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    def add(self, requests: int, tokens_in: int, tokens_out: int) -> None:
        self.requests += requests
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out


class UnmeteredAccounts:
    """Totals, which continue from the ``rows`` of an earlier run. Sums over all rows never fall."""

    def __init__(
        self,
        rows: Iterable[UnmeteredRow] = (),
        pool: FairPool[_Key] | None = None,
        now: int = 0,
    ) -> None:
        self._accounts: dict[_Key, _UnmeteredAccount] = {}
        for row in rows:
            tokens = row.tokens.get("input", 0), row.tokens.get("output", 0)
            self._accounts[row.key] = _UnmeteredAccount(row.requests, *tokens)
        own = [key for key in self._accounts if key != _others(key[-1])]
        if pool is None:
            pool = Pools().make(PoolName.UNMETERED_ACCOUNTS)
        self._places: RestoredPlaces[_Key] = RestoredPlaces(pool, own, now)
        for key in own:
            if key not in self._places:
                self._fold(key)

    def add(
        self, request: InferenceRequest, role: UnmeteredRole, owner: SharePath, now: int
    ) -> None:
        """Count a request of ``owner``."""
        service, model = shortened_name(request.service), shortened_name(request.model)
        key: _Key = (service, model, request.owner, role.value)
        admission = self._places.claim(key, owner, now)
        for displaced in admission.displaced:
            self._fold(displaced)
        if not admission:
            key = _others(role.value)
        account = self._accounts.setdefault(key, _UnmeteredAccount())
        account.add(1, request.context, request.generated)

    def _fold(self, key: _Key) -> None:
        """Add an account to the shared one of its role."""
        lost = self._accounts.pop(key)
        account = self._accounts.setdefault(_others(key[-1]), _UnmeteredAccount())
        account.add(lost.requests, lost.tokens_in, lost.tokens_out)

    def rows(self) -> tuple[UnmeteredRow, ...]:
        """One row for each account."""
        return tuple(
            UnmeteredRow(
                service,
                model,
                role,
                account.requests,
                {"input": account.tokens_in, "output": account.tokens_out},
                owner,
            )
            for (service, model, owner, role), account in self._accounts.items()
        )


def _others(role: str) -> _Key:
    return OTHER, OTHER, "", role
