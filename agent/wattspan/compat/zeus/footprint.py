"""``CarbonEmissionMonitor`` and ``EnergyCostMonitor``: windows weighed by rates that vary by hour.

The rates come from a provider of the caller, as in Zeus. A window is cut at the hours of
its rates, and the energy of each piece is asked for at the window's end: no process runs beside the
program. A host's own rates need no provider: ``[carbon]`` and ``[cost]`` of the agent.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, ClassVar

from wattspan.compat.zeus.monitor import Framework, WindowMeasurement, ZeusMonitor
from wattspan.compat.zeus.power import to_monotonic, to_unix
from wattspan.sdk import NotMeasuredError

JOULES_PER_KILOWATT_HOUR = 3.6e6
QUARTER_HOUR = timedelta(minutes=15)
"""Offsets of time zones are multiples of it, so local hours begin at one, in UTC as well."""


class CarbonIntensityProvider(abc.ABC):
    """The carbon intensity of a place, in grams of CO2 equivalent per kilowatt-hour."""

    @abc.abstractmethod
    def get_current_carbon_intensity(self) -> float:
        """The present intensity."""

    @abc.abstractmethod
    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        """The intensities of the last periods, by the UTC time of their begin."""

    @property
    @abc.abstractmethod
    def update_period(self) -> timedelta:
        """The length of one period."""

    @property
    @abc.abstractmethod
    def history_length(self) -> int:
        """The number of recent periods."""


class ElectricityPriceProvider(abc.ABC):
    """The price of electricity by month and hour."""

    @abc.abstractmethod
    def get_current_electricity_prices(self) -> dict[str, list[Any]]:
        """``energy_rate_structure``, ``energy_weekday_schedule`` and ``energy_weekend_schedule``.

        The schedules have a tier for each month (0 to 11) and hour; the first rate of a tier is its
        price per kilowatt-hour.
        """


@dataclass
class CarbonEmissionMeasurement:
    """Seconds, joules and grams of CO2 equivalent of one window, by index."""

    time: float
    gpu_energy: dict[int, float]
    gpu_carbon_emission: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    cpu_carbon_emission: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None
    dram_carbon_emission: dict[int, float] | None = None


@dataclass
class EnergyCostMeasurement:
    """Seconds, joules and cost of one window, by index, in the provider's currency."""

    time: float
    gpu_energy: dict[int, float]
    gpu_energy_cost: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    cpu_energy_cost: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None
    dram_energy_cost: dict[int, float] | None = None


Rate = Callable[[datetime], float]
"""The rate per kilowatt-hour of the period that begins at a UTC time; a MeasurementError."""


def periods(start: datetime, end: datetime, length: timedelta) -> Iterator[tuple[datetime, ...]]:
    """Begin of each period of ``length`` since the hour, and the part of it from start to end."""
    began = start.replace(minute=0, second=0, microsecond=0)
    while began < end or began <= start:
        after = began + length
        if after > start:
            yield began, max(start, began), min(end, after)
        began = after


def intensity_at(intensities: Mapping[datetime, float]) -> Rate:
    """The rate of a provider's recent intensities."""

    def rate(began: datetime) -> float:
        if began not in intensities:
            raise NotMeasuredError(
                f"The carbon intensity at {began:%Y-%m-%d %H:%M} UTC is not known: the provider "
                "does not have it. Turn estimation on, or end windows more often."
            )
        return intensities[began]

    return rate


def price_at(prices: Mapping[str, Sequence[Any]], zone: tzinfo | None = None) -> Rate:
    """The rate of a tariff; its hours are those of ``zone``, by default of this host."""

    def rate(began: datetime) -> float:
        local = began.astimezone(zone)
        days = "energy_weekday_schedule" if local.weekday() < 5 else "energy_weekend_schedule"
        try:
            tier = prices[days][local.month - 1][local.hour]
            return float(prices["energy_rate_structure"][tier][0]["rate"])
        except (LookupError, TypeError, ValueError) as error:
            raise NotMeasuredError(
                f"The price at {local:%Y-%m-%d %H:%M} is not known: the provider's tariff has no "
                f"rate for this hour ({type(error).__name__}: {error}). Correct the tariff."
            ) from None

    return rate


