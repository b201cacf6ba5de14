"""The tables of the view: devices, groups, processes, spans and tuning jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from wattspan.api.snapshot import DomainEntry, SnapshotDocument, SpanEntry, SpansEntry
from wattspan.cli import formatting
from wattspan.cli.formatting import count, duration_each, energy_each
from wattspan.cli.top.controls import ViewOptions, ViewSection
from wattspan.cli.top.rows import ConsumerRow, NestedDomain, hw_types
from wattspan.cli.tune.text import against_original, budget_text, percent, signed_joules, state_text
from wattspan.model import HwType, Provenance, TuningAccounts, TuningRow, TuningState
from wattspan.util.text import printable

T = TypeVar("T")

WIDE_COLUMNS = 120  # from this width on: bars, attribution methods and the state of GPUs

_HW_TYPE_LABELS = {
    HwType.CPU: "cpu",
    HwType.GPU: "gpu",
    HwType.MEMORY: "mem",
    HwType.ENCLOSURE: "encl",
}
_PROVENANCE_COLOURS = {
    Provenance.MEASURED: "green",
    Provenance.DERIVED: "cyan",
    Provenance.ESTIMATED: "yellow",
    Provenance.EMULATED: "magenta",
}


def _table(options: ViewOptions, *columns: Column) -> Table:
    return Table(
        *columns,
        box=None,
        expand=True,
        padding=(0, 2 if options.width >= WIDE_COLUMNS else 1, 0, 0),
        pad_edge=False,
        header_style="bold underline",
        collapse_padding=True,
    )


def _text_column(title: str, ratio: int) -> Column:
    return Column(title, no_wrap=True, overflow="ellipsis", ratio=ratio)


def _number_column(title: str, width: int | None = None) -> Column:
    return Column(title, justify="right", no_wrap=True, width=width)


def _joules(joules: float | None) -> str:
    """Joules for a column: a space in place of the prefix, so that digits line up."""
    return formatting.joules_text(joules).replace(" J", "  J")


def _by_type(joules: Mapping[HwType, float], kind: HwType) -> str:
    return _joules(joules[kind]) if kind in joules else ""


def _visible_rows(rows: Sequence[T], offset: int, limit: int | None) -> tuple[Sequence[T], int]:
    """The rows that fit, from ``offset`` on, and the number of those that do not."""
    if limit is None or len(rows) <= limit:
        return rows, 0
    first = min(offset, len(rows) - (limit - 1))
    shown = rows[first : first + limit - 1]  # the last line is the number of hidden rows
    return shown, len(rows) - len(shown)


def _with_hidden_rows(table: Table, hidden: int) -> RenderableType:
    return Group(table, Text(f"  ... and {hidden} more", style="dim")) if hidden else table


def one_line(line: Text, options: ViewOptions) -> Text:
    """``line``, cut to one line if the height is limited."""
    line.no_wrap, line.overflow = options.height is not None, "ellipsis"
    return line


def _empty_text(options: ViewOptions) -> Text:
    text = f"none with {options.filter!r}" if options.filter else "none yet"
    return Text(text, style="dim")


# ------------------------------------------------------------------------------------- devices


def device_table(
    document: SnapshotDocument, options: ViewOptions, tree: list[NestedDomain], limit: int | None
) -> RenderableType:
    wide = options.width >= WIDE_COLUMNS
    table = _table(
        options,
        _text_column("DEVICE", 4),
        _number_column("watts"),
        *([Column("", no_wrap=True)] if wide else []),
        *map(_number_column, ("joules", "procs", "idle", "unattr.")),
        Column("how", no_wrap=True),
        *([_text_column("state", 5)] if wide else []),
    )
    offset = options.offset if options.by is ViewSection.DEVICE else 0
    shown, hidden = _visible_rows(tree, offset, limit)
    for domain, depth in shown:
        name = printable(domain.hw_name)
        if domain.provenance is Provenance.EMULATED:  # the column `how` says so
            name = name.removeprefix("Emulated ")
        label = f"{'  ' * depth}{_HW_TYPE_LABELS[domain.hw_type]} {name}"
        part = domain.power_watts if domain.in_cover else None
        table.add_row(
            Text(label if domain.in_cover else f"{label} *", "" if domain.in_cover else "dim"),
            Text(formatting.watts(domain.power_watts), "bold" if domain.in_cover else "dim"),
            *([_bar(part, document.host.power_watts)] if wide else []),
            _joules(domain.energy_joules),
            *_shares(domain),
            Text(domain.provenance, style=_PROVENANCE_COLOURS[domain.provenance]),
            *([Text(printable(_state(domain)))] if wide else []),
        )
    if not tree:
        table.add_row(Text("no counter is read: see `wattspan doctor`", style="yellow"))
    return _with_hidden_rows(table, hidden)


def _shares(domain: DomainEntry) -> Iterator[str]:
    """The shares of consumers, idle and unattributed energy."""
    parts = (domain.consumers_joules, domain.idle_joules, domain.unattributed_joules)
    settled = sum(part or 0 for part in parts)
    yield from ("" if part is None else formatting.share(part, settled) for part in parts)


def _state(domain: DomainEntry) -> str:
    """The attribution method of a domain, or the state of a GPU."""
    if not domain.present:
        return "gone"
    gpu = domain.gpu
    if gpu is None:
        return "" if domain.method == "none" else f"by {domain.method}"
    parts = [
        None if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}",
        None if gpu.sm_clock_hertz is None else f"{gpu.sm_clock_hertz / 1e6:.0f} MHz",
        None if gpu.temperature_celsius is None else f"{gpu.temperature_celsius} °C",
        None if gpu.limit_watts is None else f"cap {gpu.limit_watts:.0f} W",
        *(f"held down: {reason}" for reason in gpu.throttling or ()),
    ]
    return "  ".join(part for part in parts if part)


def _bar(part: float | None, whole: float | None) -> RenderableType:
    """``part`` of the host's power."""
    return ProgressBar(total=whole, completed=part, width=10) if part and whole else ""


