"""The emulated counters follow this machine's real CPU time, and the truth is known."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from testbed.emulated_faults import FaultyPowercapEngine, FaultyPowercapTree
from testbed.powercap_layouts import LAYOUTS
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.emulation.powercap_engine import CpuLaw, PowercapRunner, on_sockets, open_cpu_load
from wattspan.sources.rapl.powercap import PowercapSource


def live_engine(root: Path, clock: SystemClock) -> FaultyPowercapEngine:
    tree = FaultyPowercapTree(root, LAYOUTS["xeon-2s"])
    return FaultyPowercapEngine(
        tree, CpuLaw(), clock, on_sockets(open_cpu_load(clock), tree.socket_of_cpu)
    )


def test_work_on_a_cpu_shows_on_its_emulated_socket(tmp_path: Path) -> None:
    clock = SystemClock()
    engine = live_engine(tmp_path, clock)
    mine = sorted(os.sched_getaffinity(0))
    cpu = mine[-1]
    socket = engine.tree.socket_of_cpu[cpu]
    os.sched_setaffinity(0, {cpu})
    try:
        engine.step()
        before = engine.busy[socket]
        worked = -_own_cpu_time()
        while worked + _own_cpu_time() < 200_000_000:
            pass
        worked += _own_cpu_time()
        engine.step()
    finally:
        os.sched_setaffinity(0, mine)
        engine.tree.close()
    # Others may use the CPU as well, so it may be more; a tick of 10 ms may not be counted yet.
    assert engine.busy[socket] - before > 0.9 * worked


def test_counter_accounts_for_idle_and_every_busy_second(tmp_path: Path) -> None:
    engine = live_engine(tmp_path, SystemClock())
    runner = PowercapRunner(engine, SystemClock())
    runner.start()
    eventually(lambda: engine.elapsed > 50_000_000, "the runner steps")
    runner.stop()
    law, socket = engine.law, 0
    expected = law.package_idle * engine.elapsed + law.package_active * engine.busy[socket]
    assert engine.energy("intel-rapl:0") == expected // 1_000_000
    engine.tree.close()


def test_reader_follows_a_running_tree_without_a_single_failure(tmp_path: Path) -> None:
    clock = SystemClock()
    engine = live_engine(tmp_path, clock)
    runner = PowercapRunner(engine, clock, period=1_000_000)
    source = PowercapSource(tmp_path, clock)
    runner.start()
    try:
        last: dict[str, int] = {}
        for _ in range(2000):
            batch = source.read()
            assert not batch.failures
            for reading in batch.readings:
                assert reading.counter >= last.get(reading.domain_id, 0)
                last[reading.domain_id] = reading.counter
        assert len(last) == 4
    finally:
        runner.stop()
        source.close()
        engine.tree.close()


def test_stopped_runner_leaves_no_thread(tmp_path: Path) -> None:
    clock = SystemClock()
    engine = live_engine(tmp_path, clock)
    runner = PowercapRunner(engine, clock)
    runner.start()
    runner.between_steps(lambda _: engine.reset("intel-rapl:0"))
    runner.stop()
    assert "emulated-powercap" not in {thread.name for thread in threading.enumerate()}
    engine.tree.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_emulated_layouts_run_on_this_host(tmp_path: Path, layout: str) -> None:
    clock = SystemClock()
    tree = FaultyPowercapTree(tmp_path, LAYOUTS[layout])
    engine = FaultyPowercapEngine(
        tree, CpuLaw(), clock, on_sockets(open_cpu_load(clock), tree.socket_of_cpu)
    )
    clock.sleep_until(clock.monotonic() + 2_000_000)
    engine.step()
    source = PowercapSource(tmp_path, clock)
    batch = source.read()
    assert len(batch.readings) == len(tree.layout.zones)
    assert not batch.failures
    source.close()
    tree.close()


def _own_cpu_time() -> int:
    times = os.times()
    return round((times.user + times.system) * 1e9)
