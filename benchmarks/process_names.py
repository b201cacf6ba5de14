"""Cost of discovering new processes, by the naming setting.

Processes that an interpreter runs, asleep; each is described as when it first uses a CPU: its
name, user and cgroups. CPU time of one thread, the policies in turn. The files come from the
kernel's memory: waiting for a disk or hanging in the kernel uses no CPU.

    .venv/bin/python -m benchmarks.process_names
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from testbed.machine import describe
from testbed.process_costs import family

from benchmarks.harness import sleepers
from wattspan.model import NamePolicy
from wattspan.processes.metadata import HostProcesses
from wattspan.processes.procfs import ProcFs
from wattspan.processes.scripts import script_of

OPTIONS = [b"-Dkey%d=" % n + b"v" * 50 for n in range(250)]
LONG = b"\0".join([b"java", *OPTIONS, b"-jar", b"a.jar", b""])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--processes", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=15)
    chosen = options.parse_args()
    print(describe())
    with sleepers(chosen.processes):
        pids = family(os.getpid())[-chosen.processes :]
        looks = {names: look(pids, names) for names in NamePolicy}
        took = {names: list[float]() for names in looks}
        for _ in range(chosen.rounds):
            for names, describe_all in looks.items():
                took[names].append(cpu_time(describe_all))
    print(
        f"\nCPU microseconds to describe one of {len(pids):,} new Python processes; "
        f"{chosen.rounds} rounds\n"
    )
    print("| `[processes] names` | median | least |")
    print("|---|---|---|")
    for names, cost in took.items():
        middle, least = (1000 * one / len(pids) for one in (statistics.median(cost), min(cost)))
        print(f'| `"{names}"` | {middle:.1f} | {least:.1f} |')
    long = statistics.median(cpu_time(read_long) for _ in range(101))
    size = f"{len(LONG) / 1024:.0f} KiB in {len(OPTIONS)} options"
    print(f"\nTo find the script in a command line of {size} takes {1000 * long:.0f} µs.")


def look(pids: list[int], names: NamePolicy) -> Callable[[], None]:
    """Describe all processes without a cached description."""

    def describe_all() -> None:
        directory = HostProcesses(ProcFs(), names)
        for pid in pids:
            consumer = directory.identify(pid)
            assert consumer is not None
            assert directory.describe(consumer) is not None

    return describe_all


def read_long() -> None:
    assert script_of("java", LONG, 64) == "java a.jar"


def cpu_time(action: Callable[[], object]) -> float:
    """CPU milliseconds of this thread."""
    began = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - began) / 1e6


if __name__ == "__main__":
    main()