# ------------------------------------------------------------------------- groups and processes

_SMALL_WATTS = 0.05  # a brief view leaves rows of less out, unless there are few


def consumer_table(
    title: str,
    document: SnapshotDocument,
    options: ViewOptions,
    rows: list[ConsumerRow],
    offset: int,
    limit: int | None,
) -> RenderableType:
    kinds = hw_types(document)
    of_process = title == "PROCESS"
    table = _table(
        options,
        *([_number_column("PID")] if of_process else []),
        _text_column(title, 3),
        _text_column("group" if of_process else "kind", 2),
        *(_number_column(f"{_HW_TYPE_LABELS[kind]} W") for kind in kinds),
        _number_column("watts"),
        _number_column("joules"),
    )
    shown, hidden = _visible_rows(rows, offset, limit)
    if options.brief and hidden:
        shown = [row for row in rows if (row.watts or 0) >= _SMALL_WATTS][:limit] or rows[:1]
        hidden = len(rows) - len(shown)
    for row in shown:
        by_type = row.watts_by_type
        table.add_row(
            *([row.pid] if of_process else []),
            Text(printable(row.name) + ("" if row.alive else " (ended)")),
            Text(printable(row.detail), style="dim"),
            *(formatting.watts(by_type[kind]) if kind in by_type else "" for kind in kinds),
            Text(formatting.watts(row.watts), style="bold"),
            _joules(row.joules),
            style="" if row.alive else "dim",
        )
    if not rows:
        table.add_row(*([""] if of_process else []), _empty_text(options))
    return _with_hidden_rows(table, hidden)


# --------------------------------------------------------------------------------------- spans


def span_table(
    rows: list[SpanEntry], kinds: list[HwType], options: ViewOptions, offset: int, limit: int | None
) -> RenderableType:
    """One line for each name: calls, joules, joules per call and per output token."""
    wide = options.width >= WIDE_COLUMNS
    table = _table(
        options,
        _text_column("SPAN", 3),
        _text_column("service", 2),
        _number_column("calls"),
        *(_number_column(f"{_HW_TYPE_LABELS[kind]} J") for kind in kinds if wide),
        *map(_number_column, ("joules", "J/call", "time/call")),
        *([_number_column("tokens out")] if wide else []),
        _number_column("J/token"),
    )
    shown, hidden = _visible_rows(rows, offset, limit)
    for row in shown:
        joules, tokens = sum(row.energy_joules.values()), row.tokens.get("output", 0)
        energy = joules * 1e6
        table.add_row(
            Text(printable(row.name)),
            Text(printable(row.service), style="dim"),
            count(row.calls),
            *(_by_type(row.energy_joules, kind) for kind in kinds if wide),
            Text(_joules(joules), style="bold"),
            energy_each(energy, row.calls),
            duration_each(row.seconds * 1e9, row.calls),
            *([count(tokens) if tokens else ""] if wide else []),
            energy_each(energy, tokens) if tokens else "",
        )
    if not rows:
        table.add_row(_empty_text(options))
    return _with_hidden_rows(table, hidden)


