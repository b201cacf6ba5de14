"""What the tables of the terminal view have in common."""

from __future__ import annotations

from typing import TypeVar

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from wattspan.cli import figures
from wattspan.cli.controls import Options
from wattspan.model import HwType

T = TypeVar("T")

WIDE = 120  # from here on there is room for bars, methods and the state of GPUs

SHORT = {HwType.CPU: "cpu", HwType.GPU: "gpu", HwType.MEMORY: "mem", HwType.ENCLOSURE: "encl"}


def plain_table(options: Options, *columns: Column) -> Table:
    return Table(
        *columns,
        box=None,
        expand=True,
        padding=(0, 2 if options.width >= WIDE else 1, 0, 0),
        pad_edge=False,
        header_style="bold underline",
        collapse_padding=True,
    )


def number(title: str) -> Column:
    return Column(title, justify="right", no_wrap=True)


def column(energy: int) -> str:
    """Joules for a column: a blank where others have a prefix, so that digits line up."""
    text = figures.joules(energy)
    return text.replace(" J", "  J")


def window(rows: list[T], offset: int, limit: int | None) -> tuple[list[T], int]:
    """The rows that fit, from ``offset`` on, and how many do not."""
    if limit is None or len(rows) <= limit:
        return rows, 0
    first = min(offset, len(rows) - (limit - 1))
    shown = rows[first : first + limit - 1]  # one line goes to "more"
    return shown, len(rows) - len(shown)


def more(hidden: int) -> list[RenderableType]:
    return [Text(f"  ... and {hidden} more", style="dim")] if hidden else []


def one_line(line: Text, options: Options) -> Text:
    """Cut to one line where lines are counted; whole where there is room for all."""
    line.no_wrap, line.overflow = options.height is not None, "ellipsis"
    return line


def nobody(options: Options) -> str:
    return f"none with {options.filter!r}" if options.filter else "none yet"
