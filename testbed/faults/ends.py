"""Ends: SIGTERM and SIGKILL at any moment, and a stop while thousands of spans are open."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from testbed.faults.power_limits import FIXED, IMPOSED, Limits
from testbed.faults.schedule import Fault, Sign
from testbed.faults.stage import ROOT, Stage

PROGRAM = [sys.executable, "-c", "from wattspan.cli import main; main()"]
START = 3.0  # seconds in which an agent has surely started, on a machine with nothing else to do
STOP_LIMIT = 20.0  # seconds: TimeoutStopSec of the unit has at least as many


@dataclass(frozen=True)
class End:
    """End of one agent that received a signal ``after`` so many seconds."""

    after: float
    code: int
    took: float
    left: Sequence[str]  # processes of its own that it left behind
    said: str
    store: str  # "ok", "none", or the defect
    capped: bool  # whether a power limit was changed at that time
    turned: Sequence[str]  # the limits that were when all had ended

    @property
    def wrong(self) -> list[str]:
        found = []
        if self.code not in (0, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM):
            found.append(f"exit code {self.code}")
        if self.left:
            found.append(f"left behind: {', '.join(self.left)}")
        if "Traceback" in self.said or "fault of wattspan" in self.said:
            found.append(f"said: {self.said[-300:]}")
        if self.store not in ("ok", "none"):
            found.append(f"store: {self.store}")
        if self.turned:
            found.append(f"limits: {', '.join(self.turned)}")
        return [f"after {self.after:.3f} s: {one}" for one in found]


def end_after(after: float, number: int = signal.SIGTERM, *, capping: bool = False) -> End:
    """Start an agent on an emulated host of its own, and end it so many seconds later.

    ``capping``: so much later than it has turned a limit.
    """
    folder = Path(tempfile.mkdtemp(prefix="wattspan-"))
    chosen = {
        "agent.state_dir": folder / "state",
        "agent.run_dir": folder / "run",
        "store.interval": "1s",
        "spans.http": "127.0.0.1:0",
        "exporters.prometheus.listen": "127.0.0.1:0",
        "exporters.files.directory": folder / "files",
        "exporters.files.interval": "200ms",
        "autotune.mode": "apply",  # so there is a capper as well
        "caps.users": "[]",
    }
    words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WATTSPAN_", "COVERAGE"))}
    (folder / "config.toml").write_text(FIXED)  # so that it has a limit to restore
    mark = f"WATTSPAN_MARK_{folder.name.replace('-', '_')}"
    try:
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(
                [*PROGRAM, "run", "--emulate", "one-socket-h100", *words],
                env=clean | {"WATTSPAN_CONFIG": str(folder / "config.toml"), mark: "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        if capping:
            _caps(process.pid)
        time.sleep(after)
        with Limits.of_agent(process.pid) as limits:
            capped = bool(limits.turned())
            began = time.monotonic()
            process.send_signal(number)
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            took = time.monotonic() - began
            left = _gone(mark)
            turned = limits.turned(imposed=IMPOSED)
        text = (folder / "said").read_text(errors="replace")
        return End(after, code, took, left, text, _store(folder / "state"), capped, turned)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _caps(pid: int, within: float = 60.0) -> None:
    """Return when an agent has turned a limit; or late, if it never does."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        with Limits.of_agent(pid) as limits:
            if limits.turned():
                return
        time.sleep(0.05)


def _gone(mark: str, within: float = 20.0) -> list[str]:
    """Processes with ``mark`` in their environment after some seconds; they are killed."""
    deadline = time.monotonic() + within
    while (pids := _marked(mark.encode())) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = []
    for pid in pids:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            left.append(b" ".join(words)[:120].decode(errors="replace"))
            os.kill(pid, signal.SIGKILL)
    return left


