"""The settings that may be tried: one level for all of a job's devices, or less for some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from wattspan.tuning.values import Range


class Lowered(NamedTuple):
    """Settings by device that are those of level ``base``, but lower for some."""

    base: int
    settings: Mapping[str, int]


_NONE: Mapping[int, Lowered] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Ladder:
    """From ``top``, where every device has its original setting, down to ``bottom``.

    Settings that are not the same for all stand between two rungs, just below that which they
    were made of: a whole job is as slow there, as long as only those have less that wait.
    """

    ranges: tuple[Range, ...]
    top: int
    bottom: int
    step: int
    lowered: Mapping[int, Lowered] = field(default_factory=lambda: _NONE)

    @classmethod
    def over(cls, ranges: Sequence[Range]) -> Ladder:
        """The ladder of these devices, none of which leaves its own range."""
        if not ranges:
            return cls((), 0, 0, 1)
        return cls(
            tuple(ranges),
            max(one.original for one in ranges),
            min(min(one.floor, one.original) for one in ranges),
            max(max(one.step for one in ranges), 1),
        )

    @property
    def rungs(self) -> int:
        """How many levels there are below the top."""
        return (self.top - self.bottom) // self.step

    def level(self, wanted: float) -> int:
        """The level nearest to ``wanted``, or the end of the ladder."""
        if wanted >= self.top:
            return self.top
        steps = round((max(wanted, self.bottom) - self.bottom) / self.step)
        return min(self.bottom + steps * self.step, self.top)

    def caps(self, level: int) -> dict[str, int]:
        """The setting of each device that does not have its original one at ``level``."""
        if level in self.lowered:
            return dict(self.lowered[level].settings)
        return {
            one.device: max(level, one.floor)
            for one in self.ranges
            if max(level, one.floor) < one.original
        }

    def base(self, level: int) -> int:
        """The rung of which ``level`` was made: itself, if it is one."""
        return self.lowered[level].base if level in self.lowered else level

    def with_lowered(self, base: int, settings: Mapping[str, int]) -> tuple[Ladder, int]:
        """The ladder with one more level, at which each device has its setting; and that level.

        LookupError: there is no room for it between ``base`` and the rung below.
        """
        level = base - 1 - len(self.lowered)
        if level <= base - self.step:
            raise LookupError(f"no room below {base} for settings that differ by device")
        lowered = {**self.lowered, level: Lowered(base, MappingProxyType(dict(settings)))}
        return replace(self, lowered=MappingProxyType(lowered)), level

    def plain(self) -> Ladder:
        """The ladder with its rungs alone."""
        return replace(self, lowered=_NONE)

    def stands_at(self, level: int, in_force: Mapping[str, int]) -> bool:
        """Whether what was read back is ``level``, but for rounding by the device."""
        asked = self.caps(level)
        for one in self.ranges:
            seen = in_force.get(one.device, one.original)
            if abs(seen - asked.get(one.device, one.original)) > one.step:
                return False
        return True
