"""Whose is the setting that stands on a device? Pure."""

from __future__ import annotations

from wattspan.actuators.readback import is_kept
from wattspan.capper.journal import Entry
from wattspan.model import Knob, KnobState, Word


class Standing(Word):
    """Whose it is."""

    OURS = "ours"
    ORIGINAL = "original"  # what stood there before us, or what the device starts with
    FOREIGN = "foreign"  # neither
    UNKNOWN = "unknown"  # the device does not tell now


def readable(knob: Knob) -> bool:
    """Whether what stands can be read back. Locked clocks can be set and reset, and no more."""
    return knob is not Knob.GPU_CLOCK


def judge(entry: Entry, state: KnobState) -> Standing:
    """Whose the setting is that ``state`` shows, where the journal has ``entry``.

    As long as a write may not have arrived, what stood there before it is ours as well, and a
    value just below it, for devices round down to their unit. A knob that cannot be read is
    ours as far as anybody can tell.
    """
    if not readable(entry.knob):
        return Standing.OURS
    present = state.requested
    if present is None:
        return Standing.UNKNOWN
    if present == entry.value:
        return Standing.OURS
    if not entry.written and entry.value is not None:
        if present == entry.before:
            return Standing.OURS
        if present != entry.original and is_kept(entry.value, present):
            return Standing.OURS
    if entry.original is not None and is_kept(entry.original, present):
        return Standing.ORIGINAL
    return Standing.FOREIGN


def adoptable(entry: Entry, present: int | None) -> bool:
    """Whether a knob somebody else has written is back to where anybody may begin anew."""
    return present is not None and present in (entry.original, entry.default)
