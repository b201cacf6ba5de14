"""Host: energy flows of one host, and its unknown energy."""

from __future__ import annotations

from typing import Any

from dashboards import palette, uids
from dashboards.layout import JOB, ONE_HOST, Place, Row, dashboard, group_kind
from dashboards.panels import Ask, Column, cell, graph, link, listing, stat_panel, states
from dashboards.promql import (
    COVER,
    HOST,
    JOULES_PER_KWH,
    KIND,
    by,
    rate,
    remainder,
    rest,
    series,
    spent,
    top,
    total,
)
from dashboards.shared import SHARE_STEPS, money_and_carbon, provenance

TOP = 10


def _of(name: str, *matchers: str) -> str:
    return series(name, *matchers, scope=HOST)


ENERGY = _of("hw_energy_joules_total", COVER)
WHOLE = _of("hw_host_energy_joules_total")
GROUPS = _of("wattspan_group_energy_joules_total", KIND)
IDLE = _of("wattspan_idle_energy_joules_total")
UNATTRIBUTED = _of("wattspan_unattributed_energy_joules_total")
DEVICE = _of("wattspan_domain_info", 'in_cover="true"')
GAPS = _of("wattspan_gap_seconds_total")


def document() -> dict[str, Any]:
    return dashboard(
        uids.HOST,
        "Energy of one host: by device, by group, idle and unattributed; unknown energy and its "
        "reasons; cost of the agent itself.",
        (JOB, ONE_HOST, group_kind(_of("wattspan_group_energy_joules_total"))),
        (
            Row("", (*_headline(), *_stack())),
            Row("Devices", _devices()),
            Row("Money and carbon", money_and_carbon(HOST)),
            Row("Unknown energy", _unknown()),
            Row("The agent itself", _agent()),
        ),
    )


def _headline() -> tuple[Place, ...]:
    return (
        Place(
            stat_panel(
                "Power",
                "Power of the host's devices now: the rate of its energy counter, which counts "
                "each joule once (packages, memory and GPUs; not their parts or mirrors).",
                palette.WATT, Ask(f"sum({rate(WHOLE)})"),
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Energy in this range",
                "Energy of the host's devices over the displayed time range.",
                palette.KWH, Ask(f"sum({spent(WHOLE)}) / {JOULES_PER_KWH}"),
                spark=False, decimals=1,
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Idle",
                "Idle part of the range's energy, by the learned baseline of each device.",
                palette.SHARE, Ask(f"sum({spent(IDLE)}) / sum({spent(WHOLE)})"),
                spark=False, decimals=1, steps=((None, palette.IDLE),),
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Unattributed",
                "Part of the range's energy that was active and not charged to any process. A "
                "large part means processes hidden from the agent, or a device without usage data.",
                palette.SHARE, Ask(f"sum({spent(UNATTRIBUTED)}) / sum({spent(WHOLE)})"),
                spark=False, decimals=1, steps=SHARE_STEPS,
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Time with a gap",
                "Time in this range with unknown energy of a device, summed over devices. No "
                "value is estimated for it: the other figures exclude it.",
                palette.SECONDS, Ask(f"sum({spent(GAPS)})"),
                spark=False, decimals=1,
                steps=((None, palette.GOOD), (0.001, palette.NOTICE), (60, palette.BAD)),
            ), 4, 4,
        ),
        provenance(HOST),
    )  # fmt: skip


def _stack() -> tuple[Place, ...]:
    divided = " - ".join(total(rate(part)) for part in (IDLE, UNATTRIBUTED, GROUPS))
    ungrouped = remainder(f"sum({rate(ENERGY)}) - {divided}")
    return (
        Place(
            graph(
                "Power by use",
                "The host's power, divided without remainder: the ten groups with most energy "
                "over the range, all other groups, processes in no group of the selected kind "
                "and devices without attribution, idle (learned baselines) and unattributed "
                "(active, not charged to any process). The height of the stack is the host's "
                "power.",
                palette.WATT,
                Ask(f"sum({rate(IDLE)})", "idle"),
                Ask(f"sum({rate(UNATTRIBUTED)})", "unattributed"),
                Ask(ungrouped, "in no group of this kind"),
                Ask(rest(TOP, "group", GROUPS), "other groups"),
                Ask(top(TOP, "group", GROUPS), "{{group}}"),
                stack=True, colours=palette.ACCOUNTS,
            ), 16, 11,
        ),
        Place(
            listing(
                "Groups with most energy",
                "Energy of the range by group of the selected kind, including ended processes; "
                "the share is of the host's energy. A row links to its processes.",
                (
                    Column("group", "Group", link=link(
                        "Its processes", uids.PROCESSES,
                        instance="${instance:percentencode}",
                        group_kind="${group_kind:percentencode}", group=cell("Group"),
                    )),
                    Column("A", "Energy", palette.JOULE, width=100),
                    Column("B", "Share", palette.SHARE, width=110, bar=True),
                ),
                Ask(f"topk(20, {by('group', spent(GROUPS))})"),
                Ask(f"topk(20, {by('group', spent(GROUPS))}) / scalar(sum({spent(WHOLE)}))"),
                sort="Energy",
            ), 8, 11,
        ),
    )  # fmt: skip


