"""Whose is the setting that stands on a device? Pure."""

from __future__ import annotations

from wattspan.actuators.readback import is_kept
from wattspan.capper.journal import Entry, Source
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
    ours as far as anybody can tell. Of an earlier boot our value is the device's own if it is the
    default, at which the device starts.
    """
    if not readable(entry.knob):
        return Standing.OURS
    present = state.requested
    if present is None:
        return Standing.UNKNOWN
    if entry.source is Source.EARLIER and present == entry.default:
        return Standing.ORIGINAL
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


def plausible(entry: Entry, state: KnobState) -> bool:
    """True if the original may be written: within the device's range, and above our value.

    Some drivers derive the range from the present limit, so the range that was recorded with the
    original counts as well.
    """
    if not readable(entry.knob):
        return entry.original is None
    original, highest = entry.original, _most(state.maximum, entry.maximum)
    if original is None or entry.value is None:
        return False
    if highest is None:  # the device reports no range: only a checksum can vouch for the original
        return entry.source is not Source.SALVAGED and original >= entry.value
    lowest = min(state.minimum or 0, entry.minimum or 0)
    return max(lowest, entry.value, 1) <= original <= highest


def may_be_capped(state: KnobState) -> bool:
    """True if a cap of ours could be in force: every cap is below the device's maximum."""
    present, maximum = state.requested, state.maximum
    return present is None or maximum is None or present < maximum


def adoptable(entry: Entry, present: int | None) -> bool:
    """Whether a knob somebody else has written is back to where anybody may begin anew."""
    return present is not None and present in (entry.original, entry.default)


def _most(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)
