"""CarbonEmissionMonitor, EnergyCostMonitor, Zeus's callbacks and the aliases of its modules."""

from __future__ import annotations

import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from time import monotonic_ns
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from testbed.forks import in_child
from testbed.metered_devices import MeteredDevices, gpu, package
from testbed.waiting import eventually

from wattspan.compat import zeus
from wattspan.compat.zeus import metric
from wattspan.compat.zeus.footprint import (
    JOULES_PER_KILOWATT_HOUR,
    CarbonEmissionMeasurement,
    CarbonEmissionMonitor,
    EnergyCostMonitor,
    Gatherer,
    intensity_at,
    periods,
    price_at,
)
from wattspan.compat.zeus.monitor import WindowMeasurement, ZeusMonitor
from wattspan.compat.zeus.optimizer import Callback, CallbackSet
from wattspan.compat.zeus.power import to_monotonic
from wattspan.compat.zeus.providers import CarbonIntensityProvider, ElectricityPriceProvider
from wattspan.sdk import AgentUnavailableError, NotMeasuredError

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


# -------------------------------------------------------------------------------- long windows

WATTS = 250
POWERED = MeteredDevices((gpu(0),), energy=lambda key, mono: mono * WATTS // 1000)


class PoweredMeter(ZeusMonitor):
    """A GPU of constant power, at any time."""

    read_devices = POWERED


class Later(PoweredMeter):
    """Windows end ``hours`` after their begin."""

    hours = 0.0

    def finish_window(self, key: str, sync_execution: bool = True) -> WindowMeasurement:
        found = super().finish_window(key, sync_execution)
        start, _ = found.period
        return found.part(start, start + round(self.hours * 3600e9))


def grams_at(hour: datetime) -> float:
    """An intensity that changes each hour."""
    return 100.0 + int(hour.timestamp()) // 3600 % 37


@dataclass
class History(CarbonIntensityProvider):
    """The last ``history_length`` hours before ``now``, but for the newest ``late`` ones.

    It fails in the hours since its begin for which ``fails`` is true.
    """

    began: datetime
    late: int = 0
    fails: Callable[[int], bool] = lambda hour: False
    zone: tzinfo | None = UTC
    update_period: timedelta = HOUR
    history_length: int = 24
    asked: int = 0

    def __post_init__(self) -> None:
        self.now = self.began

    def get_current_carbon_intensity(self) -> float:
        return grams_at(self.now)

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        self.asked += 1
        if self.fails(round((self.now - self.began) / HOUR)):
            raise TimeoutError("no answer of the provider")
        newest = self.now.replace(minute=0, second=0, microsecond=0) - self.late * HOUR
        hours = [newest - i * HOUR for i in range(self.history_length)]
        return {self._shown(hour): grams_at(hour) for hour in hours}

    def _shown(self, hour: datetime) -> datetime:
        return hour.astimezone(self.zone) if self.zone else hour.replace(tzinfo=None)


@dataclass
class LongWindow:
    """A window of a CarbonEmissionMonitor that is read each hour, as its thread does.

    In the hours of ``absent`` the agent is away, in those of ``slow`` its energy is not known yet.
    It remembers the energy since ``horizon``, which :meth:`run` calls with each hour.
    """

    hours: float
    provider: History = field(default_factory=lambda: History(datetime.now(UTC)))
    absent: Callable[[int], bool] = lambda hour: False
    slow: Callable[[int], bool] = lambda hour: False
    horizon: Callable[[int], float] = lambda hour: -1.0

    def run(self) -> CarbonEmissionMeasurement:
        meter, start, horizon = replace(POWERED), monotonic_ns(), 0

        def read(begin: int, end: int, *arguments: Any, **options: Any) -> Any:
            found = meter(begin, end, *arguments, **options)
            unknown = begin < horizon and begin < end
            return tuple(one._replace(joules=None) if unknown else one for one in found)

        class Meter(Later):
            hours = self.hours
            read_devices = staticmethod(read)

        class Monitor(CarbonEmissionMonitor):
            monitor_class = Meter
            gatherer = Gatherer(length=1e6)

        one = Monitor(self.provider, cpu_indices=[])
        one.begin_window("job", sync_execution=False)
        (window,) = one.gatherer.windows
        one.gather(window, start - 10**9)  # it began after the time until which energy is known
        for hour in range(1, int(self.hours) + 1):
            self.provider.now = self.provider.began + hour * HOUR
            meter.error = AgentUnavailableError("restarting") if self.absent(hour) else None
            meter.settled = not self.slow(hour)
            horizon = start + round(self.horizon(hour) * 3600e9)
            one.gather(window, start + hour * 3600 * 10**9)
        self.provider.now = self.provider.began + self.hours * HOUR
        meter.error, meter.settled = None, True
        found = one.end_window("job", sync_execution=False)
        one.gather(window, start + round(self.hours * 3600e9) + 10**9)  # it ends while it is read
        return found

    def expected(self) -> float:
        """The law: the power times the intensity of each hour times the part of it."""
        began, total = self.provider.began, 0.0
        end = began + self.hours * HOUR
        hour = began.replace(minute=0, second=0, microsecond=0)
        while hour < end:
            part = (min(end, hour + HOUR) - max(began, hour)) / HOUR
            total += WATTS / 1000 * part * grams_at(hour)
            hour += HOUR
        return total


@pytest.mark.parametrize("hours", [0.01, 1, 23, 24.5, 49, 30 * 24])
@pytest.mark.parametrize("late", [0, 7])
def test_window_longer_than_the_history_has_all_its_intensities(hours: float, late: int) -> None:
    window = LongWindow(hours)
    window.provider.late = late
    found = window.run()
    window.provider.now += late * HOUR
    assert found.gpu_energy == {0: pytest.approx(WATTS * hours * 3600, rel=1e-3)}
    assert found.gpu_carbon_emission == {0: pytest.approx(window.expected(), rel=1e-3)}
    assert window.provider.asked <= 2 + hours / 11


@pytest.mark.parametrize(
    "fails",
    [
        lambda hour: hour == 12,
        lambda hour: hour % 12 == 0 and hour < 60,
        lambda hour: 10 <= hour < 20,
        lambda hour: hour % 2 == 0 and hour < 60,
    ],
)
def test_failures_of_a_provider_lose_no_hour(
    fails: Callable[[int], bool], caplog: pytest.LogCaptureFixture
) -> None:
    window = LongWindow(60)
    window.provider.fails = fails
    assert window.run().gpu_carbon_emission == {0: pytest.approx(window.expected(), rel=1e-3)}
    texts = [one for one in caplog.messages if "asked for again later" in one]
    assert all("no answer of the provider" in one for one in texts)
    assert len(texts) <= 5  # once for each time that it fails


@pytest.mark.parametrize(
    "trouble",
    [
        {"absent": lambda hour: 5 <= hour < 9 or hour == 29},
        {"slow": lambda hour: hour == 3},
        {"slow": lambda hour: hour == 30},
        {"horizon": lambda hour: hour - 1.1},
    ],
    ids=["away for hours", "late at first", "late at the end", "forgets after an hour"],
)
def test_no_energy_is_lost_by_an_agent_that_is_away_late_or_forgetful(
    trouble: dict[str, Callable[[int], Any]],
) -> None:
    window = LongWindow(30, **trouble)
    found = window.run()
    assert found.gpu_energy == {0: pytest.approx(WATTS * 30 * 3600, rel=1e-3)}
    assert found.gpu_carbon_emission == {0: pytest.approx(window.expected(), rel=1e-3)}


@pytest.mark.parametrize("zone", [UTC, timezone(-5 * HOUR), timezone(5.5 * HOUR), None])
def test_hours_of_a_provider_may_be_in_any_time_zone(zone: tzinfo | None) -> None:
    window = LongWindow(3)
    window.provider.zone = zone
    assert window.run().gpu_carbon_emission == {0: pytest.approx(window.expected(), rel=1e-3)}


def test_failing_provider_leaves_the_energy_and_is_asked_again_at_the_next_read() -> None:
    window = LongWindow(2)
    window.provider.fails = lambda hour: True
    found = window.run()
    energy = {0: pytest.approx(WATTS * 7200, rel=1e-3)}
    assert found.gpu_energy == energy
    for _ in range(2):
        with pytest.raises(TimeoutError, match="no answer of the provider"):
            _ = found.gpu_carbon_emission
    assert "not all of it known: no answer of the provider" in repr(found)
    assert found.gpu_energy == energy
    window.provider.fails = lambda hour: False
    assert found.gpu_carbon_emission == {0: pytest.approx(window.expected(), rel=1e-3)}
    asked = window.provider.asked
    assert "gpu_carbon_emission={0:" in repr(found)
    assert window.provider.asked == asked  # the figures are kept


def test_provider_that_fails_once_is_asked_again_at_once() -> None:
    window = LongWindow(1)
    window.provider.fails = lambda hour: window.provider.asked % 2 == 1
    assert window.run().gpu_carbon_emission == {0: pytest.approx(window.expected(), rel=1e-3)}


def test_hour_before_the_history_is_unknown_until_the_provider_has_it() -> None:
    window = LongWindow(4)
    window.provider.late = 7
    found = window.run()
    with pytest.raises(NotMeasuredError, match=r"carbon intensity at .* UTC is not known"):
        _ = found.gpu_carbon_emission
    assert found.gpu_energy[0] > 0
    window.provider.late = 0
    assert found.gpu_carbon_emission == {0: pytest.approx(window.expected(), rel=1e-3)}


@pytest.mark.parametrize(
    "answer", [None, {}, {"yesterday": 5.0}, {NOON: "much"}, {NOON: math.nan}, {NOON: None}]
)
def test_answer_of_another_shape_is_no_intensity(answer: Any) -> None:
    window = LongWindow(1)
    window.provider.get_recent_carbon_intensity = lambda: answer  # type: ignore[method-assign]
    found = window.run()
    with pytest.raises((NotMeasuredError, AttributeError, ValueError)):
        _ = found.gpu_carbon_emission
    assert found.gpu_energy[0] > 0


def test_window_of_no_time_has_no_energy_and_needs_no_intensity() -> None:
    window = LongWindow(0)
    window.provider.fails = lambda hour: True
    found = window.run()
    assert (found.time, found.gpu_energy, found.gpu_carbon_emission) == (0.0, {0: 0.0}, {0: 0.0})


def test_period_that_was_not_measured_is_left_out_with_a_warning() -> None:
    """The agent was restarted after ten hours, and nobody read those before."""
    window = LongWindow(30, absent=lambda hour: hour <= 10, horizon=lambda hour: min(hour, 10))
    found = window.run()
    with pytest.warns(RuntimeWarning, match="'job' is partial: The energy of .* is unknown"):
        energy = found.gpu_energy
    assert 18.9 < energy[0] / (WATTS * 3600) < 20.1  # pieces end at the hours
    with pytest.warns(RuntimeWarning, match="'job' is partial"):
        assert 0 < found.gpu_carbon_emission[0] < window.expected()


def test_window_that_was_not_measured_has_no_energy() -> None:
    found = LongWindow(3, horizon=lambda hour: 10).run()
    for _ in range(2):
        with pytest.raises(NotMeasuredError, match="no reading of it is known"):
            _ = found.gpu_energy
        with pytest.raises(NotMeasuredError, match="no reading of it is known"):
            _ = found.gpu_carbon_emission


def test_measurement_is_pickled_as_the_dataclass_of_zeus() -> None:
    found = LongWindow(1).run()
    copied = pickle.loads(pickle.dumps(found))
    assert type(copied) is CarbonEmissionMeasurement
    assert copied.gpu_carbon_emission == found.gpu_carbon_emission
    assert (copied.cpu_energy, copied.cpu_carbon_emission) == (None, None)
    assert vars(copied) == asdict(found)


def test_windows_are_read_by_a_thread_that_ends_with_them() -> None:
    read = threading.Event()

    class Monitor(CarbonEmissionMonitor):
        monitor_class = PoweredMeter
        gatherer = Gatherer(length=0.001, settling=0.0)

        def gather(self, window: Any, until: int) -> None:
            super().gather(window, until)
            read.set()
            raise ZeroDivisionError("of a provider")  # the next turn follows

    one = Monitor(History(datetime.now(UTC)))
    for key in ("first", "second"):
        one.begin_window(key, sync_execution=False)
    for key in ("first", "second"):
        assert read.wait(60)
        read.clear()
        assert "wattspan-zeus-rates" in {thread.name for thread in threading.enumerate()}
        one.end_window(key, sync_execution=False)
    eventually(
        lambda: "wattspan-zeus-rates" not in {thread.name for thread in threading.enumerate()},
        "the thread ends",
    )


def test_window_that_fails_to_end_is_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Monitor(EnergyCostMonitor):
        monitor_class = PoweredMeter
        gatherer = Gatherer()

    one = Monitor(TwoTiers(), cpu_indices=[])
    one.begin_window("epoch", sync_execution=False)
    fails = MagicMock(side_effect=RuntimeError("CUDA error"))
    monkeypatch.setattr(one.zeus_monitor, "synchronize", fails)
    with pytest.raises(RuntimeError, match="CUDA error"):
        one.end_window("epoch")
    assert one.gatherer.windows == ()


def test_child_of_a_fork_has_windows_and_a_thread_of_its_own() -> None:
    class Monitor(EnergyCostMonitor):
        monitor_class = PoweredMeter

    one = Monitor(TwoTiers(), cpu_indices=[])
    one.begin_window("parent", sync_execution=False)

    def work() -> str:
        with pytest.raises(ValueError, match="before it forked this one"):
            one.end_window("parent", sync_execution=False)
        one.begin_window("child", sync_execution=False)
        names = [thread.name for thread in threading.enumerate()]
        found = one.end_window("child", sync_execution=False)
        return f"{names[1:]} {found.gpu_energy_cost[0] > 0}"

    assert in_child(work) == "['wattspan-zeus-rates'] True"
    assert one.end_window("parent", sync_execution=False).gpu_energy_cost[0] > 0


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host has summer time."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("began", "local"),
    [
        (datetime(2026, 3, 29, 0, tzinfo=UTC), [1, 3, 4]),
        (datetime(2026, 10, 25, 0, tzinfo=UTC), [2, 2, 3]),
    ],
)
def test_price_follows_the_change_of_summer_time(began: datetime, local: list[int]) -> None:
    days = [list(range(24))] * 12
    rates = [[{"rate": hour}] for hour in range(24)]
    named = ("energy_weekday_schedule", "energy_weekend_schedule")
    price = price_at({"energy_rate_structure": rates, **dict.fromkeys(named, days)})
    assert [price(began + i * HOUR) for i in range(3)] == local


