"""The settings that may be tried: one level for all of a job's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wattspan.tuning.values import Range


@dataclass(frozen=True, slots=True)
class Ladder:
    """From ``top``, where every device has its original setting, down to ``bottom``."""

    ranges: tuple[Range, ...]
    top: int
    bottom: int
    step: int

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
        return {
            one.device: max(level, one.floor)
            for one in self.ranges
            if max(level, one.floor) < one.original
        }

    def stands_at(self, level: int, in_force: Mapping[str, int]) -> bool:
        """Whether what was read back is ``level``, but for rounding by the device."""
        asked = self.caps(level)
        for one in self.ranges:
            seen = in_force.get(one.device, one.original)
            if abs(seen - asked.get(one.device, one.original)) > one.step:
                return False
        return True
