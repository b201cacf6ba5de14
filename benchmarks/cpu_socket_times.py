"""Error of the division of processes' CPU time among sockets, and cost of counting it by eBPF.

Each CPU is a socket of an emulated topology. Processes move between the CPUs and record the truth:
their own CPU time on each. Two sources of the agent read the same processes, one with the
scheduler's count, one without. Needs root, two CPUs and Linux 5.8. The cost is also that of the
program with the hardware's events (``--events hardware``) or as many of the kernel's own.

    .venv/bin/python -m benchmarks.cpu_socket_times
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from testbed.machine import describe

from wattspan.clock import SystemClock
from wattspan.processes.cpu_socket_times import SocketTimes
from wattspan.processes.ebpf import PerfEvent, call_bpf
from wattspan.processes.performance_counters import HARDWARE_EVENTS
from wattspan.processes.procfs import ProcFs
from wattspan.processes.source import CpuUsageSource
from wattspan.util.cpu_topology import (
    CpuTopology,
)

WINDOW, POLLS = 0.3, 3  # seconds of a window, and polls in it
MAX_ERROR_OF_TRUTH = 2_000_000  # nanoseconds that a process may work while a window is cut
MIN_WORK = 20_000_000  # nanoseconds of a process in a window that counts
GOAL = 0.05

_MOVER = """
import ctypes, mmap, os, random, struct, sys, time
memory, chance = mmap.mmap(int(sys.argv[1]), 4096), random.Random(int(sys.argv[2]))
cpu, clock = ctypes.CDLL(None).sched_getcpu, time.thread_time_ns
spent, last, due = [0] * os.cpu_count(), clock(), time.monotonic()
everywhere = range(os.cpu_count())
while os.getppid() == int(sys.argv[3]):
    here, now = cpu(), clock()
    spent[here] += now - last
    last = now
    struct.pack_into(f"{len(spent)}Q", memory, 0, *spent)
    if time.monotonic() > due:
        due = time.monotonic() + chance.uniform(0.02, 0.2)
        os.sched_setaffinity(0, {chance.choice(everywhere)})
        os.sched_setaffinity(0, everywhere)
"""


@dataclass
class Mover:
    """A process that moves, and the truth about it."""

    process: subprocess.Popen[bytes]
    memory: mmap.mmap

    def truth(self) -> list[int]:
        """The nanoseconds on each CPU."""
        return list(struct.unpack_from(f"{os.cpu_count()}Q", self.memory))


@contextmanager
def movers(count: int) -> Iterator[list[Mover]]:
    found: list[Mover] = []
    try:
        for seed in range(count):
            descriptor = os.memfd_create("truth")
            os.ftruncate(descriptor, 4096)
            command = [sys.executable, "-S", "-E", "-c", _MOVER]
            arguments = [str(descriptor), str(seed), str(os.getpid())]
            process = subprocess.Popen([*command, *arguments], pass_fds=[descriptor])
            found.append(Mover(process, mmap.mmap(descriptor, 4096)))
            os.close(descriptor)
        yield found
    finally:
        for mover in found:
            mover.process.kill()
            mover.process.wait()


@dataclass
class Division:
    """One source, and the errors of its windows."""

    source: CpuUsageSource
    movers: list[Mover]
    spent: dict[int, list[int]] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    _mark: dict[int, tuple[list[int], list[int], int]] = field(default_factory=dict)

    def poll(self, *, cut: bool) -> None:
        """Poll, and at a ``cut`` compare the window since the last one with the truth."""
        before = [mover.truth() for mover in self.movers]
        for usage in self.source.poll().usages:
            cpu = usage.resource.removeprefix("cpu").removeprefix(":")
            for payer, amount in usage.spent.items() if cpu else ():
                mine = self.spent.setdefault(getattr(payer, "pid", 0), [0] * (os.cpu_count() or 1))
                mine[int(cpu)] += amount
        if cut:
            for mover, first in zip(self.movers, before, strict=True):
                self._compare(mover, first, mover.truth())

    def _compare(self, mover: Mover, first: list[int], last: list[int]) -> None:
        pid = mover.process.pid
        spent = list(self.spent.get(pid, [0] * len(last)))
        unsure = sum(last) - sum(first)
        mark, self._mark[pid] = self._mark.get(pid), (last, spent, unsure)
        if mark is None:
            return
        true = [now - then for now, then in zip(last, mark[0], strict=True)]
        charged = [now - then for now, then in zip(spent, mark[1], strict=True)]
        if unsure + mark[2] > MAX_ERROR_OF_TRUTH or sum(true) < MIN_WORK or not sum(charged):
            return
        parts = zip(true, charged, strict=True)
        self.errors.append(sum(abs(t / sum(true) - c / sum(charged)) for t, c in parts) / 2)


def topology(folder: Path) -> CpuTopology:
    """Every CPU is a socket."""
    for cpu in range(os.cpu_count() or 1):
        place = folder / f"devices/system/cpu/cpu{cpu}/topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{cpu}\n")
    return CpuTopology(folder)


def measure_errors(seconds: float, count: int, sockets: CpuTopology) -> dict[str, list[float]]:
    clock = SystemClock()
    times = SocketTimes(sockets, CpuTopology().possible)
    with movers(count) as processes:
        divisions = {
            name: Division(
                CpuUsageSource(clock, ProcFs(), clock.read_cpu_clock, sockets, times=used),
                processes,
            )
            for name, used in (("counted (eBPF)", times), ("sampled", None))
        }
        due = time.monotonic()
        for at in range(round(seconds / WINDOW) * POLLS):
            due += WINDOW / POLLS
            time.sleep(max(0.0, due - time.monotonic()))
            for division in divisions.values():
                division.poll(cut=at % POLLS == 0)
        for division in divisions.values():
            division.source.close()
        return {name: division.errors for name, division in divisions.items()}


_PING = """
import os, sys
os.sched_setaffinity(0, {0})
(a, b), (c, d) = os.pipe(), os.pipe()
child = os.fork()
for _ in range(int(sys.argv[1])):
    if child:
        os.write(b, b"x"); os.read(c, 1)
    else:
        os.read(a, 1); os.write(d, b"x")
