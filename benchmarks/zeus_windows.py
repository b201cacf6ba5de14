"""Windows of wattspan.compat.zeus beside the real Zeus: error, cost, latency of the first read.

Both measure the same load of an emulated GPU, whose true energy is known. The real Zeus reads the
emulated NVML library. Needs `make all-tools` (a C compiler, the third-party clients).

    .venv/bin/python -m benchmarks.zeus_windows [--quick]
"""

from __future__ import annotations

import argparse
import json
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

LENGTHS = (0.05, 0.1, 0.5, 1.0)
REPEATS = (120, 120, 60, 40)
QUICK = (30, 30, 12, 8)
COSTS = 2000  # pairs of begin and end
LEARNING = 10.0  # seconds in which the agent finds the steps of the GPU's counter


def windows(agent: SpanAgent, repeats: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """The lines of one process."""
    sys.path.insert(0, str(ROOT))
    from testbed.nvml_library import build, environment

    plan = {
        "door": str(agent.host / "engine.sock"),
        "lengths": LENGTHS,
        "repeats": repeats,
        "costs": COSTS,
        "seed": seed,
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


def error_table(lines: Sequence[dict[str, Any]], repeats: Sequence[int]) -> Iterator[str]:
    yield (
        "Truth: energy of an emulated board between the same begin and end; p90 of errors of "
        f"{min(repeats)} to {max(repeats)} windows.\n"
    )
    yield "| length | wattspan | truth within stated | Zeus |"
    yield "|---|---:|---:|---:|"
    for seconds in LENGTHS:
        those = [one for one in lines if one.get("seconds") == seconds]
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
    for kind, name in (("gpu", "GPU"), ("cpu", "CPU packages")):
        found = [one["latency"] / 1e9 for one in lines if one.get("read") == kind]
        if found:
            yield f"First read of {name}: {quantile(found, 0.95):.3f} s (p95)."


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a quarter of the windows")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    if not CLIENTS.exists():
        sys.exit(f"There is no {CLIENTS}: run `make all-tools` first.")
    print(describe(), end="\n\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        SpanAgent(Path(folder), profile=PROFILE, emulation__counters=COUNTERS) as agent,
    ):
        time.sleep(LEARNING)
        repeats = QUICK if chosen.quick else REPEATS
        lines = windows(agent, repeats, chosen.seed)
        print(agent.said(), file=sys.stderr)
    for table in (error_table(lines, repeats), costs(lines)):
        print("\n".join(table), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
