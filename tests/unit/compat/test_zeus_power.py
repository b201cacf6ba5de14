"""PowerMonitor and TemperatureMonitor on the agent's readings."""

from __future__ import annotations

from time import monotonic_ns, time

import pytest
from testbed.metered_devices import MeteredDevices, gpu

from wattspan import sdk
from wattspan.compat.zeus.power import (
    PowerDomain,
    PowerMonitor,
    TemperatureMonitor,
    to_monotonic,
    to_unix,
)

TICK = 10**8
BOTH = (gpu(0), gpu(1))


@pytest.fixture(autouse=True)
def no_cuda_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def meter() -> MeteredDevices:
    """Readings each 100 ms from a second ago to ten seconds ahead: 100 W, 101 W, ..."""
    began = monotonic_ns() - 10 * TICK
    steps = tuple(
        (began + i * TICK, began + (i + 1) * TICK, (100 + i) * TICK / 1e9) for i in range(110)
    )
    degrees = tuple((began + i * 10 * TICK, 40 + i) for i in range(-3, 10))
    return MeteredDevices(
        BOTH,
        steps={one.id: steps for one in BOTH},
        temperatures={one.id: degrees for one in BOTH},
    )


def power_monitor(meter: MeteredDevices, **arguments: object) -> PowerMonitor:
    class Monitor(PowerMonitor):
        read_devices = meter

    return Monitor(**arguments)


def temperature_monitor(meter: MeteredDevices, **arguments: object) -> TemperatureMonitor:
    class Monitor(TemperatureMonitor):
        read_devices = meter

    return Monitor(**arguments)


def begun(meter: MeteredDevices) -> int:
    return meter.steps[BOTH[0].id][0][0]


def test_times_are_converted_both_ways() -> None:
    now = monotonic_ns()
    assert to_unix(now) == pytest.approx(time(), abs=1)
    assert to_monotonic(to_unix(now)) == pytest.approx(now, abs=10**6)


