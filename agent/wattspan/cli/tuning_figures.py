"""The figures of tuning for people, the same in the live view and in `wattspan tune`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from wattspan.cli.figures import UNKNOWN, joules
from wattspan.model import CapRow, Knob, TuningAccounts, TuningRow
from wattspan.tuning.serialization import unit


def percent(part: float | None, *, least: str = "") -> str:
    """``"3.1%"`` of a part of 1, with ``least`` before a known one; a dash if it is unknown."""
    if part is None:
        return UNKNOWN
    text = f"{100 * part:.1f}"
    return f"{least}{'0.0' if float(text) == 0 else text}%"


def of_budget(budget: float) -> str:
    """``"5%"``: what an operator wrote, without needless digits."""
    return f"{100 * budget:.4g}%"


def setting(knob: Knob, value: int | None) -> str:
    """``"560 W"``, ``"1410 MHz"``."""
    return UNKNOWN if value is None else f"{_number(knob, value)} {unit(knob)}"


def against_original(row: TuningRow, caps: Iterable[CapRow] = ()) -> str:
    """``"560 of 700 W"``: what is asked for now, against what stood before us.

    Several devices are told by their range; the original alone if nothing is asked for, or if
    it was only advised.
    """
    before = originals(row, caps)
    asked = set(row.decision.caps.values()) if row.applied else set()
    if not asked:
        return _span(row.knob, before.values())
    if not before:
        return _span(row.knob, asked)
    whole = _span(row.knob, before.values())
    return f"{_span(row.knob, asked).rpartition(' ')[0]} of {whole}"


def originals(row: TuningRow, caps: Iterable[CapRow] = ()) -> Mapping[str, int]:
    """What stood on each of the job's devices before us, as far as anybody knows."""
    found: dict[str, int] = {}
    for cap in caps:
        key = cap.state.key
        if key.knob is not row.knob or key.device not in row.devices:
            continue
        stood = cap.original
        if stood is None and not cap.holder:  # nobody holds it: what stands is the original
            stood = cap.state.requested
        if stood is not None:
            found[key.device] = stood
    return {**found, **row.original}


def saved(row: TuningRow) -> str:
    """``"12.3 kJ (9.80 kJ to 14.9 kJ)"``."""
    if row.saved is None:
        return UNKNOWN
    return " ".join(filter(None, (joules_either(row.saved), between(row))))


def between(row: TuningRow) -> str:
    """``"(9.80 kJ to 14.9 kJ)"``: the interval of what was saved; "" if it is unknown."""
    if row.saved_low is None or row.saved_high is None:
        return ""
    return f"({joules_either(row.saved_low)} to {joules_either(row.saved_high)})"


def joules_either(microjoules: int) -> str:
    """As ``joules``; what was lost instead of saved has its sign."""
    return f"-{joules(-microjoules)}" if microjoules < 0 else joules(microjoules)


def caps_of(row: TuningRow, accounts: TuningAccounts) -> list[CapRow]:
    """The caps of the job's devices, those of its own knob first."""
    found = [cap for cap in accounts.caps if cap.state.key.device in row.devices]
    return sorted(found, key=lambda cap: (cap.state.key.knob is not row.knob, cap.state.key))


def _span(knob: Knob, values: Iterable[int]) -> str:
    known = sorted(set(values))
    if not known:
        return UNKNOWN
    if len(known) == 1:
        return setting(knob, known[0])
    return f"{_number(knob, known[0])}-{setting(knob, known[-1])}"


def _number(knob: Knob, value: int) -> str:
    return str(value) if knob is Knob.GPU_CLOCK else f"{value / 1000:.4g}"
