"""Clocks that are set, hosts that sleep, programs that are stopped for a while and go on."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from testbed.faults.hardware import Act, nothing
from testbed.faults.observation import NANO, Sight
from testbed.faults.schedule import Claim, Fault, Sign, gap, rises
from testbed.faults.stage import ROOT, Stage
from testbed.process_costs import family

HOUR = 3600
ENGINE = b"wattspan.emulation.engine"


def clock_that_can_be_set(folder: Path) -> dict[str, str]:
    """The environment of programs whose wall clock and time asleep a file in ``folder`` shifts."""
    compiler = shutil.which("cc") or "cc"
    library, file = folder / "stepped_clock.so", folder / "offset"
    source = ROOT / "testbed" / "stepped_clock.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    file.write_bytes(bytes(16))
    return {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(file)}


def set_clock(wall: float, asleep: int = 0) -> Act:
    """Let the wall clock be off by seconds, and the host have slept for some."""

    def act(stage: Stage) -> None:
        # in place: the file is mapped.
        with Path(stage.environ["STEPPED_CLOCK"]).open("r+b") as file:
            file.write(struct.pack("=qq", round(wall * NANO), asleep * NANO))
        stage.wall_offset, stage.asleep = float(wall), float(asleep)

    return act


def pids(stage: Stage, *, agent: bool = False, host: bool = False) -> list[int]:
    """The agent with its children; the emulated host with its jobs."""
    found = family(stage.agent.pid) if agent else []
    if host:
        engines = [one for one in family(os.getpid()) if ENGINE in _command(one)]
        found += [pid for engine in engines if _is_of(stage, engine) for pid in family(engine)]
    return found


def send(number: int, *, agent: bool = False, host: bool = False) -> Act:
    def act(stage: Stage) -> None:
        for pid in pids(stage, agent=agent, host=host):
            with suppress(ProcessLookupError):  # a child may have ended
                os.kill(pid, number)

    return act


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_of(stage: Stage, pid: int) -> bool:
    return str(stage.host.directory).encode() in _command(pid)


def _told_time(shift: int) -> Sign:
    name = "wattspan_snapshot_time_seconds"

    def seen(before: Sight, now: Sight) -> bool:
        passed = now.at - before.at
        told = now.total(name) - before.total(name)
        return abs(told - passed - shift * NANO) < 60 * NANO

    return Sign(f"the snapshot's time is {shift:+d} s off", seen, meanwhile=True)


ENERGY = "wattspan_span_energy_joules_total"
OUTSIDE = "wattspan_span_outside_energy_joules_total"


def _joined(_: Stage, sights: Sequence[Sight]) -> bool:
    """Spans had energy after the first step."""
    return sights[-1].total(ENERGY) > sights[0].total(ENERGY)


def _within_users(_: Stage, sights: Sequence[Sight]) -> bool:
    """Spans and the time outside them had no more energy than all users."""
    spent = [
        sum(now.total(name) for name in (ENERGY, OUTSIDE))
        - now.total("wattspan_group_energy_joules_total", group_kind="user")
        for now in sights
    ]
    return max(spent) <= 0


JOINED = [
    Claim("spans were joined", _joined),
    Claim("spans and the time outside them had at most their users' energy", _within_users),
]


def _stepped(name: str, seconds: float, means: str) -> Fault:
    return Fault(
        name,
        set_clock(seconds),
        set_clock(0),
        means,
        [_told_time(round(seconds))] if abs(seconds) >= 60 else [],  # less is not visible
        JOINED,
        lasts=10.0,
        short=2.0,
    )


WALL = (
    _stepped(
        "the wall clock is set an hour forward and back",
        HOUR,
        "No effect: energy is measured by the monotonic clock, and spans are joined by the "
        "clock offset in force when they were open. A span that seems to end before its start is "
        "refused as `inverted`.",
    ),
    _stepped("the wall clock is set an hour back and forward", -HOUR, "No effect, as above."),
    _stepped(
        "the wall clock is set 50 ms forward and back",
        0.05,
        "A span that begins or ends within 150 ms of the step is wrong by at most 50 ms, or "
        "refused as `inverted`; other spans are exact.",
    ),
    _stepped(
        "the wall clock is set 50 ms back and forward",
        -0.05,
        "As above; the 50 ms that occur twice belong to the later time.",
    ),
    Fault(
        "the host sleeps for an hour",
        set_clock(HOUR, HOUR),
        nothing,
        "The energy of the time is unknown: a gap `suspend` of an hour.",
        [gap("suspend", "rapl:package-0")],
        lasts=2.0,
        short=1.0,
        how="the whole agent; its clocks simulate the sleep (boot time and wall clock "
        "advance, monotonic time does not)",
    ),
)
"""For a stage whose programs have a clock that can be set. The sleep stays: it comes last."""

STOPPED = (
    Fault(
        "the agent is stopped (SIGSTOP) and continued",
        send(signal.SIGSTOP, agent=True),
        send(signal.SIGCONT, agent=True),
        "Missed ticks are counted and never replayed; the counters include all energy of the "
        "time, and the CPU clocks of processes divide it.",
        [rises("wattspan_agent_missed_ticks_total")],
        unanswered="it is stopped",
        lasts=5.0,
        short=3.0,
    ),
    Fault(
        "the emulated hardware stops counting",
        send(signal.SIGSTOP, host=True),
        send(signal.SIGCONT, host=True),
        "A fault of the emulation, equivalent to a hypervisor that no longer updates its "
        "guest's counters: the counters stand still.",
        [],
        lasts=6.0,
        short=2.0,
        leaps=True,
    ),
    Fault(
        "all processes are stopped and continued",
        send(signal.SIGSTOP, agent=True, host=True),
        send(signal.SIGCONT, agent=True, host=True),
        "Equivalent to a virtual machine that is paused while its clocks continue; not a "
        "sleep, which the clocks would show.",
        [rises("wattspan_agent_missed_ticks_total")],
        unanswered="it is stopped",
        lasts=20.0,
        short=3.0,
        leaps=True,
    ),
)
