"""Reading the energy of devices from a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns

import pytest
from testbed.constant_history import DRAM, GPU, PACKAGE, ConstantPast
from testbed.query_server import FAR, QueryServer

from wattspan.model import GpuStatus, Instant
from wattspan.sdk import AgentUnavailableError, RefusedError
from wattspan.sdk.client import Device, read_device_windows, read_devices

SECOND = 10**9


@pytest.fixture
def past() -> ConstantPast:
    past = ConstantPast(until=FAR, known_domains=(PACKAGE, DRAM, GPU))
    past.devices[GPU.id] = 300_000
    past.gpus[GPU.id] = GpuStatus(GPU.id, Instant(5, 5), index=2, temperature_celsius=50)
    return past


@pytest.fixture
def agent(past: ConstantPast, tmp_path: Path) -> Iterator[QueryServer]:
    with QueryServer(tmp_path, past) as server:
        yield server


def read(agent: QueryServer, *arguments: object, **options: object) -> tuple[Device, ...]:
    return read_devices(*arguments, directories=(str(agent.folder),), **options)


def test_devices_have_their_energy_in_the_period(agent: QueryServer) -> None:
    package, gpu, memory = sorted(read(agent, 0, SECOND), key=lambda one: one.kind)
    assert (package.joules, gpu.joules, memory.joules) == (10.0, 300.0, 3.0)
    assert (gpu.number, gpu.uuid, gpu.kind) == (2, GPU.id, "gpu")
    assert (package.number, package.coverage, package.provenance) == (0, 1.0, "measured")
    assert package.complete
    assert not package.silent
    assert gpu.timeline == gpu.temperatures == ()


def test_asked_ids_only_are_read(agent: QueryServer) -> None:
    (gpu,) = read(agent, 0, SECOND, [GPU.id], timeline=True)
    assert gpu.id == GPU.id
    assert len(gpu.timeline) == 1
    assert gpu.temperatures == ((5, 50),)
    assert read(agent, 0, SECOND, []) == ()


def test_unknown_id_is_refused(agent: QueryServer) -> None:
    with pytest.raises(RefusedError, match=r"hw_id=GPU-7: .* Did you mean 'GPU-0'\?"):
        read(agent, 0, SECOND, ["GPU-7"])


def test_reading_is_waited_for(agent: QueryServer, past: ConstantPast) -> None:
    past.until = 0
    threading.Timer(0.05, lambda: setattr(past, "until", FAR)).start()
    end = monotonic_ns()
    assert all(one.complete for one in read(agent, end - SECOND, end, timeout=30.0))


def test_silent_device_is_not_waited_for(agent: QueryServer, past: ConstantPast) -> None:
    past.until, past.silenced = SECOND // 2, {PACKAGE.id, DRAM.id, GPU.id}
    found = read(agent, 0, SECOND, timeout=3600.0)
    assert {(one.complete, one.silent, one.coverage) for one in found} == {(False, True, 0.5)}


def test_partial_energy_is_returned_after_the_timeout(
    agent: QueryServer, past: ConstantPast
) -> None:
    past.until = SECOND // 2
    found = read(agent, 0, SECOND, timeout=0.0)
    assert {(one.complete, one.silent, one.coverage) for one in found} == {(False, False, 0.5)}


def test_missing_agent_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailableError, match="No wattspan agent answers"):
        read_devices(0, 1, timeout=3600.0, directories=(str(tmp_path),))


def test_devices_of_several_periods_are_those_of_each(
    agent: QueryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(agent.folder))
    periods = [(0, SECOND), (SECOND, 3 * SECOND)]
    assert read_device_windows(periods, [GPU.id, DRAM.id], 0.0) == [
        read(agent, *period, [GPU.id, DRAM.id]) for period in periods
    ]