if child: os.waitpid(child, 0)
"""


def cpu_of_switches(rounds: int) -> float:
    """The CPU nanoseconds of a round trip between two processes on one CPU: two switches."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-S", "-E", "-c", _PING, str(rounds)]
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used / rounds * 1e9


def run_statistics(program: int) -> tuple[int, int]:
    """The kernel's nanoseconds and runs of a program."""
    info = ctypes.create_string_buffer(256)
    request = struct.pack("=IIQ", program, 256, ctypes.addressof(info))
    call_bpf(15, request)  # BPF_OBJ_GET_INFO_BY_FD
    return struct.unpack_from("=QQ", info, 192)


SOFTWARE_EVENTS = ((1, 0), (1, 1), (1, 3), (1, 2))  # cpu-clock, task-clock, switches, page faults
EVENTS = {"hardware": HARDWARE_EVENTS, "software": SOFTWARE_EVENTS}


def print_cost(
    sockets: CpuTopology, events: Sequence[PerfEvent], repeats: int, rounds: int
) -> None:
    without, counted, runs = [], [], []
    cpu_of_switches(rounds // 10)
    for _ in range(repeats):
        without.append(cpu_of_switches(rounds))
        times = SocketTimes(sockets, CpuTopology().possible, events=events)
        counted.append(cpu_of_switches(rounds))
        statistics_on = call_bpf(32, bytes(4))  # BPF_ENABLE_STATS
        cpu_of_switches(rounds)
        spent, number = run_statistics(times.program)
        runs.append(spent / number)
        os.close(statistics_on)
        times.close()
    before, after, one = (statistics.median(found) for found in (without, counted, runs))
    print(
        f"\nA round trip of two context switches takes {before:.0f} ns of CPU time without the "
        f"program and {after:.0f} ns with it, one run of the program with {len(events)} events "
        f"{one:.0f} ns by the kernel's statistics (medians)."
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="of the comparison")
    options.add_argument("--movers", type=int, default=3)
    options.add_argument("--rounds", type=int, default=100_000, help="of two switches")
    options.add_argument("--repeats", type=int, default=0, help="of the cost of two switches")
    options.add_argument("--events", choices=EVENTS, default="software", help="of the cost")
    chosen = options.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        sockets = topology(Path(folder))
        errors = measure_errors(chosen.seconds, chosen.movers, sockets)
        print(
            f"\nTruth: CPU time that each of {chosen.movers} moving processes records on each CPU; "
            f"error of a socket's share in {WINDOW:g} s (goal if counted: p95 ≤ {GOAL:.0%}).\n"
        )
        print("| | median | p95 | most |\n|---|---|---|---|")
        for name, found in errors.items():
            found.sort()
            p95 = found[int(len(found) * 0.95)]
            print(f"| {name} | {statistics.median(found):.1%} | {p95:.1%} | {found[-1]:.1%} |")
    for events in ((), EVENTS[chosen.events]) if chosen.repeats else ():
        print_cost(sockets, events, chosen.repeats, chosen.rounds)


if __name__ == "__main__":
    main()
