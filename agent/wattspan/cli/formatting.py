"""Figures for people: a few digits, the unit beside them, and a dash for what is unknown.

What one call or one token costs, for people: three digits and a prefix, however small.
"""

from __future__ import annotations

from datetime import UTC, datetime

from wattspan.model import RatedEnergy

UNKNOWN = "-"


def watts(milliwatts: int | None) -> str:
    """``"84.2"``: watts without the unit, for a column that names it."""
    if milliwatts is None:
        return UNKNOWN
    return f"{milliwatts / 1000:.1f}" if milliwatts < 9_999_950 else f"{milliwatts / 1000:.0f}"


_PREFIXES = ("", "k", "M", "G", "T", "P")


def joules(microjoules: int | None) -> str:
    """``"12.3 kJ"``: three digits and a prefix, so that a column of them lines up."""
    if microjoules is None:
        return UNKNOWN
    value, prefix = microjoules / 1e6, 0
    while value >= 999.5 and prefix < len(_PREFIXES) - 1:
        value, prefix = value / 1000, prefix + 1
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_PREFIXES[prefix]}J"


def amount_text(weighed: RatedEnergy) -> str:
    """``"0.0034 EUR"``, ``"12.3 kg CO2e"``: three digits; ``≥`` where a part is not known."""
    if weighed.unknown and not weighed.total:
        return f"{UNKNOWN} {weighed.unit}"
    value, unit = weighed.total / 1e9, weighed.unit
    if unit == "g":
        value, unit = (value / 1000, "kg CO2e") if value >= 999.5 else (value, "g CO2e")
    digits = 2
    while digits < 6 and 0 < value < 10 ** (2 - digits):
        digits += 1  # until three say something
    return f"{'≥' if weighed.unknown else ''}{value:.{digits}f} {unit}"


def share(part: int, whole: int) -> str:
    """``"31%"`` of a whole; a dash if there is no whole."""
    if not whole:
        return UNKNOWN
    percent = 100 * part / whole
    return f"{percent:.1f}%" if 0 < percent < 9.95 else f"{percent:.0f}%"


def duration_text(nanoseconds: int) -> str:
    """``"3.2 s"``, ``"4m 12s"``, ``"2h 05m"``, ``"3d 07h"``: two units at most."""
    seconds = nanoseconds / 1e9
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {whole % 60:02}s"


def clock_time(wall: int) -> str:
    """Unix nanoseconds as a time of day, in UTC because hosts and people are elsewhere."""
    return f"{datetime.fromtimestamp(wall // 10**9, UTC):%H:%M:%S}Z"


def energy_each(microjoules: int, parts: int) -> str:
    """``"1.23 mJ"`` a part; a dash if there are no parts."""
    if parts <= 0:
        return UNKNOWN
    portion = microjoules / parts
    if portion >= 999_500:
        return joules(round(portion))
    if portion >= 999.5:
        return f"{_three_digits(portion / 1000)} mJ"
    return f"{_three_digits(portion)} µJ"


def duration_each(nanoseconds: int, parts: int) -> str:
    """``"12.3 ms"`` a part; a dash if there are no parts."""
    if parts <= 0:
        return UNKNOWN
    portion = nanoseconds / parts
    if portion >= 999_500_000:
        return duration_text(round(portion))
    if portion >= 999_500:
        return f"{_three_digits(portion / 1e6)} ms"
    return f"{_three_digits(portion / 1e3)} µs"


def count(number: int) -> str:
    """``"51.2k"``: three or four digits and a prefix."""
    value, prefix = float(number), 0
    while value >= 9999.5 and prefix < len(_SMALL_PREFIXES) - 1:
        value, prefix = value / 1000, prefix + 1
    return (
        f"{value:.0f}{_SMALL_PREFIXES[prefix]}"
        if prefix == 0
        else f"{_three_digits(value)}{_SMALL_PREFIXES[prefix]}"
    )


_SMALL_PREFIXES = ("", "k", "M", "G", "T", "P")


def _three_digits(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"