def _devices() -> tuple[Place, ...]:
    named = "hw_id, hw_name, hw_type"
    device = f"group by ({named}) ({DEVICE})"
    idle = _of("wattspan_idle_power_watts")
    return (
        Place(
            graph(
                "Power by device",
                "The rate of each device's energy counter. Only devices that can be summed: none "
                "is a part or a mirror of another.",
                palette.WATT,
                Ask(by("hw_name", rate(ENERGY)), "{{hw_name}}"), legend="list",
            ), 24, 7,
        ),
        Place(
            listing(
                "Devices",
                "Each device: its power now, its energy in the range, its learned idle power, the "
                "unattributed part of its energy, and its availability.",
                (
                    Column("hw_name", "Device", link=link(
                        "Clocks and limits, for a GPU", uids.GPUS,
                        instance="${instance:percentencode}", gpu=cell("Identity"),
                    )),
                    Column("hw_type", "Type", width=80),
                    Column("A", "Power", palette.WATT, width=90),
                    Column("B", "Energy", palette.JOULE, width=90),
                    Column("C", "Idle power", palette.WATT, width=90),
                    Column("D", "Unattributed", palette.SHARE, width=110, steps=SHARE_STEPS),
                    Column("E", "There", width=70, named={
                        "1": ("yes", palette.GOOD), "0": ("gone", palette.BAD),
                    }),
                    Column("hw_id", "Identity"),
                ),
                Ask(by(named, rate(ENERGY))),
                Ask(by(named, spent(ENERGY))),
                Ask(f"{by('hw_id', idle)} * on (hw_id) group_right {device}"),
                Ask(
                    f"{by('hw_id, hw_type', spent(UNATTRIBUTED))} / on (hw_id, hw_type)"
                    f" group_right {by(named, spent(ENERGY))}"
                ),
                Ask(
                    f"{by('hw_id', _of('wattspan_domain_up'))} * on (hw_id) group_right {device}"
                ),
                sort="Power",
            ), 24, 8,
        ),
    )  # fmt: skip


def _unknown() -> tuple[Place, ...]:
    failures = _of("wattspan_source_failures_total")
    return (
        Place(
            graph(
                "Gaps",
                "Seconds of unknown energy per second, by reason: a reset counter, a suspended "
                "host, a lost device, a late or implausible reading.",
                palette.SHARE, Ask(by("reason", rate(GAPS)), "{{reason}}"),
                bars=True, stack=True, legend="list", empty="no gaps",
            ), 8, 7,
        ),
        Place(
            states(
                "Sources",
                "Whether each source read at least one of its counters at its last tick.",
                {"1": ("reads", palette.GOOD), "0": ("fails", palette.BAD)},
                Ask(by("source", _of("wattspan_source_up")), "{{source}}"),
            ), 8, 7,
        ),
        Place(
            graph(
                "Failed readings",
                "Failed readings per second, by source; the agent's log and `wattspan doctor` "
                "give cause and remedy.",
                palette.PER_SECOND, Ask(by("source", rate(failures)), "{{source}}"),
                legend="list",
            ), 8, 7,
        ),
    )  # fmt: skip


def _agent() -> tuple[Place, ...]:
    cpu = _of("wattspan_agent_cpu_seconds_total")
    dropped = (
        ("wattspan_agent_missed_ticks_total", "skipped polls"),
        ("wattspan_agent_late_usages_total", "late usage"),
        ("wattspan_agent_dropped_history_total", "truncated history"),
        ("wattspan_agent_unnamed_groups_total", "charges to group other"),
    )
    return (
        Place(
            graph(
                "CPU of the agent",
                "CPU time of the agent, as a part of one core, by its own measurement.",
                palette.SHARE, Ask(f"sum({rate(cpu)})", "agent"),
                steps=((None, "transparent"), (0.03, palette.NOTICE), (0.1, palette.BAD)),
                legend="list",
            ), 8, 7,
        ),
        Place(
            graph(
                "Memory of the agent",
                "Resident memory of the agent (RSS).",
                palette.BYTES,
                Ask(f"sum({_of('wattspan_agent_resident_memory_bytes')})", "agent"),
                legend="list",
            ), 8, 7,
        ),
        Place(
            graph(
                "Omissions of the agent",
                "Per second: polls due while another still ran, usage that arrived after its "
                "interval was settled, history truncated by its bound, charges without room for "
                "another group. All of it is still in the sums.",
                palette.PER_SECOND,
                *(Ask(f"sum({rate(_of(name))})", legend) for name, legend in dropped),
                legend="list",
            ), 8, 7,
        ),
    )  # fmt: skip
