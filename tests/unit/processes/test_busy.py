"""Unclaimed busy time is neither invented by rounding nor lost."""

import os
import random
from pathlib import Path

import pytest

from wattspan.model import MILLISECOND, SECOND, Consumer, Instant
from wattspan.processes.cpu_socket_division import (
    PlacementSampler,
    SocketAccounting,
    UnattributedTime,
)
from wattspan.processes.cpus import (
    REFINED_TIME,
    CpuacctBusyClock,
    IdleStateBusyClock,
    ProcStatBusyClock,
)
from wattspan.processes.host import open_host_busy_clock, refined_busy_clock
from wattspan.processes.procfs import TICK, ProcFs
from wattspan.util.cpu_topology import (
    CpuTopology,
)

ROW = "cpu{cpu} 10 0 10 {idle} {iowait} 0 0 {steal} 0 0\n"


def write_stat(procfs: Path, idle: dict[int, int], iowait: int = 0, steal: int = 0) -> None:
    rows = [ROW.format(cpu=cpu, idle=i, iowait=iowait, steal=steal) for cpu, i in idle.items()]
    (procfs / "stat").write_text("cpu  1 2 3 4 5 6 7 8 9 10\n" + "".join(rows) + "intr 1 2 3\n")


def test_busy_time_excludes_idle_waiting_and_stolen(tmp_path: Path) -> None:
    write_stat(tmp_path, {0: 1000, 1: 2000})
    busy = ProcStatBusyClock(tmp_path)
    assert busy.read(0) == {0: 0, 1: 0}
    write_stat(tmp_path, {0: 1040, 1: 2000}, iowait=10, steal=20)
    assert busy.read(SECOND) == {0: 300 * MILLISECOND, 1: 700 * MILLISECOND}


