"""``CarbonEmissionMonitor`` and ``EnergyCostMonitor``: windows weighed by rates that vary by hour.

The rates come from a provider, as in Zeus: one of the caller, Electricity Maps or OpenEI. A window
is cut at the hours of its rates. While it is open, a thread reads its energy from time to time and
asks for intensities before the provider forgets them; no process runs beside the program.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta, tzinfo
from threading import Event, Lock, Thread
from time import monotonic_ns, sleep, time
from typing import Any, ClassVar, Generic, TypeVar, cast

from wattspan import sdk
from wattspan.compat.zeus.monitor import Framework, WindowMeasurement, ZeusMonitor
from wattspan.compat.zeus.power import to_monotonic, to_unix
from wattspan.compat.zeus.providers import (
    HOUR,
    CarbonIntensityProvider,
    ElectricityPriceProvider,
    in_utc,
    rate_of,
)
from wattspan.sdk import MeasurementError, NotMeasuredError
from wattspan.util.http_get import import_for_threads

JOULES_PER_KILOWATT_HOUR = 3.6e6
QUARTER_HOUR = timedelta(minutes=15)
"""Offsets of time zones are multiples of it, so local hours begin at one, in UTC as well."""

SETTLING = 5.0  # seconds until the energy up to a time is read while a window is open
LINGER = 0.1  # seconds that a thread waits for another window
MAX_INTENSITIES = 20_000  # two months of periods of 5 minutes

_log = logging.getLogger("wattspan")
_T = TypeVar("_T")


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


def intensity_at(
    known: Mapping[datetime, float], length: timedelta = HOUR, failure: Exception | None = None
) -> Rate:
    """The rate of intensities of periods of ``length``; ``failure`` is raised if it is unknown."""

    def rate(began: datetime) -> float:
        if began in known:
            return known[began]
        within = [start for start in known if start <= began < start + length]
        if not within:
            raise failure or NotMeasuredError(
                f"The carbon intensity at {began:%Y-%m-%d %H:%M} UTC is not known: the provider "
                "does not have it. Turn estimation on, or read the emission again later."
            )
        return known[max(within)]

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


_Kinds = tuple[dict[int, float], dict[int, float], dict[int, float]]
"""Figures by index of GPUs, CPU packages and their memory."""


def _sum(periods: Iterable[tuple[datetime, _Kinds]], rate: Rate) -> _Kinds:
    """The joules of each device, times a rate per kilowatt-hour; none is asked for 0 J."""
    totals: _Kinds = {}, {}, {}
    for began, kinds in periods:
        spent = any(any(one.values()) for one in kinds)
        factor = rate(began) / JOULES_PER_KILOWATT_HOUR if spent else 0.0
        for total, joules in zip(totals, kinds, strict=True):
            for i, energy in joules.items():
                total[i] = total.get(i, 0.0) + energy * factor
    return totals


def _looked_up(method: str) -> tuple[Any, Any, Any]:
    """Properties with figures of GPUs, packages and memory; None without one, but for GPUs."""

    def one(kind: int) -> property:
        return property(lambda self: getattr(self, method)()[kind] or (None if kind else {}))

    return one(0), one(1), one(2)


class _RatedWindow:
    """The energies of a window and their sums weighed by rates, looked up when they are read.

    Reading may raise a MeasurementError, or an error of the provider, and can be repeated. ``time``
    is known at once. There is no lock, which the child of a fork could find locked.
    """

    gpu_energy, cpu_energy, dram_energy = _looked_up("joules")

    def __init__(self, monitor: _RatedMonitor[Any], key: str, began: int) -> None:
        self.time, self.monitor, self._key = 0.0, monitor, key
        self._began, self._end = began, 0
        self._weighed: _Kinds | None = None
        # The begin of the period of each piece, and its energies, which it keeps once it is read.
        self._pieces: list[tuple[datetime, WindowMeasurement]] = []

    def finish(self, window: WindowMeasurement) -> None:
        """Fix the end; nothing is read."""
        self._began, self._end = window.period
        self.time = window.time

    def read(self, until: int) -> tuple[list[tuple[datetime, _Kinds]], NotMeasuredError | None]:
        """The known joules of the pieces up to a monotonic time, and why others are not known."""
        pieces, until = self._pieces.copy(), min(until, self._end or until)
        taken = pieces[-1][1].period[1] if pieces else self._began
        if until > taken or (until == self._end and not pieces):
            first, last = (datetime.fromtimestamp(to_unix(at), UTC) for at in (taken, until))
            for began, _, end in periods(first, last, self.monitor.period_length):
                # The window's own edges are exact; those of the hours are converted.
                to = until if end == last else min(until, max(taken, to_monotonic(end.timestamp())))
                pieces.append((began, self.monitor.zeus_monitor.between(self._key, taken, to)))
                taken = to
            self._pieces = pieces  # in one step: another thread may read, too
        known, lost = [], None
        for began, piece in pieces:
            try:
                found = piece.gpu_energy, piece.cpu_energy or {}, piece.dram_energy or {}
            except NotMeasuredError as error:  # such as of an agent that was restarted meanwhile
                lost = error
            else:
                known.append((began, found))
        return known, lost

    def _known(self) -> list[tuple[datetime, _Kinds]]:
        """The joules of the pieces of the ended window."""
        known, lost = self.read(self._end)
        if lost is not None:
            if not known:
                raise lost
            text = f"The energy of window {self._key!r} is partial: {lost}"
            warnings.warn(text, RuntimeWarning, stacklevel=5)
        return known

    def joules(self) -> _Kinds:
        """The joules of each device."""
        return _sum(self._known(), lambda began: JOULES_PER_KILOWATT_HOUR)

    def weighed(self) -> _Kinds:
        """The joules of each device, times the rates of their hours."""
        if self._weighed is None:
            self._weighed = _sum(self._known(), self.monitor.rate())
        return self._weighed

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except Exception as error:  # noqa: BLE001 - of the provider, too
            return f"<{type(self).__name__} of {self.time:.6g} s, not all of it known: {error}>"

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Pickled and copied as Zeus's dataclass, with its values."""
        plain: Any = type(self).__bases__[-1]
        return plain, tuple(getattr(self, one.name) for one in fields(plain))


