"""One device hangs in its driver: every other limit is restored at once, and the hang is named."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.capper_fixtures import host_fixture, limits_fixture
from testbed.capper_process import CapperProcess
from testbed.emulated_faults import FaultyHost
from testbed.power_limits import Hang, PowerLimits, restore
from testbed.waiting import eventually

from wattspan.capper.protocol import CapperClient
from wattspan.emulation.host import EmulatedHost
from wattspan.model import CapKey, Knob
from wattspan.ports import CapsError

CAPS = {Knob.GPU_POWER: 500_000, Knob.CPU_POWER: 150_000}
SETTINGS: dict[str, object] = {
    "autotune__floor": 0.1,
    "autotune__knobs": '["gpu_power", "cpu_power"]',
    "caps__largest_step": 1.0,
}


host = host_fixture("two-socket-h100", FaultyHost)
limits = limits_fixture()


@pytest.fixture(params=[Knob.GPU_POWER, Knob.CPU_POWER])
def hang(request: pytest.FixtureRequest, host: EmulatedHost, limits: PowerLimits) -> Iterator[Hang]:
    hang = Hang(host, min(key for key in limits.originals if key.knob is request.param))
    yield hang
    hang.end()


@pytest.fixture
def capper(host: EmulatedHost, tmp_path: Path) -> Iterator[CapperProcess]:
    with CapperProcess(host, tmp_path, **SETTINGS) as capper:
        yield capper.ready()


def cap_everything(capper: CapperProcess, limits: PowerLimits) -> CapperClient:
    """A client that holds a cap on every device."""
    client = capper.client()
    wanted = {key: CAPS[key.knob] for key in limits.originals}
    client.hold("job", wanted, "a test")
    eventually(lambda: limits.now(set(wanted)) == wanted, "every cap is in force")
    return client


def test_hung_device_keeps_no_other_cap_in_force(
    host: EmulatedHost, capper: CapperProcess, limits: PowerLimits, hang: Hang
) -> None:
    client = cap_everything(capper, limits)
    hang.begin()
    client.close()  # every lease ends
    others = set(limits.originals) - {hang.key}
    eventually(lambda: limits.restored(others), f"the others are restored: {capper.said}")
    row = eventually(lambda: _trouble(capper, hang.key), "the hang is reported")
    assert hang.key.device in row
    hang.end()
    eventually(lambda: limits.restored({hang.key}), "the hung device is restored after its hang")
    eventually(lambda: capper.journal() == [], "nothing is left in the journal")


def _trouble(capper: CapperProcess, key: CapKey) -> str:
    trouble = capper.row(key).trouble
    return trouble if "deadline" in trouble else ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", ["capper", "journal"])
def test_restore_with_a_hung_device_restores_the_others_and_names_it(
    host: EmulatedHost, capper: CapperProcess, limits: PowerLimits, hang: Hang, by: str
) -> None:
    holder = cap_everything(capper, limits)
    hang.begin()
    if by == "journal":
        capper.end(signal.SIGKILL)
    done = restore(capper)
    assert done.returncode == 6, done.stdout
    assert hang.key.device in done.stdout + done.stderr
    assert limits.restored(set(limits.originals) - {hang.key})
    hang.end()
    if by == "journal":
        again = restore(capper, "--json")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["restored"] == 1
    eventually(lambda: limits.restored({hang.key}), "the hung device is restored after its hang")
    holder.close()


def test_capper_starts_and_serves_while_a_device_hangs(
    host: EmulatedHost, tmp_path: Path, limits: PowerLimits, hang: Hang
) -> None:
    hang.begin()
    others = set(limits.originals) - {hang.key}
    with CapperProcess(host, tmp_path, **SETTINGS) as capper:
        client = capper.ready().client()
        wanted = {key: CAPS[key.knob] for key in others}

        def held() -> bool:
            try:
                client.hold("job", wanted, "a test")
            except CapsError:
                return False
            return True

        eventually(held, f"the other devices are held: {capper.said}")
        eventually(lambda: limits.now(others) == wanted, "their caps are in force")
        client.close()
        eventually(lambda: limits.restored(others), "their originals are back")
        hang.end()
        assert capper.end(signal.SIGTERM) == 0