_ByIndex = dict[int, float]
_Weighed = tuple[
    float, _ByIndex, _ByIndex, _ByIndex | None, _ByIndex | None, _ByIndex | None, _ByIndex | None
]


class _RatedMonitor:
    """Windows of a ZeusMonitor, cut into periods of one rate."""

    monitor_class: ClassVar[type[ZeusMonitor]] = ZeusMonitor

    def __init__(
        self,
        gpu_indices: list[int] | None,
        cpu_indices: list[int] | None,
        sync_execution_with: Framework,
    ) -> None:
        self.zeus_monitor = self.monitor_class(
            gpu_indices, cpu_indices, sync_execution_with=sync_execution_with
        )

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        """Begin a window; ValueError if ``key`` is open."""
        self.zeus_monitor.begin_window(key, sync_execution)

    @staticmethod
    def _weighed(window: WindowMeasurement, length: timedelta, rate: Rate) -> _Weighed:
        """The fields of a measurement, in their order."""
        start, end = window.period
        first, last = (datetime.fromtimestamp(to_unix(edge), UTC) for edge in (start, end))
        sums: tuple[_ByIndex, _ByIndex, _ByIndex] = {}, {}, {}
        gpu, cpu, dram = sums
        for began, since, until in periods(first, last, length):
            # The window's own edges are exact; those of the hours are converted.
            piece = window.part(
                start if since == first else to_monotonic(since.timestamp()),
                end if until == last else to_monotonic(until.timestamp()),
            )
            price = rate(began) / JOULES_PER_KILOWATT_HOUR
            energies = (piece.gpu_energy, piece.cpu_energy, piece.dram_energy)
            for weighed, joules in zip(sums, energies, strict=True):
                for i, energy in (joules or {}).items():
                    weighed[i] = weighed.get(i, 0.0) + energy * price
        return (
            *(window.time, window.gpu_energy, gpu),
            *(window.cpu_energy, cpu or None),
            *(window.dram_energy, dram or None),
        )


class CarbonEmissionMonitor(_RatedMonitor):
    """Measures windows and their carbon emissions; signatures are those of Zeus."""

    def __init__(
        self,
        carbon_intensity_provider: CarbonIntensityProvider,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
        sync_execution_with: Framework = "torch",
    ) -> None:
        super().__init__(gpu_indices, cpu_indices, sync_execution_with)
        self.carbon_intensity_provider = carbon_intensity_provider

    def end_window(self, key: str, sync_execution: bool = True) -> CarbonEmissionMeasurement:
        """End a window and return its emissions, once its energy is known.

        ValueError if no window ``key`` is open. A MeasurementError if the energy or an intensity is
        unknown; an error of the provider is raised as it is.
        """
        window = self.zeus_monitor.finish_window(key, sync_execution)
        provider = self.carbon_intensity_provider
        rate = intensity_at(provider.get_recent_carbon_intensity())
        return CarbonEmissionMeasurement(*self._weighed(window, provider.update_period, rate))


class EnergyCostMonitor(_RatedMonitor):
    """Measures windows and their cost; signatures are those of Zeus."""

    def __init__(
        self,
        electricity_price_provider: ElectricityPriceProvider,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
        sync_execution_with: Framework = "torch",
    ) -> None:
        super().__init__(gpu_indices, cpu_indices, sync_execution_with)
        self.electricity_price_provider = electricity_price_provider

    def end_window(self, key: str, sync_execution: bool = True) -> EnergyCostMeasurement:
        """End a window and return its cost, once its energy is known.

        ValueError if no window ``key`` is open. A MeasurementError if the energy or a price is
        unknown; an error of the provider is raised as it is.
        """
        window = self.zeus_monitor.finish_window(key, sync_execution)
        rate = price_at(self.electricity_price_provider.get_current_electricity_prices())
        return EnergyCostMeasurement(*self._weighed(window, QUARTER_HOUR, rate))
