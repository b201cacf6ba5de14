"""The terminal view of a snapshot: ``render(snapshot, options)``. Pure, and the same for all.

What matters is said in words and marks; colour repeats it and may be absent.

The live view: the newest snapshot on the screen, until somebody presses q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from wattspan.cli import formatting
from wattspan.cli.top.controls import KeySource, ViewOptions, ViewSection, handle_key
from wattspan.cli.top.rows import (
    ConsumerRow,
    NestedDomain,
    device_tree,
    group_rows,
    host_totals,
    hw_types,
    process_rows,
    span_rows,
)
from wattspan.cli.top.tables import (
    HW_TYPE_LABELS,
    TUNING_HEADING_LINES,
    TUNING_ROW_LINES,
    WIDE_COLUMNS,
    column,
    empty_text,
    hidden_rows_line,
    number,
    one_line,
    plain_table,
    span_table,
    spans_remainder,
    tuning_lines,
    tuning_table,
    visible_rows,
)
from wattspan.model import Footprint, GpuStatus, Provenance, Snapshot
from wattspan.ports import Clock, SnapshotView
from wattspan.util.text import printable

BANNER = "EMULATED HOST: these figures are true of no machine"
_COLOURS = {
    Provenance.MEASURED: "green",
    Provenance.DERIVED: "cyan",
    Provenance.ESTIMATED: "yellow",
    Provenance.EMULATED: "magenta",
}
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
         how the device's joules were divided
-        not known
*        lies within, or repeats, another device:
         in no sum"""


def render_snapshot(snapshot: Snapshot, options: ViewOptions) -> RenderableType:
    """Everything ``options`` asks for, in at most ``options.height`` lines."""
    head = [*_header(snapshot, options), *_notices(snapshot, options)]
    foot = [*_problems(snapshot, options), *_keys(options)]
    room = None if options.height is None else options.height - len(head) - len(foot)
    if options.help:
        return Group(*head, Text(), Text(HELP), Text(), *foot)
    body = list(_body(snapshot, options, room))
    return Group(*head, *body, *foot)


def _body(snapshot: Snapshot, options: ViewOptions, room: int | None) -> Iterator[RenderableType]:
    devices = device_tree(snapshot, options if options.by is ViewSection.DEVICE else ViewOptions())
    groups = group_rows(snapshot, options)
    processes = process_rows(snapshot, options)
    spans = span_rows(snapshot, options)
    for_tuning = _room_for_tuning(snapshot, options, room)
    rest = None if room is None else room - (for_tuning or 0)
    space = _allot_rows(options, rest, len(devices), len(groups), len(snapshot.spans.rows))
    if options.by in (ViewSection.ALL, ViewSection.DEVICE):
        yield Text()
        yield _devices(snapshot, options, devices, space.devices)
    if for_tuning != 0:
        yield Text()
        yield tuning_table(snapshot.tuning, options, None if for_tuning is None else for_tuning - 1)
    if options.by in (ViewSection.ALL, ViewSection.GROUP):
        yield Text()
        offset = options.offset if options.by is ViewSection.GROUP else 0
        yield _consumers("GROUP", snapshot, options, groups, offset, space.groups)
    if options.by in (ViewSection.ALL, ViewSection.PROCESS):
        yield Text()
        yield _consumers("PROCESS", snapshot, options, processes, options.offset, space.processes)
    if options.by in (ViewSection.ALL, ViewSection.PROCESS):
        yield _remainder(snapshot, options)
    if space.spans != 0:
        yield Text()
        offset = options.offset if options.by is ViewSection.SPAN else 0
        yield span_table(spans, hw_types(snapshot), options, offset, space.spans)
        yield spans_remainder(snapshot.spans, options)


class _RowBudget(NamedTuple):
    """How many rows each table may have; None is no limit."""

    devices: int | None
    groups: int | None
    processes: int | None
    spans: int | None = 0


BRIEF = _RowBudget(None, 8, 12, 8)
SMALL = 50  # milliwatts: rows of less are told by name only while there are few


