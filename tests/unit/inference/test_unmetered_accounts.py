"""Requests without energy: rows, checkpoints and the bound."""

from __future__ import annotations

from wattspan.inference.accounts import UnmeteredAccounts, UnmeteredRole
from wattspan.inference.requests import InferenceRequest
from wattspan.model import UnmeteredRow
from wattspan.sharing.fair_pool import SharePath
from wattspan.sharing.pools import POOL_RULES, PoolName
from wattspan.spans.values import InferenceDetails

CLIENT, ENGINE = UnmeteredRole.CLIENT, UnmeteredRole.ENGINE
USER = (("uid", 1),)
MOST = POOL_RULES[PoolName.UNMETERED_ACCOUNTS].limit


def _request(model: str = "m", service: str = "s") -> InferenceRequest:
    return InferenceRequest.of(b"r" * 8, 0, 10, (10, 20), InferenceDetails(model), service=service)


def _sum(accounts: UnmeteredAccounts) -> tuple[int, int, int]:
    rows = accounts.rows()
    return (
        sum(row.requests for row in rows),
        sum(row.tokens["input"] for row in rows),
        sum(row.tokens["output"] for row in rows),
    )


def test_requests_and_tokens_are_summed_by_role() -> None:
    accounts = UnmeteredAccounts()
    for role in (CLIENT, CLIENT, ENGINE):
        accounts.add(_request(), role, USER, 0)
    assert accounts.rows() == (
        UnmeteredRow("s", "m", "client", 2, {"input": 20, "output": 40}),
        UnmeteredRow("s", "m", "engine", 1, {"input": 10, "output": 20}),
    )


def test_totals_continue_from_rows() -> None:
    accounts = UnmeteredAccounts()
    accounts.add(_request(), CLIENT, USER, 0)
    later = UnmeteredAccounts(accounts.rows())
    later.add(_request(), CLIENT, USER, 0)
    assert _sum(later) == (2, 20, 40)
    assert len(later.rows()) == 1


def test_models_beyond_the_limit_share_an_account_of_their_role() -> None:
    accounts = UnmeteredAccounts()
    for number in range(MOST + 3):
        accounts.add(_request(str(number)), CLIENT, USER, number)
    rows = {row.model: row for row in accounts.rows()}
    assert len(rows) == MOST + 1
    assert (rows["other"].service, rows["other"].role, rows["other"].requests) == (
        "other", "client", 3,
    )  # fmt: skip
    assert _sum(accounts) == (MOST + 3, 10 * (MOST + 3), 20 * (MOST + 3))


def test_earlier_rows_beyond_the_limit_are_folded() -> None:
    rows = [UnmeteredRow("s", str(number), "client", 1, {"input": 1}) for number in range(MOST + 2)]
    rows.append(UnmeteredRow("other", "other", "client", 5, {"output": 2}))
    accounts = UnmeteredAccounts(rows)
    assert len(accounts.rows()) == MOST + 1
    assert _sum(accounts) == (MOST + 7, MOST + 2, 2)


def test_name_of_the_shared_account_has_an_account_of_its_role() -> None:
    owner: SharePath = USER
    accounts = UnmeteredAccounts()
    accounts.add(_request("other", "other"), ENGINE, owner, 0)
    assert accounts.rows()[0].key == ("other", "other", "", "engine")
