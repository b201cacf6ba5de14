"""Parts that live and die together, in order.

Carries closed books from the poller to the store, at the store's own pace.

The running agent: its threads, and the order in which they live and die.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from wattspan.model import Checkpoint, Failure, Snapshot, SourceHealth, Trouble
from wattspan.ports import Exporter, ExporterError, MonitoredExporter, WattspanError
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import Poller


@dataclass(slots=True)
class ServiceGroup:
    """Implements agent.Service over parts that are started in order and stopped in reverse.

    What cannot start takes down what was started before it; stopping goes on whatever fails.
    """

    name: str
    parts: list[tuple[Callable[[], object], Callable[[], object]]] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    _undo: ExitStack = field(default_factory=ExitStack)

    def add(self, start: Callable[[], object], stop: Callable[[], object]) -> None:
        """Another part, started after those that were added before."""
        self.parts.append((start, stop))

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.reached)

    def start(self) -> None:
        """Begin; the first error is passed on."""
        with ExitStack() as undo:
            for start, stop in self.parts:
                start()
                undo.callback(stop)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """End every part. Again: nothing."""
        self._undo.close()


class CheckpointWriter(Protocol):
    """Where closed books are kept. Writing never raises; trouble shows in ``health``."""

    def write(self, opening: Checkpoint) -> bool: ...

    @property
    def health(self) -> SourceHealth: ...

    def close(self) -> None: ...


class CheckpointRecorder:
    """Writes the newest books, each at most once. Older ones need not be written at all."""

    def __init__(self, books: CheckpointWriter, newest: Callable[[], Checkpoint | None]) -> None:
        self._books = books
        self._newest = newest
        self._written: Checkpoint | None = None

    def turn(self) -> None:
        """Write the newest books if they are not yet written."""
        opening = self._newest()
        if opening is None or opening is self._written:
            return
        if self._books.write(opening):
            self._written = opening

    def run(self, stop: threading.Event, interval: int) -> None:
        """Turn at once, and every ``interval`` nanoseconds until ``stop``.

        What an earlier run could not write any more is so in the history before anybody asks.
        """
        self.turn()
        while not stop.wait(interval / 1e9):
            self.turn()


STOP_TIMEOUT = 1.5
"""Seconds a thread is waited for. One that hangs in a driver is left behind: it is a daemon."""

WRITE_TIMEOUT = 10.0
"""Seconds that the last books have to be written in. A disk that hangs is left behind as well."""


class Service(Protocol):
    """Something that runs beside the poller, in threads of its own."""

    @property
    def name(self) -> str: ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it can be reached once started."""
        ...

    def start(self) -> None:
        """Begin. Raises a WattspanError with one clear sentence if it cannot."""
        ...

    def stop(self) -> None: ...


