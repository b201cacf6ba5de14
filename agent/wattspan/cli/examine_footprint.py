"""What a kilowatt-hour would be said to cost and to emit: read, or asked for, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wattspan.attribution.cost import BILLION
from wattspan.cli.compose_footprint import GRAM, open_rate
from wattspan.cli.diagnosis import Finding, Mark, Section
from wattspan.config import CarbonSettings, Config, CostSettings
from wattspan.config.footprint import rate_keys
from wattspan.ports import Clock, ConfigError


def examine_footprint(config: Config, clock: Clock) -> Section:
    """Asks a server only if the configuration names one."""
    findings = [
        *_rate("cost", config.cost, config.cost.currency, clock),
        *_rate("carbon", config.carbon, GRAM, clock),
    ]
    return Section("Cost and carbon", tuple(findings))


def _rate(
    name: str, table: CostSettings | CarbonSettings, unit: str, clock: Clock
) -> Iterator[Finding]:
    from wattspan.footprint.rates import PolledRate

    keys = rate_keys(table)
    if not keys:
        yield Finding(Mark.NOTE, name, f"not configured: [{name}] says nothing")
        return
    if faults := schedule_faults(table):
        yield from (Finding(Mark.FAIL, name, fault.rstrip(".")) for fault in faults)
        return
    rate = open_rate(name, table, clock)
    assert rate is not None  # noqa: S101 - somebody says it
    if isinstance(rate, PolledRate):
        rate.look()
        for failure in rate.health().failures:
            told = f"cannot {failure.verb} {failure.thing}: {failure.cause}"
            yield Finding(Mark.WARN, name, told, failure.remedy)
    now = rate.at(clock.now())
    means = f"by {name}.{keys[0]}"
    if now is not None:
        yield Finding(Mark.OK, name, f"{now / BILLION:.10g} {unit}/kWh now, {means}")
    elif table.schedule:
        yield Finding(Mark.NOTE, name, f"unknown now, {means}: no period holds at this time")


def schedule_faults(table: CostSettings | CarbonSettings) -> list[str]:
    """What is wrong with the tariff file that the table names, if it names one."""
    from wattspan.footprint.tariff_file import read_schedule

    try:
        if table.schedule:
            read_schedule(Path(table.schedule))
    except ConfigError as error:
        return str(error).splitlines()
    return []
