"""The models of a board with learned energy of their own; all other models share one pool.

Applications and clients choose the names of models, and any number of them may be active at once.
The places belong to the models with the most active time, whose older part fades. Engines have
equal parts of the active time, so that one engine with many names does not take the places of the
others. Nothing is final: a pooled model gets a place once it has clearly more active time than a
model that has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import Final

Place = str | None
"""The name of a model with a place of its own, or the pool."""

POOL: Final = None
"""The place that all other models share."""

MAX_COUNTED = 64
"""Models whose active time is known; those with the least of it are not counted."""

_CLEARLY = 2.0  # times the active time: models with nearly the same do not take turns


class ModelPlaces:
    """At most ``limit`` places."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._placed: set[str] = set()
        self._active: dict[str, float] = {}  # faded seconds

    def of(self, model: str) -> Place:
        """The place of a model until the next ``turn``; it gets a free one if there is any."""
        if model in self._placed:
            return model
        if len(self._placed) >= self._limit:
            return POOL
        self._placed.add(model)
        return model

    def add(self, active: Mapping[str, float]) -> None:
        """Add seconds of active time of models."""
        for model, seconds in active.items():
            self._active[model] = self._active.get(model, 0.0) + seconds
        if len(self._active) > MAX_COUNTED:
            self._active = dict(nlargest(MAX_COUNTED, self._active.items(), key=lambda one: one[1]))

    def turn(self, kept: float) -> list[str]:
        """Fade the active time to the part ``kept``; returns the models that leave their places.

        Their places belong to pooled models from now on.
        """
        self._active = {model: kept * seconds for model, seconds in self._active.items()}
        time = self._active
        pooled = sorted(time.keys() - self._placed, key=lambda one: (-time[one], one))
        placed = sorted(self._placed, key=lambda one: (time.get(one, 0.0), one))
        left = []
        for model, other in zip(pooled, placed, strict=False):
            if time[model] <= _CLEARLY * time.get(other, 0.0):
                break
            left.append(other)
            self._placed.remove(other)
            self._placed.add(model)
        return left
