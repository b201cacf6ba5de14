"""Every pool that users fill is listed, made by the agent, and fair to a modest user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wattspan.model import Principal
from wattspan.sharing.fair_pool import FairCache, FairPool, Overflow, share_path
from wattspan.sharing.pools import PoolName, Pools

ROOT = Path(__file__).parents[3]
MODEST = share_path(Principal(1000))
GREEDY = [share_path(Principal(1001))]
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


@pytest.mark.parametrize("greedy", [GREEDY, MINTED], ids=["one user", "64 containers"])
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


def test_value_without_a_place_is_not_kept() -> None:
    kept: FairCache[str, int] = FairCache(FairPool(1, Overflow.REFUSE))
    kept.store("first", 1, "a", 0)
    kept.store("second", 2, "a", 0)
    assert kept == {"first": 1}


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
