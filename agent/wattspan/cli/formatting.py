"""Text for people: figures with a unit prefix, a dash for an unknown value, and plain tables.

Tables are made with rich: aligned columns of plain text, never cut or coloured. It is imported when
a table is printed: `--help` needs none.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from wattspan.util.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

UNKNOWN = "-"
_PREFIXES = ("µ", "m", "", "k", "M", "G", "T", "P")
_NONE = _PREFIXES.index("")


def at_least(text: str, *, bounded: bool) -> str:
    """``text``, marked as a lower bound if ``bounded``: ``"≥ 4.3 W"``."""
    return f"≥ {text}" if bounded and text not in ("", UNKNOWN) else text


def watts(watts: float | None) -> str:
    """``"84.2"``: without the unit, for a column that names it."""
    if watts is None:
        return UNKNOWN
    return f"{watts:.1f}" if watts < 9999.95 else f"{watts:.0f}"


def joules(microjoules: float | None) -> str:
    """``"12.3 kJ"``, ``"4.30 mJ"``: three digits and a prefix."""
    if microjoules is None:
        return UNKNOWN
    return f"{_scaled(microjoules, 0) if microjoules else '0.00 '}J"


def joules_text(joules_: float | None) -> str:
    """As ``joules``, of an energy in joules."""
    return joules(None if joules_ is None else joules_ * 1e6)


def least_joules(joules_: float | None, *, bounded: bool) -> str:
    """As ``joules_text``, marked if it is a lower bound; a dash for a lower bound of 0."""
    return at_least(joules_text(joules_ if joules_ or not bounded else None), bounded=bounded)


def amount_text(total: float, unit: str, *, partial: bool) -> str:
    """``"0.0034 EUR"``, ``"12.3 kg CO2e"`` for grams; ``≥`` if ``partial``: a part is unknown."""
    if partial and not total:
        return f"{UNKNOWN} {unit}"
    if unit == "g":
        total, unit = (total / 1000, "kg CO2e") if total >= 999.5 else (total, "g CO2e")
    digits = 2
    while digits < 6 and 0 < total < 10 ** (2 - digits):
        digits += 1  # until there are three significant digits
    return at_least(f"{total:.{digits}f} {unit}", bounded=partial)


def share(part: float, whole: float) -> str:
    """``"31%"`` of ``whole``; a dash if ``whole`` is 0."""
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
    """Unix nanoseconds as a time of day in UTC."""
    return f"{datetime.fromtimestamp(wall // 10**9, UTC):%H:%M:%S}Z"


def local_time(seconds: int) -> str:
    """Unix seconds in local time, with its offset."""
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S %z}"


def energy_each(microjoules: float, parts: int) -> str:
    """``"1.23 mJ"`` for each of ``parts``; a dash if there are none."""
    if parts <= 0:
        return UNKNOWN
    return f"{_scaled(microjoules / parts, 0)}J"


def estimate(joules_: float | None, half_width: float | None) -> str:
    """``"82.5 ±0.9 mJ"``: three digits of a figure, its half-width rounded up to the last digit."""
    if joules_ is None or half_width is None:
        return UNKNOWN
    prefix, factor = unit_prefix(joules_)
    text = _three_digits(joules_ / factor)
    digits = len(text.partition(".")[2])
    wide = ceil(round(half_width / factor * 10**digits, 6)) / 10**digits
    return f"{text} ±{wide:.{digits}f} {prefix}J"


def duration_each(nanoseconds: float, parts: int) -> str:
    """``"12.3 ms"`` for each of ``parts``; a dash if there are none."""
    if parts <= 0:
        return UNKNOWN
    portion = nanoseconds / parts
    if portion >= 999_500_000:
        return duration_text(round(portion))
    if portion >= 999_500:
        return f"{_three_digits(portion / 1e6)} ms"
    return f"{_three_digits(portion / 1e3)} µs"


def count(number: int) -> str:
    """``"51.2k"``: a prefix from five digits on."""
    return str(number) if number <= 9999 else _scaled(number, _NONE).replace(" ", "")


def unit_prefix(value: float) -> tuple[str, float]:
    """The prefix in which ``value`` of a base unit has one to three digits, and its factor."""
    place = _NONE
    while abs(value) >= 999.5 and place < len(_PREFIXES) - 1:
        value, place = value / 1000, place + 1
    while 0 < abs(value) < 0.9995 and place > 0:
        value, place = value * 1000, place - 1
    return _PREFIXES[place], 1000.0 ** (place - _NONE)


def _scaled(value: float, prefix: int) -> str:
    while abs(value) >= 999.5 and prefix < len(_PREFIXES) - 1:
        value, prefix = value / 1000, prefix + 1
    return f"{_three_digits(value)} {_PREFIXES[prefix]}"


def _three_digits(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:.{digits}f}"


# -------------------------------------------------------------------------------------- tables

_UNLIMITED = 100_000  # columns


class TableColumn(NamedTuple):
    """A column of a table: its title, and its cell in a row.

    It is flush right, or else ``left``. A ``note`` stands below the title. ``ratio`` and ``width``
    divide the width of a terminal; a list of lines is as wide as its cells.
    """

    title: str
    cell: Callable[[Any], RenderableType]
    left: bool = False
    note: str = ""
    ratio: int | None = None
    width: int | None = None


def table_lines(
    columns: Iterable[TableColumn], rows: Iterable[Any], *, max_width: int | None = None
) -> list[str]:
    """The lines of a table of ``rows``, without its empty columns and titles.

    Columns that are flush left are cut to ``max_width``.
    """
    from rich.table import Table
    from rich.text import Text

    columns, rows = list(columns), list(rows)
    titled, noted = any(one.title for one in columns), any(one.note for one in columns)
    table, contents = Table.grid(padding=(0, 2, 0, 0)), []
    for column in columns:
        head = [column.title] * titled + [column.note] * noted
        cells = [*head, *(str(column.cell(row)) for row in rows)]
        if not any(cells):
            continue
        if column.left:
            table.add_column(no_wrap=True, max_width=max_width)
        else:
            table.add_column(no_wrap=True, justify="right")
        contents.append(Text("\n".join(map(printable, cells))))
    table.add_row(*contents)  # one row of many lines: rich takes 0.2 ms for each cell
    return text_lines(table)


def text_lines(content: RenderableType, width: int = _UNLIMITED) -> list[str]:
    """``content`` as lines of plain text, without trailing spaces."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(content)
    return [line.rstrip() for line in capture.get().splitlines()]