def spans_remainder(spans: SpansEntry, options: ViewOptions) -> Text:
    """The energy of services outside their spans, and the spans that no row counts."""
    outside = {service: sum(joules.values()) for service, joules in spans.outside_joules.items()}
    greatest = sorted(outside.items(), key=lambda one: -one[1])
    services = ", ".join(
        f"{printable(service)} {formatting.joules_text(joules)}" for service, joules in greatest
    )
    parts = [f"outside spans: {services}"] if any(outside.values()) else []
    parts += [
        f"{count(number)} {reason.replace('_', ' ')}"
        for reason, number in _uncounted(spans)
        if number
    ]
    return one_line(Text("; ".join(parts), style="dim"), options)


def _uncounted(spans: SpansEntry) -> Iterator[tuple[str, int]]:
    counted = {"joined", "partial", "late"}
    yield from ((reason, n) for reason, n in spans.outcomes.items() if reason not in counted)
    yield from ((f"refused ({reason})", n) for reason, n in spans.refused.items())
    yield from ((f"not forwarded ({reason})", n) for reason, n in spans.forward_drops.items())


# -------------------------------------------------------------------------------------- tuning

TUNING_HEADING_LINES = 2  # a blank line and the titles
TUNING_ROW_LINES = 2

_STATE_COLOURS = {
    TuningState.HOLDING: "green",
    TuningState.EXPLORING: "cyan",
    TuningState.RELEASED: "yellow",
}
_STATE_ORDER = [*_STATE_COLOURS, *(one for one in TuningState if one not in _STATE_COLOURS)]


def tuning_lines(accounts: TuningAccounts, options: ViewOptions) -> int:
    """The number of lines that show every job; 0 if there is none."""
    rows = _tuning_rows(accounts, options)
    return TUNING_HEADING_LINES + TUNING_ROW_LINES * len(rows) if rows else 0


def _tuning_rows(accounts: TuningAccounts, options: ViewOptions) -> list[TuningRow]:
    """The jobs, those whose settings are applied first."""
    wanted = options.filter.casefold()
    rows = [row for row in accounts.rows if wanted in row.job.casefold()]
    return sorted(rows, key=lambda row: (_STATE_ORDER.index(row.state), row.job, row.knob))


def tuning_table(
    accounts: TuningAccounts, options: ViewOptions, room: int | None = None
) -> RenderableType:
    """As many jobs as fit ``room`` lines, titles included; None is unlimited."""
    rows = _tuning_rows(accounts, options)
    most = len(rows) if room is None else min(len(rows), max(0, room - 1) // TUNING_ROW_LINES)
    title = "TUNING" if most == len(rows) else f"TUNING ({most} of {len(rows)})"
    parts: list[RenderableType] = []
    # One table of equal widths for each job, because the sentence spans all columns.
    for row in rows[:most]:
        parts.append(_tuning_line(row, accounts, options, "" if parts else title))
        sentence = Text(f"  {printable(row.decision.sentence)}", style="dim")
        parts.append(one_line(sentence, options))
    return Group(*parts)


def _tuning_line(
    row: TuningRow, accounts: TuningAccounts, options: ViewOptions, title: str
) -> RenderableType:
    wide = options.width >= WIDE_COLUMNS
    table = _table(
        options,
        _text_column(title, 1),
        Column("state", no_wrap=True, width=18 if wide else 10, overflow="ellipsis"),
        _number_column("setting", 16 if wide else 13),
        *(_number_column(name, 6) for name in ("slower", "bound", "budget", "saving")),
        *([_number_column("saved", 9), _number_column("pairs", 5)] if wide else []),
    )
    table.show_header = bool(title)
    over = row.slowdown is not None and row.slowdown > row.budget
    state = state_text(row) if wide else state_text(row).partition(" ")[0]
    saved = "" if row.saved is None else signed_joules(row.saved)
    table.add_row(
        Text(printable(row.job)),
        Text(state, style=_STATE_COLOURS.get(row.state, "dim")),
        Text(against_original(row, accounts.caps), style="bold"),
        Text(percent(row.slowdown), style="yellow" if over else ""),
        percent(row.slowdown_bound),
        budget_text(row.budget),
        Text(percent(row.saving), style="bold green" if (row.saving or 0) > 0 else ""),
        *([saved, str(row.pairs)] if wide else []),
    )
    return table