class WindowEmission(_RatedWindow, CarbonEmissionMeasurement):
    """The measurement of a CarbonEmissionMonitor."""

    gpu_carbon_emission, cpu_carbon_emission, dram_carbon_emission = _looked_up("weighed")


class WindowCost(_RatedWindow, EnergyCostMeasurement):
    """The measurement of an EnergyCostMonitor."""

    gpu_energy_cost, cpu_energy_cost, dram_energy_cost = _looked_up("weighed")


class Gatherer:
    """A thread that reads the joules of open windows after each quarter of an hour."""

    def __init__(self, length: float = 900.0, settling: float = SETTLING) -> None:
        self._length, self._settling = length, settling
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.windows: tuple[_RatedWindow, ...] = ()
        self._lock, self._idle, self._runs = Lock(), Event(), False

    def add(self, window: _RatedWindow) -> None:
        """Read an open window until it is removed."""
        with self._lock:
            self.windows = *self.windows, window
            if not self._runs:
                import_for_threads()
                self._runs = True
                Thread(target=self._work, name="wattspan-zeus-rates", daemon=True).start()

    def remove(self, window: _RatedWindow | None) -> None:
        """Read a window no more."""
        with self._lock:
            self.windows = tuple(one for one in self.windows if one is not window)
            if not self.windows:
                self._idle.set()

    def _work(self) -> None:
        while True:
            if self._idle.wait(self._length - time() % self._length + self._settling):
                sleep(LINGER)  # the next window may begin soon
                with self._lock:
                    self._idle.clear()
                    self._runs = bool(self.windows)
                    if not self._runs:
                        return
                continue
            until = monotonic_ns() - round(self._settling * 1e9)
            for window in self.windows:
                try:
                    window.monitor.gather(window, until)
                except Exception:  # noqa: BLE001 - of the provider's properties
                    _log.exception("An open window is read again later")


