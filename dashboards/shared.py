"""Panels of more than one dashboard."""

from __future__ import annotations

from typing import Any

from dashboards import palette
from dashboards.layout import HOST_SELECTOR, Chosen, Place
from dashboards.panels import Ask, stat_panel
from dashboards.promql import HOSTS, by, rate, series, spent
from dashboards.sdk import common, model, stat

PROVENANCE_SAYS = (
    "Provenance of the energy: **measured** by a counter, **derived** from measured power, "
    "**estimated** by a model of load, or **emulated** (true of no machine); several of different "
    "hosts or devices. **lower_bound**: some power now, or energy of the range, is unknown."
)
FEW_HOSTS = Chosen(
    "instance", "Hosts", "One host or several; not all, since the panel reads series by process.",
    HOST_SELECTOR, "instance", multi=True,
)  # fmt: skip
TYPES = Chosen(
    "hw_type", "Device type", "Device types of the energy.",
    series("wattspan_group_energy_joules_total"), "hw_type", multi=True, all=True,
)  # fmt: skip
PROCESS_NAMED = "{{command}} {{pid}} on {{instance}}"
"""A process in a legend, with its host: two hosts may have equal pids and commands."""

SHARE_STEPS = ((None, palette.GOOD), (0.05, palette.NOTICE), (0.15, palette.BAD))


def provenance(scope: str = HOSTS, width: int = 4, height: int = 4, *, missing: str = "") -> Place:
    """The provenance, and the certainty unless it is ``known``.

    ``missing`` selects the hosts with unknown energy in the range, by default by their counters.
    A counter stays a lower bound from then on: its certainty alone is that of all time.
    """
    domains = series("wattspan_domain_info", 'in_cover="true"', scope=scope)
    panel = stat_panel(
        "Provenance", PROVENANCE_SAYS, palette.PLAIN,
        Ask(f"count by (provenance) ({domains})", "{{provenance}}"),
        Ask(f"count by (certainty) ({_uncertain(scope, missing)})", "{{certainty}}"),
        spark=False, names=True, colours={**palette.PROVENANCE, **palette.CERTAINTY},
    )  # fmt: skip
    return Place(panel, width, height)


def _uncertain(scope: str, missing: str) -> str:
    """The certainties other than ``known`` of power now, and of energy in the range."""

    def infos(of: str, *matchers: str) -> str:
        return series(f"wattspan_{of}_certainty_info", 'certainty!="known"', *matchers, scope=scope)

    hosts = "job, instance"
    counters = "wattspan_gap_seconds_total", "wattspan_baseline_unknown_energy_joules_total"
    missing = missing or " or ".join(
        f"{by(hosts, spent(series(name, scope=scope)))} > 0" for name in counters
    )
    now, energy = infos("host", 'figure="power"'), infos("host", 'figure="energy"')
    return f"{now} or ({energy} or {infos('attribution')}) and on ({hosts}) ({missing})"


def with_currencies(panel: Any) -> Any:
    """Series that are called by a currency's code are written as that currency.

    A single figure has its name next to it: of most currencies Grafana knows no sign.
    """
    if isinstance(panel, stat.Panel):
        panel = panel.text_mode(common.BigValueTextMode.VALUE_AND_NAME)
    for code in palette.CURRENCIES:
        unit = model.DynamicConfigValue("unit", f"currency{code}")
        panel = panel.override_by_name(code, [unit])
    return panel


def money_and_carbon(scope: str) -> tuple[Place, ...]:
    """Cost of the energy of the hosts in ``scope``: their agents' own totals."""
    cost = series("wattspan_host_cost_total", scope=scope)
    grams = series("wattspan_host_carbon_grams_total", scope=scope)
    unweighed = series("wattspan_unweighed_energy_joules_total", scope=scope)
    unset = "no price set"
    return (
        Place(
            with_currencies(stat_panel(
                "Cost in this range",
                "Cost of the energy over the displayed time range, by the agent's `[cost]` table: "
                "each joule at the price of its own hour.",
                "none", Ask(by("currency", spent(cost)), "{{currency}}"),
                spark=False, decimals=2, empty=unset,
            )), 6, 4,
        ),
        Place(
            with_currencies(stat_panel(
                "Cost per hour",
                "Cost per hour at the current power and the current price.",
                "none", Ask(f"{by('currency', rate(cost))} * 3600", "{{currency}}"),
                decimals=3, empty=unset,
            )), 6, 4,
        ),
        Place(
            stat_panel(
                "Carbon in this range",
                "Emissions over the displayed time range, by the agent's `[carbon]` table: each "
                "joule at the grid's intensity of its own hour.",
                palette.GRAMS, Ask(f"sum({spent(grams)})"),
                spark=False, decimals=1, empty="no intensity set",
            ), 6, 4,
        ),
        Place(
            stat_panel(
                "Unpriced energy",
                "Energy of the range without a known price (cost) or intensity (carbon); the "
                "neighbouring figures exclude it.",
                palette.JOULE, Ask(by("footprint", spent(unweighed)), "{{footprint}}"),
                spark=False, steps=((None, palette.GOOD), (1, palette.NOTICE)),
                empty="nothing set",
            ), 6, 4,
        ),
    )  # fmt: skip
