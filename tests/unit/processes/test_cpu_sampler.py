"""The course of a process's CPU time, between the agent's ticks."""

import os
import threading
import time
from collections.abc import Callable

import pytest
from testbed.waiting import eventually

from wattspan.clock import OWN_THREAD_CLOCK, SystemClock
from wattspan.model import SECOND, Consumer
from wattspan.processes.cpu_sampler import MAX_PERIOD, MAX_SAMPLES, PERIOD, CpuSampler
from wattspan.processes.table import clock_id
from wattspan.testing import ManualClock

MS = 1_000_000
_EXITED = os.WEXITED | os.WNOHANG | os.WNOWAIT
A, B, C = Consumer(10, 1), Consumer(11, 1), Consumer(12, 1)


class Clocks(ManualClock):
    """A clock whose processes' CPU time is set by hand; reading one takes ``takes``."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[int, int] = {}
        self.takes = 0
        self.reads = 0

    def read_cpu_clock(self, clock: int) -> int:
        if clock == OWN_THREAD_CLOCK:
            return 0
        self.reads += 1
        self.advance(ns=self.takes)
        for pid, cpu in self.cpu.items():
            if clock_id(pid) == clock:
                return cpu
        raise ProcessLookupError

    def works(self, consumer: Consumer, nanoseconds: int) -> None:
        self.cpu[consumer.pid] = self.cpu.get(consumer.pid, 0) + nanoseconds


@pytest.fixture
def clock() -> Clocks:
    return Clocks()


@pytest.fixture
def fine(clock: Clocks) -> CpuSampler:
    return CpuSampler(clock, most=2)


def watch(fine: CpuSampler, clock: Clocks, *consumers: Consumer) -> None:
    for consumer in consumers:
        clock.works(consumer, 0)
        fine.watch(consumer)


def look(fine: CpuSampler, clock: Clocks, times: int = 1) -> None:
    for _ in range(times):
        clock.advance(ns=10 * MS)
        fine.sweep()


def test_process_is_sampled_from_watch_on(fine: CpuSampler, clock: Clocks) -> None:
    clock.works(A, 7)
    start = clock.monotonic()
    fine.watch(A)
    clock.works(A, 3 * MS)
    look(fine, clock)
    assert fine.take(A) == [(start, 7), (start + 10 * MS, 7 + 3 * MS)]


def test_each_sample_is_taken_once(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A)
    clock.works(A, 1)
    look(fine, clock)
    assert len(fine.take(A)) == 2
    assert fine.take(A) == []


def test_idle_period_has_its_first_and_last_sample(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A)
    start = clock.monotonic()
    look(fine, clock, 5)
    clock.works(A, MS)
    look(fine, clock)
    assert fine.take(A) == [(start, 0), (start + 50 * MS, 0), (start + 60 * MS, MS)]


def test_take_during_an_idle_period_includes_its_latest_time(
    fine: CpuSampler, clock: Clocks
) -> None:
    watch(fine, clock, A)
    start = clock.monotonic()
    look(fine, clock, 3)
    assert fine.take(A) == [(start, 0), (start + 30 * MS, 0)]
    look(fine, clock, 3)
    assert fine.take(A) == [(start + 60 * MS, 0)]


def test_exit_of_one_process_ends_only_its_samples(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A, B)
    clock.works(A, 5)
    look(fine, clock)
    del clock.cpu[A.pid]
    for _ in range(3):
        clock.works(B, MS)
        look(fine, clock)
    *_, (ended, _) = samples = fine.take(A)
    assert [cpu for _, cpu in samples] == [0, 5, 5]
    assert ended > clock.monotonic() + 10**18
    assert [cpu for _, cpu in fine.take(B)] == [0, 0, MS, 2 * MS, 3 * MS]


def test_decreased_clock_belongs_to_another_process(fine: CpuSampler, clock: Clocks) -> None:
    clock.works(A, 100 * MS)
    fine.watch(A)
    clock.cpu[A.pid] = 5 * MS
    look(fine, clock, 4)
    assert [cpu for _, cpu in fine.take(A)] == [100 * MS, 100 * MS]


def test_reading_that_was_interrupted_is_left_out(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A)
    clock.works(A, MS)
    clock.takes = 5 * MS
    look(fine, clock)
    clock.takes = 0
    clock.works(A, MS)
    look(fine, clock)
    assert [cpu for _, cpu in fine.take(A)] == [0, 2 * MS]


def test_reading_is_stamped_in_the_middle_of_its_call(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A)
    clock.takes = 400
    clock.works(A, MS)
    look(fine, clock)
    assert fine.take(A)[-1] == (clock.monotonic() - 200, MS)


def test_number_of_watched_processes_is_bounded(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A, B, C)
    assert fine.take(C) == []
    fine.unwatch(A)
    watch(fine, clock, C)
    assert len(fine.take(C)) == 1


def test_exited_processes_are_evicted_first(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A, B)
    del clock.cpu[A.pid]
    look(fine, clock)
    watch(fine, clock, C)
    assert len(fine.take(C)) == 1


def test_untaken_samples_are_bounded(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A)
    for _ in range(5 * MAX_SAMPLES):
        clock.works(A, 1)
        look(fine, clock)
    kept = fine.take(A)
    assert len(kept) <= MAX_SAMPLES + 1
    assert kept[-1] == (clock.monotonic(), 5 * MAX_SAMPLES)


def test_idle_processes_are_read_in_turns_and_busy_ones_always() -> None:
    clock = Clocks()
    fine = CpuSampler(clock)
    everybody = [Consumer(pid, 1) for pid in range(100, 180)]
    watch(fine, clock, *everybody)
    busy, late = everybody[3], everybody[60]
    for _ in range(400):
        clock.works(busy, MS)
        look(fine, clock)
    reads = clock.reads
    for _ in range(80):
        clock.works(busy, MS)
        clock.works(late, MS)
        look(fine, clock)
    assert clock.reads - reads < 80 * 80 / 4
    fine.take(late)
    look(fine, clock)
    assert len(fine.take(busy)) == 482
    clock.works(late, MS)
    look(fine, clock)
    assert fine.take(late)[-1] == (clock.monotonic(), 81 * MS)


def test_new_work_of_an_idle_process_is_sampled() -> None:
    clock = Clocks()
    fine = CpuSampler(clock)
    everybody = [Consumer(pid, 1) for pid in range(100, 180)]
    watch(fine, clock, *everybody)
    look(fine, clock, 300)
    begun = clock.monotonic()
    for consumer in everybody:
        fine.take(consumer)
        clock.works(consumer, MS)
    look(fine, clock, 20)
    for consumer in everybody:
        first = next(mono for mono, cpu in fine.take(consumer) if cpu)
        assert first - begun <= 90 * MS


def test_unwatched_process_has_no_samples(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A)
    fine.unwatch(A)
    fine.unwatch(A)
    look(fine, clock)
    assert fine.take(A) == fine.take(B) == []


def test_process_is_sampled_until_its_lease_ends_unless_it_is_renewed(clock: Clocks) -> None:
    fine = CpuSampler(clock, lease=SECOND)
    watch(fine, clock, A, B)
    look(fine, clock, 60)
    fine.watch(A)
    look(fine, clock, 60)
    fine.take(A)
    reads = clock.reads
    look(fine, clock)
    assert clock.reads - reads == 1
    assert len(fine.take(A)) == 1
    assert fine.take(B) == []
    look(fine, clock, 40)
    reads = clock.reads
    look(fine, clock, 10)
    assert clock.reads == reads  # the thread sleeps: no process is left
    clock.works(A, MS)
    fine.watch(A)
    look(fine, clock)
    assert [cpu for _, cpu in fine.take(A)] == [MS, MS]


def test_thread_sleeps_from_the_end_of_the_last_lease_until_its_renewal(clock: Clocks) -> None:
    """In virtual time, which ends while the thread waits for a process."""
    fine = CpuSampler(clock, lease=SECOND)

    def assert_lease_ends() -> None:
        began = clock.monotonic()
        watch(fine, clock, A)
        eventually(lambda: clock.monotonic() >= began + SECOND, "the end of the lease")
        eventually(lambda: not fine.take(A), "the end of the samples")
        assert clock.monotonic() <= began + SECOND + 20 * MS

    fine.start()
    try:
        assert_lease_ends()
        assert_lease_ends()
    finally:
        fine.stop()


def test_rest_of_the_thread_ends_with_the_next_work(clock: Clocks) -> None:
    fine = CpuSampler(clock)
    watch(fine, clock, A, B)
    began = clock.monotonic()
    clock.on_sleep = lambda now: clock.works(B, MS * (now == began + 50 * MS))
    fine._rest()
    fine.sweep()
    assert fine.take(A) == [(began, 0), (began + 50 * MS, 0)]
    assert fine.take(B) == [(began, 0), (began + 40 * MS, 0), (began + 50 * MS, MS)]


@pytest.mark.parametrize("change", ["exit", "unwatch", "watch", "lease", "stop"])
def test_rest_of_the_thread_ends_with_a_change_of_the_processes(clock: Clocks, change: str) -> None:
    fine = CpuSampler(clock, lease=60 * MS if change == "lease" else SECOND)
    watch(fine, clock, A)
    began = clock.monotonic()

    changes: dict[str, Callable[[], object]] = {"lease": lambda: None, "stop": fine.stop}
    changes |= {"watch": lambda: fine.watch(A), "unwatch": lambda: fine.unwatch(A)}
    changes["exit"] = clock.cpu.clear
    clock.on_sleep = lambda now: changes[change]() if now >= began + 60 * MS else None
    fine._rest()
    assert clock.monotonic() == began + 60 * MS


def test_rest_that_begins_after_a_stop_lasts_one_period(fine: CpuSampler, clock: Clocks) -> None:
    watch(fine, clock, A)
    fine.stop()
    began = clock.monotonic()
    clock.on_sleep = lambda now: clock.works(A, MS * (now > began + SECOND))
    fine._rest()
    assert clock.monotonic() == began + PERIOD


def test_period_grows_with_the_cost_of_a_sweep(fine: CpuSampler, clock: Clocks) -> None:
    assert fine.period == PERIOD
    fine._cost = 800_000
    assert fine.period == 40 * MS
    fine._cost = 20_000_000
    assert fine.period == MAX_PERIOD


def test_real_process_is_sampled_until_its_exit() -> None:
    fine = CpuSampler(SystemClock())
    fine.start()
    threads = threading.active_count()
    pid = os.fork()
    if pid == 0:
        while time.process_time() < 0.15:
            pass
        os._exit(0)
    consumer = Consumer(pid, 1)
    samples: list[tuple[int, int]] = []
    try:
        fine.watch(consumer)
        eventually(lambda: bool(os.waitid(os.P_PID, pid, _EXITED)), "the end of the child")
        samples += fine.take(consumer)
        used = os.wait4(pid, 0)[2]
    finally:
        fine.stop()
    assert threading.active_count() == threads - 1
    assert len(samples) >= 3
    assert samples == sorted(samples)
    assert [cpu for _, cpu in samples] == sorted(cpu for _, cpu in samples)
    total = (used.ru_utime + used.ru_stime) * 1e9
    assert samples[-1][1] <= total * 1.02
