"""Processes and containers: energy by process."""

from __future__ import annotations

from typing import Any

from dashboards import palette, uids
from dashboards.layout import JOB, Chosen, Place, Row, dashboard, group_kind
from dashboards.panels import Ask, Column, graph, listing, stat_panel
from dashboards.promql import JOULES_PER_KWH, KIND, among, by, rate, rest, series, spent, top
from dashboards.shared import FEW_HOSTS, PROCESS_NAMED, TYPES, provenance

TOP = 12

CHOSEN = ('group=~"$group"', 'hw_type=~"$hw_type"')
GROUPS = series("wattspan_group_energy_joules_total", KIND, *CHOSEN)
EVERY_GROUP = series("wattspan_group_energy_joules_total", KIND, 'hw_type=~"$hw_type"')
EVERY_PROCESS = series("wattspan_process_energy_joules_total", 'hw_type=~"$hw_type"')
PROCESSES = series("wattspan_process_energy_joules_total", *CHOSEN)
LISTED = series("wattspan_process_energy_joules_total", *CHOSEN, 'command!="other"')

INNERMOST = (
    "A process has the name of its innermost group: to see the processes of a group, select its "
    "kind."
)


def document() -> dict[str, Any]:
    group = Chosen(
        "group", "Group", "One group or several of the selected kind.",
        series("wattspan_group_energy_joules_total", KIND), "group", multi=True, all=True,
    )  # fmt: skip
    kinds = group_kind(series("wattspan_group_energy_joules_total"))
    return dashboard(
        uids.PROCESSES,
        "Energy by process, and by virtual machine, container, pod, job, unit or user. The Host "
        f"dashboard shows idle and unattributed energy, which has no process. {INNERMOST}",
        (JOB, FEW_HOSTS, kinds, group, TYPES),
        (
            Row("", (*_headline(), *_groups())),
            Row("Processes", _processes()),
            Row("By device type", _types()),
        ),
    )


def _headline() -> tuple[Place, ...]:
    other = series("wattspan_process_energy_joules_total", *CHOSEN[1:], 'command="other"')
    count = f"count(count by (instance, pid) ({spent(LISTED)}))"
    return (
        Place(
            stat_panel(
                "Power", "Power charged to the selected groups now.",
                palette.WATT, Ask(f"sum({rate(GROUPS)})"), empty="no such group",
            ), 5, 4,
        ),
        Place(
            stat_panel(
                "Energy in this range",
                "Energy charged to the selected groups over the displayed time range, including "
                "ended processes.",
                palette.KWH, Ask(f"sum({spent(GROUPS)}) / {JOULES_PER_KWH}"),
                spark=False, decimals=1, empty="no such group",
            ), 5, 4,
        ),
        Place(
            stat_panel(
                "Processes listed",
                "Processes with their own row in the displayed time range: at any time those with "
                "most energy, as many as `[processes] top` permits.",
                palette.PLAIN, Ask(count), spark=False, empty="none",
            ), 5, 4,
        ),
        Place(
            stat_panel(
                "Not listed",
                "Part of all processes' energy in the range that is in the row `other`: processes "
                "without their own row, including ended ones.",
                palette.SHARE, Ask(f"sum({spent(other)}) / sum({spent(EVERY_PROCESS)})"),
                spark=False, decimals=1, steps=((None, palette.OTHERS),), empty="none",
            ), 5, 4,
        ),
        provenance(),
    )  # fmt: skip


def _groups() -> tuple[Place, ...]:
    return (
        Place(
            graph(
                "Power by group",
                "Power charged to the groups with most energy over the range, and to all other "
                "selected groups, within the selected kind: groups of different kinds overlap.",
                palette.WATT,
                Ask(rest(TOP, "group", GROUPS), "other groups"),
                Ask(top(TOP, "group", GROUPS), "{{group}}"),
                stack=True, colours=palette.ACCOUNTS,
            ), 14, 10,
        ),
        Place(
            listing(
                "Groups",
                "Energy of the range by group, and its part of the energy of all groups of the "
                "kind. The share is of the energy charged to processes, without idle and "
                "unattributed.",
                (
                    Column("group", "Group"),
                    Column("A", "Power", palette.WATT, width=90),
                    Column("B", "Energy", palette.JOULE, width=90),
                    Column("C", "Share", palette.SHARE, width=120, bar=True),
                ),
                Ask(by("group", rate(GROUPS))),
                Ask(by("group", spent(GROUPS))),
                Ask(f"{by('group', spent(GROUPS))} / scalar(sum({spent(EVERY_GROUP)}))"),
                sort="Energy",
            ), 10, 10,
        ),
    )  # fmt: skip


def _processes() -> tuple[Place, ...]:
    one = "instance, group, command, pid"
    return (
        Place(
            graph(
                "Power by command",
                "Power charged to listed processes by command name, and to all others "
                f"together. {INNERMOST}",
                palette.WATT,
                Ask(rest(TOP, "command", PROCESSES), "other commands"),
                Ask(top(TOP, "command", PROCESSES), "{{command}}"),
                stack=True, colours={**palette.ACCOUNTS, "other commands": palette.OTHERS},
            ), 12, 10,
        ),
        Place(
            graph(
                "Power by process",
                "Power of the processes with most energy over the range, and of all others.",
                palette.WATT,
                Ask(rest(TOP, "instance, command, pid", PROCESSES), "other processes"),
                Ask(top(TOP, "instance, command, pid", PROCESSES), PROCESS_NAMED),
                stack=True, colours=palette.ACCOUNTS,
            ), 12, 10,
        ),
        Place(
            listing(
                "Processes with most energy",
                "Energy of the range by process and device type, while it had its own row; all "
                "others are the row `other`. The increase excludes energy charged to a process "
                "before its first scrape.",
                (
                    Column("command", "Command"),
                    Column("pid", "PID", width=80),
                    Column("group", "Group"),
                    Column("A", "Power", palette.WATT, width=80),
                    Column("B", "Energy", palette.JOULE, width=80),
                    Column("C", "GPU", palette.JOULE, width=80),
                    Column("D", "CPU", palette.JOULE, width=80),
                    Column("E", "Memory", palette.JOULE, width=80),
                    Column("instance", "Host", width=130),
                ),
                Ask(among(100, one, by(one, rate(PROCESSES)), PROCESSES)),
                Ask(among(100, one, by(one, spent(PROCESSES)), PROCESSES)),
                *(
                    Ask(among(100, one, by(one, spent(_on(kind))), PROCESSES))
                    for kind in ("gpu", "cpu", "memory")
                ),
                sort="Energy",
            ), 24, 11,
        ),
    )  # fmt: skip


def _on(kind: str) -> str:
    return series("wattspan_process_energy_joules_total", *CHOSEN, f'hw_type="{kind}"')


def _types() -> tuple[Place, ...]:
    return (
        Place(
            graph(
                "Power of the selected groups, by device type",
                "Energy charged to the selected groups on CPUs, memory and GPUs. Memory is "
                "charged by CPU time where no better data exists (`method` on "
                "`wattspan_domain_info`).",
                palette.WATT, Ask(by("hw_type", rate(GROUPS)), "{{hw_type}}"), stack=True,
                colours=palette.ACCOUNTS,
            ), 24, 8,
        ),
    )  # fmt: skip
