"""Fleet: overview of many hosts from recorded series."""

from __future__ import annotations

from typing import Any

from dashboards import palette, uids
from dashboards.layout import HOSTS as HOSTS_CHOSEN
from dashboards.layout import JOB, Place, Row, dashboard, group_kind
from dashboards.panels import Ask, Column, cell, graph, link, listing, series_label, stat_panel
from dashboards.promql import JOB as SCRAPED
from dashboards.promql import KIND, by, remainder, series
from dashboards.shared import SHARE_STEPS, provenance, with_currencies

SEEN_EVERY = 60
"""Step of the integral of recorded power, in seconds.

Whatever the rules' own interval, as long as it is below the five minutes after which Prometheus
takes a sample for gone.
"""

FIRING = series("ALERTS", 'alertstate="firing"', 'alertname=~"Wattspan.+"')

AS_RECORDED = "as recorded; unrecorded time counts as zero."

FLEET_SAYS = "All hosts of the selected scrape jobs."

POWER = series("instance:wattspan_power_watts:rate5m")
IDLE = series("instance_type:wattspan_idle_watts:rate5m")
UNATTRIBUTED = series("instance_type:wattspan_unattributed_watts:rate5m")
COST = series("instance:wattspan_cost_per_hour:rate5m")
CARBON = series("instance:wattspan_carbon_grams_per_hour:rate5m")
SAVED = series("instance:wattspan_saved_watts:rate5m")
AGENT = series("instance:wattspan_agent_cpu:rate5m")
GAPS = series("instance:wattspan_gap_seconds:rate5m")
HOST_GROUPS = series("instance_group:wattspan_power_watts:rate5m", KIND)


def _of_all(name: str, *matchers: str) -> str:
    return series(name, *matchers, scope=SCRAPED)


def _hourly(selector: str) -> str:
    """Total of an hourly amount (power is Wh an hour) over the displayed range."""
    return f"sum_over_time({selector}[$__range:{SEEN_EVERY}s]) * {SEEN_EVERY} / 3600"


ALL_POWER = _of_all("fleet:wattspan_power_watts:rate5m")
ALL_TYPES = _of_all("fleet_type:wattspan_power_watts:rate5m")
ALL_IDLE = _of_all("fleet_type:wattspan_idle_watts:rate5m")
ALL_UNATTRIBUTED = _of_all("fleet_type:wattspan_unattributed_watts:rate5m")
ALL_COST = _of_all("fleet:wattspan_cost_per_hour:rate5m")
ALL_CARBON = _of_all("fleet:wattspan_carbon_grams_per_hour:rate5m")
ALL_SAVED = _of_all("fleet:wattspan_saved_watts:rate5m")
ALL_HOSTS = _of_all("fleet:wattspan_hosts:count")
GROUPS = _of_all("fleet_group:wattspan_power_watts:rate5m", KIND)
TOP_GROUPS = _of_all("fleet_group:wattspan_power_watts:top20", KIND)
GROUP_COST = _of_all("fleet_group:wattspan_cost_per_hour:rate5m", KIND)
GROUP_CARBON = _of_all("fleet_group:wattspan_carbon_grams_per_hour:rate5m", KIND)

BUDGET = series("wattspan_fleet_budget_watts")
DEMAND = series("wattspan_fleet_demand_watts")
ALLOTTED = series("wattspan_fleet_allotted_watts")
HEADROOM = series("wattspan_fleet_headroom_watts")
SAFE = series("wattspan_fleet_safe_watts")
REGISTERED = series("wattspan_fleet_hosts")
ALLOTMENT = series("wattspan_fleet_host_allotment_watts")
HOST_DEMAND = series("wattspan_fleet_host_demand_watts")
HOST_SAFE = series("wattspan_fleet_host_safe_watts")
CONTACT = series("wattspan_fleet_contact")

TO_HOST = link("This host", uids.HOST, instance=cell("Host"))


