"""Providers of carbon intensities and electricity prices: Electricity Maps and OpenEI, as in Zeus.

Each is asked when a rate is wanted. A host's own rates need no provider: ``[carbon]`` and
``[cost]`` of the agent.
"""

from __future__ import annotations

import abc
import json
import math
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal, TypeVar
from urllib.parse import urlencode

from wattspan.util.http_get import FetchError, http_get
from wattspan.util.text import printable

HOUR = timedelta(hours=1)
REQUEST_TIMEOUT = 10.0
MAX_ANSWER = 16 << 20  # bytes: OpenEI lists all tariffs of a place

_T = TypeVar("_T")


class _ProviderError(Exception):
    """A rate that a provider did not give; the sentence is ``message``, as in Zeus."""

    message = property(str)


class ZeusCarbonIntensityHTTPError(_ProviderError):
    """A request for a carbon intensity failed."""


class ZeusCarbonIntensityNotFoundError(_ProviderError):
    """The answer has no carbon intensity."""


class ZeusElectricityPriceHTTPError(_ProviderError):
    """A request for a tariff failed."""


class ZeusElectricityPriceNotFoundError(_ProviderError):
    """The answer has no such tariff."""


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


def _value_of(key: str) -> str:
    return os.environ.get(key, "").strip()  # a file's content ends with a line feed


def _json_of(
    url: str, query: Mapping[str, object], error: type[_ProviderError], key: str, **headers: str
) -> Any:
    """The JSON of an answer; ``error`` without one. No message repeats the value of ``key``."""
    try:
        target = f"{url}?{urlencode(query)}"
        status, body = http_get(target, timeout=REQUEST_TIMEOUT, most=MAX_ANSWER, headers=headers)
    except FetchError as failure:
        raise error(f"{url} cannot be asked: {failure}. Is it reachable from this host?") from None
    text = printable(body[:200].decode(errors="replace")).replace(_value_of(key) or "\0", key)
    if status not in (200, 404):  # 404: a place without data, which the caller tells
        remedy = f" Set the environment variable {key} to a valid key." if status < 500 else ""
        raise error(f"{url} answered {status}: {text}.{remedy}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        what = f"larger than {MAX_ANSWER} bytes" if len(body) > MAX_ANSWER else "not JSON"
        raise error(f"The answer of {url} is {what}: {text}") from None


def rate_of(value: object) -> float:
    """A rate of an answer; ValueError unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def in_utc(moment: datetime) -> datetime:
    """``moment`` in UTC, which it is in without a time zone."""
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


class ElectrictyMapsClient(CarbonIntensityProvider):
    """The intensities of Electricity Maps at a place; the key is in ``ELECTRICITY_MAPS_TOKEN``."""

    address: ClassVar[str] = "https://api.electricitymap.org/v3/carbon-intensity"
    update_period, history_length = HOUR, 24

    def __init__(
        self,
        location: tuple[float, float],
        estimate: bool = False,
        emission_factor_type: Literal["direct", "lifecycle"] = "direct",
    ) -> None:
        self.lat, self.long = location
        self.estimate = estimate
        self.emission_factor_type = emission_factor_type

    def get_current_carbon_intensity(self) -> float:
        """The newest intensity."""
        return self._read("latest", lambda answer: rate_of(answer["carbonIntensity"]))

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        """The intensities of the last 24 hours; an hour without a value is left out."""
        return self._read(
            "history",
            lambda answer: {
                in_utc(datetime.fromisoformat(one["datetime"])): rate_of(one["carbonIntensity"])
                for one in answer["history"]
                if one["carbonIntensity"] is not None
            },
        )

    def _read(self, what: str, read: Callable[[Any], _T]) -> _T:
        place = {"lat": self.lat, "lon": self.long, "disableEstimations": not self.estimate}
        query = {**place, "emissionFactorType": self.emission_factor_type}
        url, key = f"{self.address}/{what}", "ELECTRICITY_MAPS_TOKEN"
        headers = {"auth-token": token} if (token := _value_of(key)) else {}
        answer = _json_of(url, query, ZeusCarbonIntensityHTTPError, key, **headers)
        try:
            return read(answer)
        except (LookupError, TypeError, ValueError) as error:
            raise ZeusCarbonIntensityNotFoundError(
                f"Electricity Maps has no intensity for {query} ({type(error).__name__}: {error}). "
                f"Turn estimation on, or choose another place. Answer: {str(answer)[:200]!r}"
            ) from None


class OpenEIClient(ElectricityPriceProvider):
    """The tariff ``label`` of OpenEI at a latitude and longitude.

    The key is in ``OPENEI_API_KEY``, or the public one, which is for a few requests a day.
    """

    address: ClassVar[str] = "https://api.openei.org/utility_rates"

    def __init__(
        self,
        location: tuple[float, float],
        label: str,
        sector: Literal["Residential", "Commercial", "Industrial", "Lighting"] = "Residential",
        radius: int = 0,
    ) -> None:
        self.lat, self.long = location
        self.label, self.sector, self.radius = label, sector, radius

    def search_json(
        self, data: object, key_name: str, target_value: object, return_value: str
    ) -> list[Any]:
        """``return_value`` of each object in ``data`` whose ``key_name`` is ``target_value``."""
        found: list[Any] = []
        if isinstance(data, dict):
            if data.get(key_name) == target_value:
                found.append(data.get(return_value))
            data = list(data.values())
        for one in data if isinstance(data, list) else ():
            found += self.search_json(one, key_name, target_value, return_value)
        return found

    def get_current_electricity_prices(self) -> dict[str, list[Any]]:
        """The rates and schedules of the tariff."""
        key, fixed = "OPENEI_API_KEY", {"version": "latest", "format": "json", "detail": "full"}
        place = {"lat": self.lat, "lon": self.long, "radius": self.radius, "sector": self.sector}
        query = {**fixed, **place, "api_key": _value_of(key) or "DEMO_KEY"}
        answer = _json_of(self.address, query, ZeusElectricityPriceHTTPError, key)
        found: dict[str, list[Any]] = {}
        for name in ("energy_rate_structure", "energy_weekday_schedule", "energy_weekend_schedule"):
            values = self.search_json(answer, "label", self.label, name.replace("_", ""))
            if not values or not isinstance(values[0], list):
                raise ZeusElectricityPriceNotFoundError(
                    f"OpenEI has no {name} of the tariff {self.label!r} for {place}. Choose a "
                    f"label of https://apps.openei.org/USURDB. Answer: {str(answer)[:200]!r}"
                )
            found[name] = values[0]
        return found


def get_time_info() -> tuple[str, str, int]:
    """The name of the month, ``"Weekday"`` or ``"Weekend"``, and the hour, of the local time."""
    now = datetime.now().astimezone()
    return now.strftime("%B"), "Weekend" if now.weekday() >= 5 else "Weekday", now.hour
