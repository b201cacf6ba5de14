"""Errors of actuators, and the readback: when a device honours and obeys a limit."""

from __future__ import annotations

from collections.abc import Callable

from wattspan.model import MILLISECOND, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock


def format_setting(knob: Knob, value: int | None) -> str:
    """``"312.5 W"``, ``"1410 MHz"``."""
    if value is None:
        return "unknown"
    return f"{value} MHz" if knob is Knob.GPU_CLOCK else f"{value / 1000:g} W"


def actuator_error(
    thing: str, cause: str, remedy: str, trouble: Trouble, *, locked: bool = False
) -> ActuatorError:
    """``thing`` is the attempt, as in "read the power limit of GPU 0"."""
    sentence = f"Cannot {thing}: {cause}."
    return ActuatorError(f"{sentence} {remedy}".rstrip(), trouble, locked=locked)


def not_honoured_error(
    knob: Knob, name: str, wanted: int | None, shown: int | None
) -> ActuatorError:
    """The device took ``wanted`` without an error and now shows ``shown``."""
    return actuator_error(
        f"set {name} to {format_setting(knob, wanted)}",
        f"it was taken without an error, and reads back as {format_setting(knob, shown)}",
        "Another program may have set it at the same moment; look for DCGM, nvidia-smi, tuned or "
        "another power manager.",
        Trouble.MALFORMED,
    )


def not_removable_error(knob: Knob, name: str) -> ActuatorError:
    """A limit that cannot be absent was to be removed."""
    return actuator_error(
        f"remove the {knob.value} limit of {name}",
        "a device always has one",
        "Set it to its original value instead.",
        Trouble.MALFORMED,
    )


COARSEST_STEP = 1_000
"""Milliwatts of the coarsest step of a power limit.

RAPL's unit is 2**-N watts, an eighth as a rule and one watt at the coarsest, and rounds down. A
board's firmware may keep whole watts.
"""

SETTLE_TIMEOUT = 200 * MILLISECOND
"""Longest time until a device obeys. Setters themselves take 10 to 20 ms."""

READ_INTERVAL = 10 * MILLISECOND


def is_honoured(wanted: int, shown: int | None) -> bool:
    """True if ``shown`` is the power limit ``wanted`` after rounding, which is always down."""
    return shown is not None and wanted - COARSEST_STEP < shown <= wanted


def is_enforced(before: KnobState, now: KnobState, wanted: int) -> bool:
    """True if the device shows the limit ``wanted`` now, and obeys it.

    A lower limit from outside that was in force ``before`` may stay in force.
    """
    if not is_honoured(wanted, now.requested):
        return False
    if now.enforced is None or now.enforced == now.requested:
        return True
    return now.enforced < wanted and _limited_externally(before)


def _limited_externally(state: KnobState) -> bool:
    requested, enforced = state.requested, state.enforced
    return requested is not None and enforced is not None and enforced < requested


def wait_for_state(
    clock: Clock, read: Callable[[], KnobState], good: Callable[[KnobState], bool]
) -> KnobState:
    """The first state that is ``good``, or the one after SETTLE_TIMEOUT."""
    end = clock.monotonic() + SETTLE_TIMEOUT
    while True:
        state = read()
        now = clock.monotonic()
        if good(state) or now >= end:
            return state
        clock.sleep_until(min(end, now + READ_INTERVAL))
