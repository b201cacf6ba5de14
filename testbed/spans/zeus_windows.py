"""Windows of ``wattspan.compat.zeus`` and of the real Zeus around the same loads.

A process of its own, in the environment of the third-party clients: reads a plan, one line of JSON,
from standard input, and prints a line of JSON for each window, for those that are read late, and
for the cost of windows, of many reads, and of a loop that reads its windows soon. The truth is the
emulated host's, at the times at which each of the two began and ended its window.
"""

from __future__ import annotations

import json
import random
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from testbed.spans.workload import SLICE, Board
from zeus.monitor import ZeusMonitor as RealMonitor

from wattspan.compat.zeus import ZeusMonitor

GPU = 0
STEP, READ_AFTER = 0.1, 0.25  # seconds
SAMPLED = 5.0  # seconds after which the agent samples a new monitor finely
REMEMBERED = 0.05  # seconds after which the emulated host knows the truth; it forgets after minutes
Load = list[tuple[float, float]]
"""Until when, in seconds, which part of the board is busy."""


def varied_load(draw: random.Random, until: float) -> Load:
    """A load that changes every 0.03 to 0.3 s."""
    load, at = [], 0.0
    while at < until:
        at += draw.uniform(0.03, 0.3)
        load.append((at, draw.choice((0.9, 0.6, 0.3, 0.0))))
    return load


def keep_up(board: Board, load: Load, start: float, until: float) -> None:
    """Follow ``load``, which began at ``start``, up to ``until`` seconds after it."""
    ends = [end for end, _ in load]
    while (now := time.monotonic() - start) < until:
        place = min(bisect_right(ends, now), len(ends) - 1)
        board.load(load[place][1])
        time.sleep(max(0.0, min(SLICE, until - now, max(0.0, ends[place] - now))))


