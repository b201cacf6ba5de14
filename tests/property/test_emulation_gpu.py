"""Emulated GPUs under any sequence of events: nothing is lost, nothing runs backwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from testbed.emulated_faults import GpuFaults
from testbed.gpu_boards import A40, BOARDS, V100
from testbed.gpu_state import true_energy
from testbed.scripted_load import ScriptedLoad

from wattspan.emulation.boards import H100, Demand, Kernel, operate
from wattspan.emulation.gpu_file import GpuFile, counter_energy
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.workloads import (
    RequestServing,
    SteadyLoad,
    Training,
)
from wattspan.testing import ManualClock

shares = st.floats(0, 1, allow_subnormal=False)
models = st.builds(Kernel, compute=shares, activity=st.floats(0.2, 1.2))
works = st.one_of(
    st.builds(SteadyLoad, demand=shares, kernel=models),
    st.builds(Training, step=st.floats(0.02, 1), host=st.floats(0.05, 0.9), kernel=models),
    st.builds(
        RequestServing, rate=st.floats(0.5, 50), cost=st.floats(0.001, 0.1), seed=st.integers(0, 9)
    ),
    st.builds(
        ScriptedLoad, phases=st.lists(st.tuples(st.floats(0.01, 1), shares), min_size=1).map(tuple)
    ),
)
boards = st.sampled_from(sorted(BOARDS)).map(BOARDS.__getitem__)
pids = st.integers(1, 4)
events = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(0, 400_000_000)),
        st.tuples(st.just("read"), st.integers(0, 400_000_000)),
        st.tuples(st.just("attach"), pids, works),
        st.tuples(st.just("detach"), pids),
        st.tuples(st.just("limit"), st.integers(0, 100)),
        st.tuples(st.just("lock"), st.integers(1, 3000)),
        st.tuples(st.just("ceiling"), st.none() | st.integers(50_000, 700_000)),
    ),
    max_size=40,
)


def perform(gpus: EmulatedGpus, clock: ManualClock, file: GpuFile, event: tuple[Any, ...]) -> None:
    """One event; ``read`` lets time pass without telling the owner."""
    board, present = gpus.state(0).board, {tenant.pid for tenant in gpus.state(0).tenants}
    match event:
        case "pass", duration:
            clock.advance(ns=duration)
            gpus.step()
        case "read", duration:
            clock.advance(ns=duration)
        case "attach", pid, work if pid not in present:
            gpus.attach(0, pid, work, memory=1 << 20)
        case "detach", pid if pid in present:
            gpus.detach(0, pid)
        case "limit", part:
            low, _, high = board.limits
            GpuFaults(gpus).foreign_limit(0, low + (high - low) * part // 100)
        case "lock", mhz:
            file.record(0).clock_request = mhz
        case "ceiling", milliwatts:
            GpuFaults(gpus).enforce_at_most(0, milliwatts)


@given(boards, st.sampled_from([1, 1_000_003, 20_000_000, 100_000_000]), events)
def test_energy_is_the_integral_of_published_power_and_fully_divided(
    board: Any, counter_step: int, happening: list[tuple[Any, ...]]
) -> None:
    clock = ManualClock()
    with TemporaryDirectory() as directory:
        kind = replace(board, counter_step=counter_step)
        with EmulatedGpus(Path(directory, "gpus"), [kind], clock) as gpus:
            file = GpuFile(gpus.path)
            integral, shown, counted = 0, 0, 0
            for event in happening:
                before, began = gpus.state(0).point.power, clock.monotonic()
                perform(gpus, clock, file, event)
                integral += before * (clock.monotonic() - began)  # mW ns: picojoules
                moment = file.read(0, clock.monotonic)
                energy = true_energy(moment)
                counter = counter_energy(file.identity(0), moment)
                assert energy == integral // 1_000_000
                assert energy >= shown
                assert counter >= counted
                assert 0 <= energy - counter <= -(-800_000 * counter_step // 1_000_000) + 1
                shown, counted = energy, counter
            found = gpus.truth(0)
            assert found.energy == integral // 1_000_000
            assert found.energy == found.idle + sum(found.processes.values())
            # Idle truth is the idle power, but for the roundings of the processes.
            idle = gpus.state(0).board.silicon.idle * (clock.monotonic() - gpus.state(0).born)
            assert 0 <= found.idle - idle // 1_000_000 <= len(found.processes)
            file.close()


@given(boards, st.lists(st.tuples(shares, models), min_size=1, max_size=5), shares)
def test_capped_gpu_keeps_its_cap_unless_it_is_at_its_floor(
    board: Any, wishes: list[tuple[float, Kernel]], part: float
) -> None:
    low, _, high = board.limits
    limit = int(low / 2 + (high - low / 2) * part)
    demands = [Demand(share, kernel) for share, kernel in wishes]
    point = operate(board.silicon, demands, limit)
    assert point.power == point.idle + sum(grant.power for grant in point.grants)
    assert point.power <= limit or (point.at_floor and point.mhz == board.silicon.min_mhz)
    assert sum(grant.share for grant in point.grants) <= 1_000_000 + len(wishes)


@given(st.sampled_from([H100, A40, V100]), models, shares, shares)
def test_lower_cap_never_draws_more_nor_works_faster(
    board: Any, kernel: Kernel, one: float, other: float
) -> None:
    low, _, high = board.limits
    limits = sorted(int(low + (high - low) * part) for part in (one, other))
    tight, loose = (operate(board.silicon, [Demand(1.0, kernel)], limit) for limit in limits)
    assert tight.power <= loose.power
    assert tight.grants[0].speed <= loose.grants[0].speed
