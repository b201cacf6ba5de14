"""CPU energy and performance counters of an emulated host, by CPU time and under power limits.

The law is pure and linear, so that the energy of any process is known exactly from its CPU time: a
socket always draws its idle power, and a fixed number of joules for each second that a CPU is
busy. Under a power limit each busy second costs less, by the same factor for every process, and
gets less done. No real processor is that simple; the emulation is, so that the truth is known.

The CPU time of a process is real. Progress of its emulated work is the emulated host's, because
only there a package's power limit slows a CPU down.

Limits are ordinary files: a write takes effect when the counters are next stepped, within one
period of the counters (10 ms by default), and only then it is rounded, refused or obeyed. A
kernel rounds and refuses inside the write; a value of whole hardware units, such as whole watts,
reads back the same on both.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from wattspan.clock import SystemClock
from wattspan.emulation.boards import EnergyLog
from wattspan.emulation.powercap_tree import CounterScope, EmulatedZone, PowercapTree, zone_at
from wattspan.emulation.workloads import GpuWork, WorkLog
from wattspan.model import MILLISECOND, Microjoules
from wattspan.ports import Clock
from wattspan.processes.cgroups import find_hierarchy
from wattspan.processes.host import open_busy_clock
from wattspan.processes.table import ReadClock, clock_id


@dataclass(frozen=True, slots=True)
class CpuLaw:
    """Milliwatts: at idle by socket, and on top for each busy CPU (so millijoules a CPU-second).

    ``board_idle`` is the part of psys beyond packages and memory. ``core_percent`` of the active
    package energy is the cores', ``uncore_percent`` of its idle energy the uncore's.
    """

    package_idle: int = 42_000
    package_active: int = 9_000
    dram_idle: int = 6_000
    dram_active: int = 1_500
    board_idle: int = 35_000
    core_percent: int = 75
    uncore_percent: int = 10

    def picojoules(
        self,
        meter: CounterScope,
        elapsed: int,
        busy: Sequence[int],
        cpus: Sequence[int],
        charged: Sequence[int] | None = None,
    ) -> int:
        """The energy counted by ``meter`` after ``elapsed`` ns, in 1e-12 J, exactly.

        ``busy`` is the CPU time of each socket since the start, ``cpus`` its number of CPUs.
        ``charged`` is the part of that time whose active energy the package spent: all of it,
        unless a power limit slowed its CPUs down.
        """
        socket = meter.socket
        charged = busy if charged is None else charged
        if meter.kind == "psys":
            boards = self.board_idle * elapsed
            return boards + sum(
                self.picojoules(CounterScope(kind, number), elapsed, busy, cpus, charged)
                for number in range(len(busy))
                for kind in ("package", "dram")
            )
        whole = {
            "package": self.package_idle * elapsed + self.package_active * charged[socket],
            "dram": self.dram_idle * elapsed + self.dram_active * busy[socket],
            "core": self.package_active * charged[socket] * self.core_percent // 100,
            "lead-core": self.package_active
            * charged[socket]
            * self.core_percent
            // (100 * max(1, cpus[socket])),
            "uncore": self.package_idle * elapsed * self.uncore_percent // 100,
        }[meter.kind]
        # Cumulative thirds of a whole: the parts add up to it exactly.
        return whole * (meter.die + 1) // meter.dies - whole * meter.die // meter.dies


CpuLoad = Callable[[], Mapping[int, int]]
"""CPU nanoseconds that each CPU has spent since some fixed moment, by CPU number."""


def open_cpu_load(clock: Clock | None = None) -> CpuLoad:
    """The most precise CPU times of this machine: those that the agent itself uses."""
    ticking = clock or SystemClock()
    busy = open_busy_clock(Path("/proc"), find_hierarchy(Path("/sys/fs/cgroup")))
    newest: dict[int, int] = {}

    def load() -> Mapping[int, int]:
        newest.update((busy and busy.read(ticking.monotonic())) or {})
        return newest

    return load


def on_sockets(load: CpuLoad, socket_of_cpu: Sequence[int]) -> Callable[[], Sequence[int]]:
    """The CPU time of each emulated socket: the sum over the real CPUs that represent it.

    CPUs beyond ``socket_of_cpu`` belong to the last socket. A CPU that goes offline keeps its time,
    so no sum ever decreases.
    """
    sockets = max(socket_of_cpu) + 1
    highest: dict[int, int] = {}

    def sums() -> Sequence[int]:
        for cpu, busy in load().items():
            highest[cpu] = max(highest.get(cpu, 0), busy)
        totals = [0] * sockets
        for cpu, busy in highest.items():
            totals[socket_of_cpu[min(cpu, len(socket_of_cpu) - 1)]] += busy
        return totals

    return sums


class CpuJobs:
    """Work by process, advanced with the counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, tuple[GpuWork, int]] = {}
        self._work_logs: dict[int, WorkLog] = {}
        self._at: int | None = None

    def attach(self, pid: int, work: GpuWork, socket: int) -> None:
        """Let a process work on the CPUs of ``socket``."""
        with self._lock:
            self._works[pid] = (work, socket)
            self._work_logs[pid] = WorkLog()

    def change_work(self, pid: int, change: Callable[[GpuWork], GpuWork]) -> None:
        """Change a process's work from now on; LookupError if it has no work here."""
        with self._lock:
            if pid not in self._works:
                raise LookupError(f"process {pid} has no work on the CPUs")
            work, socket = self._works[pid]
            self._works[pid] = (change(work), socket)

    def work_log(self, pid: int) -> WorkLog:
        """The finished work of a process."""
        with self._lock:
            return self._work_logs.get(pid) or WorkLog()

    def step(self, at: int, speeds: Sequence[float]) -> None:
        """Time has come to ``at``, and until then the sockets were as fast as ``speeds``."""
        with self._lock:
            elapsed = 0 if self._at is None else at - self._at
            self._at = at
            for pid, (work, socket) in self._works.items():
                # The "GPU" part of its work waits for memory and does not depend on the clock.
                moved = work.after(elapsed, 1.0, speeds[socket])
                self._work_logs[pid].record(at, moved.finished)
                self._works[pid] = (moved, socket)


