"""Reading back: when a device obeys, and when what it shows is what was written."""

from __future__ import annotations

from collections.abc import Callable

from wattspan.model import MILLISECOND, KnobState
from wattspan.ports import Clock

COARSEST = 1_000
"""Milliwatts of the coarsest step in which a power limit is kept.

RAPL's unit is 2**-N watts, an eighth as a rule and one watt at the coarsest; it cuts off what is
finer. A board's firmware may keep whole watts.
"""

WAIT = 200 * MILLISECOND
"""How long a device may take to obey what it was told. Setters themselves take 10 to 20 ms."""

LOOK_EVERY = 10 * MILLISECOND


def is_kept(wanted: int, told: int | None) -> bool:
    """Whether ``told`` is what a device makes of the power limit ``wanted``: never more."""
    return told is not None and wanted - COARSEST < told <= wanted


def obeys(before: KnobState, now: KnobState, wanted: int) -> bool:
    """Whether ``now`` the device shows ``wanted`` as asked for, and obeys it.

    Where something outside held it lower ``before``, it may go on to do so.
    """
    if not is_kept(wanted, now.requested):
        return False
    if now.enforced is None or now.enforced == now.requested:
        return True
    return now.enforced < wanted and _held_from_outside(before)


def _held_from_outside(state: KnobState) -> bool:
    requested, enforced = state.requested, state.enforced
    return requested is not None and enforced is not None and enforced < requested


def settled(
    clock: Clock, read: Callable[[], KnobState], good: Callable[[KnobState], bool]
) -> KnobState:
    """What ``read`` shows once it is ``good``, or after WAIT, whichever comes first."""
    end = clock.monotonic() + WAIT
    while True:
        state = read()
        now = clock.monotonic()
        if good(state) or now >= end:
            return state
        clock.sleep_until(min(end, now + LOOK_EVERY))
