"""What the zones of an emulated host had counted at any recent moment.

Makes an emulated powercap tree live: counters that follow CPU time by a declared law.

Steps an emulated powercap tree in a thread of its own.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from wattspan.emulation.cpus import CpuLaw
from wattspan.emulation.powercap_limits import PackageLimits
from wattspan.emulation.powercap_tree import EmulatedZone, PowercapTree, zone_at
from wattspan.model import MILLISECOND, Microjoules
from wattspan.ports import Clock

MAX_LOG_ENTRIES = 60_000  # steps; a minute at a thousand a second

_AT = itemgetter(0)


class CounterLog:
    """The recent steps of a powercap engine: time, and what each zone had spent."""

    def __init__(self, kept: int = MAX_LOG_ENTRIES) -> None:
        self._steps: deque[tuple[int, Mapping[str, int]]] = deque(maxlen=kept)

    def note(self, time: int, energies: Mapping[str, int]) -> None:
        self._steps.append((time, energies))

    def at(self, time: int) -> dict[str, int]:
        """Microjoules by zone at ``time``, a straight line between two steps.

        After the last step it is that step's; LookupError before the first that is kept.
        """
        steps = self._steps
        if not steps or time < steps[0][0]:
            raise LookupError(f"the truth about {time} is not remembered")
        place = min(bisect_left(steps, time, key=_AT), len(steps) - 1)
        (late, after), (early, before) = steps[place], steps[max(0, place - 1)]
        part, whole = min(time, late) - early, max(1, late - early)
        return {zone: before[zone] + (after[zone] - before[zone]) * part // whole for zone in after}


SocketLoad = Callable[[], Sequence[int]]
"""CPU nanoseconds spent on each emulated socket since some fixed moment."""

# Any reader gets EACCES from this file, root as well: the kernel's sysctls know no capability
# that overrides a mode without read permission. Nothing is ever written to it.
_UNREADABLE_FILE = "/proc/sys/vm/compact_memory"
# Opens for everybody; a read at 0 fails with EIO, for there never is memory at address 0.
_FAILING_FILE = "/proc/self/mem"


class PowercapEngine:
    """Turns time and load into counter values, and breaks counters on demand.

    Zones are named by the layout's directory ids (``intel-rapl:0:0``), under whatever id they
    are registered at the moment. Not thread-safe: faults belong to the thread that steps, or
    between ``pause`` and ``resume`` of a runner.
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
        self._elapsed = 0
        self._busy: tuple[int, ...] = tuple(0 for _ in self._load_start)
        self.limits = PackageLimits(tree, law)
        self._paid: tuple[int, ...] = self._busy
        self._zero = {zone.directory: zone.start for zone in tree.layout.zones}  # in steps
        self._still: set[str] = set()  # zones whose file is not written
        self._write_all()

    def step(self) -> None:
        """Bring every counter up to now, if one of its update periods has passed."""
        elapsed = (self._clock.monotonic() - self._start) // self._period * self._period
        if elapsed <= self._elapsed:
            return
        busy = tuple(now - then for now, then in zip(self._load(), self._load_start, strict=True))
        worked = tuple(now - then for now, then in zip(busy, self._busy, strict=True))
        parts = self.limits.parts(elapsed - self._elapsed, worked)
        self._paid = tuple(
            paid + (now if part == 1.0 else int(now * part))
            for paid, now, part in zip(self._paid, worked, parts, strict=True)
        )
        self._elapsed, self._busy = elapsed, busy
        self._write_all()

    @property
    def busy(self) -> tuple[int, ...]:
        """CPU nanoseconds on each socket since the engine was made, up to the last step."""
        return self._busy

    @property
    def paid(self) -> tuple[int, ...]:
        """The part of ``busy`` whose active energy was spent; less than all of it under limits."""
        return self._paid

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast each socket's CPUs are under its power limits; 1.0 without them."""
        return self.limits.speeds

    @property
    def elapsed(self) -> int:
        """Nanoseconds since the engine was made, up to the last step."""
        return self._elapsed

    @property
    def at(self) -> int:
        """The monotonic time of the last step."""
        return self._start + self._elapsed

    def truth(self, cpu_ns: int, kind: str = "package") -> Microjoules:
        """The active energy of a process that spent ``cpu_ns`` on one socket's CPUs, uncapped."""
        return self.law.active(kind, cpu_ns)

    def energy(self, zone: str) -> Microjoules:
        """What the hardware behind ``zone`` has spent since the start, faults regardless."""
        return Microjoules(self._picojoules(zone_at(self.tree.layout, zone)) // 1_000_000)

    def energies(self) -> Mapping[str, Microjoules]:
        """``energy`` of every zone of the layout."""
        return {zone.directory: self.energy(zone.directory) for zone in self.tree.layout.zones}

    def close(self) -> None:
        """Let go of the limits' files; the tree stays where it is."""
        self.limits.close()

    # ------------------------------------------------------------------------------ faults

    def reset(self, zone: str) -> None:
        """The counter starts again at 0."""
        emulated = zone_at(self.tree.layout, zone)
        self._zero[zone] = -self._steps(emulated)
        self._write(emulated)

    def rewind(self, zone: str, microjoules: int = 100_000_000) -> None:
        """The counter runs backwards by ``microjoules``, and on from there."""
        emulated = zone_at(self.tree.layout, zone)
        self._zero[zone] -= microjoules * 1000 // emulated.step
        self._write(emulated)

    def brink(self, zone: str, microjoules: int = 20_000_000) -> None:
        """The counter stands ``microjoules`` below its end: in a moment it wraps."""
        emulated = zone_at(self.tree.layout, zone)
        left = microjoules * 1000 // emulated.step
        self._zero[zone] = emulated.turn - left - self._steps(emulated)
        self._write(emulated)

    def freeze(self, zone: str) -> None:
        """The counter stands still; ``mend`` lets it catch up."""
        self._still.add(zone)

    def vanish(self, zone: str) -> None:
        """The zone is unregistered, with those below it. Held descriptors read nothing."""
        self.tree.remove(zone)
        self._still.update(below for below in self._zero if self._within(below, zone))

    def reappear(self, zone: str, directory: str | None = None) -> None:
        """The zone is registered anew, with those below it, counting from 0.

        Under another directory id, if one is given: ids move when packages come and go.
        """
        for below in [name for name in self._zero if self._within(name, zone)]:
            moved = None if directory is None else directory + below.removeprefix(zone)
            self.tree.add(zone_at(self.tree.layout, below), moved)
            self._still.discard(below)
            self.reset(below)

    def deny(self, zone: str) -> str:
        """Nobody may read the counter, root neither. Returns the error readers get: EACCES."""
        if os.access(_UNREADABLE_FILE, os.F_OK):
            self.tree.replace_counter(zone, _UNREADABLE_FILE)
            self._still.add(zone)
            return "EACCES"
        self.tree.replace_counter(zone, "energy_uj")  # a link to itself
        self._still.add(zone)
        return "ELOOP"

    def fail(self, zone: str) -> str:
        """Reading the counter fails, opening it does not. Returns the error: EIO."""
        self.tree.replace_counter(zone, _FAILING_FILE)
        self._still.add(zone)
        return "EIO"

    def garble(self, zone: str, content: bytes = b"not a number\n") -> None:
        """The counter answers ``content``."""
        self.tree.garble(zone, content)
        self._still.add(zone)

    def mend(self, zone: str) -> None:
        """Undo ``freeze``, ``deny``, ``fail`` and ``garble``; the counter never stopped."""
        self._still.discard(zone)
        if not self.tree.writable(zone):
            self.tree.open_counter(zone)
        self._write(zone_at(self.tree.layout, zone))

    def lock(self, zone: str) -> None:
        """Firmware locks the limits of a zone as they are: what is written does not stick."""
        self.limits.lock(zone, on=True)

    def unlock(self, zone: str) -> None:
        """Undo ``lock``."""
        self.limits.lock(zone, on=False)

    def hang(self, zone: str) -> None:
        """Accesses to the long-term limit of a zone block until ``release``."""
        self.tree.block_limit(zone)

    def release(self, zone: str) -> None:
        """Undo ``hang``."""
        self.tree.unblock_limit(zone)

    # ------------------------------------------------------------------------------ values

    def _picojoules(self, zone: EmulatedZone) -> int:
        return self.law.picojoules(zone.meter, self._elapsed, self._busy, self._cpus, self._paid)

    def _steps(self, zone: EmulatedZone) -> int:
        return self._picojoules(zone) // (zone.step * 1000)

    def _write_all(self) -> None:
        for zone in self.tree.layout.zones:
            self._write(zone)

    def _write(self, zone: EmulatedZone) -> None:
        if zone.directory not in self._still:
            steps = (self._zero[zone.directory] + self._steps(zone)) % zone.turn
            self.tree.show(zone.directory, steps * zone.step // 1000)

    @staticmethod
    def _within(directory: str, zone: str) -> bool:
        return directory == zone or directory.startswith(f"{zone}:")


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
        """``also`` is told of each step: its time, and how fast the sockets were until then."""
        self._engine = engine
        self._also = also
        self._clock = clock
        self._period = period
        self._log = CounterLog()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="emulated-powercap", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended; the counters then stand still."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def between_steps(self, act: Callable[[PowercapEngine], object]) -> object:
        """Let ``act`` have the engine while no step runs: for faults, and for a step right now."""
        with self._lock:
            return act(self._engine)

    def spent_at(self, times: Sequence[int]) -> list[dict[str, int]]:
        """What each zone had spent at each of some monotonic times, to within a period.

        LookupError for a time longer ago than is remembered.
        """
        with self._lock:
            self._step()
            return [self._log.at(time) for time in times]

    def _step(self) -> None:
        self._engine.step()
        self._also(self._engine.at, self._engine.speeds)
        self._log.note(self._engine.at, self._engine.energies())

    def _run(self) -> None:
        deadline = self._clock.monotonic()
        while not self._stop.is_set():
            with self._lock:
                self._step()
            # A missed deadline is skipped: the counters are functions of time, not of steps.
            deadline = max(deadline + self._period, self._clock.monotonic())
            self._clock.sleep_until(deadline)
