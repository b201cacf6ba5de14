"""Every pool that users fill is listed, made by the agent, and fair to a modest user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wattspan.model import SECOND, Principal
from wattspan.sharing.fair_pool import FairCache, FairPool, Overflow, share_path
from wattspan.sharing.pools import PoolName, Pools, RateLimiter

ROOT = Path(__file__).parents[3]
MODEST = share_path(Principal(1000))
GREEDY = share_path(Principal(1001))
MINTED = [share_path(Principal(1001, f"{number:064x}")) for number in range(64)]
LIMIT = 64


def test_documentation_lists_exactly_the_pools_of_the_agent() -> None:
    section = (ROOT / "docs/security.md").read_text().split("### Shared pools")[1].split("###")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (reserve|refuse|replace)\b", section, re.MULTILINE)
    assert rows == [(str(name), str(name.overflow)) for name in PoolName]


def test_agent_makes_every_pool_by_its_rule() -> None:
    made: set[str] = set()
    for file in (ROOT / "agent/wattspan").rglob("*.py"):
        made |= set(re.findall(r"\.make\(\s*PoolName\.(\w+)", file.read_text()))
    assert made == {name.name for name in PoolName}


@pytest.mark.parametrize("greedy", [[GREEDY], MINTED], ids=["one user", "64 containers"])
@pytest.mark.parametrize("name", PoolName)
def test_modest_user_gets_places_beside_a_greedy_one(
    name: PoolName, greedy: list[tuple[object, ...]]
) -> None:
    pools = Pools()
    pool = pools.make(name, LIMIT)
    for number in range(10 * LIMIT):
        pool.admit(number, greedy[number % len(greedy)])
    reserved = name.overflow is Overflow.RESERVE
    for number in range(LIMIT // 4 if reserved else LIMIT // 2):
        assert pool.admit(("modest", number), MODEST)
    for number in range(10 * LIMIT):
        pool.admit(-number, greedy[number % len(greedy)])
    assert sum(("modest", number) in pool for number in range(LIMIT // 4)) == LIMIT // 4
    assert len(pool) <= LIMIT
    counts = pools.refusals()
    assert sum(counts.values()) >= 9 * LIMIT
    assert {pool for pool, _ in counts} == {name}


@pytest.mark.parametrize("overflow", [Overflow.REFUSE, Overflow.REPLACE])
def test_value_without_a_place_is_not_kept(overflow: Overflow) -> None:
    kept: FairCache[str, int] = FairCache(FairPool(1, overflow))
    kept.store("first", 1, "a", 0)
    kept.store("second", 2, "a", 0)
    assert kept == ({"first": 1} if overflow is Overflow.REFUSE else {"second": 2})


def test_counters_of_pools_of_one_name_are_summed() -> None:
    pools = Pools()
    for _ in range(2):
        full = pools.make(PoolName.CONNECTIONS, 0)
        assert not full.acquire(MODEST)
    assert pools.refusals() == {("connections", "full"): 2, ("connections", "displaced"): 0}


def test_used_part_is_that_of_the_fullest_pool_of_a_name() -> None:
    pools = Pools()
    for used in (1, 3):
        pool = pools.make(PoolName.HANDSHAKES, 4)
        for _ in range(used):
            pool.force(MODEST)
    pools.make(PoolName.ENGINES, 0)
    assert pools.used() == {"handshakes": 0.75, "engines": 0.0}


def test_least_recently_used_item_is_displaced() -> None:
    pool: FairPool[str] = FairPool(3, Overflow.REPLACE)
    for item in "abc":
        pool.admit(item, GREEDY)
    pool.admit("a", GREEDY)
    pool.touch("unknown")
    assert pool.admit("d", MODEST).displaced == ("b",)
    assert pool.admit("e", GREEDY).displaced == ("c",)
    assert pool.scarce
    assert not pool.idle


def test_reserved_bytes_are_released_and_forced() -> None:
    pool: FairPool[object] = FairPool(100)
    assert not pool.acquire(GREEDY, 101)
    assert pool.acquire(GREEDY, 100)
    assert not pool.acquire(MODEST)
    pool.force(MODEST, 7)
    assert pool.left == -7
    pool.release(GREEDY, 100)
    pool.release(MODEST, 7)
    assert pool.acquire(MODEST, 0)
    pool.release(MODEST, 0)
    assert pool.idle
    assert pool.refused == 2


def test_unit_of_the_largest_container_is_displaced() -> None:
    pool: FairPool[object] = FairPool(7, Overflow.REFUSE)
    large, small = share_path(Principal(1001, "a")), share_path(Principal(1001, "b"))
    for path in (large, large, large, large, small, GREEDY, GREEDY):
        assert pool.acquire(path)
    assert not pool.acquire(large)
    assert pool.acquire(MODEST).displaced == (large,)
    assert pool.acquire(small).displaced == (large,)
    assert not pool.acquire(GREEDY)
    pool.release(small)
    pool.release(small)
    pool.force(GREEDY, 2)
    assert pool.acquire(small).displaced == (GREEDY,)
    assert pool.holdings((*GREEDY, "no", "such")) == (6, 0, 0)


def test_direct_item_of_a_user_replaces_one_of_a_container() -> None:
    pool: FairPool[int] = FairPool(4, Overflow.REPLACE)
    container = share_path(Principal(1001, "a"))
    for number in range(4):
        pool.admit(number, container)
    assert pool.admit(4, GREEDY).displaced == (0,)
    assert pool.admit(5, GREEDY).displaced == (1,)
    assert pool.admit(6, GREEDY).displaced == (4,)
    assert not FairPool[int](0, Overflow.REPLACE).admit(0, GREEDY)


def test_place_of_a_larger_owner_or_container_may_be_given_away() -> None:
    pool: FairPool[object] = FairPool(20)
    container, other = share_path(Principal(1001, "a")), share_path(Principal(1001, "b"))
    pool.force(container, 5)
    pool.force(other, 3)
    pool.force(GREEDY, 2)
    pool.force(MODEST, 8)
    assert pool.exceeds(container, other)
    assert pool.exceeds(container, GREEDY)
    assert not pool.exceeds(other, GREEDY)
    assert not pool.exceeds(GREEDY, other)
    assert pool.exceeds(GREEDY, MODEST)
    assert not pool.exceeds(MODEST, GREEDY)
    assert pool.exceeds(MODEST, share_path("unknown"))
    assert not pool.exceeds(container, container)
    assert pool.exceeds(share_path(Principal(1001, "a")), (*GREEDY, "no", "such"))


# -------------------------------------------------------------------------------- rates of requests


def test_full_buckets_are_evicted_first() -> None:
    pace = RateLimiter(1, 10, 3)
    for peer, asked in (("once", 1), ("thrice", 3), ("often", 10)):
        for _ in range(asked):
            pace.admits(peer, 0)
    assert pace.admits("new", 4 * SECOND)
    assert len(pace) == 2, "who owes nothing any more is not remembered"
    assert [pace.admits("often", 4 * SECOND) for _ in range(5)] == [True] * 4 + [False]