def document() -> dict[str, Any]:
    return dashboard(
        uids.FLEET,
        "All hosts at a glance: power, cost, carbon, and the groups and hosts with most energy. "
        "It reads the recorded series of dashboards/prometheus/recording.yml (means of 5 "
        "minutes), so that a thousand hosts load as fast as one. The host variable narrows panels "
        "by host; totals cover all hosts of the scrape jobs.",
        (JOB, HOSTS_CHOSEN, group_kind(_of_all("fleet_group:wattspan_power_watts:rate5m"))),
        (
            Row("", (*_headline(), *_power())),
            Row("Groups", _groups()),
            Row("Hosts", (_hosts(), _firing())),
            Row("Power budgets", _budgets()),
            Row("Money, carbon, savings", _money()),
        ),
        since="now-6h",
    )


def _headline() -> tuple[Place, ...]:
    silent = f"count({_of_all('up')} == 0) or vector(0)"
    no_price, no_intensity = "no price set", "not set"
    return (
        Place(
            stat_panel(
                "Power", f"Power of all devices now. {FLEET_SAYS}",
                palette.WATT, Ask(f"sum({ALL_POWER})"),
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Energy in range",
                f"Energy over the displayed time range, {AS_RECORDED} {FLEET_SAYS}",
                palette.KWH,
                Ask(f"sum({_hourly(ALL_POWER)}) / 1000"),
                spark=False, decimals=2,
            ), 4, 4,
        ),
        Place(
            with_currencies(stat_panel(
                "Cost / hour",
                "Cost per hour at the current power and the current price of each host.",
                "none", Ask(by("currency", ALL_COST), "{{currency}}"), decimals=2,
                empty=no_price,
            )), 4, 4,
        ),
        Place(
            with_currencies(stat_panel(
                "Cost in range",
                f"Cost over the displayed time range on the hosts with a price, {AS_RECORDED}",
                "none", Ask(by("currency", _hourly(ALL_COST)), "{{currency}}"),
                spark=False, decimals=2, empty=no_price,
            )), 4, 4,
        ),
        Place(
            stat_panel(
                "Carbon / hour",
                "Emissions per hour at the current power and the grid's current intensity.",
                palette.GRAMS, Ask(f"sum({ALL_CARBON})"), decimals=1, empty=no_intensity,
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Carbon in range",
                "Emissions over the displayed time range on the hosts with an intensity, "
                f"{AS_RECORDED}",
                palette.GRAMS, Ask(f"sum({_hourly(ALL_CARBON)})"),
                spark=False, decimals=1, empty=no_intensity,
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Firing",
                "Firing alerts of wattspan; zero also if `alerts.yml` is not loaded. The table "
                "below lists them.",
                palette.PLAIN, Ask(f"count({FIRING}) or vector(0)"), spark=False,
                steps=((None, palette.GOOD), (1, palette.BAD)),
            ), 4, 3,
        ),
        Place(
            stat_panel(
                "Hosts", f"Hosts with a running energy counter. {FLEET_SAYS}",
                palette.PLAIN, Ask(f"sum({ALL_HOSTS})"), spark=False,
            ), 4, 3,
        ),
        Place(
            stat_panel(
                "Silent", "Agents that Prometheus cannot scrape now: their hosts are missing from "
                "every figure.",
                palette.PLAIN, Ask(silent), spark=False,
                steps=((None, palette.GOOD), (1, palette.BAD)),
            ), 4, 3,
        ),
        Place(
            stat_panel(
                "Unattributed",
                "Part of the power that is active and not charged to any process.",
                palette.SHARE, Ask(f"sum({ALL_UNATTRIBUTED}) / sum({ALL_POWER})"),
                spark=False, decimals=1, steps=SHARE_STEPS,
            ), 6, 3,
        ),
        provenance(
            width=6, height=3,
            missing=f"max by (job, instance) (max_over_time({GAPS}[$__range])) > 0",
        ),
    )  # fmt: skip


def _power() -> tuple[Place, ...]:
    types = by("hw_type", ALL_TYPES)
    idle, unattributed = (  # of a type without attribution there is neither
        f"({by('hw_type', part)} or on (hw_type) {types} * 0)"
        for part in (ALL_IDLE, ALL_UNATTRIBUTED)
    )
    most = f"topk(10, avg_over_time({POWER}[$__range] @ end()))"
    return (
        Place(
            graph(
                "Power of the fleet",
                "The power of all hosts, divided without remainder: active power by device type "
                "(charged to processes; all of it without attribution), "
                "unattributed and idle. The height of the stack is the total. "
                f"{FLEET_SAYS}",
                palette.WATT,
                Ask(f"sum({ALL_IDLE})", "idle"),
                Ask(f"sum({ALL_UNATTRIBUTED})", "unattributed"),
                Ask(
                    remainder(f"{types} - on (hw_type) {idle} - on (hw_type) {unattributed}"),
                    "{{hw_type}}",
                ),
                stack=True, colours=palette.ACCOUNTS,
            ), 12, 9,
        ),
        Place(
            graph(
                "Hosts with most power",
                "The ten hosts with the highest mean power over the range. A line links to its "
                "host.",
                palette.WATT, Ask(f"{POWER} and on (job, instance) {most}", "{{instance}}"),
                links=(link("This host", uids.HOST, instance=series_label("instance")),),
            ), 12, 9,
        ),
    )  # fmt: skip


