"""The fleet's allotment over every end of a real capper: no limit above the fallback remains."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from testbed.capper_fixtures import host_fixture, limits_fixture
from testbed.capper_process import CapperProcess
from testbed.power_limits import PowerLimits
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.emulation.host import EmulatedHost
from wattspan.model import SECOND

pytestmark = pytest.mark.exhaustive

LIMIT, SAFE = 1_900_000, 700_000
SETTINGS: dict[str, object] = {
    "autotune__floor": 0.1,
    "fleet__endpoints": '["http://127.0.0.1:1"]',
}

host = host_fixture("two-socket-h100")
limits = limits_fixture()


def test_allotment_lapses_and_every_end_of_the_capper_leaves_the_fallback_at_most(
    host: EmulatedHost, tmp_path: Path, limits: PowerLimits
) -> None:
    clock = SystemClock()
    with CapperProcess(host, tmp_path, **SETTINGS) as capper:
        client = capper.ready().client()
        floors = client.allotment().floor
        eventually(lambda: limits.total() == floors, "the floors, before any allotment")
        client.allot(LIMIT, SAFE, clock.now().since_boot + 3 * SECOND, "a test")
        eventually(lambda: limits.total() > SAFE, "the allotment")
        assert limits.total() <= LIMIT
        eventually(lambda: limits.total() <= SAFE, "the fallback, without a request")
        client.allot(LIMIT, SAFE, clock.now().since_boot + 60 * SECOND, "a test")
        eventually(lambda: limits.total() > SAFE, "the allotment")
        client.close()
        assert capper.end(signal.SIGTERM) == 0
    assert limits.total() <= SAFE
    with CapperProcess(host, tmp_path, **SETTINGS, caps__ramp_watts_per_second=20) as capper:
        client = capper.ready().client()
        assert client.allotment().limit == SAFE
        client.allot(LIMIT, SAFE, clock.now().since_boot + 60 * SECOND, "a test")
        eventually(lambda: limits.total() > SAFE + 20_000, "a part of the allotment")
        client.close()
        assert capper.end(signal.SIGTERM) == 0
    assert limits.total() <= SAFE
    with CapperProcess(host, tmp_path, **SETTINGS) as capper:
        client = capper.ready().client()
        client.allot(LIMIT, SAFE, clock.now().since_boot + 60 * SECOND, "a test")
        eventually(lambda: limits.total() > SAFE, "the allotment")
        client.close()
        assert capper.end(signal.SIGKILL) == -signal.SIGKILL
    assert limits.total() <= LIMIT
    with CapperProcess(host, tmp_path, **SETTINGS) as capper:
        capper.ready().client().close()
        eventually(lambda: limits.total() <= SAFE, "the next capper begins with the fallback")
