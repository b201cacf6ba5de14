"""What comparisons have shown of each level, and of the job's noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from wattspan.tuning.blocks import Block
from wattspan.tuning.pairs import Pair
from wattspan.tuning.sequence import NOTHING, Evidence, evidence

_PAIRS = 200
"""Pairs of a level that are kept: later ones push out the first."""

_FLOOR = 0.001
"""No pair of stretches is taken to be more alike than this, in parts of its time."""

_LIES = 0.004
"""So much slower from unit to unit than units say, surely, and it is no longer their word."""


@dataclass(frozen=True, slots=True)
class Level:
    """The pairs of one level, and what follows from them.

    ``time`` is the log ratio of the time per work, capped over uncapped: of what units say, or
    of the time from unit to unit where that is slower beyond doubt (``lying``). ``power`` is
    that of mean power.
    """

    pairs: tuple[Pair, ...] = ()
    time: Evidence = NOTHING
    power: Evidence = NOTHING
    lying: bool = False

    @property
    def energy(self) -> float:
        """The log ratio of the energy per work."""
        return self.time.mean + self.power.mean


UNSEEN = Level()


@dataclass(frozen=True, slots=True)
class Known:
    """All levels that were tried, and the noise.

    ``variance`` is that of single units' time per work, relative, over ``blocks`` blocks;
    ``spread`` that of mean power from pair to pair. ``draws`` are those of the most drawing
    device, uncapped.
    """

    levels: Mapping[int, Level] = field(default_factory=lambda: MappingProxyType({}))
    variance: float = 0.0
    blocks: int = 0
    energies: int = 0  # blocks whose energy is known
    power: float = 0.0  # mean, uncapped, in milliwatts of all devices
    draws: tuple[int, ...] = ()

    @property
    def noise(self) -> float:
        """The coefficient of variation of a unit's time per work."""
        return math.sqrt(self.variance)

    def at(self, level: int) -> Level:
        """What is known of a level."""
        return self.levels.get(level, UNSEEN)

    def deviation(self, weight: float) -> float:
        """What a pair's log ratio is expected to deviate, by the noise of units alone."""
        return max(math.sqrt(self.variance * weight), _FLOOR)

    def spread(self, weight: float) -> float:
        """What it deviates, by what pairs have shown so far too."""
        expected = self.deviation(weight)
        seen = [(one.time.n, one.time.deviation) for one in self.levels.values() if one.time.n > 3]
        total = sum(n for n, _ in seen)
        if total < 8:
            return expected
        return max(expected, math.sqrt(sum(n * one * one for n, one in seen) / total))


def with_block(known: Known, block: Block, top: int) -> Known:
    """Also the noise of this block's units, if it was uncapped."""
    if block.level != top or block.units < 2:
        return known
    mean = block.busy / block.work if block.work else 0.0
    per = block.squares / block.units
    # Units of unequal work: the mean of times per work is not the time per work of all.
    variance = max(per / (mean * mean) - 1, 0.0)
    part = 1 / min(known.blocks + 1, 30)
    # One block with a straggler must not decide: it counts as a few times the usual at most.
    if known.blocks >= 3:
        variance = min(variance, 4 * known.variance + _FLOOR**2)
    power, energies = known.power, known.energies
    if block.energy is not None:
        energies += 1
        watts = block.energy * 1e6 / (block.end - block.start)
        power += (watts - power) / min(energies, 30)
    return replace(
        known,
        power=power,
        variance=known.variance + part * (variance - known.variance),
        blocks=known.blocks + 1,
        energies=energies,
    )


def with_pair(known: Known, pair: Pair) -> Known:
    """Also this pair."""
    level = known.at(pair.level)
    pairs = (*level.pairs[-_PAIRS + 1 :], pair)
    expected = known.deviation(pair.weight)
    busy = [one.busy for one in pairs]
    between = evidence([one.span - one.busy for one in pairs], _FLOOR)
    lying = between.mean > 0.01 if between.n < 3 else between.likely(-3.0) > _LIES
    time = evidence([one.span for one in pairs] if lying else busy, expected)
    powers = [one.power for one in pairs if one.power is not None]
    new = Level(pairs, time, evidence(powers, expected / 2), lying)
    return replace(known, levels=MappingProxyType({**known.levels, pair.level: new}))
