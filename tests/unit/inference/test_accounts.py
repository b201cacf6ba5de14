"""Totals of requests to language models, with energy and without: rows, buckets, bounds."""

from __future__ import annotations

from dataclasses import replace

from wattspan.inference.accounts import InferenceAccounts, UnmeteredAccounts, UnmeteredRole
from wattspan.inference.division import DivisionMethod, RequestEnergy
from wattspan.inference.host_energy import HostShare
from wattspan.inference.requests import InferenceRequest
from wattspan.model import (
    REQUEST_ENERGY_BOUNDS,
    SECOND,
    HostRequests,
    Microjoules,
    UnmeteredRow,
)
from wattspan.sharing.fair_pool import SharePath
from wattspan.sharing.pools import PoolName
from wattspan.spans.values import InferenceDetails

MAX_ACCOUNTS = PoolName.INFERENCE_ACCOUNTS.limit
MAX_UNMETERED = PoolName.UNMETERED_ACCOUNTS.limit
CLIENT, ENGINE = UnmeteredRole.CLIENT, UnmeteredRole.ENGINE


def _result(joules: float, *, model: str = "m", method: DivisionMethod = DivisionMethod.MODEL):
    details = InferenceDetails(model, cached=4)
    request = InferenceRequest.of(b"r" * 8, 0, 10, (10, 20), details, service="s")
    energy = round(1e6 * joules)
    parts = Microjoules(energy // 4), Microjoules(energy - energy // 4)
    return RequestEnergy(request, Microjoules(energy), *parts, None, method)


USER, OTHER_USER = (("uid", 1),), (("uid", 2),)


def _add(
    accounts: InferenceAccounts, results: list[RequestEnergy], owner: SharePath = USER, now: int = 0
) -> None:
    for result in results:
        accounts.open(result.request, owner, now)
    accounts.add(results)


def test_energy_and_tokens_are_summed_by_service_and_model() -> None:
    accounts = InferenceAccounts()
    _add(accounts, [_result(4), _result(8), _result(1, model="n", method=DivisionMethod.TOKENS)])

    first, second = accounts.rows()

    assert (first.service, first.model, second.model) == ("s", "m", "n")
    assert first.energy == {"input": 3_000_000, "output": 9_000_000}
    assert first.tokens == {"input": 20, "output": 40}
    assert first.requests == {"model": 2, "tokens": 0}
    assert second.requests == {"model": 0, "tokens": 1}


def test_buckets_are_cumulative_and_include_their_bound() -> None:
    accounts = InferenceAccounts()
    _add(accounts, [_result(joules) for joules in (0.0, 0.1, 0.2, 3, 20_000)])

    (row,) = accounts.rows()

    assert len(row.buckets) == len(REQUEST_ENERGY_BOUNDS)
    assert row.buckets == (2, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4)
    assert sum(row.requests.values()) == 5


def test_models_beyond_the_limit_share_an_account() -> None:
    accounts = InferenceAccounts()
    _add(accounts, [_result(1, model=str(i)) for i in range(MAX_ACCOUNTS + 5)])
    _add(accounts, [_result(1, model="other model"), _result(1, model="3")])

    rows = {(row.service, row.model): row for row in accounts.rows()}

    assert len(rows) == MAX_ACCOUNTS + 1
    assert sum(rows["other", "other"].requests.values()) == 6
    assert sum(rows["s", "3"].requests.values()) == 2


def test_totals_continue_from_an_earlier_run() -> None:
    first = InferenceAccounts()
    _add(first, [_result(4), _result(0.2, model="n", method=DivisionMethod.TOKENS)])
    both = InferenceAccounts(first.rows())
    assert both.rows() == first.rows()

    _add(both, [_result(8)])
    whole = InferenceAccounts()
    _add(whole, [_result(4), _result(0.2, model="n", method=DivisionMethod.TOKENS), _result(8)])
    assert both.rows() == whole.rows()


def test_buckets_of_a_release_with_other_bounds_are_counted_anew() -> None:
    first = InferenceAccounts()
    _add(first, [_result(4)])
    (row,) = first.rows()
    (after,) = InferenceAccounts([replace(row, buckets=(0, 1))]).rows()
    assert after == replace(row, buckets=(0,) * len(REQUEST_ENERGY_BOUNDS))


def test_displaced_account_is_added_to_the_shared_one() -> None:
    accounts = InferenceAccounts()
    _add(accounts, [_result(1, model=str(i)) for i in range(MAX_ACCOUNTS)])
    restored = InferenceAccounts(accounts.rows())
    for owned in (accounts, restored):
        _add(owned, [_result(1, model="modest")], OTHER_USER)
        rows = {row.model: row for row in owned.rows()}
        assert len(rows) == MAX_ACCOUNTS + 1
        assert rows["other"].requests["model"] == 1
        assert sum(row.buckets[-1] for row in rows.values()) == MAX_ACCOUNTS + 1


def test_account_without_requests_for_a_day_gives_its_place_to_another_model() -> None:
    accounts = InferenceAccounts()
    _add(accounts, [_result(1, model=str(i)) for i in range(MAX_ACCOUNTS)])
    _add(accounts, [_result(1, model="0")], now=3600 * SECOND)
    _add(accounts, [_result(1, model="new")], now=24 * 3600 * SECOND)
    assert [row.model for row in accounts.rows()] == ["0", "other", "new"]


def test_request_that_settles_after_the_loss_of_its_account_is_counted() -> None:
    accounts = InferenceAccounts()
    accounts.add([_result(1)])
    others = _result(1).request._replace(service="other", model="other")
    accounts.open(others, USER, 0)
    assert [row.model for row in accounts.rows()] == ["other"]


def test_restored_accounts_beyond_the_limit_are_added_to_the_shared_one() -> None:
    one = InferenceAccounts()
    _add(one, [_result(4)])
    rows = [replace(one.rows()[0], model=str(i)) for i in range(MAX_ACCOUNTS + 3)]
    restored = InferenceAccounts(rows).rows()
    assert len(restored) == MAX_ACCOUNTS + 1
    assert sum(row.energy["output"] for row in restored) == sum(r.energy["output"] for r in rows)


def test_equal_names_of_two_owners_have_an_account_each() -> None:
    accounts = InferenceAccounts()
    for owner, label in ((USER, "ann"), (OTHER_USER, "bob")):
        mine = _result(1)
        mine = mine._replace(request=mine.request._replace(owner=label))
        _add(accounts, [mine], owner)
    assert [(row.service, row.model, row.owner) for row in accounts.rows()] == [
        ("s", "m", "ann"),
        ("s", "m", "bob"),
    ]


def _whole(result: RequestEnergy, cpu: int, **others: int) -> RequestEnergy:
    return result._replace(host=HostShare({"cpu": cpu, **others}, True))


def test_requests_with_known_energy_of_the_host_are_counted_apart() -> None:
    accounts = InferenceAccounts()
    _add(
        accounts,
        [
            _whole(_result(4), 2_000_000, memory=500_000),
            _result(1)._replace(host=HostShare({"cpu": 7}, False)),
            _whole(_result(8), 1_000_000, memory=0),
        ],
    )

    (row,) = accounts.rows()

    assert row.host.energy == {"gpu": 12_000_000, "cpu": 3_000_000, "memory": 500_000}
    assert (row.host.requests, row.host.tokens) == (2, {"input": 20, "output": 40})
    assert row.host.counts == dict.fromkeys(("gpu", "cpu", "memory"), (2, 40))
    assert row.host.buckets == (0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2)
    assert sum(row.requests.values()) == 3
    assert InferenceAccounts(accounts.rows()).rows() == accounts.rows()


def test_each_part_counts_the_requests_that_have_it() -> None:
    accounts = InferenceAccounts()
    _add(accounts, [_whole(_result(4), 2, idle=0), _whole(_result(8), 1)])
    (row,) = accounts.rows()
    assert row.host.counts == {"gpu": (2, 40), "cpu": (2, 40), "idle": (1, 20)}


def test_requests_without_counters_of_the_cpu_have_no_energy_of_the_host() -> None:
    accounts = InferenceAccounts()
    _add(accounts, [_result(4)])
    assert accounts.rows()[0].host == HostRequests()


# --------------------------------------------------------------------------- without energy


def _request(model: str = "m", service: str = "s") -> InferenceRequest:
    return InferenceRequest.of(b"r" * 8, 0, 10, (10, 20), InferenceDetails(model), service=service)


def _sums(accounts: UnmeteredAccounts) -> tuple[int, int, int]:
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


def test_totals_without_energy_continue_from_rows() -> None:
    accounts = UnmeteredAccounts()
    accounts.add(_request(), CLIENT, USER, 0)
    later = UnmeteredAccounts(accounts.rows())
    later.add(_request(), CLIENT, USER, 0)
    assert _sums(later) == (2, 20, 40)
    assert len(later.rows()) == 1


def test_models_beyond_the_limit_share_an_account_of_their_role() -> None:
    accounts = UnmeteredAccounts()
    for number in range(MAX_UNMETERED + 3):
        accounts.add(_request(str(number)), CLIENT, USER, number)
    rows = {row.model: row for row in accounts.rows()}
    assert len(rows) == MAX_UNMETERED + 1
    assert (rows["other"].service, rows["other"].role, rows["other"].requests) == (
        "other", "client", 3,
    )  # fmt: skip
    assert _sums(accounts) == (
        MAX_UNMETERED + 3,
        10 * (MAX_UNMETERED + 3),
        20 * (MAX_UNMETERED + 3),
    )


def test_earlier_rows_without_energy_beyond_the_limit_are_folded() -> None:
    rows = [
        UnmeteredRow("s", str(number), "client", 1, {"input": 1})
        for number in range(MAX_UNMETERED + 2)
    ]
    rows.append(UnmeteredRow("other", "other", "client", 5, {"output": 2}))
    accounts = UnmeteredAccounts(rows)
    assert len(accounts.rows()) == MAX_UNMETERED + 1
    assert _sums(accounts) == (MAX_UNMETERED + 7, MAX_UNMETERED + 2, 2)


def test_name_of_the_shared_account_has_an_account_of_its_role() -> None:
    accounts = UnmeteredAccounts()
    accounts.add(_request("other", "other"), ENGINE, USER, 0)
    assert accounts.rows()[0].key == ("other", "other", "", "engine")
