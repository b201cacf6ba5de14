"""How an actuator says that something cannot be done, and how it shows a setting."""

from __future__ import annotations

from wattspan.model import Knob, Trouble
from wattspan.ports import ActuatorError


def shown(knob: Knob, value: int | None) -> str:
    """A setting as people write it: "312.5 W", "1410 MHz"."""
    if value is None:
        return "unknown"
    return f"{value} MHz" if knob is Knob.GPU_CLOCK else f"{value / 1000:g} W"


def refused(
    thing: str, cause: str, remedy: str, trouble: Trouble, *, locked: bool = False
) -> ActuatorError:
    """``thing`` says what was tried, "read the power limit of GPU 0"."""
    sentence = f"Cannot {thing}: {cause}."
    return ActuatorError(f"{sentence} {remedy}".rstrip(), trouble, locked=locked)


def not_honoured(knob: Knob, name: str, wanted: int | None, told: int | None) -> ActuatorError:
    """The device took ``wanted`` without complaint and now shows ``told``."""
    return refused(
        f"set {name} to {shown(knob, wanted)}",
        f"it was taken without complaint, and reads back as {shown(knob, told)}",
        "Something else may have set it at the same moment; look for DCGM, nvidia-smi, tuned or "
        "another power manager.",
        Trouble.MALFORMED,
    )


def no_number(knob: Knob, name: str) -> ActuatorError:
    """A limit that is always some number was to be taken away."""
    return refused(
        f"take the {knob.value} limit of {name} away",
        "it always has a number",
        "Set it to its original value instead.",
        Trouble.MALFORMED,
    )
