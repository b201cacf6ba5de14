"""Whether a held level still is what it was.

Pairs tell surely but come seldom: their log ratios are summed up against a rate between what is
known and what must not be (CUSUM; Page 1954). Blocks tell at once but not why: a lasting shift
of the time or the power of work only makes the next comparison come sooner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from wattspan.tuning.decisions.blocks import Block

_RUN = 8.5
"""The logarithm of the pairs, about 5,000, between two false alarms."""

_JUMP = 0.03
"""A slowdown so much beyond the budget must not last."""

_SLOW = 1 / 32
_POWER = 0.06
LASTING = 12
"""Blocks in a row that lie apart from those before: the job is another one."""


@dataclass(frozen=True, slots=True)
class Cusum:
    """The sum of pairs against the rate, and how far it may rise."""

    total: float = 0.0
    pairs: int = 0
    inconclusive: bool = False

    @property
    def suspicious(self) -> bool:
        """Whether it would be good to know more soon."""
        return self.total > 0.3 or self.inconclusive

    @property
    def alarmed(self) -> bool:
        """Whether the level must be given up."""
        return self.total >= 1.0


def add_pair(cusum: Cusum, ratio: float, usual: float, limit: float, deviation: float) -> Cusum:
    """With one more pair. The total is told in parts of the height at which it alarms.

    One pair alone never alarms: something may have happened to one of its stretches.
    """
    bad = limit + _JUMP
    usual = min(max(usual, 0.0), limit)
    rate = (usual + bad) / 2
    height = max(deviation * deviation * _RUN / (bad - usual), 0.25 * (bad - usual))
    rise = min((ratio - rate) / height, 0.8)
    return Cusum(max(0.0, cusum.total + rise), cusum.pairs + 1)


def add_inconclusive_pair(cusum: Cusum) -> Cusum:
    """With a pair that says nothing: another one is wanted soon."""
    return replace(cusum, inconclusive=True)


@dataclass(frozen=True, slots=True)
class LevelShift:
    """The usual logarithms of time and power per block at one level, and how long it was not so."""

    level: int | None = None
    time: float = 0.0
    power: float | None = None
    shifted: int = 0
    blocks: int = 0

    @property
    def suspected(self) -> bool:
        """Whether a comparison should come soon."""
        return self.shifted >= 2

    @property
    def changed(self) -> bool:
        """Whether it has lasted."""
        return self.shifted >= LASTING


def update_level_shift(raw: LevelShift, block: Block, deviation: float) -> LevelShift:
    """With one more block of the level that is held; others are passed over."""
    time = math.log(block.busy / block.work)
    power = None
    if block.energy is not None:
        power = math.log(block.energy / (block.end - block.start))
    if raw.level != block.level or raw.blocks == 0:
        return LevelShift(block.level, time, power, 0, 1)
    far = abs(time - raw.time) > max(0.05, 4 * deviation)
    if power is not None and raw.power is not None:
        far = far or abs(power - raw.power) > _POWER
    if far and raw.blocks >= 4:
        return replace(raw, shifted=raw.shifted + 1)
    part = max(_SLOW, 1 / (raw.blocks + 1))
    if power is not None and raw.power is not None:
        power = raw.power + part * (power - raw.power)
    return LevelShift(
        raw.level,
        raw.time + part * (time - raw.time),
        power if power is not None else raw.power,
        0,
        raw.blocks + 1,
    )
