"""The slowdown account: time lost at each level, against the allowance of the whole run.

Time at the original setting increases the allowance, exploration uses it. The slowdown of a level
is an estimate from its comparisons, so losses are recomputed as comparisons arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from wattspan.tuning.decisions.blocks import Block, LevelTime

_EMPTY: Mapping[int, int] = MappingProxyType({})


def lost_part(slower: float) -> float:
    """The ratio of capped time that was lost, from the log ratio of the time per work."""
    return 1 - math.exp(-slower)


@dataclass(frozen=True, slots=True)
class SlowdownAccount:
    """Nanoseconds of work by level since the job last changed; ``closed_*`` are from before.

    ``energy`` and ``metered`` are the energy and time of the blocks with known energy, by level.
    """

    elapsed: int = 0
    units: int = 0
    times: Mapping[int, int] = field(default_factory=lambda: _EMPTY)
    energy: Mapping[int, float] = field(default_factory=lambda: _EMPTY)
    metered: Mapping[int, int] = field(default_factory=lambda: _EMPTY)
    closed_lost: float = 0.0
    closed_bound: float = 0.0
    closed_saved: tuple[float, float, float] = (0.0, 0.0, 0.0)
    held: Mapping[int, int] = field(default_factory=lambda: _EMPTY)  # of ``times``
    closed_explored: float = 0.0

    def lost(self, slower: Callable[[int], float]) -> float:
        """Nanoseconds lost, for this log ratio of time at each level."""
        return self.closed_lost + self._sum(slower)

    def bound(self, slower: Callable[[int], float]) -> float:
        """Upper bound of the nanoseconds lost."""
        return self.closed_bound + self._sum(slower)

    def _sum(self, slower: Callable[[int], float]) -> float:
        return sum([span * lost_part(slower(level)) for level, span in self.times.items()])

    def explored(self, slower: Callable[[int], float]) -> float:
        """Nanoseconds lost while no certified level was held."""
        held = sum([span * lost_part(slower(level)) for level, span in self.held.items()])
        return max(self.closed_explored + self._sum(slower) - held, 0.0)

    def slowdown(self, lost: float) -> float:
        """The slowdown of the whole run for this loss."""
        undisturbed = self.elapsed - lost
        return lost / undisturbed if undisturbed > 0 else 0.0

    def saved(self, energy: Callable[[int], float], settling: float) -> float:
        """Microjoules saved since the job last changed, for this log ratio of energy per level.

        ``settling`` is the ratio of the saving that is assumed while a setting settles.
        """
        total = 0.0
        for level, metered in self.metered.items():
            lasted = metered + settling * max(self.times.get(level, 0) - metered, 0)
            total += self.energy[level] * lasted / metered * (math.exp(-energy(level)) - 1)
        return total


def allowance(budget: float, elapsed: float) -> float:
    """The time that may be lost of ``elapsed`` within ``budget``."""
    return elapsed * budget / (1 + budget)


def charge_time(
    account: SlowdownAccount, time: LevelTime, level: int, top: int, *, held: bool
) -> SlowdownAccount:
    """Add time at ``level``; ``held`` if a certified level was held."""
    if level == top:
        return replace(
            account, elapsed=account.elapsed + time.span, units=account.units + time.units
        )
    times = {**account.times, level: account.times.get(level, 0) + time.span}
    return replace(
        account,
        elapsed=account.elapsed + time.span,
        units=account.units + time.units,
        times=MappingProxyType(times),
        held=MappingProxyType({**account.held, level: account.held.get(level, 0) + time.span})
        if held
        else account.held,
    )


def charge_energy(account: SlowdownAccount, block: Block, top: int) -> SlowdownAccount:
    """Add the energy of a block, if it is known."""
    if block.energy is None or block.level == top:
        return account
    level = block.level
    energy = {**account.energy, level: account.energy.get(level, 0.0) + block.energy}
    metered = {**account.metered, level: account.metered.get(level, 0) + block.end - block.start}
    return replace(account, energy=MappingProxyType(energy), metered=MappingProxyType(metered))


def close_account(
    account: SlowdownAccount,
    likely: Callable[[int], float],
    bound: Callable[[int], float],
    saved: tuple[float, float, float],
) -> SlowdownAccount:
    """Close the account because the job changed: losses at levels are unknown from now on."""
    before = account.closed_saved
    return replace(
        account,
        closed_lost=account.lost(likely),
        closed_bound=account.bound(bound),
        closed_explored=account.explored(likely),
        closed_saved=(before[0] + saved[0], before[1] + saved[1], before[2] + saved[2]),
        times=_EMPTY,
        held=_EMPTY,
        energy=_EMPTY,
        metered=_EMPTY,
    )