def _groups() -> tuple[Place, ...]:
    totals = by("group", GROUPS)
    most = f"topk(10, sum by (group) (sum_over_time({TOP_GROUPS}[$__range] @ end())))"
    return (
        Place(
            graph(
                "Groups with most power",
                "Power of the ten groups with most energy over the range, over all hosts, within "
                "the selected kind: groups of different kinds overlap. A group is hidden while "
                "twenty others of its kind have more power.",
                palette.WATT,
                Ask(f"{by('group', TOP_GROUPS)} and on (group) {most}", "{{group}}"),
                stack=True, colours=palette.ACCOUNTS,
            ), 9, 10,
        ),
        Place(
            listing(
                "Groups",
                "The fifty groups with most power now over all hosts: power, and its cost and "
                "emissions per hour on the hosts with a known price and intensity.",
                (
                    Column("group", "Group"),
                    Column("A", "Power", palette.WATT, width=80),
                    Column("B", "Per hour", "none", width=80),
                    Column("currency", "Currency", width=80),
                    Column("C", "Carbon", palette.GRAMS, width=80),
                ),
                Ask(f"topk(50, {totals})"),
                Ask(f"{by('group, currency', GROUP_COST)} and on (group) topk(50, {totals})"),
                Ask(f"{by('group', GROUP_CARBON)} and on (group) topk(50, {totals})"),
                sort="Power",
            ), 8, 10,
        ),
        Place(
            listing(
                "Groups by host",
                "The fifty pairs of group and host with most power now. A row links to the "
                "processes.",
                (
                    Column("group", "Group", link=link(
                        "Its processes here", uids.PROCESSES, instance=cell("Host"),
                        group_kind="${group_kind:percentencode}", group=cell("Group"),
                    )),
                    Column("instance", "Host", link=TO_HOST),
                    Column("A", "Power", palette.WATT, width=90),
                ),
                Ask(f"topk(50, {by('instance, group', HOST_GROUPS)})"),
                sort="Power",
            ), 7, 10,
        ),
    )  # fmt: skip


def _hosts() -> Place:
    host = "instance"
    return Place(
        listing(
            "Hosts, one by one",
            "Each host now: power, its idle and unattributed parts, cost and carbon per hour, "
            "savings of the tuner, seconds of unknown energy in the last 5 minutes (summed over "
            "devices), CPU of the agent as a part of one core. A row links to the host.",
            (
                Column("instance", "Host", link=TO_HOST),
                Column("A", "Power", palette.WATT, bar=True),
                Column("B", "Idle", palette.SHARE, width=80),
                Column("C", "Unattributed", palette.SHARE, width=110, steps=SHARE_STEPS),
                Column("D", "Cost per hour", "none", width=110),
                Column("currency", "Currency", width=80),
                Column("E", "Carbon per hour", palette.GRAMS, width=120),
                Column("F", "Saved", palette.WATT, width=80, link=link(
                    "Tuning of this host", uids.AUTOTUNER, instance=cell("Host"),
                )),
                Column(
                    "G", "Gaps", palette.SECONDS, width=80,
                    steps=((None, palette.GOOD), (0.001, palette.NOTICE)),
                ),
                Column(
                    "H", "Agent", palette.SHARE, width=80,
                    steps=((None, palette.GOOD), (0.03, palette.NOTICE), (0.1, palette.BAD)),
                ),
            ),
            Ask(by(host, POWER)),
            Ask(f"{by(host, IDLE)} / {by(host, POWER)}"),
            Ask(f"{by(host, UNATTRIBUTED)} / {by(host, POWER)}"),
            Ask(by(f"{host}, currency", COST)),
            Ask(by(host, CARBON)),
            Ask(by(host, SAVED)),
            Ask(f"{by(host, GAPS)} * 300"),
            Ask(by(host, AGENT)),
            sort="Power",
        ),
        24, 12,
    )  # fmt: skip


