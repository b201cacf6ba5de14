"""What one call or one token costs, for people: three digits and a prefix, however small."""

from __future__ import annotations

from wattspan.cli.figures import UNKNOWN, joules, lasting


def each(microjoules: int, parts: int) -> str:
    """``"1.23 mJ"`` a part; a dash if there are no parts."""
    if parts <= 0:
        return UNKNOWN
    portion = microjoules / parts
    if portion >= 999_500:
        return joules(round(portion))
    if portion >= 999.5:
        return f"{_three(portion / 1000)} mJ"
    return f"{_three(portion)} µJ"


def lasting_each(nanoseconds: int, parts: int) -> str:
    """``"12.3 ms"`` a part; a dash if there are no parts."""
    if parts <= 0:
        return UNKNOWN
    portion = nanoseconds / parts
    if portion >= 999_500_000:
        return lasting(round(portion))
    if portion >= 999_500:
        return f"{_three(portion / 1e6)} ms"
    return f"{_three(portion / 1e3)} µs"


def count(number: int) -> str:
    """``"51.2k"``: three or four digits and a prefix."""
    value, prefix = float(number), 0
    while value >= 9999.5 and prefix < len(_PREFIXES) - 1:
        value, prefix = value / 1000, prefix + 1
    return (
        f"{value:.0f}{_PREFIXES[prefix]}" if prefix == 0 else f"{_three(value)}{_PREFIXES[prefix]}"
    )


_PREFIXES = ("", "k", "M", "G", "T", "P")


def _three(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"
