"""The slowdown account: time lost at each level, against the allowance of the whole run.

Time at the original setting increases the allowance, exploration uses it. The slowdown of a level
is an estimate from its comparisons, so losses are recomputed as comparisons arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wattspan.tuning.decisions.blocks import Block, LevelTime


def lost_part(slower: float) -> float:
    """The ratio of capped time that was lost, from the log ratio of the time per work."""
    return 1 - math.exp(-slower)


def allowance(budget: float, elapsed: float) -> float:
    """The time that may be lost of ``elapsed`` within ``budget``."""
    return elapsed * budget / (1 + budget)


class ComparedEnergy(NamedTuple):
    """Comparisons of a level with the original, weighed with the energy around each.

    The effect of a cap may change while it is held. So each comparison counts for the energy up to
    the comparisons before and after it, half of which is its own. ``energy`` is all the energy that
    was spent up to the last comparison.
    """

    energy: float = 0.0
    times: float = 0.0  # log ratios of time per work, times energies
    powers: float = 0.0  # log ratios of power, times energies
    squares: float = 0.0  # of the energies of all comparisons but the last
    own: float = 0.0  # energy of the last comparison so far
    last: tuple[float, float] | None = None  # its log ratios of time and power

    def add(self, time: float, power: float, energy: float) -> ComparedEnergy:
        """Add a comparison, after ``energy`` since the last."""
        before, own = (self.last, energy / 2) if self.last is not None else ((time, power), energy)
        return ComparedEnergy(
            self.energy + energy,
            self.times + energy * (before[0] + time) / 2,
            self.powers + energy * (before[1] + power) / 2,
            self.squares + (self.own + energy - own) ** 2,
            own,
            (time, power),
        )

    @property
    def time(self) -> float:
        """Mean log ratio of time per work."""
        return self.times / self.energy

    @property
    def power(self) -> float:
        """Mean log ratio of power."""
        return self.powers / self.energy

    @property
    def comparisons(self) -> float:
        """The number of equally weighed comparisons with the same standard error."""
        return self.energy**2 / (self.squares + self.own**2)


class LevelUse(NamedTuple):
    """Nanoseconds of work at a level, ``held`` of them while it was certified.

    ``energy`` and ``metered`` are the energy and time of the blocks with known energy.
    """

    time: int = 0
    held: int = 0
    energy: float = 0.0
    metered: int = 0
    compared: ComparedEnergy = ComparedEnergy()


@dataclass(frozen=True, slots=True)
class SlowdownAccount:
    """Use of each level since the job last changed; ``closed_*`` are from before."""

    elapsed: int = 0
    units: int = 0
    levels: Mapping[int, LevelUse] = field(default_factory=dict)
    closed_lost: float = 0.0
    closed_bound: float = 0.0
    closed_saved: tuple[float, float, float] = (0.0, 0.0, 0.0)
    closed_explored: float = 0.0

    def lost(self, slower: Callable[[int], float]) -> float:
        """Nanoseconds lost, for this log ratio of time at each level."""
        return self.closed_lost + self._sum(slower)

    def bound(self, slower: Callable[[int], float]) -> float:
        """Upper bound of the nanoseconds lost."""
        return self.closed_bound + self._sum(slower)

    def _sum(self, slower: Callable[[int], float]) -> float:
        return sum([use.time * lost_part(slower(level)) for level, use in self.levels.items()])

    def explored(self, slower: Callable[[int], float]) -> float:
        """Nanoseconds lost while no certified level was held."""
        held = sum([use.held * lost_part(slower(level)) for level, use in self.levels.items()])
        return max(self.closed_explored + self._sum(slower) - held, 0.0)

    def slowdown(self, lost: float) -> float:
        """The slowdown of the whole run for this loss."""
        undisturbed = self.elapsed - lost
        return lost / undisturbed if undisturbed > 0 else 0.0

    @property
    def metered(self) -> bool:
        """True if the energy of any capped work is known."""
        return any(use.metered for use in self.levels.values()) or any(self.closed_saved)

    def add_time(self, time: LevelTime, level: int, top: int, *, held: bool) -> SlowdownAccount:
        """Add time at ``level``; ``held`` if it was certified and held."""
        levels = self.levels
        if level != top:
            use = levels.get(level, LevelUse())
            use = use._replace(time=use.time + time.span, held=use.held + time.span * held)
            levels = {**levels, level: use}
        elapsed, units = self.elapsed + time.span, self.units + time.units
        return replace(self, elapsed=elapsed, units=units, levels=levels)

    def add_energy(self, block: Block, top: int) -> SlowdownAccount:
        """Add the energy of a block, if it is known."""
        if block.energy is None or block.level == top:
            return self
        use = self.levels.get(block.level, LevelUse())
        use = use._replace(
            energy=use.energy + block.energy, metered=use.metered + block.end - block.start
        )
        return replace(self, levels={**self.levels, block.level: use})

    def add_comparison(self, level: int, time: float, power: float) -> SlowdownAccount:
        """Add the log ratios of a comparison, which counts for the energy since the last one."""
        use = self.levels.get(level, LevelUse())
        compared = use.compared.add(time, power, use.energy - use.compared.energy)
        return replace(self, levels={**self.levels, level: use._replace(compared=compared)})

    def final(self, lost: float, bound: float) -> SlowdownAccount:
        """The account with these losses in nanoseconds as final figures."""
        return replace(self, levels={}, closed_lost=lost, closed_bound=bound)

    def close(
        self,
        likely: Callable[[int], float],
        bound: Callable[[int], float],
        saved: tuple[float, float, float],
    ) -> SlowdownAccount:
        """Close the account because the job changed: losses at levels are unknown from now on."""
        low, middle, high = self.closed_saved
        return replace(
            self.final(self.lost(likely), self.bound(bound)),
            closed_explored=self.explored(likely),
            closed_saved=(low + saved[0], middle + saved[1], high + saved[2]),
        )
