"""The tables of the view: devices, groups, processes and tuning jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from wattspan.api.snapshot_document import (
    DomainEntry,
    GroupEntry,
    InferenceEntry,
    ListedProcess,
    SnapshotDocument,
    SpanEntry,
)
from wattspan.cli import formatting
from wattspan.cli.top.controls import SortKey, ViewOptions
from wattspan.cli.tune.text import (
    against_original,
    decision_text,
    job_budget_text,
    percent,
    signed_joules,
    state_text,
)
from wattspan.model import (
    BaselineQuality,
    Certainty,
    HwType,
    Provenance,
    TuningAccounts,
    TuningRow,
    TuningState,
)
from wattspan.util.text import printable

WIDE_COLUMNS = 120  # from this width on: bars, attribution methods and the state of GPUs

HW_TYPE_LABELS = {
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

EnergyEntry = ListedProcess | GroupEntry | SpanEntry
E = TypeVar("E", ListedProcess, GroupEntry, SpanEntry)

# ------------------------------------------------------------------------------------ selection


def select_rows(document: SnapshotDocument, options: ViewOptions) -> SnapshotDocument:
    """``document`` with the processes, groups and spans of the filter, sorted."""
    return replace(
        document,
        processes=_select(document.processes, ("name", "group", "pid"), options),
        groups=_select(document.groups, ("name", "kind"), options),
        spans=replace(
            document.spans,
            names=_select(document.spans.names, ("name", "service"), options),
            inference=_select_models(document.spans.inference, options),
        ),
    )


def _select(rows: list[E], names: Sequence[str], options: ViewOptions) -> list[E]:
    wanted = options.filter.casefold()

    def texts(row: E) -> list[str]:
        return [str(getattr(row, name)) for name in names]

    found = [row for row in rows if any(wanted in text.casefold() for text in texts(row))]
    found.sort(key=lambda row: (row.name.casefold(), texts(row)))
    if options.sort is SortKey.WATTS:
        found.sort(
            key=lambda row: (-1 if (w := watts(row)) is None else w, joules(row)), reverse=True
        )
    elif options.sort is SortKey.JOULES:
        found.sort(key=joules, reverse=True)
    return found


def _select_models(rows: list[InferenceEntry], options: ViewOptions) -> list[InferenceEntry]:
    """The models of the filter; sorted by name, or by joules."""
    wanted = options.filter.casefold()
    found = [row for row in rows if wanted in f"{row.model} {row.service}".casefold()]
    found.sort(key=lambda row: (row.model, row.service))
    if options.sort is not SortKey.NAME:
        found.sort(key=lambda row: sum(row.gpu_joules.values()), reverse=True)
    return found


def watts(row: EnergyEntry) -> float | None:
    """The power of all types; None for spans, whose energy is known when they have ended."""
    powers = {} if isinstance(row, SpanEntry) else row.power_watts
    return sum(powers.values()) if powers else None


def joules(row: EnergyEntry) -> float:
    return sum(row.energy_joules.values())


def hw_types(document: SnapshotDocument) -> list[HwType]:
    """The hardware types whose energy is attributed."""
    found = {domain.hw_type for domain in document.domains if domain.attributed}
    return [kind for kind in HwType if kind in found]


class NestedDomain(NamedTuple):
    domain: DomainEntry
    depth: int


def device_tree(document: SnapshotDocument, wanted: str = "") -> list[NestedDomain]:
    """Each domain, followed by the domains that it contains; siblings are sorted by name.

    Only domains that contain ``wanted``.
    """
    known = {domain.hw_id for domain in document.domains}
    children: dict[str | None, list[DomainEntry]] = {}
    for domain in document.domains:
        parent = domain.hw_parent if domain.hw_parent in known else None
        children.setdefault(parent, []).append(domain)
    tree: list[NestedDomain] = []

    def descend(parent: str | None, depth: int) -> None:
        for domain in sorted(children.pop(parent, ()), key=_device_order):
            tree.append(NestedDomain(domain, depth))
            descend(domain.hw_id, depth + 1)

    descend(None, 0)
    for cyclic in children.values():  # domains that are each other's parents
        tree += [NestedDomain(domain, 0) for domain in cyclic]
    return [nested for nested in tree if wanted.casefold() in _device_text(nested.domain)]


def _device_order(domain: DomainEntry) -> tuple[int, str, str]:
    return list(HwType).index(domain.hw_type), domain.hw_name, domain.hw_id


def _device_text(domain: DomainEntry) -> str:
    return f"{domain.hw_type} {domain.hw_name} {domain.hw_id} {domain.provenance}".casefold()


# --------------------------------------------------------------------------------- common parts


class TableField(NamedTuple):
    """A column, and its cell in each row."""

    column: Column
    cell: Callable[[Any], RenderableType]


def text_field(title: str, ratio: int, cell: Callable[[Any], RenderableType]) -> TableField:
    return TableField(Column(title, no_wrap=True, overflow="ellipsis", ratio=ratio), cell)


def number_field(
    title: str, cell: Callable[[Any], RenderableType], width: int | None = None
) -> TableField:
    return TableField(Column(title, justify="right", no_wrap=True, width=width), cell)


def _table(options: ViewOptions, fields: Iterable[TableField | None], rows: Iterable[Any]) -> Table:
    shown = [field for field in fields if field is not None]
    table = Table(
        *(field.column for field in shown),
        box=None,
        expand=True,
        padding=(0, 2 if options.width >= WIDE_COLUMNS else 1, 0, 0),
        pad_edge=False,
        header_style="bold underline",
        collapse_padding=True,
    )
    for row in rows:
        table.add_row(*(field.cell(row) for field in shown))
    return table


class VisibleRows(NamedTuple):
    """The rows of a table from ``offset`` on, at most ``limit``; None is unlimited."""

    rows: Sequence[Any]
    offset: int
    limit: int | None


def listing(
    options: ViewOptions, fields: Iterable[TableField | None], visible: VisibleRows, empty: str = ""
) -> RenderableType:
    """The rows that fit, and a line with the number of the others, or ``empty``."""
    rows, offset, limit = visible
    shown, note = rows, ""
    if limit is not None and len(rows) > limit:
        first = min(offset, len(rows) - (limit - 1))
        shown = rows[first : first + limit - 1]  # the last line is the number of hidden rows
        note = f"... and {len(rows) - len(shown)} more"
    elif not rows:
        note = empty or (f"none with {options.filter!r}" if options.filter else "none yet")
    table = _table(options, fields, shown)
    return Group(table, Text(f"  {note}", style="dim")) if note else table


def joules_cell(joules: float | None) -> str:
    """Joules for a column: a space in place of the prefix, so that digits line up."""
    return formatting.joules_text(joules).replace(" J", "  J")


def bounded_joules(row: EnergyEntry, joules_: float) -> str:
    """The energy of a row for a column, marked if it is a lower bound."""
    return formatting.at_least(joules_cell(joules_), bounded=bool(row.bounded))


def one_line(line: Text, options: ViewOptions) -> Text:
    """``line``, cut to one line if the height is limited."""
    line.no_wrap, line.overflow = options.height is not None, "ellipsis"
    return line


# ------------------------------------------------------------------------------------- devices

_PARTS = {
    "procs": attrgetter("domain.consumers_joules"),
    "idle": attrgetter("domain.idle_joules"),
    "unattr.": attrgetter("domain.unattributed_joules"),
}


def device_table(
    document: SnapshotDocument, options: ViewOptions, visible: VisibleRows
) -> RenderableType:
    wide = options.width >= WIDE_COLUMNS
    whole = document.host.least_power_watts
    fields = (
        text_field("DEVICE", 4, _device_label),
        number_field("watts", _device_watts),
        TableField(Column("", no_wrap=True), partial(_bar, whole)) if wide else None,
        number_field("joules", _device_joules),
        *(number_field(title, partial(_share, part)) for title, part in _PARTS.items()),
        TableField(Column("how", no_wrap=True), _provenance),
        text_field("state", 5, _state) if wide else None,
    )
    return listing(options, fields, visible, "no counter is read: see `wattspan doctor`")


def _device_label(row: NestedDomain) -> Text:
    domain, depth = row
    name = printable(domain.hw_name)
    if domain.provenance is Provenance.EMULATED:  # the column `how` says so
        name = name.removeprefix("Emulated ")
    label = f"{'  ' * depth}{HW_TYPE_LABELS[domain.hw_type]} {name}"
    return Text(label) if domain.in_cover else Text(f"{label} *", "dim")


def _device_watts(row: NestedDomain) -> Text:
    return Text(formatting.watts(row.domain.power_watts), "bold" if row.domain.in_cover else "dim")


def _device_joules(row: NestedDomain) -> str:
    bounded = row.domain.energy_certainty is Certainty.LOWER_BOUND
    return formatting.at_least(joules_cell(row.domain.energy_joules), bounded=bounded)


def _bar(whole: float | None, row: NestedDomain) -> RenderableType:
    """The domain's part of the host's power."""
    part = row.domain.power_watts if row.domain.in_cover else None
    return ProgressBar(total=whole, completed=part, width=10) if part and whole else ""


def _share(part: Callable[[NestedDomain], float | None], row: NestedDomain) -> str:
    """The share of consumers, idle or unattributed energy."""
    settled = sum(each(row) or 0 for each in _PARTS.values())
    energy = part(row)
    return "" if energy is None else formatting.share(energy, settled)


def _provenance(row: NestedDomain) -> Text:
    return Text(row.domain.provenance, style=_PROVENANCE_COLOURS[row.domain.provenance])


def _state(row: NestedDomain) -> Text:
    """The attribution method of a domain, or the state of a GPU."""
    domain, gpu = row.domain, row.domain.gpu
    if not (domain.present or domain.lost):
        return Text("gone")
    if domain.silent:
        return Text("no reading", "yellow")
    if gpu is None:
        method = "" if domain.method == "none" else f"by {printable(domain.method)}"
        unsure = domain.baseline in (BaselineQuality.UNKNOWN, BaselineQuality.DOUBTFUL)
        return Text(f"{method}, {domain.baseline}" if unsure else method)
    parts = [
        None if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}",
        None if gpu.sm_clock_hertz is None else f"{gpu.sm_clock_hertz / 1e6:.0f} MHz",
        None if gpu.temperature_celsius is None else f"{gpu.temperature_celsius} °C",
        None if gpu.limit_watts is None else f"cap {gpu.limit_watts:.0f} W",
        *(f"held down: {reason}" for reason in gpu.throttling or ()),
    ]
    return Text(printable("  ".join(part for part in parts if part)))


# ------------------------------------------------------------------------- groups and processes


def process_table(
    document: SnapshotDocument, options: ViewOptions, visible: VisibleRows
) -> RenderableType:
    fields = (
        number_field("PID", lambda row: "" if row.pid is None else str(row.pid)),
        text_field("PROCESS", 3, _process_name),
        text_field("group", 2, lambda row: Text(printable(row.group), style="dim")),
        *_energy_fields(document),
    )
    return listing(options, fields, visible)


def group_table(
    document: SnapshotDocument, options: ViewOptions, visible: VisibleRows
) -> RenderableType:
    fields = (
        text_field("GROUP", 3, name_cell),
        text_field("kind", 2, lambda row: Text(row.kind, style="dim")),
        *_energy_fields(document),
    )
    return listing(options, fields, visible)


def name_cell(row: EnergyEntry) -> Text:
    return Text(printable(row.name))


def _process_name(row: ListedProcess) -> Text:
    return name_cell(row) if row.alive else Text(f"{printable(row.name)} (ended)", style="dim")


def _energy_fields(document: SnapshotDocument) -> Iterator[TableField]:
    for kind in hw_types(document):
        yield number_field(f"{HW_TYPE_LABELS[kind]} W", partial(_watts_of, kind))
    yield number_field("watts", _total_watts)
    yield number_field("joules", lambda row: bounded_joules(row, joules(row)))


def _watts_of(kind: HwType, row: ListedProcess | GroupEntry) -> str:
    known = formatting.watts(row.power_watts[kind]) if kind in row.power_watts else ""
    return formatting.at_least(known, bounded=kind in row.power_bounded)


def _total_watts(row: ListedProcess | GroupEntry) -> Text:
    known = formatting.watts(watts(row))
    return Text(formatting.at_least(known, bounded=bool(row.power_bounded)), style="bold")


# -------------------------------------------------------------------------------------- tuning

TUNING_LINES = 4  # a blank line, the titles, a job and its sentence


def job_lines(rows: Sequence[TuningRow]) -> int:
    """Lines of each job: of a declared one, also the answer to its application."""
    return 3 if any(row.declared is not None for row in rows) else 2


_STATE_COLOURS = {
    TuningState.HOLDING: "green",
    TuningState.EXPLORING: "cyan",
    TuningState.RELEASED: "yellow",
}
_STATE_ORDER = [*_STATE_COLOURS, *(one for one in TuningState if one not in _STATE_COLOURS)]


def tuning_rows(accounts: TuningAccounts, options: ViewOptions) -> list[TuningRow]:
    """The jobs of the filter, those whose settings are applied first."""
    wanted = options.filter.casefold()
    rows = [row for row in accounts.rows if wanted in row.job.casefold()]
    return sorted(rows, key=lambda row: (_STATE_ORDER.index(row.state), row.job, row.knob))


def tuning_table(
    rows: Sequence[TuningRow], accounts: TuningAccounts, options: ViewOptions, limit: int | None
) -> RenderableType:
    """At most ``limit`` jobs; None is unlimited."""
    shown = rows[:limit]
    title = "TUNING" if len(shown) == len(rows) else f"TUNING ({len(shown)} of {len(rows)})"
    wide = options.width >= WIDE_COLUMNS
    parts: list[RenderableType] = []
    # One table of equal widths for each job, because the sentence spans all columns.
    for row in shown:
        fields = (
            text_field(title, 1, lambda row: Text(printable(row.job))),
            TableField(
                Column("state", no_wrap=True, width=18 if wide else 10, overflow="ellipsis"),
                partial(_tuning_state, wide),
            ),
            number_field(
                "setting",
                lambda row: Text(against_original(row, accounts.caps), style="bold"),
                16 if wide else 13,
            ),
            number_field("slower", _slowdown, 6),
            number_field("bound", lambda row: percent(row.slowdown_bound), 6),
            number_field("budget", job_budget_text, 6),
            number_field("saving", _saving, 6),
            number_field("saved", _saved, 9) if wide else None,
            number_field("pairs", lambda row: str(row.pairs), 5) if wide else None,
        )
        table = _table(options, fields, [row])
        table.show_header = not parts
        sentence = Text(f"  {decision_text(row)}", style="dim")
        parts += [table, one_line(sentence, options)]
        if row.declared is not None:  # what was asked for, what was given and why
            answer = Text(f"  {printable(row.declared.reason)}", style="dim")
            parts.append(one_line(answer, options))
    return Group(*parts)


def _tuning_state(wide: bool, row: TuningRow) -> Text:
    state = state_text(row)
    text = state if wide else state.partition(" ")[0]
    return Text(text, style=_STATE_COLOURS.get(row.state, "dim"))


def _slowdown(row: TuningRow) -> Text:
    over = row.slowdown is not None and row.slowdown > row.budget
    return Text(percent(row.slowdown), style="yellow" if over else "")


def _saving(row: TuningRow) -> Text:
    return Text(percent(row.saving), style="bold green" if (row.saving or 0) > 0 else "")


def _saved(row: TuningRow) -> str:
    return "" if row.saved is None else signed_joules(row.saved)