def _marked(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _store(state: Path) -> str:
    path = state / "wattspan-emulated.sqlite"
    if not path.exists():
        return "none"
    try:
        with closing(sqlite3.connect(path)) as database:
            return str(database.execute("PRAGMA integrity_check").fetchone()[0])
    except sqlite3.Error as error:
        return str(error)


def moments(count: int, seed: int = 1) -> list[tuple[float, bool]]:
    """When to end agents: most while they start, some once they have turned limits."""
    draw = random.Random(seed)
    starting = [(START * n / (count * 3 // 4), False) for n in range(count * 3 // 4)]
    return starting + [(draw.random() * 2, True) for _ in range(count - len(starting))]


def sweep(count: int, number: int = signal.SIGTERM, beside: int = 2) -> list[End]:
    def end(moment: tuple[float, bool]) -> End:
        after, capping = moment
        return end_after(after, number, capping=capping)

    with ThreadPoolExecutor(beside) as pool:
        return list(pool.map(end, moments(count)))


def at_any_moment(count: int, short: int) -> Fault:
    """Many agents that are ended at all times, and one that keeps running."""
    ends: list[End] = []

    def inject(stage: Stage) -> None:
        ends.extend(sweep(count))

    def note(_: Stage) -> str:
        wrong = [one for end in ends for one in end.wrong]
        slowest = max((end.took for end in ends), default=0.0)
        ended = (
            f"{len(ends) - len(wrong)} of {len(ends)} ended in order, at most {slowest:.1f} s later"
        )
        capped = f"limits were turned in {sum(end.capped for end in ends)} of those moments"
        return "; ".join([ended, capped, *wrong[:3]])

    return Fault(
        f"SIGTERM at {count} moments, from the first millisecond of the start on",
        inject,
        lambda _: None,
        "An agent may be stopped at any time; it leaves no process, file or cap behind.",
        [
            Sign(
                "no process left, stores sound",
                lambda *_: bool(ends) and not any(end.wrong for end in ends),
            ),
            Sign(
                "every power limit as it was",
                lambda *_: any(end.capped for end in ends) and not any(end.turned for end in ends),
            ),
            Sign("all within TimeoutStopSec", lambda *_: all(e.took < STOP_LIMIT for e in ends)),
        ],
        lasts=0.1,
        how="separate agents beside the observed one",
        note=note,
    )


def killed_again_and_again(times: int) -> Fault:
    """SIGKILL at random times; the next run starts on the remaining state."""
    draw = random.Random(7)
    took: list[float] = []

    def inject(stage: Stage) -> None:
        for _ in range(times):
            time.sleep(0.2 + draw.random() * 2)
            began = time.monotonic()
            stage.restart(signal.SIGKILL)
            took.append(time.monotonic() - began)

    return Fault(
        f"SIGKILL at {times} random moments, each followed by a start",
        inject,
        lambda _: None,
        "Totals continue from the last published values; the time between is a gap.",
        unanswered="it is ended and started anew",
        lasts=0.1,
        short=0.1,
        missing=100.0,  # no measurement without an agent
        note=lambda _: f"first figures {max(took):.1f} s after the kill at most",
    )


# -------------------------------------------------------------------------------- open spans

ANNOUNCER = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from wattspan import otel
provider = TracerProvider()
assert otel.instrument(provider)
tracer = provider.get_tracer("open")
spans = []
import time
for n in range(int(sys.argv[1])):
    spans.append(tracer.start_span(f"open {n % 50}"))
    if n % 500 == 499:
        time.sleep(0.02)
print("open", flush=True)
while not sys.stdin.closed and sys.stdin.readline():
    pass
"""


def open_at_stop(count: int) -> Fault:
    """An application announces spans and ends none; the agent is stopped and restarted."""
    found: dict[str, float] = {}

    def inject(stage: Stage) -> None:
        application = subprocess.Popen(
            [sys.executable, "-c", ANNOUNCER, str(count)],
            env=os.environ | {"WATTSPAN_RUN_DIR": str(stage.run), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert application.stdout is not None
            if application.stdout.readline() != b"open\n":
                raise RuntimeError("the application told of no spans")
            name = "wattspan_spans_open"
            stage.until(
                lambda: stage.last.total(name) >= count * 10**9, f"{count} spans are open", 30
            )
            found["open"] = stage.last.total(name) / 1e9
            began = time.monotonic()
            stage.agent.send_signal(signal.SIGTERM)
            found["code"] = stage.agent.wait(60)
            found["took"] = time.monotonic() - began
            stage.begin_again()
        finally:
            application.communicate()

    return Fault(
        f"{count:,} open spans at the stop",
        inject,
        lambda _: None,
        "Open spans have no energy; the energy of their processes is outside all spans.",
        [
            Sign(
                f"{count:,} open, exit code 0, within TimeoutStopSec",
                lambda *_: found.get("code") == 0 and found["took"] < STOP_LIMIT,
            )
        ],
        unanswered="it is ended and started anew",
        lasts=0.1,
        short=0.1,
        missing=100.0,
        note=lambda _: json.dumps({k: round(v, 2) for k, v in found.items()}).replace('"', "")[
            1:-1
        ],
    )


FAULTS = [at_any_moment(40, 8), killed_again_and_again(6), open_at_stop(10_000)]
SHORT = [killed_again_and_again(2), open_at_stop(10_000)]
