"""The terminal view of a snapshot, printed once or live.

Words and marks carry the meaning; colour only repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wattspan.api.snapshot_document import RateEntry, SnapshotDocument
from wattspan.cli import formatting
from wattspan.cli.top.controls import KeySource, ViewOptions, ViewSection, handle_key
from wattspan.cli.top.engines import engine_columns, host_columns, host_rows
from wattspan.cli.top.tables import (
    NO_COUNTER,
    TUNING_LINES,
    device_columns,
    device_tree,
    group_columns,
    job_lines,
    listing,
    model_columns,
    model_rows,
    one_line,
    process_columns,
    select_rows,
    span_columns,
    spans_remainder,
    tuning_rows,
    tuning_table,
)
from wattspan.model import BaselineQuality, Certainty, TuningAccounts
from wattspan.ports import Clock
from wattspan.tuning.serialization import tuning_accounts
from wattspan.util.text import printable

BANNER = "EMULATED HOST: no figure is of real hardware"
HELP = """\
tab      everything, processes, groups, devices, spans
s        sort by watts, joules, name
/        filter; enter keeps it, escape clears it
up down  scroll; also j k, page up, page down
?        this help
q        quit

watts    mean power over about the last second
joules   since the agent first saw it
procs, idle, unattr.
         division of the device's joules
-        unknown
*        part of another device, or measured twice:
         in no sum
