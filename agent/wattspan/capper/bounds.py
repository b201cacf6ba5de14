"""How far a knob may be turned: within hardware, operator and what stood before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from wattspan.model import Knob, KnobState

_MILLIWATTS = 1_000


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator allows.

    ``floor`` and ``largest_step`` are parts of a device's default setting, ``floor_watts`` holds
    for every cap on power, whoever wants it.
    """

    floor: float = 0.0
    floor_watts: int = 0
    largest_step: float = 1.0


class Bounds(NamedTuple):
    """The settings that may be written; the original itself is no cap and is below ``highest``."""

    lowest: int
    highest: int

    def clamp(self, value: int) -> int:
        """``value`` as near as it is allowed. Where nothing is allowed, the highest."""
        return min(max(value, self.lowest), self.highest)


def bounds(state: KnobState, original: int | None, rules: Rules, *, tuned: bool) -> Bounds | None:
    """What may be written to a knob that stood at ``original``; None if that is not known.

    A clock cannot be read, so its original is no number: its highest setting stands for it. With
    ``tuned`` the tuner's floor holds beside the operator's: an operator who wants a lower cap
    says so, and a tuner never does.
    """
    highest = _least(original, state.maximum)
    if highest is None:
        return None
    lowest = state.minimum or 0
    if state.key.knob is not Knob.GPU_CLOCK:
        lowest = max(lowest, rules.floor_watts * _MILLIWATTS)
    default = usual(state)
    if tuned and default is not None:
        lowest = max(lowest, math.ceil(rules.floor * default))
    return Bounds(min(lowest, highest), highest)


def usual(state: KnobState) -> int | None:
    """What parts of a setting are parts of: the default, or the highest where there is none."""
    return state.default if state.default is not None else state.maximum


def stepped(state: KnobState, present: int | None, value: int, rules: Rules) -> int:
    """``value``, or the lowest setting on the way down to it that one move may reach."""
    whole = usual(state)
    if present is None or whole is None:
        return value
    return max(value, present - max(1, math.floor(rules.largest_step * whole)))


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
