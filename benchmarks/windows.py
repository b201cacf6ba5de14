"""Cost of manual measurement: beginning and ending a window, and reading its figures.

.venv/bin/python -m benchmarks.windows
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

from testbed.machine import describe
from testbed.spans.agent import SpanAgent

import wattspan
from wattspan.compat.zeus import Measurement, ZeusMonitor
from wattspan.sdk.client import read_measurement

FIRST = """
import socket, time, wattspan
wattspan.window
start = time.perf_counter_ns()
wattspan.window().begin()
print(time.perf_counter_ns() - start)
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--windows", type=int, default=100_000)
    options.add_argument("--reads", type=int, default=200)
    options.add_argument("--kept", type=int, default=5000)
    chosen = options.parse_args()
    print(describe())
    print("\nMicroseconds; a running agent on an emulated host with two sockets and two GPUs\n")
    print("| | median | p99 |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        agent = SpanAgent(Path(folder))
        os.environ["WATTSPAN_RUN_DIR"] = str(agent.run_dir)
        with closing(agent):
            begins, ends, windows = edges(chosen.windows)
            show("begin", begins)
            show("end", ends)
            show("the first window of a process", (first() for _ in range(100)))
            windows[-1].result(timeout=30)
            show("reading a settled window", reads(windows[-chosen.reads :]))
            devices(chosen.kept)


def edges(count: int) -> tuple[list[int], list[int], list[wattspan.Window]]:
    """Nanoseconds of each begin and end, and the windows."""
    begins, ends, windows = [], [], []
    with wattspan.window():
        pass  # the first, which sends a word to the agent
    for _ in range(count):
        window = wattspan.window("train")
        before = time.perf_counter_ns()
        window.begin()
        between = time.perf_counter_ns()
        window.end()
        ends.append(time.perf_counter_ns() - between)
        begins.append(between - before)
        windows.append(window)
    return begins, ends, windows[-1000:]


def devices(count: int) -> None:
    """Seconds for the sum of kept windows of a GPU, and the part of a loop that reading takes."""
    warnings.simplefilter("ignore")
    monitor = ZeusMonitor(gpu_indices=[0], cpu_indices=[])

    def step(seconds: float) -> Measurement:
        monitor.begin_window("step", sync_execution=False)
        time.sleep(seconds)
        return monitor.end_window("step", sync_execution=False)

    kept = [step(0.001) for _ in range(count)]
    time.sleep(1)
    summed = took(lambda: sum(one.total_energy for one in kept)) / 1e9
    print(f"\n{count:,} kept windows of one GPU are summed in {summed:.2f} s.")
    kept, spent = [], 0
    for _ in range(100):
        kept.append(step(0.1))
        if len(kept) > 3:
            spent += took(lambda: kept[-4].total_energy)
    part = spent / 1e9 / sum(one.time for one in kept)
    print(f"Reading each window 0.3 s after its end takes {part:.1%} of a loop of 0.1 s.")


def first() -> int:
    """Nanoseconds that the first window of a program takes to begin."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


def reads(windows: Iterable[wattspan.Window]) -> Iterable[int]:
    """Nanoseconds of each, without others that are unread."""
    queries = [
        {"pid": "self", "family": "1", "start": f"mono:{start}", "end": f"mono:{end}"}
        for start, end in (window.period for window in windows)
    ]
    return (took(partial(read_measurement, query, 5.0)) for query in queries)


def took(act: Callable[[], object]) -> int:
    before = time.perf_counter_ns()
    act()
    return time.perf_counter_ns() - before


def show(name: str, nanoseconds: Iterable[int]) -> None:
    values = sorted(nanoseconds)
    median, late = values[len(values) // 2], values[len(values) * 99 // 100]
    print(f"| {name} | {written(median)} | {written(late)} |", flush=True)


def written(nanoseconds: int) -> str:
    micros = nanoseconds / 1e3
    return f"{micros:.2f}" if micros < 10 else f"{micros:,.0f}"


if __name__ == "__main__":
    main()