def _firing() -> Place:
    return Place(
        listing(
            "Firing alerts",
            "The how-to on alerts gives meaning, diagnosis and remedy of each alert by name. The "
            "table is empty too if `alerts.yml` is not loaded.",
            (
                Column("alertname", "Alert"),
                Column("severity", "Severity", width=100),
                Column("instance", "Host", link=TO_HOST),
                Column("A", "Times", palette.PLAIN, width=80),
            ),
            Ask(by("alertname, severity, instance", FIRING)),
            sort="Severity", rising=True, empty="no alerts",
        ),
        24, 6,
    )  # fmt: skip


def _budgets() -> tuple[Place, ...]:
    def of_places(selector: str) -> str:
        return f"max by (place) ({selector})"

    empty = "no fleet budgets"
    return (
        Place(
            graph(
                "Limits and budgets of places",
                "Sum of the limits that the hosts of a row or rack may enforce, beside its budget, "
                "as the leader of the fleet knows them. The sum stays below the budget, except "
                "while a lowered budget is not in force yet.",
                palette.WATT,
                Ask(of_places(BUDGET), "budget of {{place}}"),
                Ask(of_places(ALLOTTED), "limits of {{place}}"),
                Ask(of_places(DEMAND), "demand of {{place}}"),
                empty=empty,
            ), 12, 9,
        ),
        Place(
            listing(
                "Places",
                "Each row or rack now: its budget, the demand of its hosts, the limits that they "
                "may enforce, the limits without contact to the fleet, and the unused rest.",
                (
                    Column("place", "Place"),
                    Column("A", "Budget", palette.WATT, width=90),
                    Column("B", "Demand", palette.WATT, width=90),
                    Column("C", "Limits", palette.WATT, width=90),
                    Column("D", "Safe", palette.WATT, width=90),
                    Column("E", "Headroom", palette.WATT, width=90),
                    Column("F", "Hosts", palette.PLAIN, width=80),
                ),
                *map(
                    Ask, map(of_places, (BUDGET, DEMAND, ALLOTTED, SAFE, HEADROOM, REGISTERED))
                ),
                sort="Budget", empty=empty,
            ), 12, 9,
        ),
        Place(
            listing(
                "Allotments of hosts",
                "Each host of a fleet now: the power that it asks for, its limit, its limit "
                "without contact at most, and its contact to the fleet (1 or 0).",
                (
                    Column("instance", "Host", link=TO_HOST),
                    Column("A", "Demand", palette.WATT),
                    Column("B", "Limit", palette.WATT),
                    Column("C", "Safe", palette.WATT),
                    Column(
                        "D", "Contact", palette.PLAIN,
                        steps=((None, palette.BAD), (1, palette.GOOD)),
                    ),
                ),
                Ask(by("instance", HOST_DEMAND)),
                Ask(by("instance", ALLOTMENT)),
                Ask(by("instance", HOST_SAFE)),
                Ask(by("instance", CONTACT)),
                sort="Limit", empty=empty,
            ), 24, 8,
        ),
    )  # fmt: skip


def _money() -> tuple[Place, ...]:
    return (
        Place(
            with_currencies(graph(
                "Cost per hour, by currency",
                "Price times power of each host, summed by currency.",
                "none", Ask(by("currency", ALL_COST), "{{currency}}"), legend="list",
                empty="no price set",
            )), 8, 8,
        ),
        Place(
            graph(
                "Carbon over time",
                "The grid's intensity times the power of each host, summed.",
                palette.GRAMS, Ask(f"sum({ALL_CARBON})", "emissions"), legend="list",
                empty="not set",
            ), 8, 8,
        ),
        Place(
            graph(
                "Saved by the tuner",
                "Certain savings in power: growth of the lower bound of each tuned job's saving "
                "against its original setting.",
                palette.WATT, Ask(f"sum({ALL_SAVED})", "certain savings"), legend="list",
                empty="no tuned jobs",
            ), 8, 8,
        ),
    )  # fmt: skip
