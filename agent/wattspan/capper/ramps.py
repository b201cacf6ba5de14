"""Bounds the rate at which a host's power limits change, up and down. Pure.

The allowance of one direction is the power by which the host's limits may change now: the rate
times the time since the last change, at most a second of it. In any period of T seconds the limits
therefore go up, and go down, by at most the rate times T + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from wattspan.capper.budget_shares import SHARE_STEP, BudgetClaim, share_budget
from wattspan.model import SECOND, CapKey

_LONGEST: Final = SECOND


class RampAllowance(NamedTuple):
    """Milliwatts by which the limits may go up and down, as of the monotonic time ``at``."""

    at: int
    up: int
    down: int

    @classmethod
    def full(cls, rate: int, now: int) -> RampAllowance:
        """The allowance after a second without a change; ``rate`` is in milliwatts per second."""
        return cls(now, rate, rate)

    def advanced(self, rate: int, now: int) -> RampAllowance:
        """The allowance at ``now``, at a rate in milliwatts per second."""
        elapsed = min(max(0, now - self.at), _LONGEST)
        more = rate * elapsed // SECOND
        return RampAllowance(now, min(self.up + more, rate), min(self.down + more, rate))

    def used(self, change: int) -> RampAllowance:
        """The allowance after a change of one limit by ``change`` milliwatts."""
        if change >= 0:
            return self._replace(up=max(0, self.up - change))
        return self._replace(down=max(0, self.down + change))


def ramp_parts(changes: Mapping[CapKey, int], allowance: int) -> dict[CapKey, int]:
    """The part of each change, all above 0, that ``allowance`` permits now; in milliwatts.

    The parts are in proportion to the changes, and in whole watts unless a change is complete. The
    watts that are left by rounding go to the largest remaining changes, so that none waits forever.
    """
    parts = share_budget({key: BudgetClaim(0, most) for key, most in changes.items()}, allowance)
    left = allowance - sum(parts.values())
    for key in sorted(changes, key=lambda key: (parts[key] - changes[key], key)):
        rest = changes[key] - parts[key]
        more = rest if rest <= left else left // SHARE_STEP * SHARE_STEP
        parts[key] += more
        left -= more
    return parts
