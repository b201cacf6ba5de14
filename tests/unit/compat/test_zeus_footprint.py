"""CarbonEmissionMonitor, EnergyCostMonitor, the pushed metrics and the zeus."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
from testbed.metered_devices import MeteredDevices, gpu, package

from wattspan.compat import zeus
from wattspan.compat.zeus import metric
from wattspan.compat.zeus.footprint import (
    JOULES_PER_KILOWATT_HOUR,
    CarbonEmissionMonitor,
    CarbonIntensityProvider,
    ElectricityPriceProvider,
    EnergyCostMonitor,
    intensity_at,
    periods,
    price_at,
)
from wattspan.compat.zeus.monitor import WindowMeasurement, ZeusMonitor
from wattspan.compat.zeus.optimizer import Callback, CallbackSet
from wattspan.compat.zeus.power import to_monotonic
from wattspan.sdk import NotMeasuredError

HOUR = timedelta(hours=1)
NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)  # a Monday


class Meter(ZeusMonitor):
    """A ZeusMonitor over known devices."""

    read_devices = MeteredDevices((gpu(0), package(0), package(0, "memory")))


class ConstantIntensity(CarbonIntensityProvider):
    """The same intensity in all hours around the present."""

    update_period, history_length = HOUR, 24

    def __init__(self, grams: float) -> None:
        self._grams = grams

    def get_current_carbon_intensity(self) -> float:
        return self._grams

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        return {now + i * HOUR: self._grams for i in range(-2, 3)}


class TwoTiers(ElectricityPriceProvider):
    """A tariff with the same price in all hours of working days, and another at weekends."""

    def get_current_electricity_prices(self) -> dict[str, list[Any]]:
        return {
            "energy_rate_structure": [[{"rate": 0.5}], [{"rate": 0.5}], [{}]],
            "energy_weekday_schedule": [[0] * 24 for _ in range(12)],
            "energy_weekend_schedule": [[1] * 24 for _ in range(12)],
        }


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (10, 20, [(0, 10, 20)]),
        (50, 70, [(0, 50, 60), (60, 60, 70)]),
        (60, 180, [(60, 60, 120), (120, 120, 180)]),
        (30, 30, [(0, 30, 30)]),
    ],
)
def test_window_is_cut_at_the_hours(
    start: int, end: int, expected: Sequence[tuple[int, ...]]
) -> None:
    minutes = [NOON + timedelta(minutes=i) for i in (start, end)]
    cut = list(periods(minutes[0], minutes[1], HOUR))
    assert cut == [tuple(NOON + timedelta(minutes=i) for i in part) for part in expected]


def test_shorter_periods_begin_at_the_hour() -> None:
    quarter = timedelta(minutes=15)
    (only,) = periods(NOON + 2.2 * quarter, NOON + 2.5 * quarter, quarter)
    assert only[0] == NOON + 2 * quarter


def test_unknown_intensity_is_an_error_that_names_the_hour() -> None:
    assert intensity_at({NOON: 300.0})(NOON) == 300.0
    with pytest.raises(NotMeasuredError, match="2026-03-02 13:00 UTC is not known"):
        intensity_at({NOON: 300.0})(NOON + HOUR)


def test_price_is_that_of_the_local_hour() -> None:
    weekday = [list(range(24)) for _ in range(12)]
    prices = {
        "energy_rate_structure": [[{"rate": i / 10}] for i in range(24)],
        "energy_weekday_schedule": weekday,
        "energy_weekend_schedule": [[0] * 24 for _ in range(12)],
    }
    assert price_at(prices, UTC)(NOON) == pytest.approx(1.2)
    assert price_at(prices, timezone(5 * HOUR))(NOON) == pytest.approx(1.7)
    assert price_at(prices, UTC)(NOON - timedelta(days=1)) == 0.0
    broken = {**prices, "energy_rate_structure": [[{}]]}
    with pytest.raises(NotMeasuredError, match="price at 2026-03-02 12:00 is not known"):
        price_at(broken, UTC)(NOON)


def test_emissions_are_energy_times_intensity() -> None:
    class Monitor(CarbonEmissionMonitor):
        monitor_class = Meter

    one = Monitor(ConstantIntensity(400.0))
    one.begin_window("job", sync_execution=False)
    with pytest.raises(ValueError, match="'job' already exists"):
        one.begin_window("job", sync_execution=False)
    found = one.end_window("job", sync_execution=False)
    assert found.time > 0
    assert found.gpu_energy[0] > 0
    factor = 400.0 / JOULES_PER_KILOWATT_HOUR
    assert found.gpu_carbon_emission == {0: pytest.approx(found.gpu_energy[0] * factor)}
    assert found.cpu_energy
    assert found.cpu_carbon_emission == {0: pytest.approx(found.cpu_energy[0] * factor)}
    assert found.dram_energy
    assert found.dram_carbon_emission == {0: pytest.approx(found.dram_energy[0] * factor)}
    with pytest.raises(ValueError, match="'job' does not exist"):
        one.end_window("job")


def test_cost_is_energy_times_price() -> None:
    class Monitor(EnergyCostMonitor):
        monitor_class = Meter

    one = Monitor(TwoTiers(), cpu_indices=[])
    one.begin_window("job", sync_execution=False)
    found = one.end_window("job", sync_execution=False)
    cost = found.gpu_energy[0] / JOULES_PER_KILOWATT_HOUR * 0.5
    assert found.gpu_energy_cost == {0: pytest.approx(cost)}
    assert (found.cpu_energy_cost, found.dram_energy_cost) == (None, None)


@pytest.fixture
def india(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's time zone is half an hour beside the hours of UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "IST-5:30")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("india")
def test_price_changes_at_the_local_hour_within_an_hour_of_utc() -> None:
    turn = datetime.now(UTC).replace(minute=30, second=0, microsecond=0) - HOUR
    begin, end = (to_monotonic(turn.timestamp() + seconds) for seconds in (-600, 600))

    class Hourly(ElectricityPriceProvider):
        def get_current_electricity_prices(self) -> dict[str, list[Any]]:
            days = [list(range(24))] * 12
            rates = [[{"rate": hour}] for hour in range(24)]
            named = ("energy_weekday_schedule", "energy_weekend_schedule")
            return {"energy_rate_structure": rates, **dict.fromkeys(named, days)}

    class Past(Meter):
        def finish_window(self, key: str, sync_execution: bool = True) -> WindowMeasurement:
            return super().finish_window(key, sync_execution).part(begin, end)

    class Monitor(EnergyCostMonitor):
        monitor_class = Past

    one = Monitor(Hourly(), cpu_indices=[])
    one.begin_window("job", sync_execution=False)
    found = one.end_window("job", sync_execution=False)
    after = turn.astimezone().hour
    mean = (after + (after - 1) % 24) / 2
    cost = found.gpu_energy[0] / JOULES_PER_KILOWATT_HOUR * mean
    assert found.gpu_energy_cost == {0: pytest.approx(cost, rel=1e-3)}


METRICS = [
    (lambda: metric.EnergyHistogram([], [], "", "j"), "wattspan_span_energy_joules_total"),
    (lambda: metric.EnergyCumulativeCounter([], [], 1, "", "j"), "hw_energy_joules_total"),
    (lambda: metric.PowerGauge([], 1, "", "j"), "scrape hw_power_watts"),
]


@pytest.mark.parametrize(("construct", "replacement"), METRICS)
def test_metric_names_what_to_scrape(
    construct: Any, replacement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        construct()
    (message,) = caplog.messages
    assert message.startswith("Nothing is pushed to a gateway: ")
    assert replacement in message


@pytest.mark.parametrize(("construct", "replacement"), METRICS)
def test_metric_refuses_a_repeated_and_an_unknown_window(construct: Any, replacement: str) -> None:
    found = construct()
    found.begin_window("step", sync_execution=False)
    with pytest.raises(ValueError, match="window 'step' is open"):
        found.begin_window("step")
    found.end_window("step", sync_execution=False)
    with pytest.raises(ValueError, match="window 'step' is not open"):
        found.end_window("step")


# ------------------------------------------------------------------------------------- aliases


def test_aliases_stand_where_zeus_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, ModuleType] = {}
    assert zeus.install(modules, lambda name: None)
    assert set(modules) == {"zeus.utils", *zeus.ALIASES}
    assert modules["zeus"].monitor.ZeusMonitor is ZeusMonitor
    assert modules["zeus"].monitor.energy is modules["zeus.monitor.energy"]
    assert modules["zeus.metric"].PowerGauge is metric.PowerGauge
    assert modules["zeus"].__version__ == "0.16.0"
    for name, exported in zeus.ALIASES.items():
        for one in {*exported} - {"HFGlobalPowerLimitOptimizer"}:
            first, second = getattr(modules[name], one), getattr(modules[name], one)
            assert first is second
            assert not isinstance(first, ModuleType)
    assert zeus.install(modules, lambda name: pytest.fail("looked for Zeus again"))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        assert find_spec(name)  # by which programs tell whether Zeus is installed


def test_aliased_class_that_needs_a_framework_is_found_at_its_use() -> None:
    modules: dict[str, ModuleType] = {}
    assert zeus.install(modules, lambda name: None)
    module = modules["zeus.optimizer.power_limit"]
    with pytest.raises(ImportError, match="install transformers"):
        _ = module.HFGlobalPowerLimitOptimizer
    with pytest.raises(AttributeError, match="HFGlobalPowerLimitOptimizers"):
        _ = module.HFGlobalPowerLimitOptimizers


def test_installed_zeus_is_left_alone() -> None:
    modules: dict[str, ModuleType] = {}
    assert not zeus.install(modules, lambda name: "found")
    assert modules == {}
    modules["zeus"] = ModuleType("zeus")
    assert not zeus.install(modules, lambda name: None)
    assert list(modules) == ["zeus"]


def test_package_exports_every_public_name() -> None:
    for name in zeus.__all__:
        assert getattr(zeus, name) is not None
    assert {"ZeusMonitor", "install"} <= set(dir(zeus))
    with pytest.raises(AttributeError, match="no attribute 'ZeusMonitors'"):
        _ = zeus.ZeusMonitors  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------- callbacks


class Recorder(Callback):
    """Records the hooks that it overrides."""

    def __init__(self) -> None:
        self.called: list[object] = []

    def on_step_begin(self) -> None:
        self.called.append("step")

    def on_evaluate(self, metric: float) -> None:
        self.called.append(metric)


def test_callback_set_calls_every_hook_of_every_callback() -> None:
    recorders = [Recorder(), Recorder()]
    both = CallbackSet([*recorders, Callback()])
    for hook in ("train_begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "train_end"):
        getattr(both, f"on_{hook}")()
    both.on_evaluate(0.5)
    both.on_instruction_begin("forward")
    both.on_instruction_end("forward")
    assert [one.called for one in recorders] == [["step", 0.5]] * 2
