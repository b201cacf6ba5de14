"""The part of the composition root for cost and carbon: rates and their accumulators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wattspan.attribution.cost import CoverEnergy, RateAccumulator, billionths
from wattspan.config import CarbonSettings, Config, CostSettings
from wattspan.model import Checkpoint, Footprint, Instant, RatedEnergy, Snapshot, SourceHealth
from wattspan.ports import Clock
from wattspan.service.agent import ServiceGroup

if TYPE_CHECKING:
    from wattspan.footprint.price_and_carbon import (
        ConstantRate,
        EnergyRate,
        ExternalRate,
        PolledRate,
        TariffRate,
    )

GRAM = "g"


class _FootprintRate(NamedTuple):
    rate: EnergyRate
    total: RateAccumulator

    def add(self, spent: int, at: Instant) -> RatedEnergy:
        try:
            rate = self.rate.at(at)
        except Exception:  # noqa: BLE001 - a failing rate is unknown and must not end the poller
            rate = None
        return self.total.add(spent, rate)


class FootprintTracker:
    """Cost and carbon of the cover's energy, and the threads that look up rates."""

    def __init__(self, config: Config, clock: Clock, checkpoint: Checkpoint | None) -> None:
        self.services = ServiceGroup("footprint")
        self._clock = clock
        self._lookups: list[PolledRate] = []
        self._cover = CoverEnergy(checkpoint.accounts if checkpoint is not None else ())
        before = checkpoint.footprint if checkpoint is not None else Footprint()
        self._cost = self._open("cost", config.cost, config.cost.currency, before.cost)
        self._carbon = self._open("carbon", config.carbon, GRAM, before.carbon)

    def report(self, snapshot: Snapshot) -> Footprint:
        """The totals up to a snapshot. To be called once per snapshot, by one thread."""
        cost, carbon = self._cost, self._carbon
        if cost is None and carbon is None:
            return Footprint()
        spent = self._cover.spent(snapshot.domains)
        return Footprint(
            cost=None if cost is None else cost.add(spent, snapshot.at),
            carbon=None if carbon is None else carbon.add(spent, snapshot.at),
        )

    def health(self) -> tuple[SourceHealth, ...]:
        """The health of the rates that are looked up."""
        return tuple(lookup.health() for lookup in self._lookups)

    def _open(
        self, name: str, table: CostSettings | CarbonSettings, unit: str, before: RatedEnergy | None
    ) -> _FootprintRate | None:
        from wattspan.footprint.price_and_carbon import PolledRate

        rate = open_rate(name, table, self._clock)
        if rate is None:
            return None
        if isinstance(rate, PolledRate):
            self._lookups.append(rate)
            self.services.add(rate.start, rate.stop)
        return _FootprintRate(rate, RateAccumulator(unit, rate.origin, before))


def open_rate(
    name: str, table: CostSettings | CarbonSettings, clock: Clock
) -> ConstantRate | TariffRate | ExternalRate | None:
    """The rate that a table configures, without a lookup yet; None if it configures none."""
    from wattspan.footprint.price_and_carbon import (
        ConstantRate,
        ExternalRate,
        TariffRate,
        query_number,
        read_number,
    )

    if (constant := configured_rate(table)) is not None:
        return ConstantRate(billionths(constant))
    if table.schedule:
        return TariffRate(name, Path(table.schedule))
    if not table.url and not table.file:
        return None
    path, timeout = Path(table.file), table.timeout / 1e9
    return ExternalRate(
        name,
        f"the rate per kilowatt-hour from {table.url or path}",
        (lambda: query_number(table.url, table.query, timeout))
        if table.url
        else (lambda: read_number(path, clock.now().wall)),
        clock,
        factor=table.factor,
        interval=table.refresh,
        max_age=table.max_age,
    )


def configured_rate(table: CostSettings | CarbonSettings) -> float | None:
    """The constant rate of a table; None if it configures none."""
    return table.price if isinstance(table, CostSettings) else table.intensity