UNIT = 125_000  # microwatts: the power unit of nearly every processor
_LARGEST = 0x7FFF * UNIT  # fifteen bits
_SMOOTHING = 100_000_000  # ns over which the draw is averaged that a limit is held against
MIN_SPEED = 0.15
"""The part of its active power that a package spends at its lowest clock. A limit below that power
plus the idle power is not obeyed."""
CLOCK_EXPONENT = 2.4
"""Active power goes with this power of the clock: declared, not measured."""


@dataclass(slots=True)
class _Constraint:
    """One limit of one zone, with its file held open."""

    fd: int
    value: int  # microwatts, as it was last accepted
    text: bytes  # content of the file for that value


@dataclass(slots=True)
class _Zone:
    zone: EmulatedZone
    enabled_fd: int
    constraints: list[_Constraint] = field(default_factory=list)


class PackageLimits:
    """Reads the limits of every package, and computes its speed under them."""

    def __init__(self, tree: PowercapTree, law: CpuLaw) -> None:
        self._tree, self._law = tree, law
        self.locked = {zone.directory for zone in tree.layout.zones if zone.locked}
        self._zones: list[_Zone] = []
        self._generation = -1
        self._active = [0.0] * tree.layout.sockets  # mean milliwatts above idle that are wanted
        self._speeds = tuple(1.0 for _ in range(tree.layout.sockets))

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each socket's CPUs, 1.0 being full speed."""
        return self._speeds

    def power_shares(self, elapsed: int, busy: Sequence[int]) -> tuple[float, ...]:
        """The part of its active power that each socket spends, after ``elapsed`` more ns.

        ``busy`` is the CPU time of each socket in them.
        """
        limits = self._limits()
        weight = min(1.0, elapsed / _SMOOTHING)
        parts = []
        for socket, worked in enumerate(busy):
            wanted = self._law.package_active * worked / elapsed
            self._active[socket] += weight * (wanted - self._active[socket])
            parts.append(self._power_share(self._active[socket], limits[socket]))
        self._speeds = tuple(part ** (1.0 / CLOCK_EXPONENT) for part in parts)
        return tuple(parts)

    def _power_share(self, active: float, limit: float | None) -> float:
        room = None if limit is None else limit - self._law.package_idle
        if room is None or active <= max(room, 0):
            return 1.0
        return max(MIN_SPEED, room / active)

    def _limits(self) -> list[float | None]:
        """The milliwatts each socket may draw; None where nothing limits it."""
        if self._generation != self._tree.generation:
            self._open()
        by_die: list[dict[int, float]] = [{} for _ in self._active]
        for zone in self._zones:
            limit = self._limit(zone)
            if limit is not None:
                dies, meter = by_die[zone.zone.meter.socket], zone.zone.meter
                dies[meter.die] = min(limit, dies.get(meter.die, limit))
        # A die without a limit leaves its socket without one.
        count = {z.zone.meter.socket: z.zone.meter.dies for z in self._zones}
        return [
            sum(dies.values()) if dies and len(dies) == count.get(socket) else None
            for socket, dies in enumerate(by_die)
        ]

    def _limit(self, zone: _Zone) -> float | None:
        for constraint in zone.constraints:
            self._apply_write(constraint, zone.zone.directory in self.locked)
        if os.pread(zone.enabled_fd, 8, 0).strip() == b"0":
            return None
        return min(constraint.value for constraint in zone.constraints) / 1000

    def _apply_write(self, constraint: _Constraint, locked: bool) -> None:
        """Accept a written value, rounded as hardware would, or restore the value before."""
        text = os.pread(constraint.fd, 32, 0)
        if text == constraint.text or not text:  # unchanged, or truncated by a writer
            return
        written = text.strip()
        if written.isdigit() and not locked:
            value = min(int(written), _LARGEST) // UNIT * UNIT
            constraint.value = value or constraint.value
        constraint.text = b"%d\n" % constraint.value
        if text != constraint.text:
            os.ftruncate(constraint.fd, len(constraint.text))
            os.pwrite(constraint.fd, constraint.text, 0)

    def _open(self) -> None:
        """Open the files of every package that is registered now."""
        self.close()
        self._generation = self._tree.generation
        for zone in self._tree.layout.zones:
            path = self._tree.path(zone.directory)
            if zone.meter.kind != "package" or not (path / "enabled").exists():
                continue
            opened = _Zone(zone, os.open(path / "enabled", os.O_RDONLY | os.O_CLOEXEC))
            for file in sorted(path.glob("constraint_*_power_limit_uw")):
                fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
                text = os.pread(fd, 32, 0)
                opened.constraints.append(_Constraint(fd, int(text), text))
            if opened.constraints:
                self._zones.append(opened)
            else:
                os.close(opened.enabled_fd)

    def close(self) -> None:
        """Close the files."""
        for zone in self._zones:
            for fd in (zone.enabled_fd, *(one.fd for one in zone.constraints)):
                os.close(fd)
        self._zones = []


