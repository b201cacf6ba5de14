"""Steps an emulated powercap tree in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from wattspan.emulation.powercap_engine import PowercapEngine
from wattspan.emulation.powercap_truth import CounterLog
from wattspan.model import MILLISECOND
from wattspan.ports import Clock


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
