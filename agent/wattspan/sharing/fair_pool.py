"""A bounded pool, divided fairly among the owners that fill it.

Owners form levels: first a user or host, then its container. Only the first levels compete with
each other; all containers of a user share the user's part, so that a user gains nothing by creating
containers. `Overflow` is the behaviour of a full pool:

- REPLACE and REFUSE are max-min fair. An owner whose siblings have more gets a place of the largest
  one: its least recently used item is displaced. An owner that never has more than the limit
  divided by the number of owners is therefore neither refused nor displaced.
- RESERVE displaces nothing, for what is in use and cannot be taken away. An owner may hold as much
  as its level has left. So one owner gets half at most, a second one at least a quarter, and
  something is left for the next one as long as there are few.

Each operation costs the number of levels, and the logarithm of the number of siblings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)
V = TypeVar("V")

SharePath = tuple[Hashable, ...]
"""The levels of an owner, as `Principal.path`: the largest first."""

_MAX_UNUSED = 64  # outdated entries that trigger a compaction


def share_path(owner: Hashable) -> SharePath:
    """The levels of a principal or of another quota owner; unknown owners are one."""
    path = getattr(owner, "path", None)
    return path if isinstance(path, tuple) else (owner,)


class Overflow(StrEnum):
    """The behaviour of a full pool towards an owner that has its share."""

    REPLACE = "replace"  # the owner's least recently used item is displaced by its new one
    REFUSE = "refuse"  # the new item is refused
    RESERVE = "reserve"  # the new item is refused, and nothing is ever displaced


class Admission(NamedTuple, Generic[T]):
    """The answer of a pool; true if the item was admitted. ``displaced`` lost their places."""

    admitted: bool
    displaced: tuple[T, ...] = ()

    def __bool__(self) -> bool:
        return self.admitted


_ADMITTED: Admission[SharePath] = Admission(True)
_REFUSED: Admission[SharePath] = Admission(False)


class _Owner:
    """An owner: ``held`` is the sum of its own ``direct`` part and of its children."""

    __slots__ = ("above", "children", "direct", "heap", "held", "items", "key", "recorded")

    def __init__(self, above: _Owner | None, key: Hashable) -> None:
        self.above, self.key = above, key
        self.held = self.direct = 0
        self.children: dict[Hashable, _Owner] = {}
        # Entries of children, which may be outdated: none is less than what its child holds.
        self.heap: list[tuple[int, int, _Owner]] = []
        self.recorded = 0  # the largest entry of this owner in the heap above
        self.items: OrderedDict[Any, None] = OrderedDict()  # the longest unused first

    def largest(self) -> _Owner | None:
        """The child with most."""
        heap = self.heap
        while heap:
            entry, order, child = heap[0]
            if not child.held:
                heappop(heap)
            elif child.held == -entry:
                return child
            else:
                child.recorded = child.held
                heapreplace(heap, (-child.held, order, child))
        return None

    def record(self, child: _Owner, order: int) -> None:
        """Update the entry of a child that has gained."""
        if child.held <= child.recorded:
            return
        child.recorded = child.held
        heappush(self.heap, (-child.held, order, child))
        if len(self.heap) > 2 * len(self.children) + _MAX_UNUSED:
            self.heap = []
            for number, one in enumerate(self.children.values()):
                one.recorded = one.held
                self.heap.append((-one.held, number, one))
            heapify(self.heap)

    def loser(self) -> _Owner:
        """The owner at or below this one that is the next to lose a place."""
        owner = self
        while (child := owner.largest()) is not None and child.held > owner.direct:
            owner = child
        return owner


class _Place(NamedTuple):
    """The place of an item."""

    path: SharePath
    owner: _Owner
    used: int


class FairPool(Generic[T]):
    """At most ``limit`` items or units. For one thread, or under a lock.

    Items that were not used for ``lifetime`` nanoseconds expire; 0 is without end. A pool has
    either items (`admit`), or units that have no identity (`acquire`): of displaced units the
    path of the owner that loses one is returned.
    """

    def __init__(
        self, limit: int, overflow: Overflow = Overflow.RESERVE, lifetime: int = 0
    ) -> None:
        self.limit, self.overflow, self._lifetime = limit, overflow, lifetime
        self._root = _Owner(None, None)
        self._places: OrderedDict[T, _Place] = OrderedDict()  # the longest unused first
        self._order = 0
        self.refused = self.displaced = 0  # items and requests for units, since the start

    def __len__(self) -> int:
        """The items, or the units."""
        return self._root.held

    def __contains__(self, item: T) -> bool:
        return item in self._places

    @property
    def left(self) -> int:
        return self.limit - self._root.held

    @property
    def idle(self) -> bool:
        """True if the pool is empty."""
        return not self._root.held

    @property
    def scarce(self) -> bool:
        """True if less than three quarters are left."""
        return 4 * self.left < 3 * self.limit

    def holdings(self, path: SharePath) -> tuple[int, ...]:
        """The places that the owner holds at each of its levels."""
        found = []
        owner: _Owner | None = self._root
        for key in path:
            owner = None if owner is None else owner.children.get(key)
            found.append(0 if owner is None else owner.held)
        return tuple(found)

    def exceeds(self, path: SharePath, other: SharePath) -> bool:
        """True if a place of ``path`` may be given to ``other`` without a reversal of the two."""
        for own, theirs, key, other_key in zip(
            self.holdings(path), self.holdings(other), path, other, strict=False
        ):
            if key != other_key:
                return own > theirs + 1
        return len(path) > len(other) and self.holdings(path)[-1] > self._direct(other) + 1

    def _direct(self, path: SharePath) -> int:
        owner: _Owner | None = self._root
        for key in path:
            owner = None if owner is None else owner.children.get(key)
        return 0 if owner is None else owner.direct

    # ------------------------------------------------------------------------------- items

    def admit(self, item: T, path: SharePath, now: int = 0) -> Admission[T]:
        """Add ``item``, or use it again; expired and displaced items lose their places."""
        if item in self._places:
            self.touch(item, now)
            return Admission(True)
        lost: tuple[T, ...] = ()
        if self.left < 1:
            lost = tuple(self.expire(now))
        if not self.permits(path, 1):
            victim = self._victim(path)
            if victim is None:
                self.refused += 1
                return Admission(False, lost)
            self.displaced += 1
            displaced = next(iter(victim.items))
            self.remove(displaced)
            lost = (*lost, displaced)
        owner = self._add(path, 1)
        owner.items[item] = None
        self._places[item] = _Place(path, owner, now)
        return Admission(True, lost)

    def touch(self, item: T, now: int = 0) -> None:
        """Record a use of an item, if it has a place."""
        place = self._places.get(item)
        if place is not None:
            self._places[item] = place._replace(used=now)
            self._places.move_to_end(item)
            place.owner.items.move_to_end(item)

    def remove(self, item: T) -> bool:
        """Free the place of an item; False if it has none."""
        place = self._places.pop(item, None)
        if place is None:
            return False
        del place.owner.items[item]
        self._subtract(place.owner, 1)
        return True

    def expire(self, now: int) -> Sequence[T]:
        """Free the places of items that were not used for the lifetime; returns them."""
        expired: list[T] = []
        if self._lifetime:
            while self._places:
                item = next(iter(self._places))
                if now - self._places[item].used < self._lifetime:
                    break
                expired.append(item)
                self.remove(item)
        return expired

    # ------------------------------------------------------------------------------- units

    def acquire(self, path: SharePath, size: int = 1) -> Admission[SharePath]:
        """Reserve ``size`` units; a pool that displaces has units of one."""
        if not size or self.permits(path, size):
            self.force(path, size)
            return _ADMITTED
        victim = self._victim(path)
        if victim is None:
            self.refused += 1
            return _REFUSED
        self.displaced += 1
        lost = _path(victim)
        self._subtract(victim, 1)
        self._add(path, 1)
        return Admission(True, (lost,))

    def force(self, path: SharePath, size: int = 1) -> None:
        """Reserve ``size`` units regardless of the limit."""
        if size:
            self._add(path, size)

    def release(self, path: SharePath, size: int = 1) -> None:
        """Free units that were reserved."""
        if not size:
            return
        owner = self._root
        for key in path:
            owner = owner.children[key]
        self._subtract(owner, size)

    # ---------------------------------------------------------------------------- division

    def permits(self, path: SharePath, size: int = 1) -> bool:
        """True if there is room without displacement."""
        left = self.left
        if self.overflow is not Overflow.RESERVE:
            return size <= left
        for held in self.holdings(path):
            if held + size > left:
                return False
            left -= held
        return True

    def _victim(self, path: SharePath) -> _Owner | None:
        """The owner that loses a place to one of ``path``; None if it has its share."""
        if self.overflow is Overflow.RESERVE:
            return None
        owner = self._root
        for key in path:
            own = owner.children.get(key)
            held = 0 if own is None else own.held
            loser = owner.loser()
            most = owner.direct if loser is owner else _below(loser, owner).held
            if most > held + 1:  # at least two more: equal owners do not take turns
                return loser
            if own is None:
                return None
            owner = own
        loser = owner.loser()
        if loser is not owner and _below(loser, owner).held > owner.direct + 1:
            return loser
        return owner if owner.direct and self.overflow is Overflow.REPLACE else None

    def _add(self, path: SharePath, size: int) -> _Owner:
        owner = self._root
        owner.held += size
        for key in path:
            child = owner.children.get(key)
            if child is None:
                child = owner.children[key] = _Owner(owner, key)
            child.held += size
            if self.overflow is not Overflow.RESERVE:
                self._order += 1
                owner.record(child, self._order)
            owner = child
        owner.direct += size
        return owner

    def _subtract(self, owner: _Owner, size: int) -> None:
        owner.direct -= size
        at: _Owner | None = owner
        while at is not None:
            at.held -= size
            if not at.held and at.above is not None:
                del at.above.children[at.key]
            at = at.above


def _below(owner: _Owner, above: _Owner) -> _Owner:
    """The child of ``above`` that ``owner`` is or belongs to."""
    while owner.above is not above and owner.above is not None:
        owner = owner.above
    return owner


def _path(owner: _Owner) -> SharePath:
    keys: list[Hashable] = []
    at = owner
    while at.above is not None:
        keys.append(at.key)
        at = at.above
    return tuple(reversed(keys))


class FairCache(dict[T, V]):
    """Values of items that have places of a pool; `store` forgets those that have lost theirs."""

    def __init__(self, pool: FairPool[T]) -> None:
        super().__init__()
        self._pool = pool

    def store(self, item: T, value: V, owner: Hashable, now: int, *below: Hashable) -> None:
        """Set the value of an item, if its owner gets a place; ``below`` are levels within it."""
        admission = self._pool.admit(item, (*share_path(owner), *below), now)
        for lost in admission.displaced:
            del self[lost]
        if admission:
            self[item] = value


_EARLIER: SharePath = ("earlier",)


class RestoredPlaces(Generic[T]):
    """Places of a pool, some of which continue from an earlier run of the agent.

    The owner of a restored item is unknown until it is claimed: all of them share one part.
    """

    def __init__(self, pool: FairPool[T], restored: Iterable[T], now: int) -> None:
        """``restored`` items beyond the part have no place."""
        self._pool = pool
        self._earlier = {item for item in restored if pool.admit(item, _EARLIER, now)}

    def __contains__(self, item: T) -> bool:
        return item in self._pool

    def claim(self, item: T, path: SharePath, now: int) -> Admission[T]:
        """Admit an item that its owner uses; a restored one leaves the part of all."""
        if item in self._earlier:
            self._earlier.discard(item)
            self._pool.remove(item)
        admission = self._pool.admit(item, path, now)
        self._earlier.difference_update(admission.displaced)
        return admission
