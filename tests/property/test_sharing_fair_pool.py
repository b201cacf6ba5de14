"""A pool never exceeds its limit, and no owner can take the share of another."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import Principal
from wattspan.sharing.fair_pool import FairPool, Overflow, SharePath, share_path

paths = st.sampled_from(
    [
        share_path(Principal(1)),
        share_path(Principal(2)),
        share_path(Principal(1, "a")),
        share_path(Principal(1, "b")),
        share_path(Principal(0, pod="p")),
        share_path(Principal(1000, pod="p")),
        share_path("192.0.2.1"),
        share_path(None),
    ]
)
limits = st.integers(1, 12)
displacing = st.sampled_from([Overflow.REPLACE, Overflow.REFUSE])
MODEST, GREEDY = share_path(Principal(1000)), share_path(Principal(1001))


@given(
    limits,
    st.sampled_from(Overflow),
    st.integers(0, 20),
    st.lists(st.tuples(paths, st.integers(0, 30), st.sampled_from("aaatrx")), max_size=150),
)
def test_pool_agrees_with_its_admissions_for_any_use(
    limit: int, overflow: Overflow, lifetime: int, steps: list[tuple[SharePath, int, str]]
) -> None:
    pool: FairPool[int] = FairPool(limit, overflow, lifetime)
    inside: dict[int, SharePath] = {}
    refused = 0
    for now, (path, item, act) in enumerate(steps):
        if act == "a":
            known = item in inside
            admission = pool.admit(item, path, now)
            for lost in admission.displaced:
                del inside[lost]
            refused += not admission
            if admission and not known:
                inside[item] = path
        elif act == "t":
            pool.touch(item, now)
        elif act == "r":
            assert pool.remove(item) == (inside.pop(item, None) is not None)
        else:
            for lost in pool.expire(now):
                del inside[lost]
        assert len(pool) == len(inside) <= limit
        assert pool.left == limit - len(inside)
        assert all(one in pool for one in inside)
        held = Counter(path[0] for path in inside.values())
        assert pool.holdings(path)[0] == held[path[0]]
    assert pool.refused == refused
    assert overflow is not Overflow.RESERVE or not pool.displaced


@given(
    st.integers(2, 40),
    displacing,
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=300),
)
def test_owner_within_an_equal_share_is_neither_refused_nor_displaced(
    limit: int, overflow: Overflow, asked: list[tuple[int, int]]
) -> None:
    pool: FairPool[object] = FairPool(limit, overflow)
    modest: set[object] = set()
    share = limit // 7
    for number, (owner, container) in enumerate(asked):
        path: SharePath = (owner, container) if container else (owner,)
        if pool.admit(number, path):
            assert len(pool) <= limit
        if len(modest) < share:
            admission = pool.admit(("modest", number), MODEST)
            assert admission
            modest.add(("modest", number))
        assert all(item in pool for item in modest)


@given(st.integers(2, 60), displacing, st.permutations(range(120)))
def test_division_does_not_depend_on_the_order_of_requests(
    limit: int, overflow: Overflow, order: list[int]
) -> None:
    pool: FairPool[int] = FairPool(limit, overflow)
    for number in order:
        pool.admit(number, (number % 3,))
    held = sorted(pool.holdings((owner,))[0] for owner in range(3))
    assert sum(held) == min(limit, 120)
    assert held[-1] - held[0] <= 1


@given(st.integers(1, 30), displacing, st.lists(st.tuples(paths, st.booleans()), max_size=150))
def test_units_are_taken_from_the_owner_that_is_named(
    limit: int, overflow: Overflow, steps: list[tuple[SharePath, bool]]
) -> None:
    pool: FairPool[object] = FairPool(limit, overflow)
    held: Counter[SharePath] = Counter()
    for path, adds in steps:
        if adds:
            admission = pool.acquire(path)
            held.subtract(admission.displaced)
            held[path] += bool(admission)
        elif held[path]:
            pool.release(path)
            held[path] -= 1
        assert len(pool) == held.total() <= limit
        assert min(held.values(), default=0) >= 0


@pytest.mark.slow
def test_flood_of_one_owner_costs_the_same_for_each_item() -> None:
    pool: FairPool[int] = FairPool(50_000, Overflow.REPLACE)
    for number in range(120_000):
        pool.admit(number, GREEDY)
    assert pool.admit(-1, MODEST).displaced == (70_000,)
    assert pool.displaced == 70_001
