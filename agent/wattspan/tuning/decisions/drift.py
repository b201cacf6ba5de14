"""Drift of a held level.

Pairs are conclusive but rare: their log ratios are summed against a rate between the usual and
the excessive one (CUSUM; Page 1954). Blocks are frequent but ambiguous: a lasting shift of their
time or power only makes the next comparison earlier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from wattspan.tuning.decisions.blocks import Block

_LOG_RUN_LENGTH = 8.5
"""Logarithm of the mean number of pairs between false alarms, about 5,000."""

_EXCESS = 0.03
"""Distance of the excessive slowdown from the budget, as a log ratio."""

_MIN_WEIGHT = 1 / 32
_MAX_POWER_SHIFT = 0.06
MIN_SHIFTED_BLOCKS = 12
"""Deviating blocks in a row after which the job counts as changed."""


@dataclass(frozen=True, slots=True)
class Cusum:
    """The sum of pairs against the rate, in parts of the alarm threshold."""

    total: float = 0.0
    pairs: int = 0
    inconclusive: bool = False

    @property
    def suspicious(self) -> bool:
        """True if the next comparison should be early."""
        return self.total > 0.3 or self.inconclusive

    @property
    def alarmed(self) -> bool:
        """True if the level must be released."""
        return self.total >= 1.0


def add_pair(cusum: Cusum, ratio: float, usual: float, limit: float, deviation: float) -> Cusum:
    """Add a pair. One pair alone never alarms: one of its blocks may have been disturbed."""
    bad = limit + _EXCESS
    usual = min(max(usual, 0.0), limit)
    rate = (usual + bad) / 2
    height = max(deviation * deviation * _LOG_RUN_LENGTH / (bad - usual), 0.25 * (bad - usual))
    rise = min((ratio - rate) / height, 0.8)
    return Cusum(max(0.0, cusum.total + rise), cusum.pairs + 1)


def add_inconclusive_pair(cusum: Cusum) -> Cusum:
    """Record a pair that permits no conclusion, so that the next one is early."""
    return replace(cusum, inconclusive=True)


@dataclass(frozen=True, slots=True)
class LevelShift:
    """Usual log time and log power of blocks at one level, and the deviating blocks in a row."""

    level: int | None = None
    time: float = 0.0
    power: float | None = None
    shifted: int = 0
    blocks: int = 0

    @property
    def suspected(self) -> bool:
        """True if the next comparison should be early."""
        return self.shifted >= 2

    @property
    def changed(self) -> bool:
        """True if the shift has lasted, so that the job counts as changed."""
        return self.shifted >= MIN_SHIFTED_BLOCKS


def update_level_shift(shift: LevelShift, block: Block, deviation: float) -> LevelShift:
    """Add a block of the held level."""
    time = math.log(block.busy / block.work)
    power = None
    if block.energy is not None:
        power = math.log(block.energy / (block.end - block.start))
    if shift.level != block.level or shift.blocks == 0:
        return LevelShift(block.level, time, power, 0, 1)
    far = abs(time - shift.time) > max(0.05, 4 * deviation)
    if power is not None and shift.power is not None:
        far = far or abs(power - shift.power) > _MAX_POWER_SHIFT
    if far and shift.blocks >= 4:
        return replace(shift, shifted=shift.shifted + 1)
    weight = max(_MIN_WEIGHT, 1 / (shift.blocks + 1))
    if power is not None and shift.power is not None:
        power = shift.power + weight * (power - shift.power)
    return LevelShift(
        shift.level,
        shift.time + weight * (time - shift.time),
        power if power is not None else shift.power,
        0,
        shift.blocks + 1,
    )
