"""Size and trend of the agent's memory during process churn.

.venv/bin/python -m benchmarks.memory --minutes 10
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from testbed.machine import describe
from testbed.process_costs import rss_megabytes

from benchmarks.harness import fetch, sleepers
from benchmarks.peers import agent

GOAL = 45.0  # megabytes at rest; 55 with spans


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--processes", type=int, default=500, help="sleeping ones")
    options.add_argument("--churn", type=int, default=20, help="short-lived processes a second")
    chosen = options.parse_args()
    print(describe())
    samples: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, sleepers(chosen.processes):
        subject = agent(Path(folder))
        with subject.running() as pid:
            assert subject.url is not None
            began = time.monotonic()
            while (elapsed := time.monotonic() - began) < chosen.minutes * 60:
                churn(chosen.churn)
                fetch(subject.url)
                samples.append((elapsed, rss_megabytes(pid)))
                if len(samples) % 30 == 1:
                    print(f"  {elapsed:.0f} s: {samples[-1][1]:.1f} MB", file=sys.stderr)
                time.sleep(max(0.0, began + len(samples) - time.monotonic()))
    settled = samples[len(samples) // 3 :]  # the history fills first
    values = [megabytes for _, megabytes in settled]
    print(
        f"\nRSS over {chosen.minutes:g} minutes, {chosen.processes} processes, "
        f"{chosen.churn} short-lived ones and one scrape a second (goal: {GOAL:g} MB, flat)\n"
    )
    print("| first | median | most | trend of the last two thirds |")
    print("|---|---|---|---|")
    print(
        f"| {samples[0][1]:.1f} MB | {statistics.median(values):.1f} MB | {max(values):.1f} MB "
        f"| {slope(settled) * 3600:+.2f} MB/h |"
    )


def churn(count: int) -> None:
    """Run ``count`` processes that end at once."""
    for process in [subprocess.Popen(["/bin/true"]) for _ in range(count)]:
        process.wait()


def slope(samples: list[tuple[float, float]]) -> float:
    """The least-squares slope through the samples, per second."""
    return statistics.linear_regression(*zip(*samples, strict=True)).slope


if __name__ == "__main__":
    main()
