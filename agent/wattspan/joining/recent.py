"""What was seen of late, in bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """A dictionary of bounded size that forgets the oldest half when it is full."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[bytes, T] = {}
        self._old: dict[bytes, T] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def __setitem__(self, key: bytes, value: T) -> None:
        self._young[key] = value
        self._turn()

    def isdisjoint(self, keys: Collection[bytes]) -> bool:
        """Whether none of ``keys`` is remembered."""
        return self._young.keys().isdisjoint(keys) and self._old.keys().isdisjoint(keys)

    def update(self, values: Mapping[bytes, T]) -> None:
        """Remember each of ``values`` under its key."""
        self._young.update(values)
        self._turn()

    def _turn(self) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}

    def get(self, key: bytes) -> T | None:
        """What is remembered under ``key``, if anything is."""
        found = self._young.get(key)
        return self._old.get(key) if found is None else found
