"""Processes under measurement: start one, know its CPU time and memory, stop it, by its pid.

CPU time is the kernel's CPU clock of the process: nanoseconds, user and system, all threads.
It costs the measured process no CPU time, and unlike wall time it hardly depends on other load.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from testbed.process_costs import cpu_seconds, family, rss_megabytes, stop

_SLEEPERS = """
import os, sys
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
os.write(1, b"ready")
os.read(0, 1)
while True:
    try: os.wait()
    except ChildProcessError: break
"""


_FORKER = """
import os, select, sys, time
rate, started, began = int(sys.argv[1]), 0, time.monotonic()
os.write(1, b"ready")
while not select.select([0], [], [], 0.01)[0]:
    due = int((time.monotonic() - began) * rate) - started
    due = min(due, max(1, rate // 10))  # a late start is not made up for
    pids = [os.posix_spawn("/bin/true", ["true"], {}) for _ in range(due)]
    for pid in pids: os.waitpid(pid, 0)
    started += due
    if due == rate // 10: began = time.monotonic() - started / rate
os.write(1, b"%d" % started)
"""


@dataclass(frozen=True)
class Subject:
    """Something to measure: its start command, and the requests during its run."""

    name: str
    command: Sequence[str | Path]
    url: str | None = None  # scraped once a second, like a monitoring system would
    environ: dict[str, str] = field(default_factory=dict)
    with_children: bool = True  # whether the cost of descendants counts
    warm_up: float = 10.0  # seconds until its cost is steady
    steady: bytes = b""  # its answer contains this once its cost is, at most some minutes later
    beside: Sequence[str | Path] = ()  # a command that runs beside it and is not part of the cost

    def processes(self, pid: int) -> list[int]:
        """The processes whose cost is the subject's."""
        return family(pid) if self.with_children else [pid]

    def cpu_seconds(self, pid: int) -> float:
        """CPU time so far, including ended descendants if they count."""
        ended = _cpu_of_ended_children(pid) if self.with_children else 0.0
        return ended + sum(cpu_seconds(one) for one in self.processes(pid))

    @contextmanager
    def running(self, within: float = 60.0) -> Iterator[int]:
        """Its pid, once it responds; the process is gone afterwards."""
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [str(word) for word in self.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=os.environ | self.environ,
            )
            try:
                deadline = time.monotonic() + within
                while self.url is not None and not _answers(self.url):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{self.name} did not start: {_last_words(log)}")
                    time.sleep(0.02)
                yield process.pid
                if process.poll() is not None:
                    raise RuntimeError(f"{self.name} ended by itself: {_last_words(log)}")
            finally:
                stop(process)


@dataclass(frozen=True)
class Cost:
    """Resource usage of a subject over a window: percent of one core, and megabytes at its end."""

    cpu_percent: float
    rss: float


def measure(subject: Subject, window: float) -> Cost:
    """Start, let it settle, scrape it once a second for ``window`` seconds, stop it."""
    with ExitStack() as running:
        pid = running.enter_context(subject.running())
        if subject.beside:
            running.enter_context(piped(subject.beside))
        _scrape_for(subject.url, subject.warm_up)
        _await_steady(subject)
        began, used = time.monotonic(), subject.cpu_seconds(pid)
        _scrape_for(subject.url, window)
        used, lasted = subject.cpu_seconds(pid) - used, time.monotonic() - began
        return Cost(used / lasted * 100, sum(map(rss_megabytes, subject.processes(pid))))


def medians(
    subjects: Sequence[Subject], repeats: int, once: Callable[[Subject], Cost]
) -> dict[str, Cost]:
    """The median cost of each subject; rounds take turns, so that drift falls on all alike."""
    costs: dict[str, list[Cost]] = {subject.name: [] for subject in subjects}
    for round_ in range(repeats):
        for subject in subjects:
            cost = once(subject)
            costs[subject.name].append(cost)
            print(
                f"  round {round_ + 1}, {subject.name}: {cost.cpu_percent:.2f} % of a core, "
                f"{cost.rss:.0f} MB",
                file=sys.stderr,
            )
    return {
        name: Cost(
            statistics.median(cost.cpu_percent for cost in found),
            statistics.median(cost.rss for cost in found),
        )
        for name, found in costs.items()
    }


@contextmanager
def piped(command: Sequence[str | Path]) -> Iterator[tuple[IO[str], IO[str]]]:
    """Run a process that ends with its input; yields its standard input and output."""
    process = subprocess.Popen(
        [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdin, process.stdout
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


@contextmanager
def sleepers(count: int) -> Iterator[None]:
    """Start ``count`` sleeping processes, which end with this process in any case."""
    # The end of their input is the end of them all.
    with piped([sys.executable, "-S", "-E", "-c", _SLEEPERS, str(count)]) as (_, output):
        if output.read(5) != "ready":
            raise RuntimeError(f"only some of {count} processes could be started")
        yield


@dataclass
class Forker:
    """Short-lived processes: the achieved rate per second is known at the end."""

    rate: float = 0.0


@contextmanager
def forker(rate: int) -> Iterator[Forker]:
    """Run ``rate`` processes a second that end at once, as far as the machine manages."""
    load = Forker()
    if not rate:
        yield load
        return
    with piped([sys.executable, "-S", "-E", "-c", _FORKER, str(rate)]) as (control, output):
        output.read(5)
        began = time.monotonic()
        yield load
        control.close()
        load.rate = int(output.read() or 0) / (time.monotonic() - began)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


def _answers(url: str) -> bool:
    with suppress(OSError):
        return bool(fetch(url))
    return False


def _cpu_of_ended_children(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[13]) + int(stat[14])) / os.sysconf("SC_CLK_TCK")  # cutime, cstime


def _await_steady(subject: Subject, within: float = 300.0) -> None:
    deadline = time.monotonic() + within
    while subject.url is not None and subject.steady not in fetch(subject.url):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{subject.name} does not settle: its answer lacks {subject.steady!r}"
            )
        _scrape_for(subject.url, 1.0)


def _scrape_for(url: str | None, seconds: float) -> None:
    end = time.monotonic() + seconds
    due = time.monotonic()
    while (now := time.monotonic()) < end:
        if url is not None and now >= due:
            fetch(url)
            due = max(due + 1.0, time.monotonic())
        time.sleep(max(0.0, min(due if url is not None else end, end) - time.monotonic()))


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace").strip()[-500:] or "it said nothing"
