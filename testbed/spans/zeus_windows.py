"""Windows of ``wattspan.compat.zeus`` and of the real Zeus around the same loads.

A process of its own, in the environment of the third-party clients: reads a plan, one line of JSON,
from standard input, and prints a line of JSON for each window and for the cost of windows. The
truth is the emulated host's, at the times at which each of the two began and ended its window.
"""

from __future__ import annotations

import json
import random
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from testbed.spans.workload import SLICE, Board
from zeus.monitor import ZeusMonitor as RealMonitor

from wattspan.compat.zeus import ZeusMonitor

GPU = 0
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
) -> dict[str, Any]:
    """One window of both, one inside the other, and the latency of the first read."""
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
    asked = time.monotonic_ns()
    _ = measured.cpu_energy if kind == "cpu" else measured.gpu_energy
    latency = time.monotonic_ns() - asked
    board.load(0.0)
    true = [spent_between(board, measured.period), spent_between(board, times)]
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


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    draw = random.Random(plan["seed"])
    board = Board(plan["door"], GPU)
    ours = ZeusMonitor(gpu_indices=[GPU])
    real = RealMonitor(gpu_indices=[GPU], cpu_indices=[])
    todo = [
        seconds
        for seconds, repeat in zip(plan["lengths"], plan["repeats"], strict=True)
        for _ in range(repeat)
    ]
    draw.shuffle(todo)
    for seconds in todo:
        print(json.dumps(window(board, ours, real, draw, seconds)), flush=True)
    for name, monitor in (("ours", ours), ("zeus", real)):
        print(json.dumps({"cost": name, **costs(monitor, plan["costs"])}), flush=True)


if __name__ == "__main__":
    main()
