"""Tuning in the terminal view: a line a job, and its sentence below."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from wattspan.cli.controls import Options
from wattspan.cli.tables import WIDE, one_line, plain_table
from wattspan.cli.tune_text import state
from wattspan.cli.tuning_figures import (
    against_original,
    joules_either,
    of_budget,
    percent,
)
from wattspan.model import TuningAccounts, TuningRow, TuningState
from wattspan.util.text import printable

HEADING = 2  # a blank line and the titles
EACH = 2  # lines a job

_COLOURS = {
    TuningState.HOLDING: "green",
    TuningState.EXPLORING: "cyan",
    TuningState.RELEASED: "yellow",
}
_ORDER = [*_COLOURS, *(state for state in TuningState if state not in _COLOURS)]


def tuning_lines(accounts: TuningAccounts, options: Options) -> int:
    """How many lines it takes to show every job; 0 if there is none."""
    rows = tuning_rows(accounts, options)
    return HEADING + EACH * len(rows) if rows else 0


def tuning_rows(accounts: TuningAccounts, options: Options) -> list[TuningRow]:
    """The jobs, those first whose settings are turned."""
    wanted = options.filter.casefold()
    kept = [row for row in accounts.rows if wanted in row.job.casefold()]
    return sorted(kept, key=lambda row: (_ORDER.index(row.state), row.job, row.knob))


def tuning_table(
    accounts: TuningAccounts, options: Options, room: int | None = None
) -> RenderableType:
    """As many jobs as ``room`` lines hold, titles included; None is room for all."""
    rows = tuning_rows(accounts, options)
    most = len(rows) if room is None else min(len(rows), max(0, room - 1) // EACH)
    title = "TUNING" if most == len(rows) else f"TUNING ({most} of {len(rows)})"
    parts: list[RenderableType] = []
    # A table a job, so that the sentence between can go over all columns; their widths are alike.
    for row in rows[:most]:
        parts.append(_line(row, accounts, options, "" if parts else title))
        sentence = Text(f"  {printable(row.decision.sentence)}", style="dim")
        parts.append(one_line(sentence, options))
    return Group(*parts)


def _line(row: TuningRow, accounts: TuningAccounts, options: Options, title: str) -> RenderableType:
    wide = options.width >= WIDE
    table = plain_table(
        options,
        Column(title, no_wrap=True, overflow="ellipsis", ratio=1),
        Column("state", no_wrap=True, width=18 if wide else 10, overflow="ellipsis"),
        Column("setting", justify="right", no_wrap=True, width=16 if wide else 13),
        Column("slower", justify="right", no_wrap=True, width=6),
        Column("bound", justify="right", no_wrap=True, width=6),
        Column("budget", justify="right", no_wrap=True, width=6),
        Column("saving", justify="right", no_wrap=True, width=6),
        *([Column("saved", justify="right", no_wrap=True, width=9)] if wide else []),
        *([Column("pairs", justify="right", no_wrap=True, width=5)] if wide else []),
    )
    table.show_header = bool(title)
    over = row.slowdown is not None and row.slowdown > row.budget
    table.add_row(
        Text(printable(row.job)),
        Text(
            state(row) if wide else state(row).partition(" ")[0],
            style=_COLOURS.get(row.state, "dim"),
        ),
        Text(against_original(row, accounts.caps), style="bold"),
        Text(percent(row.slowdown), style="yellow" if over else ""),
        percent(row.slowdown_bound),
        of_budget(row.budget),
        Text(percent(row.saving), style="bold green" if (row.saving or 0) > 0 else ""),
        *(["" if row.saved is None else joules_either(row.saved)] if wide else []),
        *([str(row.pairs)] if wide else []),
    )
    return table
