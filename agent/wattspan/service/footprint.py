"""A part of the composition root: what a kilowatt-hour comes to, and what weighs energy by it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wattspan.attribution.cost import CoverEnergy, RateAccumulator, billionths
from wattspan.config import CarbonSettings, Config, CostSettings
from wattspan.model import Checkpoint, Footprint, Instant, RatedEnergy, Snapshot, SourceHealth
from wattspan.ports import Clock
from wattspan.service.agent import ServiceGroup

if TYPE_CHECKING:
    from wattspan.footprint.rates import (
        ConstantRate,
        EnergyRate,
        ExternalRate,
        PolledRate,
        TariffRate,
    )

GRAM = "g"


class _FootprintRate(NamedTuple):
    rate: EnergyRate
    scale: RateAccumulator

    def put(self, spent: int, snapshot: Snapshot) -> RatedEnergy:
        return self.scale.put(spent, self._known(snapshot.at))

    def _known(self, at: Instant) -> int | None:
        try:
            return self.rate.at(at)
        except Exception:  # noqa: BLE001 - one missing column, not the end of the poller
            return None


class FootprintTracker:
    """Weighs the cover of every snapshot; and the threads in which rates are looked up."""

    def __init__(self, config: Config, clock: Clock, opening: Checkpoint | None) -> None:
        self.services = ServiceGroup("footprint")
        self._clock = clock
        self._lookups: list[PolledRate] = []
        self._cover = CoverEnergy(opening.accounts if opening is not None else ())
        before = opening.footprint if opening is not None else Footprint()
        self._cost = self._open("cost", config.cost, config.cost.currency, before.cost)
        self._carbon = self._open("carbon", config.carbon, GRAM, before.carbon)

    def weigh(self, snapshot: Snapshot) -> Footprint:
        """What the cover has come to. For one thread, and every snapshot once."""
        cost, carbon = self._cost, self._carbon
        if cost is None and carbon is None:
            return Footprint()
        spent = self._cover.spent(snapshot.domains)
        return Footprint(
            cost=None if cost is None else cost.put(spent, snapshot),
            carbon=None if carbon is None else carbon.put(spent, snapshot),
        )

    def health(self) -> tuple[SourceHealth, ...]:
        """How the rates that are looked up are doing."""
        return tuple(lookup.health() for lookup in self._lookups)

    def _open(
        self, name: str, table: CostSettings | CarbonSettings, unit: str, before: RatedEnergy | None
    ) -> _FootprintRate | None:
        from wattspan.footprint.rates import PolledRate

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
    """What the table says a kilowatt-hour comes to; None: nothing. Asks nobody yet."""
    from wattspan.footprint.rates import (
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
        f"what a kilowatt-hour comes to from {table.url or path}",
        (lambda: query_number(table.url, table.query, timeout))
        if table.url
        else (lambda: read_number(path, clock.now().wall)),
        clock,
        factor=table.factor,
        every=table.refresh,
        max_age=table.max_age,
    )


def configured_rate(table: CostSettings | CarbonSettings) -> float | None:
    """The figure that stands in the configuration itself."""
    return table.price if isinstance(table, CostSettings) else table.intensity
