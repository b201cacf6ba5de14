"""Promises of Zeus's tests as programs, each of which fails if its promise is not kept.

A program has the public names of Zeus only, and runs in an environment with Zeus as in one where
``install()`` provides them: ``zeus_promises.py NAME FOLDER``. The host has two packages with memory
counters and two GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

WORK = 0.35  # seconds: some steps of an energy counter
CLOCKS = 0.001  # seconds by which the clocks of two measurements may differ


@contextmanager
def refused(text: str) -> Iterator[None]:
    """The block raises a ValueError that contains ``text``."""
    said = ""
    try:
        yield
    except ValueError as error:
        said = str(error)
    assert text in said, f"{text!r} is not in {said!r}"


def gpu_monitor(**options: Any) -> Any:
    from zeus.monitor import ZeusMonitor

    return ZeusMonitor(cpu_indices=[], **options)


class Timed:
    """Windows of a monitor, and the times just before and after their edges."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self._begun: dict[str, tuple[float, float]] = {}

    def begin(self, key: str, **options: Any) -> None:
        before = time.time()
        self._monitor.begin_window(key, sync_execution=False, **options)
        self._begun[key] = (before, time.time())

    def end(self, key: str) -> Any:
        """The measurement, the time of which is that between its edges."""
        since, began = self._begun[key]
        ended = time.time()
        found = self._monitor.end_window(key, sync_execution=False)
        until = time.time()
        assert ended - began - CLOCKS <= found.time <= until - since + CLOCKS, found.time
        return found


# ------------------------------------------------------------------------------------- windows


def wrong_windows_are_refused(_: Path) -> None:
    monitor = gpu_monitor(gpu_indices=[0])
    monitor.begin_window("a", sync_execution=False)
    with refused("'a' already exists"):
        monitor.begin_window("a", sync_execution=False)
    monitor.end_window("a", sync_execution=False)
    for key in ("a", "b"):
        with refused(f"'{key}' does not exist"):
            monitor.end_window(key, sync_execution=False)


def windows_in_any_order_have_their_own_time_and_energy(_: Path) -> None:
    windows = Timed(gpu_monitor())
    found = {}
    for edge in (
        "+serial",
        "-serial",
        "+a",
        "+b",
        "-a",
        "-b",
        "+outer",
        "+inner",
        "-inner",
        "-outer",
    ):
        if edge[0] == "+":
            windows.begin(edge[1:])
        else:
            found[edge[1:]] = windows.end(edge[1:])
        time.sleep(WORK)
    for one in found.values():
        assert set(one.gpu_energy) == {0, 1}
        assert all(energy > 0 for energy in one.gpu_energy.values()), one
        assert abs(one.total_energy - sum(one.gpu_energy.values())) < 1e-6
    assert all(found["inner"].gpu_energy[i] <= found["outer"].gpu_energy[i] + 1e-6 for i in (0, 1))


def open_window_is_begun_anew_on_request(_: Path) -> None:
    monitor = gpu_monitor(gpu_indices=[0])
    windows = Timed(monitor)
    windows.begin("a")
    time.sleep(WORK)
    with refused("'a' already exists"):
        windows.begin("a")
    windows.begin("a", restart=True)
    windows.end("a")
    windows.begin("b", restart=True)
    windows.end("b")
    with refused("'b' does not exist"):
        monitor.end_window("b", sync_execution=False)


def gpus_are_all_or_those_named(_: Path) -> None:
    for chosen, expected in ((None, [0, 1]), ([1], [1]), ([0, 1], [0, 1])):
        monitor = gpu_monitor(gpu_indices=chosen)
        assert monitor.gpu_indices == expected
        monitor.begin_window("a", sync_execution=False)
        time.sleep(WORK)
        assert list(monitor.end_window("a", sync_execution=False).gpu_energy) == expected


def visible_gpus_are_numbered_from_0(_: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    monitor = gpu_monitor()
    assert monitor.gpu_indices == [0]
    monitor.begin_window("a", sync_execution=False)
    time.sleep(WORK)
    assert list(monitor.end_window("a", sync_execution=False).gpu_energy) == [0]


def packages_have_energy_and_those_with_a_counter_memory_too(_: Path) -> None:
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=[])
    assert monitor.cpu_indices == [0, 1]
    monitor.begin_window("a")
    time.sleep(WORK)
    found = monitor.end_window("a")
    assert found.gpu_energy == {}
    assert set(found.cpu_energy) == set(found.dram_energy) == {0, 1}
    assert all(one > 0 for one in (*found.cpu_energy.values(), *found.dram_energy.values()))


