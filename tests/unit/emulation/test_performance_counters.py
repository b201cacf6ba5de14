"""Emulated performance counters follow the CPU time of jobs and the speed of their sockets."""

from __future__ import annotations

from wattspan.emulation.powercap_engine import CounterLaw, JobCounters
from wattspan.model import MILLISECOND, SECOND, Counts
from wattspan.processes.performance_counters import CounterSums
from wattspan.processes.table import clock_id

LAW = CounterLaw(cycles=2000, instructions=3000, misses=5)


class Jobs:
    """Jobs with CPU clocks, on two sockets."""

    def __init__(self) -> None:
        self.sockets = {7: 0, 8: 1}
        self.clocks = {7: int(SECOND), 8: int(SECOND)}
        self.speeds = [1.0, 1.0]
        self.counters = JobCounters(LAW, lambda: self.sockets, lambda: self.speeds, self.read)

    def read(self, clock: int) -> int:
        for pid, spent in self.clocks.items():
            if clock_id(pid) == clock:
                return spent
        raise ProcessLookupError

    def counts(self) -> dict[tuple[int, int], Counts]:
        pairs, words = CounterSums.decoded(self.counters.sums())
        rows = [Counts(*words[5 * at : 5 * at + 5]) for at in range(len(pairs))]
        return {(pair >> 32, pair & 0xFFFFFFFF): row for pair, row in zip(pairs, rows, strict=True)}


def test_counts_follow_cpu_time_and_a_limited_socket_slows_its_cycles() -> None:
    jobs = Jobs()
    jobs.speeds[1] = 0.5
    for pid in jobs.clocks:
        jobs.clocks[pid] += MILLISECOND
    assert jobs.counts() == {
        (7, 0): Counts(MILLISECOND, 2_000_000, 2_000_000, 3_000_000, 5_000),
        (8, 1): Counts(MILLISECOND, 1_000_000, 2_000_000, 1_500_000, 5_000),
    }
    assert {row.time for row in jobs.counts().values()} == {0}


def test_ended_job_has_no_counts_and_a_new_one_all_of_its_own() -> None:
    jobs = Jobs()
    del jobs.clocks[7]
    jobs.sockets, jobs.clocks[9] = {**jobs.sockets, 9: 0}, int(MILLISECOND)
    assert {key: row.time for key, row in jobs.counts().items()} == {(8, 1): 0, (9, 0): MILLISECOND}
    jobs.counters.close()
