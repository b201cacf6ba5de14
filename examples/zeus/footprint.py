"""Emissions and cost of a section, measured with the interface of Zeus and fixed rates.

Only the imports differ from a script for Zeus, whose modules are ``zeus.monitor.carbon`` and
``zeus.monitor.price``.
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from wattspan.compat.zeus import (
    CarbonEmissionMonitor,
    CarbonIntensityProvider,
    ElectricityPriceProvider,
    EnergyCostMonitor,
)


class FixedIntensity(CarbonIntensityProvider):
    """400 g of CO2 equivalent per kilowatt-hour."""

    def get_current_carbon_intensity(self) -> float:
        return 400.0

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        return {now - timedelta(hours=hour): 400.0 for hour in range(24)}

    @property
    def update_period(self) -> timedelta:
        return timedelta(hours=1)

    @property
    def history_length(self) -> int:
        return 24


class FixedPrice(ElectricityPriceProvider):
    """0.30 per kilowatt-hour at all times."""

    def get_current_electricity_prices(self) -> dict[str, list[Any]]:
        every_hour = [[0] * 24 for _ in range(12)]
        return {
            "energy_rate_structure": [[{"rate": 0.30}]],
            "energy_weekday_schedule": every_hour,
            "energy_weekend_schedule": every_hour,
        }


def main() -> None:
    carbon = CarbonEmissionMonitor(FixedIntensity(), gpu_indices=[0], cpu_indices=[])
    cost = EnergyCostMonitor(FixedPrice(), gpu_indices=[0], cpu_indices=[])
    carbon.begin_window("job", sync_execution=False)
    cost.begin_window("job", sync_execution=False)
    time.sleep(2)  # replace it by your own work
    spent = cost.end_window("job", sync_execution=False)
    emitted = carbon.end_window("job", sync_execution=False)
    print(f"emissions: {emitted.gpu_carbon_emission[0]:.4f} g of {emitted.gpu_energy[0]:.1f} J")
    print(f"cost: {spent.gpu_energy_cost[0]:.6f} of {spent.gpu_energy[0]:.1f} J")


if __name__ == "__main__":
    main()