def _room_for_tuning(snapshot: Snapshot, options: ViewOptions, room: int | None) -> int | None:
    """Lines for tuning beside everything else: a quarter of all, but no less than one job."""
    wanted = tuning_lines(snapshot.tuning, options)
    if options.by is not ViewSection.ALL or not wanted:
        return 0
    if room is None:
        return None
    least = TUNING_HEADING_LINES + TUNING_ROW_LINES
    return min(wanted, max(least, room // 4)) if room >= 3 * least else 0


def _allot_rows(
    options: ViewOptions, room: int | None, devices: int, groups: int, spans: int
) -> _RowBudget:
    """Devices first, a third of the rest to groups, all else to processes.

    Beside everything else spans are shown if there are any, and if there is room.
    """
    if options.by is ViewSection.SPAN:
        return _RowBudget(0, 0, 0, None if room is None else max(1, room - 3))
    beside = options.by is ViewSection.ALL and spans > 0
    if room is None:
        space = BRIEF if options.brief else _RowBudget(None, None, None, None)
        return space if beside else space._replace(spans=0)
    if options.by is not ViewSection.ALL:
        rows = max(1, room - 3)
        return _RowBudget(rows, rows, rows)
    left = max(0, room - 7)  # three headings with a blank line above each, and the remainder
    for_spans = 0
    if beside and left >= 20:
        for_spans = min(spans, left // 5)
        left -= for_spans + 3
    for_devices = min(devices, max(1, left // 2))
    for_groups = min(groups, max(1, (left - for_devices) // 3))
    return _RowBudget(for_devices, for_groups, max(1, left - for_devices - for_groups), for_spans)


# ---------------------------------------------------------------------------- above the tables


def _header(snapshot: Snapshot, options: ViewOptions) -> Iterator[RenderableType]:
    total = host_totals(snapshot)
    name, banner = printable(snapshot.host), ""
    if snapshot.emulated and options.brief:
        name, banner = name.removeprefix("emulated-"), "EMULATED "
    left = Text.assemble(
        ("wattspan  ", "bold"),
        (banner, "bold magenta"),
        f"{name}  ",
        (formatting.clock_time(snapshot.at.wall), "dim"),
    )
    unit = "" if total.power is None else " W"
    right = Text.assemble(
        (f"{formatting.watts(total.power)}{unit}", "bold"),
        f"  {formatting.joules(total.energy)}",
        (
            f" in {formatting.duration_text(_uptime(snapshot))}" if _uptime(snapshot) > 0 else "",
            "dim",
        ),
        *_footprint_text(snapshot.footprint, options),
    )
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(left, right)
    yield line


def _footprint_text(footprint: Footprint, options: ViewOptions) -> Iterator[str]:
    """What the host's energy has cost; or emitted, if only that is known."""
    weighed = footprint.cost or footprint.carbon
    if weighed is not None:
        told = formatting.amount_text(weighed)
        yield f"  {told.replace('≥', '>=') if options.ascii else told}"


def _uptime(snapshot: Snapshot) -> int:
    started = snapshot.stats.started
    return snapshot.at.wall - started.wall if started.wall else 0


def _notices(snapshot: Snapshot, options: ViewOptions) -> Iterator[RenderableType]:
    if snapshot.emulated and not options.brief:
        yield Text(f" {BANNER} ", style="bold reverse magenta", no_wrap=True, overflow="ellipsis")
    if options.notice:
        yield Text(
            printable(f"! {options.notice}"), style="bold yellow", no_wrap=True, overflow="ellipsis"
        )
    if options.note:
        yield Text(printable(options.note), no_wrap=True, overflow="ellipsis")


# ------------------------------------------------------------------------------------- devices


def _devices(
    snapshot: Snapshot, options: ViewOptions, tree: list[NestedDomain], rows: int | None
) -> RenderableType:
    wide = options.width >= WIDE_COLUMNS
    table = plain_table(
        options,
        Column("DEVICE", no_wrap=True, overflow="ellipsis", ratio=4),
        number("watts"),
        *([Column("", no_wrap=True)] if wide else []),
        number("joules"),
        number("procs"),
        number("idle"),
        number("unattr."),
        Column("how", no_wrap=True),
        *([Column("state", no_wrap=True, overflow="ellipsis", ratio=5)] if wide else []),
    )
    whole = host_totals(snapshot).power
    gpus = {gpu.domain_id: gpu for gpu in snapshot.gpus}
    offset = options.offset if options.by is ViewSection.DEVICE else 0
    shown, hidden = visible_rows(tree, offset, rows)
    for account, depth in shown:
        domain = account.domain
        settled = account.consumers + account.idle + account.unattributed
        split = (account.consumers, account.idle, account.unattributed)
        shares = [formatting.share(part, settled) for part in split]
        named = printable(domain.name)
        if domain.provenance is Provenance.EMULATED:  # which another column says
            named = named.removeprefix("Emulated ")
        name = "  " * depth + f"{HW_TYPE_LABELS[domain.hw_type]} {named}"
        mark = "" if domain.in_cover else " *"
        cells: list[RenderableType] = [
            Text(name + mark, style="" if domain.in_cover else "dim"),
            Text(formatting.watts(account.power), style="bold" if domain.in_cover else "dim"),
        ]
        if wide:
            part = account.power if domain.in_cover else None
            cells.append(_bar(part, whole, options))
        cells += [
            column(account.energy),
            *(shares if account.attributed else ["", "", ""]),
            Text(domain.provenance, style=_COLOURS[domain.provenance]),
        ]
        if wide:
            cells.append(
                Text(printable(_state(account.present, domain.method, gpus.get(domain.id))))
            )
        table.add_row(*cells)
    if not tree:
        table.add_row(Text("no counter is read: see `wattspan doctor`", style="yellow"))
    return Group(table, *hidden_rows_line(hidden))


def _state(present: bool, method: str, gpu: GpuStatus | None) -> str:
    """What a wide terminal has room for: how it is charged, and how a GPU is."""
    if not present:
        return "gone"
    if gpu is None:
        return "" if method == "none" else f"by {method}"
    parts = [
        None if gpu.utilisation is None else f"{gpu.utilisation:.0%}",
        None if gpu.sm_clock_hz is None else f"{gpu.sm_clock_hz / 1e6:.0f} MHz",
        None if gpu.temperature_celsius is None else f"{gpu.temperature_celsius} °C",
        None if gpu.limits.enforced is None else f"cap {gpu.limits.enforced / 1000:.0f} W",
        *(f"held down: {reason}" for reason in gpu.throttling or ()),
    ]
    return "  ".join(part for part in parts if part)


_BAR = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def _bar(part: int | None, whole: int | None, options: ViewOptions) -> Text:
    """A part of the host's power, ten cells long."""
    if not part or not whole:
        return Text(" " * _BAR)
    eighths = round(8 * _BAR * min(1.0, part / whole))
    if options.ascii:
        return Text(("#" * round(eighths / 8)).ljust(_BAR))
    full, rest = divmod(eighths, 8)
    return Text(("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(_BAR), style="blue")


# ------------------------------------------------------------------------- groups and processes


def _consumers(
    title: str,
    snapshot: Snapshot,
    options: ViewOptions,
    rows: list[ConsumerRow],
    offset: int,
    limit: int | None,
) -> RenderableType:
    kinds = hw_types(snapshot)
    of_process = title == "PROCESS"
    table = plain_table(
        options,
        *([number("PID")] if of_process else []),
        Column(title, no_wrap=True, overflow="ellipsis", ratio=3),
        Column("group" if of_process else "kind", no_wrap=True, overflow="ellipsis", ratio=2),
        *(number(f"{HW_TYPE_LABELS[kind]} W") for kind in kinds),
        number("watts"),
        number("joules"),
    )
    shown, hidden = _brief(rows, limit) if options.brief else visible_rows(rows, offset, limit)
    for row in shown:
        name = printable(row.name) + ("" if row.alive else " (ended)")
        powers = [formatting.watts(row.power[kind]) if kind in row.power else "" for kind in kinds]
        table.add_row(
            *([row.pid] if of_process else []),
            Text(name),
            Text(printable(row.detail), style="dim"),
            *powers,
            Text(formatting.watts(row.watts), style="bold"),
            column(row.joules),
            style="" if row.alive else "dim",
        )
    if not rows:
        table.add_row(*([""] if of_process else []), Text(empty_text(options), style="dim"))
    return Group(table, *hidden_rows_line(hidden))


def _brief(rows: list[ConsumerRow], limit: int | None) -> tuple[list[ConsumerRow], int]:
    """The rows that draw something, or all if they are few; and how many are left out."""
    if limit is None or len(rows) <= limit:
        return rows, 0
    shown = [row for row in rows if (row.watts or 0) >= SMALL][:limit] or rows[:1]
    return shown, len(rows) - len(shown)


def _remainder(snapshot: Snapshot, options: ViewOptions) -> Text:
    """The joules that no row shows: without them the rows would not add up."""
    total = host_totals(snapshot)
    parts = [
        ("other", sum(snapshot.other.values())),
        ("ended", sum(snapshot.retired.values())),
        ("idle", total.idle),
        ("unattributed", total.unattributed),
    ]
    told = [f"{name} {formatting.joules(energy)}" for name, energy in parts if energy]
    line = Text("beside these: " + ", ".join(told) if told else "", style="dim")
    return one_line(line, options)


# ---------------------------------------------------------------------------- below the tables


def _problems(snapshot: Snapshot, options: ViewOptions) -> Iterator[RenderableType]:
    sentences = [str(failure) for health in snapshot.health for failure in health.failures]
    sentences += [
        f"{account.domain.name}: {formatting.duration_text(duration)} unknown ({reason})"
        for account in snapshot.domains
        for reason, duration in sorted(account.gaps.items())
        if duration
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
        parts = f"q quit   tab {options.by}   s {options.order}   / filter   ? help"
        if options.filter:
            parts += f"   only {options.filter!r}"
        yield Text(parts, style="reverse", no_wrap=True, overflow="ellipsis")


def watch(
    view: SnapshotView,
    options: ViewOptions,
    *,
    clock: Clock,
    console: Console,
    keys: KeySource,
    interval: int,
    running: Callable[[], bool] = lambda: True,
    notice: Callable[[], str] = lambda: "",
    note: Callable[[], str] = lambda: "",
) -> None:
    """Show ``view`` every ``interval`` nanoseconds while ``running`` and nobody quits.

    ``view`` is asked from this thread. Whoever owns ``keys`` opens and closes them.
    """
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while running():
            snapshot = view()
            due = clock.monotonic() + interval
            while True:
                shown = fit_to_console(replace(options, note=note()), console, notice())
                screen.update(render_snapshot(snapshot, shown), refresh=True)
                typed = keys.wait((due - clock.monotonic()) / 1e9)
                for key in typed:
                    chosen = handle_key(options, key)
                    if chosen is None:
                        return
                    options = chosen
                if not typed:
                    break


def fit_to_console(options: ViewOptions, console: Console, notice: str = "") -> ViewOptions:
    """``options`` for the size and the abilities of ``console``."""
    return replace(
        options,
        width=console.width,
        height=console.height if console.is_terminal else None,
        ascii=not console.encoding.lower().startswith("utf"),
        keys=console.is_terminal,
        notice=notice or options.notice,
    )


def print_once(
    view: SnapshotView,
    options: ViewOptions,
    console: Console,
    notice: Callable[[], str] = lambda: "",
) -> None:
    """Print one snapshot, as long as it takes."""
    snapshot = view()
    plain = replace(fit_to_console(options, console, notice()), height=None, keys=False)
    console.print(render_snapshot(snapshot, plain))