def test_intensity_of_a_longer_period_holds_in_all_its_hours() -> None:
    rate = intensity_at({NOON: 300.0, NOON + 3 * HOUR: 400.0}, 3 * HOUR)
    assert [rate(NOON + i * HOUR) for i in range(6)] == [300.0] * 3 + [400.0] * 3
    with pytest.raises(NotMeasuredError):
        rate(NOON + 6 * HOUR)


def test_time_info_is_of_the_local_time() -> None:
    now = datetime.now().astimezone()
    month, day, hour = zeus.get_time_info()
    assert (month, day) in {(now.strftime("%B"), "Weekday"), (now.strftime("%B"), "Weekend")}
    assert hour in {now.hour, (now + HOUR).hour}


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
    assert not zeus.install(modules, lambda name: find_spec("json"))
    assert modules == {}
    modules["zeus"] = ModuleType("zeus")
    assert not zeus.install(modules, lambda name: None)
    assert list(modules) == ["zeus"]


def test_folder_of_the_name_zeus_is_not_an_installed_zeus(tmp_path: Path) -> None:
    (tmp_path / "zeus").mkdir()  # such as that of our own examples
    folder = PathFinder.find_spec("zeus", [str(tmp_path)])
    assert folder is not None
    assert zeus.install({}, lambda name: folder)


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