def test_power_is_the_mean_between_two_readings(meter: MeteredDevices) -> None:
    one = power_monitor(meter)
    assert one.gpu_indices == [0, 1]
    one._stopped = begun(meter) + 50 * TICK  # it has lasted 4 s
    assert one.get_power() == {0: pytest.approx(149.0), 1: pytest.approx(149.0)}
    later = to_unix(begun(meter) + 20 * TICK + TICK // 2)
    assert one.get_power(later) == {0: pytest.approx(120.0), 1: pytest.approx(120.0)}


def test_monitor_that_is_read_remains_registered_until_it_stops(
    meter: MeteredDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sdk, "registration", sdk.WatchRegistration())
    monkeypatch.setattr(sdk, "_send_watch_request", lambda place: not asked.append(place))
    one = power_monitor(meter)
    one.get_power()
    assert len(asked) == 1
    sdk.registration.due = 0  # as time does
    one.get_power()
    assert len(asked) == 2
    sdk.registration.due = 0
    one.stop()
    one.get_power()
    assert len(asked) == 2


def test_power_without_readings_is_none(meter: MeteredDevices) -> None:
    meter.steps[BOTH[1].id] = ()
    assert power_monitor(meter).get_power() is None
    assert power_monitor(meter, gpu_indices=[0]).get_power() is not None


def test_timeline_contains_the_readings_since_the_construction(meter: MeteredDevices) -> None:
    one = power_monitor(meter)
    one._stopped = begun(meter) + 30 * TICK
    timeline = one.get_power_timeline("device_instant")
    watts = [power for _, power in timeline[0]]
    assert timeline[0] == timeline[1]
    assert watts == pytest.approx([*range(130 - len(watts), 130)])
    assert 18 <= len(watts) <= 20
    assert timeline[0][-1][0] == pytest.approx(to_unix(one._stopped), abs=0.01)


def test_timeline_is_limited_by_gpu_time_and_number(meter: MeteredDevices) -> None:
    one = power_monitor(meter, max_samples_per_gpu=5)
    one._stopped = begun(meter) + 60 * TICK
    last = to_unix(begun(meter) + 40 * TICK + TICK // 2)
    timeline = one.get_power_timeline(PowerDomain.DEVICE_AVERAGE, gpu_index=1, end_time=last)
    assert list(timeline) == [1]
    assert [power for _, power in timeline[1]] == pytest.approx([135, 136, 137, 138, 139])
    assert one.get_power_timeline("device_average", end_time=time() - 1000) == {0: [], 1: []}
    everything = one.get_all_power_timelines(gpu_index=0)
    assert set(everything) == {"device_instant", "device_average"}


def test_gaps_are_left_out_of_a_timeline(meter: MeteredDevices) -> None:
    steps = list(meter.steps[BOTH[0].id])
    steps[20] = (*steps[20][:2], None)
    meter.steps[BOTH[0].id] = tuple(steps)
    one = power_monitor(meter, gpu_indices=[0])
    one._stopped = begun(meter) + 25 * TICK
    watts = [power for _, power in one.get_power_timeline("device_instant")[0]]
    assert watts[-5:] == pytest.approx([119, 121, 122, 123, 124])


def test_energy_is_that_of_the_device(meter: MeteredDevices) -> None:
    one = power_monitor(meter, gpu_indices=[1])
    start, end = to_unix(begun(meter)), to_unix(begun(meter) + 10 * TICK)
    true = meter.joules(BOTH[1].id, 0, 10 * TICK)
    assert one.get_energy(start, end) == {1: pytest.approx(true, rel=0.01)}


def test_stopped_monitor_keeps_its_period(meter: MeteredDevices) -> None:
    one = power_monitor(meter)
    one.stop()
    stopped = one._stopped
    one.stop()
    assert one._stopped == stopped


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"gpu_indices": []}, "gpu_indices is empty"),
        ({"power_domains": []}, "power_domains is empty"),
        ({"power_domains": ["memory_average"]}, "memory_average is not measured"),
        ({"power_domains": ["wall"]}, "'wall' is not a valid PowerDomain"),
    ],
)
def test_invalid_argument_is_a_value_error(
    meter: MeteredDevices, arguments: dict[str, list[object]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        power_monitor(meter, **arguments)


def test_unmonitored_power_is_a_value_error(meter: MeteredDevices) -> None:
    one = power_monitor(meter, power_domains=["device_average"])
    with pytest.raises(ValueError, match="device_instant is not monitored; monitored: device_av"):
        one.get_power()
    with pytest.raises(ValueError, match="device_instant is not monitored"):
        one.get_power_timeline("device_instant")


def test_temperature_is_the_nearest_reading(meter: MeteredDevices) -> None:
    one = temperature_monitor(meter)
    assert one.gpu_indices == [0, 1]
    assert one.get_temperature() == {0: 41, 1: 41}
    one._stopped = begun(meter) + 55 * TICK
    assert one.get_temperature(to_unix(begun(meter) + 32 * TICK)) == {0: 43, 1: 43}
    timeline = one.get_temperature_timeline(gpu_index=0)
    assert [degrees for _, degrees in timeline[0]] == [42, 43, 44, 45]
    assert list(timeline) == [0]
    assert one.get_temperature_timeline(end_time=time() - 1000)[0] == []


def test_newest_temperatures_only_are_kept(meter: MeteredDevices) -> None:
    one = temperature_monitor(meter, max_samples_per_gpu=2)
    one._stopped = begun(meter) + 55 * TICK
    assert [t for _, t in one.get_temperature_timeline()[1]] == [44, 45]
    one.stop()
    assert one._stopped == begun(meter) + 55 * TICK


def test_unknown_temperature_is_none(meter: MeteredDevices) -> None:
    meter.temperatures[BOTH[1].id] = ()
    assert temperature_monitor(meter).get_temperature() is None
    with pytest.raises(ValueError, match="gpu_indices is empty"):
        temperature_monitor(meter, gpu_indices=[])