class _RatedMonitor(Generic[_T]):
    """Windows of a ZeusMonitor, cut into periods of one rate, an hour at most."""

    monitor_class: ClassVar[type[ZeusMonitor]] = ZeusMonitor
    window_class: ClassVar[type[_RatedWindow]]
    period_length: Any
    rate: Callable[[], Rate]
    gatherer: ClassVar[Gatherer] = Gatherer()

    def __init__(self, gpus: list[int] | None, cpus: list[int] | None, sync: Framework) -> None:
        self.zeus_monitor = self.monitor_class(gpus, cpus, sync_execution_with=sync)
        self._open: dict[str, Any] = {}

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        """Begin a window; ValueError if ``key`` is open."""
        self.zeus_monitor.begin_window(key, sync_execution)
        self._open[key] = window = self.window_class(self, key, monotonic_ns())
        self.gatherer.add(window)

    def end_window(self, key: str, sync_execution: bool = True) -> _T:
        """End a window; its figures are looked up when they are read.

        ValueError if no window ``key`` is open. Reading raises a MeasurementError if an energy or
        a rate is unknown, and an error of the provider as it is; it can be repeated.
        """
        try:
            ended = self.zeus_monitor.finish_window(key, sync_execution)
        finally:  # the GPU may have failed
            self.gatherer.remove(window := self._open.pop(key, None))
        window.finish(ended)
        return cast(_T, window)

    def gather(self, window: _RatedWindow, until: int) -> None:
        """Read an open window up to a monotonic time; what is not known yet is read again later."""
        with suppress(MeasurementError, RuntimeWarning):  # a warning may be an error
            sdk.registration.renew_if_due()
            window.read(until)


class CarbonEmissionMonitor(_RatedMonitor[CarbonEmissionMeasurement]):
    """Measures windows and their carbon emissions; signatures are those of Zeus."""

    window_class = WindowEmission

    def __init__(
        self,
        carbon_intensity_provider: CarbonIntensityProvider,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
        sync_execution_with: Framework = "torch",
    ) -> None:
        super().__init__(gpu_indices, cpu_indices, sync_execution_with)
        self.carbon_intensity_provider = carbon_intensity_provider
        self._known: dict[datetime, float] = {}
        self._asked = monotonic_ns()
        self._failed = False

    @property
    def period_length(self) -> timedelta:
        """The provider's period, an hour at most."""
        return min(self.carbon_intensity_provider.update_period, HOUR)

    def gather(self, window: _RatedWindow, until: int) -> None:
        """Also ask when half of the provider's history has passed; a failure is logged once.

        Half: a provider may be late by hours, or not answer for some.
        """
        super().gather(window, until)
        provider = self.carbon_intensity_provider
        period = (provider.history_length // 2 or 1) * provider.update_period
        if until - self._asked >= period.total_seconds() * 1e9:
            failure = self._ask(until)
            if failure is not None and not self._failed:
                _log.warning("Carbon intensities are asked for again later: %s", failure)
            self._failed = failure is not None

    def _ask(self, now: int) -> Exception | None:
        """Add the provider's present answer to the known intensities; its error."""
        try:
            answer = self.carbon_intensity_provider.get_recent_carbon_intensity()
            found = {in_utc(at): rate_of(one) for at, one in answer.items() if one is not None}  # type: ignore[redundant-expr]
        except Exception as error:  # noqa: BLE001 - raised for an hour that is not known
            return error
        known = {**self._known, **found}  # another thread may read the old ones
        self._known = dict(sorted(known.items())[-MAX_INTENSITIES:])
        self._asked = now
        return None

    def rate(self) -> Rate:
        """The known intensities; the provider is asked, and once more after a failure."""
        now = monotonic_ns()
        failure = self._ask(now) and self._ask(now)
        return intensity_at(self._known, self.carbon_intensity_provider.update_period, failure)


class EnergyCostMonitor(_RatedMonitor[EnergyCostMeasurement]):
    """Measures windows and their cost; signatures are those of Zeus."""

    window_class = WindowCost
    period_length = QUARTER_HOUR

    def __init__(
        self,
        electricity_price_provider: ElectricityPriceProvider,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
        sync_execution_with: Framework = "torch",
    ) -> None:
        super().__init__(gpu_indices, cpu_indices, sync_execution_with)
        self.electricity_price_provider = electricity_price_provider

    def rate(self) -> Rate:
        """The present tariff."""
        return price_at(self.electricity_price_provider.get_current_electricity_prices())
