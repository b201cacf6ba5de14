"""Sharing of connections, places and turns among owners."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Generator
from dataclasses import dataclass

import pytest

from wattspan.http.limits import (
    ConnectionLimiter,
    ConnectionState,
    FairQueue,
    FairTurns,
    ServerCapacity,
    ServerLimits,
)
from wattspan.http.sockets import Peer, UserPrincipals, connection_owner, local_principal
from wattspan.model import SECOND, Principal
from wattspan.sharing.fair_pool import FairPool
from wattspan.testing import ManualClock


@types.coroutine
def one_turn() -> Generator[None, None, None]:
    """One turn of the event loop."""
    yield


GREEDY, HONEST = "greedy", "honest"


@dataclass(eq=False)
class Caller:
    """A connection that is only counted."""

    room: ServerCapacity
    answering: bool = False
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        self.room.remove(self)


def crowded(room: ServerCapacity, many: int) -> list[Caller]:
    """``many`` connections of one peer, each in the middle of a request."""
    callers = [Caller(room) for _ in range(many)]
    for one in callers:
        room.add(one, GREEDY)
    return callers


def test_rejected_connection_uses_no_slot() -> None:
    room = ServerCapacity(ServerLimits(connections=4), ManualClock())
    callers = crowded(room, 7)
    honest = Caller(room)
    assert room.add(honest, HONEST)
    assert sum(one.closed for one in callers) == 1
    assert set(callers) - {one for one in callers if one.closed} < room.connections


def test_number_of_explained_rejections_is_bounded() -> None:
    room = ServerCapacity(ServerLimits(connections=4), ManualClock())
    crowded(room, 8)
    assert not room.overloaded
    crowded(room, 1)
    assert room.overloaded


def test_rejected_client_is_served_once_a_place_is_free() -> None:
    room = ServerCapacity(ServerLimits(connections=2), ManualClock())
    callers = crowded(room, 3)
    for one in callers:
        one.close()
    assert room.connections == frozenset()
    assert room.add(Caller(room), GREEDY)


def test_active_requests_are_not_dropped_for_an_equal_owner() -> None:
    crowd: ConnectionLimiter[int] = ConnectionLimiter(2)
    assert crowd.add(1, GREEDY, 0)
    assert crowd.add(2, GREEDY, 0)
    assert crowd.eviction_candidate(GREEDY, 0) is None
    assert not crowd.add(3, GREEDY, 0)
    crowd.set_state(1, ConnectionState.IDLE, 1)
    assert crowd.eviction_candidate(GREEDY, 2) == 1
    assert crowd.eviction_candidate(HONEST, 2) == 1
    assert crowd.eviction_candidate(GREEDY, 60 * SECOND) == 1


def test_owner_gets_at_most_half_of_the_free_slots() -> None:
    shares: FairPool[object] = FairPool(8)
    taken = {owner: sum(bool(shares.acquire((owner,))) for _ in range(8)) for owner in "abcd"}
    assert taken == {"a": 4, "b": 2, "c": 1, "d": 1}
    shares.release(("a",), 4)
    assert [bool(shares.acquire(("d",))) for _ in range(3)] == [True, True, False]


def test_one_body_may_take_all_that_is_left() -> None:
    shares: FairPool[object] = FairPool(100)
    assert not shares.acquire(("a",), 101)
    assert shares.acquire(("a",), 100)
    assert not shares.acquire(("b",), 1)
    shares.release(("a",), 100)
    assert shares.acquire(("b",), 100)


def test_owners_are_served_in_turn_for_any_queue_length() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1"):
        queue.put((item[0],), item)
    assert queue.pop(lambda owner: owner != ("a",)) == "b1"
    assert [queue.pop() for _ in range(5)] == ["a1", "c1", "a2", "a3", None]


def test_lock_passes_to_waiting_owners_in_turn() -> None:
    lock, order = FairTurns(1), list[str]()

    async def work(name: str) -> None:
        async with lock.of(name[0]):
            order.append(name)
            await one_turn()

    async def scenario() -> None:
        tasks = [asyncio.ensure_future(work(name)) for name in ("a1", "a2", "a3", "b1", "b2")]
        await one_turn()
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with lock.of("c"):
            order.append("c")

    asyncio.run(scenario())
    assert order == ["a1", "b1", "b2", "a3", "c"]


def test_requests_of_owners_are_answered_in_turn() -> None:
    room, order = ServerCapacity(ServerLimits(), ManualClock()), list[str]()

    async def answer(name: str) -> None:
        async with room.turn(name[0]):
            order.append(name)

    async def scenario() -> None:
        await asyncio.gather(*map(answer, ("a1", "a2", "a3", "a4", "b1")))

    asyncio.run(scenario())
    assert order == ["a1", "b1", "a2", "a3", "a4"]


def test_requests_of_one_owner_that_last_leave_places_for_those_of_others() -> None:
    room, order = ServerCapacity(ServerLimits(connections=4), ManualClock()), list[str]()

    async def answer(name: str, over: asyncio.Event) -> None:
        async with room.turn(name[0]):
            order.append(name)
            await over.wait()

    async def scenario() -> None:
        over = asyncio.Event()
        tasks = [asyncio.ensure_future(answer(name, over)) for name in ("a1", "a2", "a3", "a4")]
        while len(order) < 2:
            await one_turn()
        tasks[2].cancel()
        tasks.append(asyncio.ensure_future(answer("b1", over)))
        while "b1" not in order:
            await one_turn()
        assert order == ["a1", "a2", "b1"]
        over.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a1", "a2", "b1", "a4"]

    asyncio.run(scenario())


class Owners(UserPrincipals):
    def __init__(self, owner: Principal | None) -> None:
        self.owner = owner

    def socket_owner(self, end: tuple[str, int], other: tuple[str, int]) -> Principal | None:
        return self.owner


@pytest.mark.parametrize(
    ("remote", "local", "user", "owner"),
    [
        ("127.0.0.1", "127.0.0.1", 7, Principal(7)),
        ("127.0.0.2", "127.0.0.1", None, "loopback"),
        ("::1", "::1", 7, Principal(7)),
        ("192.0.2.1", "192.0.2.1", 7, Principal(7)),
        ("192.0.2.1", "192.0.2.2", 7, "192.0.2.1"),
    ],
)
def test_connections_from_this_host_have_their_user_as_owner(
    remote: str, local: str, user: int | None, owner: object
) -> None:
    ends = (remote, 40_000), (local, 4318)
    found = local_principal(*ends, Owners(None if user is None else Principal(user)))
    assert connection_owner(ends[0], found) == owner


def test_requests_of_unidentified_peers_are_answered_in_turn() -> None:
    owner = Peer().quota_owner

    async def scenario() -> bool:
        async with asyncio.timeout(10), FairTurns(1).of(owner):
            return True

    assert asyncio.run(scenario())
