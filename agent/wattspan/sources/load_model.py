"""A processor's power as a function of its load, for hosts that have no counter. Pure.

The curve is that of Fan, Weber and Barroso, "Power Provisioning for a Warehouse-sized Computer"
(ISCA 2007): idle + (busy - idle) * (2u - u**r), where u is the busy fraction of the CPUs and r
was fitted to 1.4 over several hundred servers. At r = 1 it is the straight line.
"""

from __future__ import annotations

from dataclasses import dataclass

from wattspan.model import Milliwatts


@dataclass(frozen=True, slots=True)
class LoadModel:
    """``idle`` and ``busy`` are milliwatts of one socket; ``curvature`` is the r above, 1 to 2.

    Beyond 2 the curve would fall before full load, below 1 it would start below idle.
    """

    idle: Milliwatts
    busy: Milliwatts
    curvature: float = 1.4

    def __post_init__(self) -> None:
        if not 0 <= self.idle <= self.busy:
            raise ValueError("idle power must lie between 0 and the power at full load")
        if not 1 <= self.curvature <= 2:
            raise ValueError("the curvature must lie between 1 and 2")

    def power(self, busy: int, capacity: int) -> Milliwatts:
        """The power while ``busy`` of ``capacity`` nanoseconds of CPU time were spent."""
        load = min(1.0, max(0.0, busy / capacity)) if capacity > 0 else 0.0
        shape = 2 * load - load**self.curvature
        return Milliwatts(round(self.idle + (self.busy - self.idle) * shape))
