"""The spans of instrumented applications in the terminal view.

They have no watts: what a span spent is known when it has ended, so figures are since the agent
first saw the name.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from wattspan.cli import figures
from wattspan.cli.controls import Options
from wattspan.cli.portions import count, each, lasting_each
from wattspan.cli.tables import SHORT, WIDE, column, more, nobody, number, one_line, plain_table
from wattspan.cli.tables import window as window_of
from wattspan.model import HwType, SpanAccounts, SpanRow
from wattspan.util.text import printable


def span_table(
    rows: list[SpanRow], kinds: list[HwType], options: Options, offset: int, limit: int | None
) -> RenderableType:
    """One line a name: calls, joules, and what a call and an output token cost."""
    wide = options.width >= WIDE
    table = plain_table(
        options,
        Column("SPAN", no_wrap=True, overflow="ellipsis", ratio=3),
        Column("service", no_wrap=True, overflow="ellipsis", ratio=2),
        number("calls"),
        *(number(f"{SHORT[kind]} J") for kind in kinds if wide),
        number("joules"),
        number("J/call"),
        number("time/call"),
        *([number("tokens out")] if wide else []),
        number("J/token"),
    )
    shown, hidden = window_of(rows, offset, limit)
    for row in shown:
        energy, made = sum(row.energy.values()), row.tokens.get("output", 0)
        table.add_row(
            Text(printable(row.name)),
            Text(printable(row.service), style="dim"),
            count(row.count),
            *(_of_kind(row, kind) for kind in kinds if wide),
            Text(column(energy), style="bold"),
            each(energy, row.count),
            lasting_each(row.time, row.count),
            *([count(made) if made else ""] if wide else []),
            each(energy, made) if made else "",
        )
    if not rows:
        table.add_row(Text(nobody(options), style="dim"))
    return Group(table, *more(hidden))


def spans_remainder(spans: SpanAccounts, options: Options) -> Text:
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
        f"{printable(service)} {figures.joules(energy)}" for service, energy in greatest
    )


_IN_ROWS = frozenset({"joined", "partial", "late"})


def _uncounted(spans: SpanAccounts) -> Iterator[tuple[str, int]]:
    yield from ((reason, n) for reason, n in spans.outcomes.items() if reason not in _IN_ROWS)
    for reason, n in spans.refused.items():
        yield f"refused ({reason})", n
    for reason, n in spans.forward_drops.items():
        yield f"not forwarded ({reason})", n