def test_offline_cpu_keeps_its_busy_time(tmp_path: Path) -> None:
    write_stat(tmp_path, {0: 0, 1: 0})
    busy = ProcStatBusyClock(tmp_path)
    busy.read(0)
    write_stat(tmp_path, {0: 100, 1: 50})
    busy.read(SECOND)
    write_stat(tmp_path, {0: 200})
    assert busy.read(2 * SECOND) == {0: 0, 1: SECOND // 2}
    write_stat(tmp_path, {0: 300, 1: 50})
    assert busy.read(3 * SECOND) == {0: 0, 1: SECOND // 2}
    write_stat(tmp_path, {0: 400, 1: 50})
    assert busy.read(4 * SECOND) == {0: 0, 1: 3 * SECOND // 2}


def test_unreadable_file_is_unknown_not_zero(tmp_path: Path) -> None:
    (tmp_path / "cpuacct.usage_percpu").write_text("5 7\n")
    busy = CpuacctBusyClock(tmp_path)
    assert busy.read(0) == {0: 0, 1: 0}
    (tmp_path / "cpuacct.usage_percpu").write_text("garbage\n")
    assert busy.read(1) is None
    (tmp_path / "cpuacct.usage_percpu").write_text("9 7\n")
    assert busy.read(2) == {0: 4, 1: 0}


def test_steps_of_the_busy_clock_add_one_step_in_all_and_not_one_each_time() -> None:
    rng = random.Random(1)
    account, true, unclaimed = UnattributedTime(), 0, 0
    for _ in range(10_000):
        true += rng.randrange(100 * MILLISECOND)
        seen = true // TICK * TICK + rng.choice((0, TICK))  # steps, and steps that come early
        new = account.settle(busy=seen, spent=true)
        assert new >= 0
        unclaimed += new
    assert unclaimed <= TICK


def test_unattributed_time_is_exact_to_one_clock_step() -> None:
    rng = random.Random(2)
    account, named, nobody, unclaimed = UnattributedTime(), 0, 0, 0
    for _ in range(10_000):
        named += rng.randrange(90 * MILLISECOND)
        nobody += rng.randrange(5 * MILLISECOND)
        unclaimed += account.settle(busy=(named + nobody) // TICK * TICK, spent=named)
    assert nobody - TICK <= unclaimed <= nobody


class IdleStates:
    """A sysfs with two idle states of each CPU, in microseconds, and a coarse ``/proc/stat``.

    The kernel adds the time of a state when its CPU wakes.
    """

    def __init__(self, root: Path, cpus: int = 2) -> None:
        self.root = root
        self.idle = dict.fromkeys(range(cpus), 0)  # true idle nanoseconds
        self.folders = {cpu: root / f"devices/system/cpu/cpu{cpu}/cpuidle" for cpu in range(cpus)}
        for folder in self.folders.values():
            for state in (0, 1):
                (folder / f"state{state}").mkdir(parents=True)
                (folder / f"state{state}" / "time").write_text("1000\n")

    def advance(self, idle: dict[int, int], *, asleep: tuple[int, ...] = ()) -> None:
        """``idle`` nanoseconds pass in idle states; CPUs in ``asleep`` have not woken since."""
        for cpu, spent in idle.items():
            self.idle[cpu] += spent
            if cpu not in asleep:
                text = f"{1000 + self.idle[cpu] // 1000}\n"
                (self.folders[cpu] / "state1" / "time").write_text(text)
        write_stat(self.root, {cpu: spent // TICK for cpu, spent in self.idle.items()})


def idle_state_clock(states: IdleStates) -> IdleStateBusyClock:
    states.advance({})
    clock = IdleStateBusyClock(states.root, ProcStatBusyClock(states.root))
    assert clock.read(0) == dict.fromkeys(states.idle, 0)
    return clock


def test_idle_states_refine_busy_time_to_a_microsecond(tmp_path: Path) -> None:
    states = IdleStates(tmp_path)
    clock = idle_state_clock(states)
    assert clock.step == 1000
    for tick in range(1, 20):
        states.advance({0: 63_217_000, 1: 99_999_000})
        assert clock.read(tick * SECOND // 10) == {0: tick * 36_783_000, 1: tick * 1000}
    clock.close()


def test_cpu_in_a_long_idle_state_is_busy_for_two_steps_at_most(tmp_path: Path) -> None:
    states = IdleStates(tmp_path, cpus=1)
    clock = idle_state_clock(states)
    for tick in range(1, 50):
        states.advance({0: SECOND // 10}, asleep=(0,))
        busy = clock.read(tick * SECOND // 10)
        assert busy is not None
        assert 0 <= busy[0] <= 2 * TICK
    states.advance({0: SECOND // 10 - 5 * MILLISECOND})
    assert clock.read(5 * SECOND) == {0: 5 * MILLISECOND}


def test_idle_time_before_the_first_read_is_not_counted(tmp_path: Path) -> None:
    states = IdleStates(tmp_path, cpus=1)
    states.advance({0: 7 * SECOND}, asleep=(0,))
    clock = IdleStateBusyClock(tmp_path, ProcStatBusyClock(tmp_path))
    assert clock.read(0) == {0: 0}
    states.advance({0: SECOND // 20})
    busy = clock.read(SECOND // 10)
    assert busy is not None
    assert abs(busy[0] - SECOND // 20) <= 2 * TICK
    states.advance({0: 30_001_000})
    later = clock.read(SECOND // 5)
    assert later is not None
    assert later[0] - busy[0] == 69_999_000


def test_idle_states_are_read_for_a_limited_time(tmp_path: Path) -> None:
    states = IdleStates(tmp_path, cpus=1)
    clock = idle_state_clock(states)
    states.advance({0: 63_217_000})
    assert clock.read(REFINED_TIME) == {0: REFINED_TIME - 60 * MILLISECOND}
    assert (clock.name, clock.step) == ("/proc/stat", TICK)
    for folder in (tmp_path / "devices").rglob("time"):
        folder.unlink()
    assert clock.read(REFINED_TIME + SECOND) is not None
    clock.close()


@pytest.mark.parametrize("readable", [True, False])
def test_lost_idle_state_affects_its_cpu_alone(tmp_path: Path, readable: bool) -> None:
    states = IdleStates(tmp_path)
    time = states.folders[0] / "state0" / "time"
    if not readable:  # the read fails, as of a file that the kernel has removed
        time.unlink()
        time.mkdir()
    clock = idle_state_clock(states)
    if readable:
        time.write_text("garbage\n")
    for tick in range(1, 20):
        states.advance({0: 63_217_000, 1: 99_999_000})
        known = tick * SECOND // 10 - states.idle[0] // TICK * TICK
        assert clock.read(tick * SECOND // 10) == {0: known, 1: tick * 1000}
    assert clock.step == TICK
    clock.close()


def test_host_without_idle_states_keeps_its_busy_clock(tmp_path: Path) -> None:
    write_stat(tmp_path, {0: 0})
    coarse = ProcStatBusyClock(tmp_path)
    assert refined_busy_clock(coarse, tmp_path / "none") is coarse
    assert refined_busy_clock(None, tmp_path) is None
    states = IdleStates(tmp_path)
    refined = refined_busy_clock(coarse, states.root)
    assert isinstance(refined, IdleStateBusyClock)
    refined.close()


def test_usage_has_metered_time_with_a_precise_clock_only(tmp_path: Path) -> None:
    states = IdleStates(tmp_path)
    clock = idle_state_clock(states)
    (tmp_path / "devices/system/cpu/online").write_text("0-1\n")
    topology = CpuTopology(tmp_path)
    accounts = SocketAccounting(topology, PlacementSampler(ProcFs(), topology), clock)
    accounts.update_busy(accounts.sample_busy(), 0)
    instants = [Instant(tick * SECOND // 10, 0) for tick in range(3)]
    host, socket = accounts.usages(instants[0], instants[0], (), {}, complete=True)
    assert host.metered is socket.metered is None
    states.advance({0: 63_217_000, 1: SECOND // 10})
    accounts.update_busy(accounts.sample_busy(), instants[1].mono)
    host, socket = accounts.usages(instants[0], instants[1], (), {}, complete=True)
    assert host.metered == socket.metered == 36_783_000
    accounts.update_busy(accounts.sample_busy(), REFINED_TIME)
    host, socket = accounts.usages(instants[1], instants[2], (), {}, complete=True)
    assert host.metered is socket.metered is None
    clock.close()


def test_container_with_lxcfs_does_not_know_the_busy_time_of_the_host(tmp_path: Path) -> None:
    """Its ``stat`` is mounted from another file system, and its CPUs are those of its cpuset.

    The CPUs that are offline on a host run nothing.
    """
    procfs, cpus = tmp_path / "proc", tmp_path / "sys/devices/system/cpu"
    procfs.mkdir()
    (procfs / "stat").symlink_to("/proc/stat")
    assert open_host_busy_clock(procfs, tmp_path, None) is None
    (procfs / "stat").unlink()
    write_stat(procfs, {0: 0})
    assert open_host_busy_clock(procfs, tmp_path, None) is not None
    (cpus / "cpu0/topology").mkdir(parents=True)
    (cpus / "cpu0/topology/physical_package_id").write_text("0\n")
    (cpus / "online").write_text("0\n")
    (cpus / "present").write_text("0-3\n")
    mounted = os.memfd_create("online")
    os.write(mounted, b"0\n")
    for unclaimed in (0, 3 * SECOND):
        topology = CpuTopology(tmp_path / "sys")
        accounts = SocketAccounting(topology, PlacementSampler(ProcFs(procfs), topology), None)
        instants, active = (Instant(0, 0), Instant(SECOND, 0)), [(Consumer(7, 1), SECOND, None)]
        usages = accounts.usages(*instants, active, {}, True, sees_all=False)
        assert [usage.unclaimed for usage in usages] == [unclaimed] * 2
        (cpus / "online").unlink()
        (cpus / "online").symlink_to(f"/proc/self/fd/{mounted}")
    os.close(mounted)
