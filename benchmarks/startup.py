"""Time from the start of the program to its first figure, next to its peers.

For the agent the first figure is a nonzero counter of energy attributed to a process; for an
exporter, its first answer. The agent waits for its emulated host, which starts first: the last row
is the part of the agent's time that no real host has.

    .venv/bin/python -m benchmarks.startup
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from testbed.machine import describe
from testbed.process_costs import stop

from benchmarks.harness import Subject, fetch
from benchmarks.peers import agent, peers
from wattspan.emulation.host import EmulatedHost, profile_named

FIRST_FIGURE = {
    "wattspan": re.compile(
        rb"^wattspan_process_energy_joules_total\{[^\n]*\} (?!0(\.0)?$)", re.MULTILINE
    )
}
PROFILE = "two-socket-h100"
ANYTHING = re.compile(rb"^[a-z]", re.MULTILINE)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=5)
    chosen = options.parse_args()
    print(describe())
    print(f"\nTo the first figure, seconds; {chosen.repeats} starts (goal: 0.5 s for wattspan)\n")
    print("| | median | least | most |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for subject in [agent(Path(folder), profile=PROFILE), *peers(Path(folder))]:
            if subject.url is None:
                continue
            took = [first_figure(subject) for _ in range(chosen.repeats)]
            print(
                f"| {subject.name} | {statistics.median(took):.2f} | {min(took):.2f} "
                f"| {max(took):.2f} |"
            )
    took = [emulated_host() for _ in range(chosen.repeats)]
    print(
        f"| of wattspan's time: its emulated host | {statistics.median(took):.2f} "
        f"| {min(took):.2f} | {max(took):.2f} |"
    )


def emulated_host() -> float:
    """Seconds that the emulated host of the agent takes to start."""
    began = time.monotonic()
    with EmulatedHost(profile_named(PROFILE)):
        return time.monotonic() - began


def first_figure(subject: Subject, within: float = 60.0) -> float:
    """Seconds until the subject's answer holds its first figure."""
    assert subject.url is not None
    wanted = FIRST_FIGURE.get(subject.name, ANYTHING)
    began = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in subject.command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while time.monotonic() - began < within:
            with suppress(OSError):
                if wanted.search(fetch(subject.url)):
                    return time.monotonic() - began
            if process.poll() is not None:
                raise RuntimeError(f"{subject.name} ended with {process.returncode}")
            time.sleep(0.01)
    finally:
        stop(process)
    raise RuntimeError(f"{subject.name}: no figure within {within:g} s")


if __name__ == "__main__":
    main()
