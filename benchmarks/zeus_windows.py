"""Windows of wattspan.compat.zeus beside the real Zeus: error, cost, late reads and many reads.

Both measure the same load of an emulated GPU, whose true energy is known. The real Zeus reads the
emulated NVML library. Needs `make all-tools` (a C compiler, the third-party clients).

With --starts, short windows of eight boards of constant power, whose counters move at evenly spread
times, from the start of an agent on; without Zeus and its tools.

    .venv/bin/python -m benchmarks.zeus_windows [--quick] [--starts 8]
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.machine import describe
from testbed.spans.accuracy import CLIENTS, COUNTERS, PROFILE, ROOT, quantile
from testbed.spans.agent import SpanAgent
from testbed.spans.workload import Board

LENGTHS = (0.05, 0.1, 0.5, 1.0)
REPEATS = (120, 120, 60, 40)
QUICK = (30, 30, 12, 8)
COSTS = 2000  # pairs of begin and end
BOARDS, SHORT = 8, 0.12  # of the windows from the start of an agent on, in seconds
WATCHED, KNOWN_AFTER, MOST = 20.0, 3.0, 0.05  # seconds, seconds, relative error
LATE, QUICK_LATE = 440.0, 30.0  # seconds until kept windows are read for the first time
MANY, STEPS = 5000, 150  # kept windows that are read together, and windows of a loop
LEARNING = 10.0  # seconds in which the agent finds the steps of the GPU's counter


def windows(
    agent: SpanAgent, repeats: Sequence[int], seed: int, late: float
) -> list[dict[str, Any]]:
    """The lines of one process."""
    sys.path.insert(0, str(ROOT))
    from testbed.nvml_library import build, environment

    plan = {
        "door": str(agent.host / "engine.sock"),
        "lengths": LENGTHS,
        "repeats": repeats,
        "costs": COSTS,
        "seed": seed,
        "late": late,
        "every": 4,  # of the windows has one that is read late
        "many": MANY,
        "steps": STEPS,
    }
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("CUDA_")},
            **environment(build(Path(folder)), agent.host / "gpus"),
            "WATTSPAN_RUN_DIR": str(agent.run_dir),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agent")]),
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run(
            [str(CLIENTS), "-m", "testbed.spans.zeus_windows"],
            input=json.dumps(plan) + "\n",
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environ,
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def error(one: dict[str, Any], who: str) -> float:
    """Relative."""
    return abs(one[who] - one[f"{who}_true"]) / float(one[f"{who}_true"])


def error_table(lines: Sequence[dict[str, Any]], read: str) -> Iterator[str]:
    yield (
        "Truth: energy of an emulated board between the same begin and end; p90 of errors of "
        f"{len(lines)} windows, first read {read}.\n"
    )
    yield "| length | wattspan | truth within stated | Zeus |"
    yield "|---|---:|---:|---:|"
    for seconds in LENGTHS:
        those = [one for one in lines if one["seconds"] == seconds]
        if not those:
            continue
        ours, zeus = ([error(one, who) for one in those] for who in ("ours", "zeus"))
        within = [abs(one["ours"] - one["ours_true"]) <= one["uncertainty"] for one in those]
        yield (
            f"| {seconds:g} s | {quantile(ours, 0.9):.1%} | {sum(within) / len(within):.0%} "
            f"| {quantile(zeus, 0.9):.1%} |"
        )


def costs(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    ours, zeus = (next(one for one in lines if one.get("cost") == who) for who in ("ours", "zeus"))
    yield (
        f"Begin and end cost {ours['median']:.1f} µs (Zeus: {zeus['median']:.1f} µs) without "
        "synchronisation."
    )
    many = next(one for one in lines if "many" in one)
    yield (
        f"Reading {many['many']:,} kept windows of one GPU takes {many['ours']:.2f} s (begins and "
        f"ends by Zeus: {many['zeus']:.2f} s)."
    )
    ours, zeus = (next(one for one in lines if one.get("loop") == who) for who in ("ours", "zeus"))
    yield (
        "Windows of 0.1 s, each read 0.25 s after its end or later, take "
        f"{ours['overhead']:.2%} of the time of their loop (Zeus: {zeus['overhead']:.2%})."
    )
    for kind, name in (("gpu", "GPU"), ("cpu", "CPU packages")):
        found = [one["latency"] / 1e9 for one in lines if one.get("read") == kind]
        if found:
            yield f"First read of {name}: {quantile(found, 0.95):.3f} s (p95)."


def first_windows(door: str) -> None:
    """Measure windows of all boards, from the registration of this process on; print them."""
    from wattspan.compat.zeus import ZeusMonitor

    board = Board(door, None)
    for gpu in range(BOARDS):
        board.ask(do="attach", gpu=gpu, load=0.6)
    monitor = ZeusMonitor(gpu_indices=list(range(BOARDS)), cpu_indices=[])
    time.sleep(0.5)  # the power is constant from now on
    windows, registered = [], time.monotonic()
    while (since := time.monotonic() - registered) < WATCHED:
        monitor.begin_window("w", sync_execution=False)
        time.sleep(SHORT)
        windows.append((since, monitor.finish_window("w", sync_execution=False)))
        if len(windows) % 2:
            _ = windows[-1][1].gpu_energy  # read at once; the others, when more is known
    for since, one in windows:
        early, late = (at["gpus"] for at in board.truths(one.period))
        true = [(late[gpu]["energy"] - early[gpu]["energy"]) / 1e6 for gpu in range(BOARDS)]
        off = [abs(one.gpu_energy[gpu] - true[gpu]) for gpu in range(BOARDS)]
        within = [off[gpu] <= one.uncertainty[gpu] for gpu in range(BOARDS)]
        worst = max(map(operator.truediv, off, true))
        print(json.dumps({"since": since, "worst": worst, "within": within}), flush=True)


def start_table(starts: int) -> Iterator[str]:
    yield (
        f"{BOARDS} emulated boards of constant power, counters that move at evenly spread times, "
        f"windows of {SHORT} s from the registration of a process at a fresh agent on. Error: of "
        "the worst board of a window.\n"
    )
    yield "| start | largest error after 3 s | last error above 5 % | truth within stated |"
    yield "|---:|---:|---:|---:|"
    good = 0
    for start in range(1, starts + 1):
        with tempfile.TemporaryDirectory() as folder:
            agent = SpanAgent(Path(folder), profile="eight-h100")
            with agent:
                environ = {**os.environ, "WATTSPAN_RUN_DIR": str(agent.run_dir)}
                program = [sys.executable, "-m", "benchmarks.zeus_windows", "--boards"]
                done = subprocess.run(
                    [*program, str(agent.host / "engine.sock")],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    env=environ,
                )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        later = max(one["worst"] for one in lines if one["since"] >= KNOWN_AFTER)
        last = max((one["since"] for one in lines if one["worst"] > MOST), default=0.0)
        within = [each for one in lines for each in one["within"]]
        good += later <= MOST
        yield f"| {start} | {later:.1%} | {last:.1f} s | {sum(within) / len(within):.1%} |"
    yield f"\nEvery window after {KNOWN_AFTER:g} s within {MOST:.0%}: {good} of {starts} starts."


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a quarter of the windows")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--starts", type=int, help="starts of an agent with eight boards, only")
    options.add_argument("--boards", help=argparse.SUPPRESS)  # the door of the emulated host
    chosen = options.parse_args()
    if chosen.boards:
        first_windows(chosen.boards)
        return
    if chosen.starts:
        print(describe(), end="\n\n")
        for line in start_table(chosen.starts):
            print(line, flush=True)
        return
    if not CLIENTS.exists():
        sys.exit(f"There is no {CLIENTS}: run `make all-tools` first.")
    print(describe(), end="\n\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        SpanAgent(Path(folder), profile=PROFILE, emulation__counters=COUNTERS) as agent,
    ):
        time.sleep(LEARNING)
        repeats = QUICK if chosen.quick else REPEATS
        late = QUICK_LATE if chosen.quick else LATE
        lines = windows(agent, repeats, chosen.seed, late)
        print(agent.said(), file=sys.stderr)
    found = [one for one in lines if "seconds" in one]
    soon = [one for one in found if "late" not in one]
    delayed = [one for one in found if "late" in one]
    tables = error_table(soon, "at once"), error_table(delayed, f"{late:g} s later"), costs(lines)
    for table in tables:
        print("\n".join(table), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