MAX_LOG_ENTRIES = 60_000  # steps; a minute at a thousand a second

SocketLoad = Callable[[], Sequence[int]]
"""CPU nanoseconds spent on each emulated socket since some fixed moment."""


class PowercapEngine:
    """Turns time and load into counter values.

    Zones are named by the layout's directory ids (``intel-rapl:0:0``). Not thread-safe.
    """

    def __init__(
        self,
        tree: PowercapTree,
        law: CpuLaw,
        clock: Clock,
        load: SocketLoad,
        *,
        period: int = MILLISECOND,
    ) -> None:
        self.tree = tree
        self.law = law
        self._clock = clock
        self._load = load
        self._period = period
        self._start = clock.monotonic()
        self._load_start = tuple(load())
        self._cpus = [tree.socket_of_cpu.count(s) for s in range(tree.layout.sockets)]
        self.elapsed = 0  # nanoseconds up to the last step
        self.busy: tuple[int, ...] = tuple(0 for _ in self._load_start)
        self.limits = PackageLimits(tree, law)
        # The part of ``busy`` whose active energy was spent; less than all of it under limits.
        self.charged: tuple[int, ...] = self.busy
        self._zero = {zone.directory: zone.start for zone in tree.layout.zones}  # in steps
        self._write_all()

    def step(self) -> None:
        """Bring every counter up to now, if one of its update periods has passed."""
        elapsed = (self._clock.monotonic() - self._start) // self._period * self._period
        if elapsed <= self.elapsed:
            return
        busy = tuple(now - then for now, then in zip(self._load(), self._load_start, strict=True))
        worked = tuple(now - then for now, then in zip(busy, self.busy, strict=True))
        parts = self.limits.power_shares(elapsed - self.elapsed, worked)
        self.charged = tuple(
            paid + (now if part == 1.0 else int(now * part))
            for paid, now, part in zip(self.charged, worked, parts, strict=True)
        )
        self.elapsed, self.busy = elapsed, busy
        self._write_all()

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each socket's CPUs under its power limits; 1.0 without them."""
        return self.limits.speeds

    @property
    def at(self) -> int:
        """The monotonic time of the last step."""
        return self._start + self.elapsed

    def energy(self, zone: str) -> Microjoules:
        """The energy of the hardware behind ``zone`` since the start, regardless of faults."""
        return Microjoules(self.picojoules(zone_at(self.tree.layout, zone).meter) // 1_000_000)

    def picojoules(self, scope: CounterScope) -> int:
        """The energy within ``scope`` since the start, in 1e-12 J."""
        return self.law.picojoules(scope, self.elapsed, self.busy, self._cpus, self.charged)

    def energies(self) -> Mapping[str, Microjoules]:
        """``energy`` of every zone of the layout."""
        return {zone.directory: self.energy(zone.directory) for zone in self.tree.layout.zones}

    def close(self) -> None:
        """Close the limits' files; the tree stays."""
        self.limits.close()

    # ------------------------------------------------------------------------------ values

    def _steps(self, zone: EmulatedZone) -> int:
        return self.picojoules(zone.meter) // (zone.step * 1000)

    def _write_all(self) -> None:
        for zone in self.tree.layout.zones:
            self._write(zone)

    def _write(self, zone: EmulatedZone) -> None:
        steps = (self._zero[zone.directory] + self._steps(zone)) % zone.turn
        self.tree.show(zone.directory, steps * zone.step // 1000)


class PowercapRunner:
    """Calls ``engine.step`` every ``period`` nanoseconds until it is stopped."""

    def __init__(
        self,
        engine: PowercapEngine,
        clock: Clock,
        *,
        period: int = 10 * MILLISECOND,
        also: Callable[[int, Sequence[float]], object] = lambda _at, _speeds: None,
    ) -> None:
        """``also`` is called with the time of each step and the speeds until then."""
        self._engine = engine
        self._also = also
        self._clock = clock
        self._period = period
        self._log = EnergyLog[str](MAX_LOG_ENTRIES)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="emulated-powercap", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended; the counters no longer move."""
        self._stop.set()
        self._thread.join()

    def between_steps(self, act: Callable[[PowercapEngine], object]) -> object:
        """Let ``act`` have the engine while no step runs: for faults, and for a step right now."""
        with self._lock:
            return act(self._engine)

    def spent_at(self, times: Sequence[int]) -> list[dict[str, int]]:
        """The energy of each zone at each of some monotonic times, to within a period.

        LookupError for a time before the recorded ones.
        """
        with self._lock:
            self._step()
            return [self._log.at(min(time, self._engine.at)) for time in times]

    def _step(self) -> None:
        self._engine.step()
        self._also(self._engine.at, self._engine.speeds)
        self._log.record(self._engine.at, self._engine.energies())

    def _run(self) -> None:
        deadline = self._clock.monotonic()
        while not self._stop.is_set():
            with self._lock:
                self._step()
            # A missed deadline is skipped: the counters are functions of time, not of steps.
            deadline = max(deadline + self._period, self._clock.monotonic())
            self._clock.sleep_until(deadline)


# ------------------------------------------------------------------------- performance counters


class CounterLaw(NamedTuple):
    """Counts in a microsecond of CPU time at full speed, of every job."""

    cycles: int = 2600
    instructions: int = 3900
    misses: int = 8


class JobCounters:
    """The counts of jobs since the last call, in the form of the helper's answers.

    They count the jobs only, whose CPU time is real. A power limit of a socket slows its cycles and
    its instructions; misses go with CPU time, as the energy of the emulated memory does.

    ``sockets`` tells the socket of each job by its pid, ``speeds`` the speed of each socket's CPUs.
    """

    def __init__(
        self,
        law: CounterLaw,
        sockets: Callable[[], Mapping[int, int]],
        speeds: Callable[[], Sequence[float]],
        read_clock: ReadClock = SystemClock.read_cpu_clock,
    ) -> None:
        self._law, self._sockets, self._speeds = law, sockets, speeds
        self._read_clock = read_clock
        self._seen: dict[int, int] = {}  # CPU time of each job
        self.sums()

    def sums(self) -> bytes:
        """All pairs of a pid and a socket, then time, cycles, reference, instructions, misses."""
        pairs, words = array("Q"), array("Q")
        cycles, instructions, misses = self._law
        before, self._seen, speeds = self._seen, {}, self._speeds()
        for pid, socket in self._sockets().items():
            try:
                now = self._read_clock(clock_id(pid))
            except OSError:  # it has ended
                continue
            self._seen[pid] = now
            time = max(0, now - before.get(pid, 0))
            paced = round(time * speeds[socket])
            pairs.append(pid << 32 | socket)
            counts = paced * cycles, time * cycles, paced * instructions, time * misses
            words.extend((time, *(each // 1000 for each in counts)))
        return pairs.tobytes() + words.tobytes()

    def close(self) -> None:
        """Nothing is open."""