class Agent:
    """One poller thread, one recorder thread, and whatever the exporters run.

    Nothing starts before ``start``; after ``stop`` nothing of the agent is left but threads that
    a driver holds. What was measured up to the stop is in the store.
    """

    def __init__(
        self,
        poller: Poller,
        exporters: Sequence[Exporter],
        services: Sequence[Service] = (),
        *,
        books: CheckpointWriter | None = None,
        record_every: int = 5 * 10**9,
        log: Callable[[str], None],
    ) -> None:
        self._poller = poller
        self._exporters = exporters
        self._services = services
        self._books = books
        self._recorder = None if books is None else CheckpointRecorder(books, poller.checkpoint)
        self._record_every = record_every
        self._log = log
        self._stop = threading.Event()
        self._ended = False
        # Not an Event: its lock is no place for a signal handler to find the main thread in.
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._started: list[Exporter] = []
        self._serving: list[Service] = []
        self.failure: BaseException | None = None
        self.left_behind = False
        """Whether a thread did not end when it was told to: something hangs, for ever perhaps."""
        poller.exporter_drops = self._drops
        poller.exporter_health = self._health

    @property
    def view(self) -> Callable[[], Snapshot]:
        return self._poller.view

    @property
    def past(self) -> EnergyHistory:
        """What was spent in stretches of the recent past; implements ports.Past."""
        return self._poller.past

    @property
    def closing(self) -> Checkpoint | None:
        """After ``stop``: the books as they stood, for an agent that goes on from there."""
        return self._poller.checkpoint()

    def watch(self, alive: Callable[[], None]) -> None:
        """Call ``alive`` from the poller's loop, often: where it hangs, the calls end."""
        self._poller.alive = alive

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the started exporters and services can be reached."""
        exporters = tuple(one.address for one in self._started if one.address is not None)
        return exporters + tuple(each for one in self._serving for each in one.addresses)

    def _drops(self) -> dict[str, int]:
        """What each exporter has dropped; one that cannot tell is left out, and costs no poll."""
        told: dict[str, int] = {}
        for exporter in self._started:
            with suppress(Exception):
                told[exporter.name] = exporter.drops
        return told

    def _health(self) -> tuple[SourceHealth, ...]:
        """How those exporters are doing that can tell; one that fails to costs no poll."""
        told = map(_health_of, self._started)
        return tuple(health for health in told if health is not None)

    def start(self) -> None:
        """Begin. An exporter that cannot start is passed on, after those started are stopped."""
        try:
            self._poller.turn()
            self._poller.publish()
            # What takes long to start, such as a capper, must not make one interval of that time.
            self._run("poller", lambda: self._poller.run(self._stop))
            for exporter in self._exporters:
                self._open(exporter)
            for service in self._services:
                service.start()
                self._serving.append(service)
        except BaseException:
            self.stop()
            raise
        recorder = self._recorder
        if recorder is not None:
            self._run("recorder", lambda: recorder.run(self._stop, self._record_every))

    def _open(self, exporter: Exporter) -> None:
        try:
            exporter.start(self._poller.view)
        except WattspanError:
            raise
        except Exception as error:
            raise ExporterError(
                f"Cannot start the exporter {exporter.name!r}: {type(error).__name__}: {error}. "
                "Report it to its authors, or turn it off in the configuration."
            ) from error
        self._started.append(exporter)

    def wait(self, timeout: float | None = None) -> bool:
        """Until ``request_stop``, or a thread's failure; True if so, False after ``timeout``.

        ``wake`` ends it sooner. For one thread at a time.
        """
        if not self._ended:
            with suppress(queue.Empty):
                self._ended = self._bell.get(timeout=timeout)
        return self._ended

    def request_stop(self) -> None:
        """Make ``wait`` return, for good. Safe in a signal handler."""
        self._bell.put(True)

    def fail(self, part: str, error: BaseException) -> None:
        """End because a part of it did, by an error that nobody expected."""
        self.failure = error
        self._log(f"{part} failed: {type(error).__name__}: {error}.")
        self.request_stop()

    def wake(self) -> None:
        """Make ``wait`` return once: there is something to look at. Safe in a signal handler."""
        self._bell.put(False)

    def stop(self) -> None:
        """End everything, and keep what was measured, whatever of it fails. Again: nothing."""
        if self._stop.is_set():
            return
        # What runs beside the poller ends while energy still settles for it.
        for service in reversed(self._serving):
            self._attempt(f"service {service.name!r}", service.stop)
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_TIMEOUT)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        self.left_behind = bool(alive)
        if "wattspan-poller" in alive:
            self._log("The poller does not return and is left behind; a driver call hangs.")
        else:
            self.failure = self._attempt("last books", self._poller.finish) or self.failure
        recorder = self._recorder
        written = recorder is None or self._in_time("recorder", recorder.turn)
        if not written:
            self._log("The disk of the store does not answer; the last books are left behind.")
            self.left_behind = True
        for exporter in self._started:
            self._attempt(f"exporter {exporter.name!r}", exporter.stop)
        if not alive:
            self._attempt("sources", self._poller.close)
        if self._books is not None and written:
            self.left_behind |= not self._in_time("store", self._books.close)

    def _in_time(self, what: str, act: Callable[[], object]) -> bool:
        """Attempt what a disk may hang in; whether it came to an end."""

        def attempt() -> None:
            self.failure = self._attempt(what, act) or self.failure

        thread = threading.Thread(target=attempt, name=f"wattspan-last-{what}", daemon=True)
        thread.start()
        thread.join(WRITE_TIMEOUT)
        return not thread.is_alive()

    def _attempt(self, what: str, act: Callable[[], object]) -> Exception | None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the rest must be ended all the same
            self._log(f"Ending the {what} failed: {type(error).__name__}: {error}.")
            return error
        return None

    def _run(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - a dead thread must end the agent, loudly
                self.fail(f"The {name}", error)

        thread = threading.Thread(target=guarded, name=f"wattspan-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()


def _health_of(exporter: Exporter) -> SourceHealth | None:
    try:
        return exporter.health if isinstance(exporter, MonitoredExporter) else None
    except Exception as error:  # noqa: BLE001 - an exporter's fault must not end the poller
        failure = Failure(
            exporter.name,
            f"how the exporter {exporter.name!r} is doing",
            Trouble.MALFORMED,
            f"{type(error).__name__}: {error}",
            "Report it to its authors, or turn it off in the configuration.",
        )
        return SourceHealth(exporter.name, False, 0, 1, (failure,))
