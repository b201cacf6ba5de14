"""What the zones of an emulated host had counted at any recent moment.

Makes an emulated powercap tree live: counters that follow CPU time by a declared law.

Steps an emulated powercap tree in a thread of its own.
"""

from __future__ import annotations

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
        self._elapsed = 0
        self._busy: tuple[int, ...] = tuple(0 for _ in self._load_start)
        self.limits = PackageLimits(tree, law)
        self._paid: tuple[int, ...] = self._busy
        self._zero = {zone.directory: zone.start for zone in tree.layout.zones}  # in steps
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

    # ------------------------------------------------------------------------------ values

    def _picojoules(self, zone: EmulatedZone) -> int:
        return self.law.picojoules(zone.meter, self._elapsed, self._busy, self._cpus, self._paid)

    def _steps(self, zone: EmulatedZone) -> int:
        return self._picojoules(zone) // (zone.step * 1000)

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
