"""The number of instances of a tracked server, from the energy of one instance at each load.

Instances share the load equally, and the number of generated tokens does not depend on their
number: E(n) is proportional to the joules per token of an instance at the load total / n. Only load
bins that were met have figures: nothing is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from wattspan.model import LoadBinFigures, LoadFigures
from wattspan.tuning.decisions.load import BIN_RATIO

_ROUNDING = 1e-9


class InstanceRange(NamedTuple):
    """Numbers of instances whose loads are in one bin; ``most`` is None without a limit.

    ``change`` is the relative change of the energy against the present number, None if unknown.
    """

    least: int
    most: int | None
    bin: LoadBinFigures
    change: float | None


def instance_ranges(load: LoadFigures, instances: int) -> list[InstanceRange]:
    """The numbers of instances with known figures, from the fewest.

    ``load`` is that of one of ``instances`` (1 at least) with the same load.
    """
    total = load.load * instances
    if total <= 0:
        return []
    now = next((one.joules_per_token for one in load.bins if one.bin == load.bin), None)
    found = []
    for one in sorted(load.bins, key=lambda one: -one.bin):
        least = max(1, math.ceil(total / one.bin_bound - _ROUNDING))
        most = math.ceil(total / one.bin_bound * BIN_RATIO - _ROUNDING) - 1 if one.bin else None
        if most is None or most >= least:
            energy = one.joules_per_token
            change = energy / now - 1 if energy is not None and now else None
            found.append(InstanceRange(least, most, one, change))
    return found


def best_range(ranges: Iterable[InstanceRange]) -> InstanceRange | None:
    """The range with the least energy of those that certainly keep the limits, None without one."""
    kept = [one for one in ranges if one.bin.kept and one.change is not None]
    return min(kept, key=lambda one: one.change or 0.0, default=None)
