"""How an actuator says that something cannot be done, and how it shows a setting.

Reading back: when a device obeys, and when what it shows is what was written.
"""

from __future__ import annotations

from collections.abc import Callable

from wattspan.model import MILLISECOND, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock


def format_setting(knob: Knob, value: int | None) -> str:
    """A setting as people write it: "312.5 W", "1410 MHz"."""
    if value is None:
        return "unknown"
    return f"{value} MHz" if knob is Knob.GPU_CLOCK else f"{value / 1000:g} W"


def actuator_error(
    thing: str, cause: str, remedy: str, trouble: Trouble, *, locked: bool = False
) -> ActuatorError:
    """``thing`` says what was tried, "read the power limit of GPU 0"."""
    sentence = f"Cannot {thing}: {cause}."
    return ActuatorError(f"{sentence} {remedy}".rstrip(), trouble, locked=locked)


def not_honoured_error(
    knob: Knob, name: str, wanted: int | None, told: int | None
) -> ActuatorError:
    """The device took ``wanted`` without complaint and now shows ``told``."""
    return actuator_error(
        f"set {name} to {format_setting(knob, wanted)}",
        f"it was taken without complaint, and reads back as {format_setting(knob, told)}",
        "Something else may have set it at the same moment; look for DCGM, nvidia-smi, tuned or "
        "another power manager.",
        Trouble.MALFORMED,
    )


def not_removable_error(knob: Knob, name: str) -> ActuatorError:
    """A limit that is always some number was to be taken away."""
    return actuator_error(
        f"take the {knob.value} limit of {name} away",
        "it always has a number",
        "Set it to its original value instead.",
        Trouble.MALFORMED,
    )


COARSEST_STEP = 1_000
"""Milliwatts of the coarsest step in which a power limit is kept.

RAPL's unit is 2**-N watts, an eighth as a rule and one watt at the coarsest; it cuts off what is
finer. A board's firmware may keep whole watts.
"""

SETTLE_TIMEOUT = 200 * MILLISECOND
"""How long a device may take to obey what it was told. Setters themselves take 10 to 20 ms."""

READ_INTERVAL = 10 * MILLISECOND


def is_honoured(wanted: int, told: int | None) -> bool:
    """Whether ``told`` is what a device makes of the power limit ``wanted``: never more."""
    return told is not None and wanted - COARSEST_STEP < told <= wanted


def is_enforced(before: KnobState, now: KnobState, wanted: int) -> bool:
    """Whether ``now`` the device shows ``wanted`` as asked for, and obeys it.

    Where something outside held it lower ``before``, it may go on to do so.
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
    """What ``read`` shows once it is ``good``, or after WAIT, whichever comes first."""
    end = clock.monotonic() + SETTLE_TIMEOUT
    while True:
        state = read()
        now = clock.monotonic()
        if good(state) or now >= end:
            return state
        clock.sleep_until(min(end, now + READ_INTERVAL))
