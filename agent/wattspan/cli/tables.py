"""Tables for people, made with rich: aligned columns of plain text, never cut or coloured."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from wattspan.util.text import printable

_UNLIMITED = 100_000  # columns


def table_lines(
    rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,), max_width: int | None = None
) -> list[str]:
    """The lines of a table without its empty columns.

    Columns in ``left`` are flush left and cut to ``max_width``; the others are flush right.
    """
    table, contents = Table.grid(padding=(0, 2, 0, 0)), []
    for place, column in enumerate(zip(*rows, strict=True)):
        if not any(column):
            continue
        if place in left:
            table.add_column(no_wrap=True, max_width=max_width)
        else:
            table.add_column(no_wrap=True, justify="right")
        contents.append(Text("\n".join(map(printable, column))))
    table.add_row(*contents)  # one row of many lines: rich takes 0.2 ms for each cell
    return text_lines(table)


def text_lines(content: RenderableType, width: int = _UNLIMITED) -> list[str]:
    """``content`` as lines of plain text, without trailing spaces."""
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as capture:
        console.print(content)
    return [line.rstrip() for line in capture.get().splitlines()]
