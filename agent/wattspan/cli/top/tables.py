"""What the tables of the terminal view have in common.

The spans of instrumented applications in the terminal view.

They have no watts: what a span spent is known when it has ended, so figures are since the agent
first saw the name.

Tuning in the terminal view: a line a job, and its sentence below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from wattspan.cli import formatting
from wattspan.cli.formatting import count, duration_each, energy_each
from wattspan.cli.top.controls import ViewOptions
from wattspan.cli.tune.text import against_original, budget_text, percent, signed_joules, state_text
from wattspan.model import HwType, SpanAccounts, SpanRow, TuningAccounts, TuningRow, TuningState
from wattspan.util.text import printable

T = TypeVar("T")

WIDE_COLUMNS = 120  # from here on there is room for bars, methods and the state of GPUs

HW_TYPE_LABELS = {
    HwType.CPU: "cpu",
    HwType.GPU: "gpu",
    HwType.MEMORY: "mem",
    HwType.ENCLOSURE: "encl",
}


def plain_table(options: ViewOptions, *columns: Column) -> Table:
    return Table(
        *columns,
        box=None,
        expand=True,
        padding=(0, 2 if options.width >= WIDE_COLUMNS else 1, 0, 0),
        pad_edge=False,
        header_style="bold underline",
        collapse_padding=True,
    )


def number(title: str) -> Column:
    return Column(title, justify="right", no_wrap=True)


def column(energy: int) -> str:
    """Joules for a column: a blank where others have a prefix, so that digits line up."""
    text = formatting.joules(energy)
    return text.replace(" J", "  J")


def visible_rows(rows: list[T], offset: int, limit: int | None) -> tuple[list[T], int]:
    """The rows that fit, from ``offset`` on, and how many do not."""
    if limit is None or len(rows) <= limit:
        return rows, 0
    first = min(offset, len(rows) - (limit - 1))
    shown = rows[first : first + limit - 1]  # one line goes to "more"
    return shown, len(rows) - len(shown)


def hidden_rows_line(hidden: int) -> list[RenderableType]:
    return [Text(f"  ... and {hidden} more", style="dim")] if hidden else []


def one_line(line: Text, options: ViewOptions) -> Text:
    """Cut to one line where lines are counted; whole where there is room for all."""
    line.no_wrap, line.overflow = options.height is not None, "ellipsis"
    return line


def empty_text(options: ViewOptions) -> str:
    return f"none with {options.filter!r}" if options.filter else "none yet"


def span_table(
    rows: list[SpanRow], kinds: list[HwType], options: ViewOptions, offset: int, limit: int | None
) -> RenderableType:
    """One line a name: calls, joules, and what a call and an output token cost."""
    wide = options.width >= WIDE_COLUMNS
    table = plain_table(
        options,
        Column("SPAN", no_wrap=True, overflow="ellipsis", ratio=3),
        Column("service", no_wrap=True, overflow="ellipsis", ratio=2),
        number("calls"),
        *(number(f"{HW_TYPE_LABELS[kind]} J") for kind in kinds if wide),
        number("joules"),
        number("J/call"),
        number("time/call"),
        *([number("tokens out")] if wide else []),
        number("J/token"),
    )
    shown, hidden = visible_rows(rows, offset, limit)
    for row in shown:
        energy, made = sum(row.energy.values()), row.tokens.get("output", 0)
        table.add_row(
            Text(printable(row.name)),
            Text(printable(row.service), style="dim"),
            count(row.count),
            *(_of_kind(row, kind) for kind in kinds if wide),
            Text(column(energy), style="bold"),
            energy_each(energy, row.count),
            duration_each(row.time, row.count),
            *([count(made) if made else ""] if wide else []),
            energy_each(energy, made) if made else "",
        )
    if not rows:
        table.add_row(Text(empty_text(options), style="dim"))
    return Group(table, *hidden_rows_line(hidden))


def spans_remainder(spans: SpanAccounts, options: ViewOptions) -> Text:
    """What services spent outside their spans, and the spans that no row counts."""
    told = [f"outside spans: {_outside(spans)}"] if any(spans.outside.values()) else []
    told += [
        f"{count(number)} {reason.replace('_', ' ')}"
        for reason, number in _uncounted(spans)
        if number
    ]
    return one_line(Text("; ".join(told), style="dim"), options)


def _of_kind(row: SpanRow, kind: HwType) -> str:
    return column(row.energy[kind]) if kind in row.energy else ""


def _outside(spans: SpanAccounts) -> str:
    services: dict[str, int] = {}
    for (service, _), energy in spans.outside.items():
        services[service] = services.get(service, 0) + energy
    greatest = sorted(services.items(), key=lambda one: -one[1])
    return ", ".join(
        f"{printable(service)} {formatting.joules(energy)}" for service, energy in greatest
    )


_IN_ROWS = frozenset({"joined", "partial", "late"})


def _uncounted(spans: SpanAccounts) -> Iterator[tuple[str, int]]:
    yield from ((reason, n) for reason, n in spans.outcomes.items() if reason not in _IN_ROWS)
    for reason, n in spans.refused.items():
        yield f"refused ({reason})", n
    for reason, n in spans.forward_drops.items():
        yield f"not forwarded ({reason})", n


TUNING_HEADING_LINES = 2  # a blank line and the titles
TUNING_ROW_LINES = 2  # lines a job

_COLOURS = {
    TuningState.HOLDING: "green",
    TuningState.EXPLORING: "cyan",
    TuningState.RELEASED: "yellow",
}
_ORDER = [*_COLOURS, *(state for state in TuningState if state not in _COLOURS)]


def tuning_lines(accounts: TuningAccounts, options: ViewOptions) -> int:
    """How many lines it takes to show every job; 0 if there is none."""
    rows = tuning_rows(accounts, options)
    return TUNING_HEADING_LINES + TUNING_ROW_LINES * len(rows) if rows else 0


def tuning_rows(accounts: TuningAccounts, options: ViewOptions) -> list[TuningRow]:
    """The jobs, those first whose settings are turned."""
    wanted = options.filter.casefold()
    kept = [row for row in accounts.rows if wanted in row.job.casefold()]
    return sorted(kept, key=lambda row: (_ORDER.index(row.state), row.job, row.knob))


def tuning_table(
    accounts: TuningAccounts, options: ViewOptions, room: int | None = None
) -> RenderableType:
    """As many jobs as ``room`` lines hold, titles included; None is room for all."""
    rows = tuning_rows(accounts, options)
    most = len(rows) if room is None else min(len(rows), max(0, room - 1) // TUNING_ROW_LINES)
    title = "TUNING" if most == len(rows) else f"TUNING ({most} of {len(rows)})"
    parts: list[RenderableType] = []
    # A table a job, so that the sentence between can go over all columns; their widths are alike.
    for row in rows[:most]:
        parts.append(_line(row, accounts, options, "" if parts else title))
        sentence = Text(f"  {printable(row.decision.sentence)}", style="dim")
        parts.append(one_line(sentence, options))
    return Group(*parts)


def _line(
    row: TuningRow, accounts: TuningAccounts, options: ViewOptions, title: str
) -> RenderableType:
    wide = options.width >= WIDE_COLUMNS
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
            state_text(row) if wide else state_text(row).partition(" ")[0],
            style=_COLOURS.get(row.state, "dim"),
        ),
        Text(against_original(row, accounts.caps), style="bold"),
        Text(percent(row.slowdown), style="yellow" if over else ""),
        percent(row.slowdown_bound),
        budget_text(row.budget),
        Text(percent(row.saving), style="bold green" if (row.saving or 0) > 0 else ""),
        *(["" if row.saved is None else signed_joules(row.saved)] if wide else []),
        *([str(row.pairs)] if wide else []),
    )
    return table