+        CPU time is weighed by its learned cost or
         by performance counters"""

DocumentView = Callable[[], SnapshotDocument]


def render_snapshot(document: SnapshotDocument, options: ViewOptions) -> RenderableType:
    """The sections that ``options`` selects, in at most ``options.height`` lines."""
    head = [*_header(document), *_notices(document, options)]
    foot = [*_problems(document, options), *_keys(options)]
    room = None if options.height is None else options.height - len(head) - len(foot)
    if options.help:
        return Group(*head, Text(), Text(HELP), Text(), *foot)
    body = list(_body(select_rows(document, options), options, room))
    return Group(*head, *body, *foot)


def _body(
    document: SnapshotDocument, options: ViewOptions, room: int | None
) -> Iterator[RenderableType]:
    of_devices = options.by is ViewSection.DEVICE
    devices = device_tree(document, options.filter if of_devices else "")
    accounts = _tuning_accounts(document)
    jobs = tuning_rows(accounts, options)
    groups, spans, engines = document.groups, document.spans.names, document.engines
    models, hosts = model_rows(document.spans), host_rows(document)
    of_spans = len(spans), len(jobs), len(models), len(engines), len(hosts)
    rows = _RowBudget(len(devices), len(groups), None, *of_spans)
    space = _allot_rows(options, room, rows, job_lines(jobs))
    table = partial(listing, options, 0 if options.by is ViewSection.ALL else options.offset)
    if space.devices != 0:
        yield Text()
        yield table(device_columns(document, options), devices, space.devices, NO_COUNTER)
    if space.jobs != 0:
        yield Text()
        yield tuning_table(jobs, accounts, options, space.jobs)
    if space.groups != 0:
        yield Text()
        yield table(group_columns(document), groups, space.groups)
    if space.processes != 0:
        columns, processes = process_columns(document), document.processes
        yield Text()
        yield listing(options, options.offset, columns, processes, space.processes)
        yield _remainder(document, options)
    if space.spans != 0:
        yield Text()
        yield table(span_columns(document, options), spans, space.spans)
        yield spans_remainder(document, options)
    if space.models != 0:
        yield Text()
        yield table(model_columns(document), models, space.models)
    if space.engines != 0:
        yield Text()
        yield table(engine_columns(options), engines, space.engines)
    if space.hosts != 0:
        yield Text()
        yield table(host_columns(), hosts, space.hosts)


def _tuning_accounts(document: SnapshotDocument) -> TuningAccounts:
    """The tuning jobs; none if a newer agent describes them with values unknown here."""
    try:
        return tuning_accounts(document.tuning)
    except (LookupError, TypeError, ValueError, AttributeError):
        return TuningAccounts()


class _RowBudget(NamedTuple):
    """The number of rows of each table; None is unlimited, 0 hides it."""

    devices: int | None = 0
    groups: int | None = 0
    processes: int | None = 0
    spans: int | None = 0
    jobs: int | None = 0
    models: int | None = 0
    engines: int | None = 0
    hosts: int | None = 0


_SECTIONS = {
    ViewSection.DEVICE: "devices",
    ViewSection.GROUP: "groups",
    ViewSection.PROCESS: "processes",
}
_BRIEF = _RowBudget(None, 8, 12, 8, None, 8, 8, 8)
_OF_MODELS = "models", "engines", "hosts"
_MOST_MODELS = 3  # of a terminal's lines, among all sections; so many engines and parts


def _allot_rows(
    options: ViewOptions, room: int | None, rows: _RowBudget, job_lines: int
) -> _RowBudget:
    """A quarter of ``room`` lines to jobs, a fifth to spans; then devices, groups, processes.

    A job has ``job_lines`` lines. Among all sections, jobs and spans are shown if there are any
    and if there is room.
    """
    if options.by is ViewSection.SPAN:
        return _allot_span_rows(room, rows)
    if options.by is not ViewSection.ALL:
        limit = None if room is None else max(1, room - 3)
        return _RowBudget()._replace(**{_SECTIONS[options.by]: limit})
    if room is None:
        most = _BRIEF if options.brief else _RowBudget(*[None] * len(_RowBudget._fields))
        return most._replace(
            **{one: 0 for one in ("spans", "jobs", *_OF_MODELS) if not getattr(rows, one)}
        )
    left = room - 7  # three headings with a blank line above each, a remainder
    jobs = spans = 0
    if rows.jobs and room >= 3 * TUNING_LINES:
        jobs = min(rows.jobs, max(1, (room // 4 - 2) // job_lines))
        left -= TUNING_LINES - 2 + job_lines * jobs
    if rows.spans and left >= 20:
        spans = min(rows.spans, left // 5)
        left -= spans + 3
    of_models = dict.fromkeys(_OF_MODELS, 0)
    for section in _OF_MODELS:
        if (wanted := getattr(rows, section)) and left >= 20:
            of_models[section] = min(wanted, _MOST_MODELS)
            left -= of_models[section] + 2
    left = max(0, left)
    devices = min(rows.devices or 0, max(1, left // 2))
    groups = min(rows.groups or 0, max(1, (left - devices) // 3))
    processes = max(1, left - devices - groups)
    # An empty table of devices or groups has a line that tells why.
    named = max(1, devices), max(1, groups), processes
    return _RowBudget(*named, spans, jobs, **of_models)


def _allot_span_rows(room: int | None, rows: _RowBudget) -> _RowBudget:
    """A quarter of ``room`` lines each to engines, models and their parts, if there is room."""
    if room is None:
        return _RowBudget(spans=None, **{one: getattr(rows, one) for one in _OF_MODELS})
    of_models = dict.fromkeys(_OF_MODELS, 0)
    for section in ("engines", "models", "hosts"):
        if (wanted := getattr(rows, section)) and room >= 12:
            of_models[section] = min(wanted, room // 4)
            room -= of_models[section] + 2
    return _RowBudget(spans=max(1, room - 3), **of_models)


# ---------------------------------------------------------------------------- above the tables


def _header(document: SnapshotDocument) -> Iterator[RenderableType]:
    left = Text.assemble(
        ("wattspan  ", "bold"),
        f"{printable(document.host_name)}  ",
        (formatting.clock_time(document.at_unix_ns), "dim"),
    )
    host = document.host
    began = document.since_unix_ns or document.agent.started_unix_ns  # of the energy
    counted = document.at_unix_ns - began if began else 0
    power = host.least_power_watts
    watts = f"{formatting.watts(power)}{'' if power is None else ' W'}"
    joules = formatting.joules_text(host.energy_joules)
    right = Text.assemble(
        (formatting.at_least(watts, bounded=host.power_certainty is Certainty.LOWER_BOUND), "bold"),
        "  ",
        formatting.at_least(joules, bounded=host.energy_certainty is Certainty.LOWER_BOUND),
        (f" in {formatting.duration_text(counted)}" if counted > 0 else "", "dim"),
        _footprint_text(document.cost or document.carbon, host.energy_certainty),
    )
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(left, right)
    yield line


def _footprint_text(rated: RateEntry | None, energy: Certainty) -> str:
    """The amount so far; a lower bound if the rate or the energy of a part is unknown."""
    if rated is None:
        return ""
    partial = bool(rated.unknown_joules) or energy is not Certainty.KNOWN
    return f"  {formatting.amount_text(rated.total, rated.unit, partial=partial)}"


_UNSURE: Mapping[BaselineQuality | None, str] = {
    BaselineQuality.UNKNOWN: "unknown",
    BaselineQuality.DOUBTFUL: "doubtful",
}
_RESTRICTED = "Left out: others' processes, groups, spans, totals. `sudo wattspan top` shows them."


def _notices(document: SnapshotDocument, options: ViewOptions) -> Iterator[RenderableType]:
    if document.emulated:
        yield Text(f" {BANNER} ", style="bold reverse magenta", no_wrap=True, overflow="ellipsis")
    if options.notice:
        yield Text(printable(options.notice), style="bold", no_wrap=True, overflow="ellipsis")
    if document.restricted:
        yield Text(_RESTRICTED, style="bold", no_wrap=True, overflow="ellipsis")


# ---------------------------------------------------------------------------- below the tables


def _remainder(document: SnapshotDocument, options: ViewOptions) -> Text:
    """The energy of no row, without which the rows would not add up; lower bounds are marked."""
    host, bounded = document.host, bool(document.bounded)
    missing = host.energy_certainty is not Certainty.KNOWN
    parts: tuple[tuple[str, float | None, bool], ...] = (
        ("other", sum(document.other_joules.values()), bounded),
        ("ended", sum(document.ended_joules.values()), bounded),
        ("idle", host.idle_joules, bounded or missing),
        ("unattributed", host.unattributed_joules, missing),
    )
    texts = [f"{name} {formatting.least_joules(j, bounded=b)}" for name, j, b in parts if j]
    return one_line(Text("not listed: " + ", ".join(texts) if texts else "", "dim"), options)


def _problems(document: SnapshotDocument, options: ViewOptions) -> Iterator[RenderableType]:
    sentences = [failure for source in document.sources for failure in source.failures]
    sentences += [
        f"{domain.hw_name}: {formatting.duration_text(round(seconds * 1e9))} unknown ({reason})"
        for domain in document.domains
        for reason, seconds in sorted(domain.gap_seconds.items())
        if seconds
    ]
    sentences += [
        f"{domain.hw_name}: idle power {_UNSURE[domain.baseline]}, processes have a lower bound "
        f"({domain.baseline})"
        for domain in document.domains
        if domain.baseline in _UNSURE and (domain.baseline_unknown_joules or document.restricted)
    ]
    most = 3
    if options.height is None:
        most = 10
    elif options.height < 24:
        most = 1
    for sentence in sentences[:most]:
        yield one_line(Text(f"! {printable(sentence)}", style="yellow"), options)
    if len(sentences) > most:
        yield Text(f"! {len(sentences) - most} more: see `wattspan doctor`", style="yellow")


def _keys(options: ViewOptions) -> Iterator[RenderableType]:
    if options.editing:
        yield Text(f"/{options.filter}_   enter keeps it, escape clears it", style="reverse")
    elif options.keys:
        parts = f"q quit   tab {options.by}   s {options.sort}   / filter   ? help"
        if options.filter:
            parts += f"   only {options.filter!r}"
        yield Text(parts, style="reverse", no_wrap=True, overflow="ellipsis")


# ------------------------------------------------------------------------------------- showing


def watch(
    view: DocumentView,
    options: ViewOptions,
    clock: Clock,
    console: Console,
    keys: KeySource,
    interval: int,
    *,
    running: Callable[[], bool] = lambda: True,
    notice: Callable[[], str] = lambda: "",
) -> None:
    """Show ``view`` every ``interval`` nanoseconds, until a key quits or ``running`` ends.

    ``view`` is called from this thread. The caller opens and closes ``keys``.
    """
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while running():
            document = view()
            due = clock.monotonic() + interval
            while True:
                shown = fit_to_console(options, console, notice())
                screen.update(render_snapshot(document, shown), refresh=True)
                typed = keys.wait((due - clock.monotonic()) / 1e9)
                for key in typed:
                    chosen = handle_key(options, key)
                    if chosen is None:
                        return
                    options = chosen
                if not typed:
                    break


def fit_to_console(options: ViewOptions, console: Console, notice: str = "") -> ViewOptions:
    """``options`` with the size and the abilities of ``console``."""
    return replace(
        options,
        width=console.width,
        height=console.height if console.is_terminal else None,
        keys=console.is_terminal,
        notice=notice,
    )


def print_once(
    view: DocumentView,
    options: ViewOptions,
    console: Console,
    notice: Callable[[], str] = lambda: "",
) -> None:
    """Print one snapshot, of any height."""
    document = view()
    plain = replace(fit_to_console(options, console, notice()), height=None, keys=False)
    console.print(render_snapshot(document, plain))
