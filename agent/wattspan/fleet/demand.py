"""The power for which a host asks, from the power that it draws. Pure."""

from __future__ import annotations

from typing import Final

_LIMITED: Final = 0.9
"""Fraction of the limit from which on a host may be held back by it."""
_HEADROOM: Final = 1.15
_GROWTH: Final = 1.25
"""Factor by which a limited host asks for more, each time."""
_DECAY: Final = 0.98
"""Factor by which the demand falls at most, each time: a short pause releases little power."""


def next_demand(
    previous: int | None, power: int | None, limit: int, floor: int, original: int
) -> int | None:
    """The next demand of a host that draws ``power`` under ``limit``, all in milliwatts.

    A limited host does not show the power that it wants, so its demand grows until the limit holds
    it back no more. None, which asks for everything, while the power is unknown.
    """
    if power is None:
        return None
    is_limited = power >= _LIMITED * limit
    wanted = round(max(power, limit) * _GROWTH if is_limited else power * _HEADROOM)
    if previous is not None:
        wanted = max(wanted, round(previous * _DECAY))
    return min(max(wanted, floor), original)