LOG, MEASURED = "windows.csv", "measured.json"


def log_has_a_line_for_each_window(folder: Path) -> None:
    """The lines are compared by ``windows_are_logged``, after the end of this process."""
    monitor = gpu_monitor(log_file=folder / LOG)
    measured = []
    for edge in ("+a", "-a", "+b", "+c", "-b", "+d", "-d", "-c"):
        if edge[0] == "+":
            monitor.begin_window(edge[1:], sync_execution=False)
        else:
            measured.append((edge[1:], monitor.end_window(edge[1:], sync_execution=False)))
        time.sleep(WORK)
    monitor.begin_window("cancelled", sync_execution=False)
    monitor.end_window("cancelled", sync_execution=False, cancel=True)
    facts = [[key, one.time, *one.gpu_energy.values()] for key, one in measured]
    (folder / MEASURED).write_text(json.dumps(facts))


def windows_are_logged(folder: Path) -> None:
    header, *lines = (folder / LOG).read_text().splitlines()
    assert header == "start_time,window_name,elapsed_time,gpu0_energy,gpu1_energy"
    logged = [line.split(",") for line in lines]
    assert [[key, *map(float, numbers)] for _, key, *numbers in logged] == json.loads(
        (folder / MEASURED).read_text()
    )
    assert all(abs(float(began) - time.time()) < 3600 for began, *_ in logged)


def zeus_replays_a_log(folder: Path) -> None:
    from zeus.utils.testing import ReplayZeusMonitor

    replay = ReplayZeusMonitor(log_file=folder / LOG, ignore_sync_execution=True)
    assert replay.gpu_indices == [0, 1]
    for key, *numbers in json.loads((folder / MEASURED).read_text()):
        replay.begin_window(key)
        found = replay.end_window(key)
        assert [found.time, *found.gpu_energy.values()] == numbers


def energy_of_0_is_warned_of(_: Path) -> None:
    """Windows without a step of the counter, of which one may have one."""
    monitor = gpu_monitor(gpu_indices=[0])
    energies = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            monitor.begin_window("a", sync_execution=False)
            energies.append(monitor.end_window("a", sync_execution=False).gpu_energy[0])
    zeros = energies.count(0.0)
    assert zeros >= 4, f"{zeros} of 5 windows have 0 J"
    assert any("was measured as zero" in str(one.message) for one in caught)


# ------------------------------------------------------------------------------------- servers


