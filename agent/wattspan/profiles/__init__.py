"""What one payer spent, and when: cumulative energy over time, in bounded memory.

A domain tells a payer's energy in intervals of 100 ms or so. Their edges are the *knots* of a
function that only rises: energy since the beginning. Inside an interval the energy of a CPU or
of memory follows the payer's CPU clock, where that was sampled, and is spread evenly where not;
a GPU's is always spread evenly.

A counter that moves in steps misplaces up to a step's energy at each edge. Where that is more
than a fiftieth of what the payer spent, neighbouring intervals are *pooled*, the fewest that
bring it below and at most a second of them, and the whole pool follows the CPU clock: the edges
of pools are trusted, those inside are not. A pool is released when it is complete, so the newest
energy may wait up to a second, and what was answered once is never answered differently. (To
release at once and correct afterwards would be quicker, and would move energy that spans have
already been given.)

The domains' functions are merged, up to the *watermark*, into rows that hold every kind of
energy at one time. Rows of the recent past stay as they are; older ones are thinned, ever more
coarsely, and what that changes is added to the uncertainty.

The energies of a row stand side by side in one integer, each in a *lane* of its own, wide enough
that sums, differences and products by one number never touch the neighbour. One operation
then counts for all kinds: that is what lets spans be joined in microseconds.
"""

from __future__ import annotations

from wattspan.profiles.lanes import (
    CLOCK_MASK,
    GPU_MASK,
    SHARE,
    SHARE_WHOLE,
    WHOLE,
    Lanes,
    lanes_of,
)
from wattspan.profiles.profile import NOTHING, EnergyProfile
from wattspan.profiles.rows import Rows

__all__ = [
    "CLOCK_MASK",
    "GPU_MASK",
    "NOTHING",
    "SHARE",
    "SHARE_WHOLE",
    "WHOLE",
    "EnergyProfile",
    "Lanes",
    "Rows",
    "lanes_of",
]
