"""Processes with lifetimes shorter than a poll."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from testbed.faults.judge import Breach
from testbed.faults.observation import NANO, Sight
from testbed.faults.schedule import Fault, Sign
from testbed.faults.stage import Stage

SOURCE = Path(__file__).with_name("spawn.c")
RATE = 1500  # requested per second; the result has the achieved rate
ROOM = {"processes.top": 500}
"""A row is kept for a minute; new processes must be listed at once."""
ROWS = "wattspan_process_energy_joules_total"


class Spawner:
    """The program that creates them, compiled for one stage, and its final output."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self._process: subprocess.Popen[str] | None = None
        self.told = ""

    def start(self, stage: Stage) -> None:
        program = stage.folder / "spawner"
        if not program.exists():
            compiler = shutil.which("cc") or "cc"
            words = [compiler, "-O2", "-pthread", "-o", str(program), str(SOURCE)]
            subprocess.run(words, check=True)
        self._process = subprocess.Popen(
            [str(program), *self._words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def end(self, _: Stage) -> None:
        if self._process is not None:
            self.told = self._process.communicate(timeout=60)[0].strip()
            self._process = None

    def rate(self, _: Stage) -> str:
        return f"{self.told} a second"


def charged(command: str, joules: float = 0.5) -> Sign:
    """A process called so that was not there before is charged, in a row of its own."""

    def seen(before: Sight, now: Sight) -> bool:
        old = {series.labels.get("pid") for series, _ in before.pick(ROWS, command=command)}
        return any(
            value > joules * NANO and series.labels.get("pid") not in old
            for series, value in now.pick(ROWS, command=command)
        )

    return Sign(f"`{command}` is charged", seen)


def begins_again(breach: Breach) -> bool:
    """The row of a process whose pid was used before."""
    return breach.what == "fall" and breach.series.startswith(ROWS) and "spawner" in breach.series


def _faults() -> Sequence[Fault]:
    short, threads, reuse = (
        Spawner("short", str(RATE)),
        Spawner("threads", str(RATE)),
        Spawner("reuse"),
    )
    return (
        Fault(
            "a thousand short-lived processes a second",
            short.start,
            short.end,
            "With the kernel's process events, each is charged when it ends; without them "
            "they are their cgroup's remainder. The accounts balance in both cases.",
            [],
            lasts=15.0,
            short=3.0,
            note=short.rate,
        ),
        Fault(
            "a process with short-lived threads",
            threads.start,
            threads.end,
            "The CPU clock of a process includes ended threads: the process is charged for all.",
            [charged("spawner")],
            lasts=10.0,
            short=4.0,
            note=threads.rate,
        ),
        Fault(
            "a pid is reused by a process of the same name",
            reuse.start,
            reuse.end,
            "They are two consumers, distinguished by their start time. A scrape has one "
            "series for both: the newer one has it, and it starts again like a reset counter.",
            [charged("spawner")],
            excuses=begins_again,
            lasts=6.5,
            short=6.5,
            note=lambda _: f"pid {reuse.told} twice",
        ),
    )


FAULTS = _faults()
