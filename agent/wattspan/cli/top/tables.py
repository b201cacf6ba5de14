"""The tables of the view: devices, tuning jobs, groups, processes, spans and language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace
from rich.console import Group, JustifyMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wattspan.api.inference_entries import EngineEntry, InferenceEntry
from wattspan.api.snapshot_document import (
    DomainEntry,
    GroupEntry,
    ListedProcess,
    SnapshotDocument,
    SpanEntry,
    SpansEntry,
)
from wattspan.cli import formatting
from wattspan.cli.formatting import TableColumn, at_least, count, duration_each, energy_each
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
    COUNTERS,
    LEARNED_POWERS,
    BaselineQuality,
    Certainty,
    HwType,
    Provenance,
    TuningAccounts,
    TuningRow,
    TuningState,
    UnmeteredRow,
    service_label,
)
from wattspan.util.text import printable

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
            unmetered=[row for row in document.spans.unmetered if _is_wanted(row, options)],
        ),
        engines=[row for row in document.engines if _is_wanted(row, options)],
    )


def _select(rows: list[E], names: Sequence[str], options: ViewOptions) -> list[E]:
    wanted = options.filter.casefold()

    def texts(row: E) -> list[str]:
        return [str(getattr(row, name)) for name in names]

    found = [row for row in rows if any(wanted in text.casefold() for text in texts(row))]
    found.sort(key=lambda row: (row.name.casefold(), texts(row)))
    if options.sort is SortKey.WATTS:
        found.sort(
            key=lambda row: (-1 if (w := _watts(row)) is None else w, _joules(row)), reverse=True
        )
    elif options.sort is SortKey.JOULES:
        found.sort(key=_joules, reverse=True)
    return found


def _is_wanted(row: InferenceEntry | UnmeteredRow | EngineEntry, options: ViewOptions) -> bool:
    name = row.engine if isinstance(row, EngineEntry) else row.service
    return options.filter.casefold() in f"{row.model} {name}".casefold()


def _select_models(rows: list[InferenceEntry], options: ViewOptions) -> list[InferenceEntry]:
    """The models of the filter; sorted by name, or by joules."""
    found = [row for row in rows if _is_wanted(row, options)]
    found.sort(key=lambda row: (row.model, row.service))
    if options.sort is not SortKey.NAME:
        found.sort(key=lambda row: sum(row.gpu_joules.values()), reverse=True)
    return found


def _watts(row: EnergyEntry) -> float | None:
    """The power of all types; None for spans, whose energy is known when they have ended."""
    powers = {} if isinstance(row, SpanEntry) else row.power_watts
    return sum(powers.values()) if powers else None


def _joules(row: EnergyEntry) -> float:
    return sum(row.energy_joules.values())


def _hw_types(document: SnapshotDocument) -> list[HwType]:
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


def _table(options: ViewOptions, columns: Iterable[TableColumn], rows: Iterable[Any]) -> Table:
    columns = list(columns)
    table = Table(
        box=None,
        expand=True,
        padding=(0, 2 if options.wide else 1, 0, 0),
        pad_edge=False,
        header_style="bold underline",
        collapse_padding=True,
    )
    for column in columns:
        justify: JustifyMethod = "left" if column.left else "right"
        table.add_column(
            column.title, justify=justify, no_wrap=True, ratio=column.ratio, width=column.width
        )
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def listing(
    options: ViewOptions,
    offset: int,
    columns: Iterable[TableColumn],
    rows: Sequence[Any],
    limit: int | None,
    empty: str = "",
) -> RenderableType:
    """At most ``limit`` lines of ``rows`` from ``offset`` on, and one with the number of others.

    Without rows, a line is ``empty`` or tells about the filter.
    """
    shown, note = rows, ""
    if limit is not None and len(rows) > limit:
        first = min(offset, len(rows) - (limit - 1))
        shown = rows[first : first + limit - 1]  # the last line is the number of hidden rows
        note = f"... and {len(rows) - len(shown)} more"
    elif not rows:
        note = empty or (f"none with {options.filter!r}" if options.filter else "none yet")
    table = _table(options, columns, shown)
    return Group(table, Text(f"  {note}", style="dim")) if note else table


def _joules_cell(joules: float | None) -> str:
    """Joules for a column: a space in place of the prefix, so that digits line up."""
    return formatting.joules_text(joules).replace(" J", "  J")


def _bounded_joules(row: EnergyEntry) -> str:
    """The energy of a row for a column, marked if it is a lower bound."""
    return _least(_joules_cell(_joules(row)), _joules(row), bounded=bool(row.bounded))


def _least(text: str, joules: float, *, bounded: bool) -> str:
    """``text`` of an energy, marked if that is a lower bound; a dash for a lower bound of 0."""
    return at_least(text if joules or not bounded else formatting.UNKNOWN, bounded=bounded)


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


_METHODS = {LEARNED_POWERS: "by learned cost", "none": ""}
NO_COUNTER = "no counter is read: see `wattspan doctor`"


def device_columns(document: SnapshotDocument, options: ViewOptions) -> list[TableColumn]:
    whole = document.host.least_power_watts
    columns = [
        TableColumn("DEVICE", _device_label, left=True, ratio=4),
        TableColumn("watts", _device_watts),
        TableColumn("joules", _device_joules),
        *(TableColumn(title, partial(_share, part)) for title, part in _PARTS.items()),
        TableColumn("how", _provenance, left=True),
    ]
    if options.wide:
        columns.insert(2, TableColumn("", partial(_bar, whole), left=True))
        columns.append(TableColumn("state", _state, left=True, ratio=5))
    return columns


def _device_label(row: NestedDomain) -> Text:
    domain, depth = row
    name = printable(domain.hw_name)
    if domain.provenance is Provenance.EMULATED:  # the column `how` says so
        name = name.removeprefix("Emulated ")
    label = f"{'  ' * depth}{_HW_TYPE_LABELS[domain.hw_type]} {name}"
    return Text(label) if domain.in_cover else Text(f"{label} *", "dim")


def _device_watts(row: NestedDomain) -> Text:
    return Text(formatting.watts(row.domain.power_watts), "bold" if row.domain.in_cover else "dim")


def _device_joules(row: NestedDomain) -> str:
    bounded = row.domain.energy_certainty is Certainty.LOWER_BOUND
    return at_least(_joules_cell(row.domain.energy_joules), bounded=bounded)


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
    """The provenance of a domain, marked where CPU time is weighed or counted."""
    provenance = row.domain.provenance
    mark = " +" if row.domain.method in {LEARNED_POWERS, COUNTERS} else ""
    return Text(f"{provenance}{mark}", style=_PROVENANCE_COLOURS[provenance])


def _state(row: NestedDomain) -> Text:
    """The attribution method of a domain, or the state of a GPU."""
    domain, gpu = row.domain, row.domain.gpu
    if not (domain.present or domain.lost):
        return Text("gone")
    if domain.silent:
        return Text("no reading", "yellow")
    if gpu is None:
        method = _METHODS.get(domain.method, f"by {printable(domain.method)}")
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


def process_columns(document: SnapshotDocument) -> list[TableColumn]:
    return [
        TableColumn("PID", lambda row: "" if row.pid is None else str(row.pid)),
        TableColumn("PROCESS", _process_name, left=True, ratio=3),
        TableColumn("group", lambda row: _dim(row.group), left=True, ratio=2),
        *_energy_columns(document),
    ]


def group_columns(document: SnapshotDocument) -> list[TableColumn]:
    return [
        TableColumn("GROUP", _name, left=True, ratio=3),
        TableColumn("kind", lambda row: _dim(row.kind), left=True, ratio=2),
        *_energy_columns(document),
    ]


def _dim(text: str) -> Text:
    return Text(printable(text), style="dim")


def _name(row: EnergyEntry) -> Text:
    return Text(printable(row.name))


def _process_name(row: ListedProcess) -> Text:
    return _name(row) if row.alive else _dim(f"{row.name} (ended)")


def _energy_columns(document: SnapshotDocument) -> Iterator[TableColumn]:
    for kind in _hw_types(document):
        yield TableColumn(f"{_HW_TYPE_LABELS[kind]} W", partial(_watts_of, kind))
    yield TableColumn("watts", _total_watts)
    yield TableColumn("joules", _bounded_joules)


def _watts_of(kind: HwType, row: ListedProcess | GroupEntry) -> str:
    known = formatting.watts(row.power_watts[kind]) if kind in row.power_watts else ""
    return at_least(known, bounded=kind in row.power_bounded)


def _total_watts(row: ListedProcess | GroupEntry) -> Text:
    known = formatting.watts(_watts(row))
    return Text(at_least(known, bounded=bool(row.power_bounded)), style="bold")


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
    wide = options.wide
    columns = [
        TableColumn(title, lambda row: Text(printable(row.job)), left=True, ratio=1),
        TableColumn("state", partial(_tuning_state, wide), left=True, width=18 if wide else 10),
        TableColumn(
            "setting",
            lambda row: Text(against_original(row, accounts.caps), style="bold"),
            width=16 if wide else 13,
        ),
        TableColumn("slower", _slowdown, width=6),
        TableColumn("bound", lambda row: percent(row.slowdown_bound), width=6),
        TableColumn("budget", job_budget_text, width=6),
        TableColumn("saving", _saving, width=6),
    ]
    if wide:
        columns.append(TableColumn("saved", _saved, width=9))
        columns.append(TableColumn("pairs", lambda row: str(row.pairs), width=5))
    parts: list[RenderableType] = []
    # One table of equal widths for each job, because the sentence spans all columns.
    for row in shown:
        table = _table(options, columns, [row])
        table.show_header = not parts
        # Of a declared job also what was asked for, what was given and why.
        answers = [] if row.declared is None else [printable(row.declared.reason)]
        sentences = (decision_text(row), *answers)
        parts += [table, *(one_line(Text(f"  {one}", style="dim"), options) for one in sentences)]
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


# ------------------------------------------------------------------- spans and language models


def span_columns(document: SnapshotDocument, options: ViewOptions) -> list[TableColumn]:
    """One line for each name: calls, joules, joules per call and per output token."""
    kinds = _hw_types(document) if options.wide else ()
    columns = [
        TableColumn("SPAN", _name, left=True, ratio=3),
        TableColumn("service", partial(_service, document), left=True, ratio=2),
        TableColumn("calls", lambda row: count(row.calls)),
        *(TableColumn(f"{_HW_TYPE_LABELS[kind]} J", partial(_joules_of, kind)) for kind in kinds),
        TableColumn("joules", lambda row: Text(_bounded_joules(row), style="bold")),
        TableColumn("J/call", lambda row: _joules_each(row, row.calls)),
        TableColumn("time/call", lambda row: duration_each(row.seconds * 1e9, row.calls)),
        TableColumn("J/token", lambda row: _tokens(row, partial(_joules_each, row))),
    ]
    if options.wide:
        columns.insert(-1, TableColumn("tokens out", lambda row: _tokens(row, count)))
    return columns


def _service(document: SnapshotDocument, row: SpanEntry | InferenceEntry) -> Text:
    """The service of a row, with its owner where services have several owners."""
    owners = {one.owner for one in document.spans.names if one.owner}
    label = service_label(row.service, row.owner if len(owners) > 1 else "")
    return _dim(label)


def _joules_of(kind: HwType, row: SpanEntry) -> str:
    if (joules := row.energy_joules.get(kind)) is None:
        return ""
    return _least(_joules_cell(joules), joules, bounded=kind in row.bounded)


def _joules_each(row: SpanEntry, parts: int) -> str:
    joules = _joules(row)
    return _least(energy_each(joules * 1e6, parts), joules, bounded=bool(row.bounded))


def _tokens(row: SpanEntry, text: Callable[[int], str]) -> str:
    tokens = row.tokens.get("output", 0)
    return text(tokens) if tokens else ""


def model_rows(spans: SpansEntry) -> list[InferenceEntry]:
    """The models with energy, and after them those of requests without known energy."""
    unmetered = (
        InferenceEntry(row.service, row.model, {}, {}, {row.role: row.requests}, row.owner)
        for row in spans.unmetered
    )
    return [*spans.inference, *sorted(unmetered, key=attrgetter("model", "service"))]


def model_columns(document: SnapshotDocument) -> list[TableColumn]:
    """One line for each language model: GPU joules of its requests and tokens.

    The last column is the part of the requests whose energy was divided by the learned energy of
    tokens; the others were divided by their numbers of tokens. Of requests without known energy it
    is the role, for which there is no room beside a name.
    """
    mark = partial(at_least, bounded=HwType.GPU in document.bounded)
    return [
        TableColumn("MODEL", lambda row: Text(printable(row.model)), left=True, ratio=3),
        TableColumn("service", partial(_service, document), left=True, ratio=2),
        TableColumn("requests", lambda row: count(_requests(row))),
        TableColumn("gpu J", lambda row: Text(mark(_joules_cell(_gpu_joules(row))), style="bold")),
        TableColumn("J/request", lambda row: mark(_joules_a_request(row))),
        TableColumn("J/token in", lambda row: mark(_joules_a_token("input", row))),
        TableColumn("J/token out", lambda row: mark(_joules_a_token("output", row))),
        TableColumn("learned", _learned),
    ]


def _requests(row: InferenceEntry) -> int:
    return sum(row.requests.values())


def _gpu_joules(row: InferenceEntry) -> float | None:
    return sum(row.gpu_joules.values()) or None  # no request needs 0 J


def _joules_a_request(row: InferenceEntry) -> str:
    joules = _gpu_joules(row)
    return formatting.UNKNOWN if joules is None else energy_each(joules * 1e6, _requests(row))


def _learned(row: InferenceEntry) -> str:
    known = row.requests.get("model", 0)
    return formatting.share(known, _requests(row)) if row.gpu_joules else "".join(row.requests)


def _joules_a_token(token_type: str, row: InferenceEntry) -> str:
    tokens = row.tokens.get(token_type, 0)
    return energy_each(row.gpu_joules.get(token_type, 0.0) * 1e6, tokens) if tokens else ""


def spans_remainder(document: SnapshotDocument, options: ViewOptions) -> Text:
    """The energy of services outside their spans, and the spans that no row counts."""
    spans, bounded = document.spans, bool(document.bounded)
    outside = {service: sum(joules.values()) for service, joules in spans.outside_joules.items()}
    greatest = sorted(outside.items(), key=lambda one: -one[1])
    services = ", ".join(
        f"{printable(name)} {formatting.least_joules(j, bounded=bounded)}" for name, j in greatest
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