class WebService:
    """A server that gives ``answer`` and keeps what is posted."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self._posted: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                with service._changed:
                    service._posted.append((self.path, body))
                    service._changed.notify_all()
                self.do_GET()

            def do_GET(self) -> None:
                body = json.dumps(service.answer).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"

    def wait_for(self, path: str, samples: Sequence[str]) -> list[float]:
        """The values of ``samples`` in the first text posted to ``path`` that has them all."""
        found: list[str | None] = []
        with self._changed:
            while True:
                while self._posted:
                    to, body = self._posted.pop(0)
                    lines = dict(line.rsplit(" ", 1) for line in body.splitlines() if line)
                    found = [lines.get(sample) for sample in samples]
                    if to == path and None not in found:
                        return [float(one or 0) for one in found]
                assert self._changed.wait(30), f"{samples}: {found}"


# ------------------------------------------------------------------------------------- footprint


def intensity_is_that_of_the_service(_: Path) -> None:
    from zeus.monitor.carbon import ElectrictyMapsClient, ZeusCarbonIntensityNotFoundError

    service = WebService({"zone": "US-MIDW-MISO", "carbonIntensity": 466})
    ElectrictyMapsClient.address = service.url
    client = ElectrictyMapsClient((42.3, -83.7), estimate=True, emission_factor_type="lifecycle")
    assert client.get_current_carbon_intensity() == 466
    service.answer = {"error": "No recent data"}
    try:
        client.get_current_carbon_intensity()
    except ZeusCarbonIntensityNotFoundError:
        return
    raise AssertionError("an answer without an intensity has one")


def tariff_is_that_of_the_service(_: Path) -> None:
    from zeus.monitor.price import OpenEIClient, ZeusElectricityPriceNotFoundError

    rates, hours = [[{"rate": 0.1056, "adj": 0.029681}]], [[0] * 24 for _ in range(12)]
    tariff = {"energyratestructure": rates} | dict.fromkeys(
        ("energyweekdayschedule", "energyweekendschedule"), hours
    )
    service = WebService({"items": [{"label": "other"}, {"label": "mine", **tariff}]})
    OpenEIClient.address = service.url
    assert OpenEIClient((42.3, -83.7), "mine").get_current_electricity_prices() == {
        "energy_rate_structure": rates,
        "energy_weekday_schedule": hours,
        "energy_weekend_schedule": hours,
    }
    for label, answer in (("unknown", service.answer), ("mine", {"items": []})):
        service.answer = answer
        try:
            OpenEIClient((-100, -100), label).get_current_electricity_prices()
        except ZeusElectricityPriceNotFoundError:
            continue
        raise AssertionError(f"{label} is found in {answer}")


class Intensities:
    """Grams per kilowatt-hour, by the period's number since the hour."""

    history_length = 24

    def __init__(self, seconds: int, grams: Callable[[int], float]) -> None:
        self.update_period = timedelta(seconds=seconds)
        self._grams = grams

    def get_current_carbon_intensity(self) -> float:
        return self._grams(0)

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        periods = range(-10, 7200 // self.update_period.seconds + 1)
        return {hour + i * self.update_period: self._grams(i) for i in periods}


def weighed(found: Any, suffix: str) -> list[tuple[float, float]]:
    """Kilowatt-hours and their weighed value, of each device of a measurement."""
    pairs = []
    for kind in ("gpu", "cpu", "dram"):
        energy, value = getattr(found, f"{kind}_energy"), getattr(found, f"{kind}_{suffix}")
        assert set(energy) == set(value) == {0, 1}, found
        pairs += [(energy[i] / 3.6e6, value[i]) for i in energy]
    return pairs


def emission_is_energy_times_intensity(_: Path) -> None:
    from zeus.monitor.carbon import CarbonEmissionMonitor

    monitor = CarbonEmissionMonitor(Intensities(3600, lambda _: 466.0))
    monitor.begin_window("a", sync_execution=False)
    monitor.begin_window("b", sync_execution=False)
    time.sleep(WORK)
    found = [monitor.end_window("a", sync_execution=False)]
    time.sleep(WORK)
    found.append(monitor.end_window("b", sync_execution=False))
    for one in found:
        for energy, grams in weighed(one, "carbon_emission"):
            assert abs(grams - energy * 466.0) < 1e-9 < grams


def each_period_has_its_own_intensity(_: Path) -> None:
    """Periods of one second: in each second one has a tenth of the others' intensity."""
    from zeus.monitor.carbon import CarbonEmissionMonitor

    monitor = CarbonEmissionMonitor(Intensities(1, lambda i: 100.0 if i % 2 else 1000.0))
    monitor.begin_window("a", sync_execution=False)
    time.sleep(3.5)
    for energy, grams in weighed(monitor.end_window("a", sync_execution=False), "carbon_emission"):
        assert 200.0 * energy < grams < 900.0 * energy


class Tariff:
    """Prices by hour of the day."""

    def __init__(self, price: Callable[[int], float]) -> None:
        self._price = price

    def get_current_electricity_prices(self) -> dict[str, Any]:
        hours = [list(range(24)) for _ in range(12)]
        return {
            "energy_rate_structure": [[{"rate": self._price(hour)}] for hour in range(24)],
            "energy_weekday_schedule": hours,
            "energy_weekend_schedule": hours,
        }


def _costs(price: Callable[[int], float]) -> list[tuple[float, float]]:
    from zeus.monitor.price import EnergyCostMonitor

    monitor = EnergyCostMonitor(Tariff(price))
    monitor.begin_window("a", sync_execution=False)
    time.sleep(WORK)
    return weighed(monitor.end_window("a", sync_execution=False), "energy_cost")


def cost_is_energy_times_price(_: Path) -> None:
    for energy, cost in _costs(lambda _: 0.25):
        assert abs(cost - energy * 0.25) < 1e-12 < cost


def hours_of_a_tariff_are_utc(_: Path) -> None:
    os.environ["TZ"] = "UTC-5:30"  # POSIX: ahead of UTC
    time.tzset()
    utc = datetime.now(UTC)
    for energy, cost in _costs(float):
        lasting = {utc.hour, datetime.now(UTC).hour}
        assert round(cost / energy) in lasting, f"{cost / energy:.1f} is not of the hour in UTC"


# ------------------------------------------------------------------------------------- metrics


def _energy_samples(name: str) -> list[str]:
    return [
        f'energy_monitor_{device}_energy_joules_{name}{{window="a",index="{i}"}}'
        for device in ("gpu", "cpu", "dram")
        for i in (0, 1)
    ]


def histogram_observes_each_window(_: Path) -> None:
    from zeus.metric import EnergyHistogram

    gateway = WebService()
    metric = EnergyHistogram([0, 1], [0, 1], gateway.url, "job")
    for repetition in (1.0, 2.0):
        metric.begin_window("a", sync_execution=False)
        time.sleep(WORK)
        metric.end_window("a", sync_execution=False)
        counts = gateway.wait_for("/metrics/job/job", _energy_samples("count"))
        assert counts == [repetition] * 6, counts


def counter_rises_while_its_window_is_open(_: Path) -> None:
    from zeus.metric import EnergyCumulativeCounter

    gateway = WebService()
    metric = EnergyCumulativeCounter([0, 1], [0, 1], 1, gateway.url, "job")
    metric.begin_window("a", sync_execution=False)
    counted = [gateway.wait_for("/metrics/job/job", _energy_samples("total")) for _ in range(2)]
    metric.end_window("a", sync_execution=False)
    counted.append(gateway.wait_for("/metrics/job/job", _energy_samples("total")))
    for before, after in pairwise(counted):
        assert all(0 < one <= other for one, other in zip(before, after, strict=True)), counted
    assert counted[0] != counted[-1]


def gauge_has_the_power_while_its_window_is_open(_: Path) -> None:
    from zeus.metric import PowerGauge

    gateway = WebService()
    metric = PowerGauge([0, 1], 1, gateway.url, "job")
    metric.begin_window("a", sync_execution=False)
    samples = [f'power_monitor_gpu_power_watts{{window="a",index="{i}"}}' for i in (0, 1)]
    assert all(watts > 0 for watts in gateway.wait_for("/metrics/job/job", samples))
    metric.end_window("a", sync_execution=False)
    with refused("'a'"):
        metric.end_window("a", sync_execution=False)


# ------------------------------------------------------------------------------------- optimizers

PROFILE = ((300, 3000.0, 10.0), (250, 2600.0, 10.4), (200, 2700.0, 10.9), (150, 2900.0, 14.0))
"""Limits with energy and time: least energy at 250 W, and slower below it."""


def _selected(name: str, *arguments: float) -> int:
    from zeus.optimizer import power_limit

    tried = [
        power_limit.PowerLimitMeasurement(power_limit=watts, energy=energy, time=seconds)
        for watts, energy, seconds in PROFILE
    ]
    return int(getattr(power_limit, name)(*arguments).select(tried))


def selectors_choose_the_least_energy_time_or_cost(_: Path) -> None:
    assert _selected("Energy") == 250
    assert _selected("Time") == 300
    for eta in (0.0, 0.25, 0.5, 0.75, 1.0):
        cost = {watts: eta * energy + (1 - eta) * 300 * time for watts, energy, time in PROFILE}
        assert _selected("ZeusCost", eta) == min(cost, key=lambda watts: cost[watts])


def slowdown_selects_the_lowest_limit_within_it(_: Path) -> None:
    for factor, watts in ((1.0, 300), (1.05, 250), (1.1, 200), (1.5, 150)):
        chosen = _selected("MaxSlowdownConstraint", factor)
        assert chosen == watts, f"{chosen} W is chosen within {factor}"


def optimizers_have_the_same_signature(_: Path) -> None:
    """With a stand-in for transformers."""
    stand_in = ModuleType("transformers")
    stand_in.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    sys.modules["transformers"] = stand_in
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, HFGlobalPowerLimitOptimizer

    ours, hugging_face = map(
        signature, (GlobalPowerLimitOptimizer.__init__, HFGlobalPowerLimitOptimizer.__init__)
    )
    assert ours == hugging_face, hugging_face


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