def window(
    board: Board, ours: ZeusMonitor, real: RealMonitor, draw: random.Random, seconds: float
) -> tuple[Callable[[], None], Callable[[], dict[str, Any]]]:
    """One window of both, one inside the other.

    The first result asks for the truth, soon; the second reads ours for the first time.
    """
    lead = draw.uniform(0.05, 0.35)
    load = varied_load(draw, lead + seconds + 0.1)
    outside = draw.random() < 0.5  # Zeus's window around ours, or inside it
    times: list[int] = []

    def real_begin() -> None:
        before = time.monotonic_ns()
        real.begin_window("w", sync_execution=False)
        times.append((before + time.monotonic_ns()) // 2)

    start = time.monotonic()
    keep_up(board, load, start, lead)
    if outside:
        real_begin()
    ours.begin_window("w", sync_execution=False)
    if not outside:
        real_begin()
    keep_up(board, load, start, lead + seconds)
    before = time.monotonic_ns()
    if not outside:
        found = real.end_window("w", sync_execution=False)
        times.append((before + time.monotonic_ns()) // 2)
    measured = ours.finish_window("w", sync_execution=False)
    ended = time.monotonic_ns()
    if outside:
        found = real.end_window("w", sync_execution=False)
        times.append((ended + time.monotonic_ns()) // 2)
    kind = "cpu" if draw.random() < 0.3 else "gpu"
    true: list[float] = []

    def know() -> None:
        board.load(0.0)
        if not true:
            true.extend((spent_between(board, measured.period), spent_between(board, times)))

    def read() -> dict[str, Any]:
        asked = time.monotonic_ns()
        _ = measured.cpu_energy if kind == "cpu" else measured.gpu_energy
        latency = time.monotonic_ns() - asked
        know()
        return {
            "seconds": seconds,
            "ours": measured.gpu_energy[GPU],
            "ours_true": true[0],
            "uncertainty": measured.uncertainty[GPU],
            "coverage": measured.coverage,
            "zeus": found.gpu_energy[GPU],
            "zeus_true": true[1],
            "read": kind,
            "latency": latency,
        }

    return know, read


def spent_between(board: Board, period: Sequence[int]) -> float:
    """The true joules of the board."""
    early, late = board.truths(period)
    return float(late["gpus"][GPU]["energy"] - early["gpus"][GPU]["energy"]) / 1e6


def costs(monitor: Any, count: int) -> dict[str, float]:
    """Microseconds of begin and end together, without synchronisation: median time and CPU."""
    elapsed = []
    cpu = time.thread_time_ns()
    for _ in range(count):
        before = time.perf_counter_ns()
        monitor.begin_window("cost", sync_execution=False)
        monitor.end_window("cost", sync_execution=False)
        elapsed.append(time.perf_counter_ns() - before)
    cpu = time.thread_time_ns() - cpu
    return {"median": sorted(elapsed)[count // 2] / 1e3, "cpu": cpu / count / 1e3}


def many_reads(monitor: ZeusMonitor, real: RealMonitor, count: int) -> dict[str, Any]:
    """Seconds that all calls for ``count`` windows take: of ours at the end, of the reads."""
    kept, calls = [], 0.0
    for _ in range(count):
        monitor.begin_window("kept", sync_execution=False)
        time.sleep(0.001)
        kept.append(monitor.end_window("kept", sync_execution=False))
    time.sleep(2.0)
    began = time.perf_counter()
    energies = [one.gpu_energy[GPU] for one in kept]
    reads = time.perf_counter() - began
    for _ in range(count):
        began = time.perf_counter()
        real.begin_window("kept", sync_execution=False)
        real.end_window("kept", sync_execution=False)
        calls += time.perf_counter() - began
    return {"many": len(energies), "ours": reads, "zeus": calls}


def loop_overhead(monitor: Any, count: int) -> float:
    """The part of the time of a loop that its windows take, read 0.25 s after their end."""
    unread: deque[tuple[float, Any]] = deque()
    calls, first = 0.0, time.perf_counter()
    for _ in range(count):
        began = time.perf_counter()
        monitor.begin_window("step", sync_execution=False)
        calls += time.perf_counter() - began
        time.sleep(STEP)
        began = time.perf_counter()
        unread.append((began, monitor.end_window("step", sync_execution=False)))
        while began - unread[0][0] >= READ_AFTER:
            _ = unread.popleft()[1].gpu_energy[GPU]
        calls += time.perf_counter() - began
    return calls / (time.perf_counter() - first)


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    draw = random.Random(plan["seed"])
    board = Board(plan["door"], GPU)
    ours = ZeusMonitor(gpu_indices=[GPU])
    real = RealMonitor(gpu_indices=[GPU], cpu_indices=[])
    time.sleep(SAMPLED)
    todo = [
        seconds
        for seconds, repeat in zip(plan["lengths"], plan["repeats"], strict=True)
        for _ in range(repeat)
    ]
    draw.shuffle(todo)
    kept = []
    for seconds in todo[:: plan["every"]]:
        know, read = window(board, ours, real, draw, seconds)
        time.sleep(REMEMBERED)
        know()
        kept.append(read)
    due = time.monotonic() + plan["late"]
    for seconds in todo:
        print(json.dumps(window(board, ours, real, draw, seconds)[1]()), flush=True)
    print(json.dumps(many_reads(ours, real, plan["many"])), flush=True)
    for name, monitor in (("ours", ours), ("zeus", real)):
        overhead = loop_overhead(monitor, plan["steps"])
        print(json.dumps({"loop": name, "overhead": overhead}), flush=True)
    time.sleep(max(0.0, due - time.monotonic()))
    for read in kept:
        print(json.dumps({"late": plan["late"], **read(), "read": "late"}), flush=True)
    for name, monitor in (("ours", ours), ("zeus", real)):
        print(json.dumps({"cost": name, **costs(monitor, plan["costs"])}), flush=True)


if __name__ == "__main__":
    main()
