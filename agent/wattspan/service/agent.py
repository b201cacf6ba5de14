"""The running agent: its threads and parts, started in order and stopped in reverse."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from wattspan.model import Checkpoint, Failure, Snapshot, SourceHealth, Trouble
from wattspan.otlp.destination import LOGS, METRICS, SPANS
from wattspan.ports import (
    DeviceQueries,
    Exporter,
    ExporterError,
    MonitoredExporter,
    SnapshotView,
    SourceError,
    WattspanError,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import DEVICES, HISTORY, TUNING, Poller
from wattspan.storage.store import DeferredStore, Store
from wattspan.util.process import run_again

STOP_TIMEOUT = 1.5
"""Seconds to wait for a thread. A thread that hangs in a driver continues as a daemon."""

WRITE_TIMEOUT = 10.0
"""Seconds for the last checkpoint, which a hanging disk exceeds."""


@dataclass(slots=True)
class ServiceGroup:
    """Parts with threads of their own, started in order and stopped in reverse.

    If a part cannot start, the parts before it are stopped; an error of one does not keep the
    others from stopping. ``addresses`` are known once all have started. ``health_checks`` return
    the health of parts, from any thread.
    """

    name: str
    parts: list[tuple[Callable[[], object], Callable[[], object]]] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    health_checks: list[Callable[[], Iterable[SourceHealth]]] = field(default_factory=list)
    _undo: ExitStack = field(default_factory=ExitStack)

    def add(self, start: Callable[[], object], stop: Callable[[], object]) -> None:
        """Append a part."""
        self.parts.append((start, stop))

    def add_thread(
        self,
        name: str,
        run: Callable[[threading.Event], object],
        timeout: float | None = None,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        """Append a thread of ``run``, which returns once its event is set.

        ``wake`` ends a wait of it for anything else than the event.

        After an unexpected error, which is reported as that of any thread, it is run again. A call
        that hangs delays the end by ``timeout`` seconds at most.
        """
        stop = threading.Event()
        thread = threading.Thread(target=run_again, args=(run, stop), name=name, daemon=True)

        def end() -> None:
            stop.set()
            wake()
            thread.join(timeout)

        self.add(thread.start, end)

    def health(self) -> Iterator[SourceHealth]:
        """The health of all parts that report it."""
        return (health for check in self.health_checks for health in check())

    def start(self) -> None:
        """Start all parts; the first error is passed on."""
        with ExitStack() as undo:
            for start, stop in self.parts:
                start()
                undo.callback(stop)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Stop all parts. Idempotent."""
        self._undo.close()


class ExporterGroup:
    """The exporters of an agent. An exporter's bug does not affect the poller."""

    def __init__(self, exporters: Iterable[Exporter] = ()) -> None:
        """``exporters`` is iterated over once, by ``start``."""
        self._exporters = exporters
        self._started: list[Exporter] = []

    @property
    def started(self) -> Sequence[Exporter]:
        return self._started

    def start(self, view: SnapshotView) -> None:
        """Start all exporters; ExporterError for the first one that cannot start."""
        for exporter in self._exporters:
            self.add(exporter, view)

    def add(self, exporter: Exporter, view: SnapshotView) -> None:
        """Start one more exporter; ExporterError if it cannot start. Safe from any thread."""
        try:
            exporter.start(view)
        except WattspanError:
            raise
        except Exception as error:
            raise ExporterError(
                f"Cannot start the exporter {exporter.name!r}: {type(error).__name__}: "
                f"{error}. Report it to its authors, or turn it off in the configuration."
            ) from error
        self._started.append(exporter)

    def drops(self) -> dict[str, int]:
        """Dropped exports by exporter, of those that report them."""
        drops: dict[str, int] = {}
        for exporter in self._started:
            with suppress(Exception):
                drops[exporter.name] = exporter.drops
        return drops

    def health(self) -> tuple[SourceHealth, ...]:
        """The health of the exporters that report it."""
        health: list[SourceHealth] = []
        for exporter in self._started:
            try:
                if isinstance(exporter, MonitoredExporter):
                    health.append(exporter.health)
            except Exception as error:  # noqa: BLE001 - a plugin's bug must not end the poller
                failure = Failure(
                    exporter.name,
                    f"the health of the exporter {exporter.name!r}",
                    Trouble.MALFORMED,
                    f"{type(error).__name__}: {error}",
                    "Report it to its authors, or turn it off in the configuration.",
                )
                health.append(SourceHealth(exporter.name, False, 0, 1, (failure,)))
        return tuple(health)


class CheckpointRecorder:
    """Writes the newest checkpoint, each at most once; older ones may be skipped."""

    def __init__(
        self,
        store: Store | DeferredStore,
        newest: Callable[[], Checkpoint | None],
    ) -> None:
        self._store = store
        self._newest = newest
        self._written: Checkpoint | None = None

    def turn(self) -> None:
        """Write the newest checkpoint unless it is already written."""
        checkpoint = self._newest()
        if checkpoint is None or checkpoint is self._written:
            return
        if self._store.write(checkpoint):
            self._written = checkpoint

    def run(self, stop: threading.Event, interval: int) -> None:
        """Write at once, then every ``interval`` nanoseconds until ``stop``.

        The first write puts energy that an earlier run could not store into the history before
        the first query.
        """
        self.turn()
        while not stop.wait(interval / 1e9):
            self.turn()


class Agent:
    """One poller thread, one recorder thread, and the threads of exporters and services.

    ``start`` starts all threads; after ``stop`` only threads that hang in a driver are left. All
    energy measured before the stop is in the store.
    """

    def __init__(
        self,
        poller: Poller,
        exporters: ExporterGroup,
        services: Sequence[ServiceGroup] = (),
        *,
        devices: DeviceQueries,
        store: Store | DeferredStore | None = None,
        record_every: int = 5 * 10**9,
        log: Callable[[str], None],
    ) -> None:
        self._poller = poller
        self.devices, self.demand = devices, poller.demand
        self._exporters = exporters
        self._services = services
        self._store = store
        self._recorder = None if store is None else CheckpointRecorder(store, poller.checkpoint)
        self._record_every = record_every
        self._log = log
        self._stop = threading.Event()
        self._ended = False
        # Not an Event: a signal handler may interrupt the main thread while it holds the lock.
        self._wakeups: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._serving: list[ServiceGroup] = []
        self.failure: BaseException | None = None
        self.left_behind = False
        """True if a thread did not end in time and may hang forever."""

    @property
    def view(self) -> Callable[[], Snapshot]:
        return self._poller.view

    @property
    def history(self) -> EnergyHistory:
        """The energy of recent periods; implements ports.EnergyQueries."""
        return self._poller.history

    @property
    def closing(self) -> Checkpoint | None:
        """The final checkpoint after ``stop``, from which another agent continues."""
        return self._poller.checkpoint()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the started exporters and services."""
        exporters = (one.address for one in self._exporters.started)
        services = (each for one in self._serving for each in one.addresses)
        return (*(address for address in exporters if address is not None), *services)

    def start(self) -> None:
        """Start all parts; if one fails, those started before are stopped."""
        try:
            self._poller.turn()
            self._poller.publish()
            # The poller first: a part that starts slowly, such as a capper, must not delay a tick.
            self._run("poller", lambda: self._poller.run(self._stop))
            self._exporters.start(self._poller.view)
            for service in self._services:
                service.start()
                self._serving.append(service)
        except BaseException:
            self.stop()
            raise
        recorder = self._recorder
        if recorder is not None:
            self._run(
                "recorder",
                lambda: run_again(lambda stop: recorder.run(stop, self._record_every), self._stop),
            )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``request_stop`` or a failure: True; False after ``timeout`` or ``wake``.

        For one thread at a time.
        """
        if not self._ended:
            with suppress(queue.Empty):
                self._ended = self._wakeups.get(timeout=timeout)
        return self._ended

    def request_stop(self) -> None:
        """Make ``wait`` return True from now on. Safe in a signal handler."""
        self._wakeups.put(True)

    def fail(self, part: str, error: BaseException) -> None:
        """End because of an unexpected error in a part."""
        self.failure = error
        self._log(f"{part} failed: {type(error).__name__}: {error}.")
        self.request_stop()

    def wake(self) -> None:
        """Make ``wait`` return once. Safe in a signal handler."""
        self._wakeups.put(False)

    def stop(self) -> None:
        """Stop all parts and store the last checkpoint, whichever part fails. Idempotent."""
        if self._stop.is_set():
            return
        # Services end while energy still settles for them.
        for service in reversed(self._serving):
            self._attempt(f"service {service.name!r}", service.stop)
        self._stop.set()
        self.demand.wake()
        for thread in self._threads:
            thread.join(STOP_TIMEOUT)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        self.left_behind = bool(alive)
        if "wattspan-poller" in alive:
            self._log("The poller does not end: a driver call hangs. The agent ends without it.")
        else:
            self.failure = self._attempt("last checkpoint", self._poller.finish) or self.failure
        recorder = self._recorder
        written = recorder is None or self._in_time("recorder", recorder.turn)
        if not written:
            self._log("The disk of the store does not respond; the last checkpoint is not stored.")
            self.left_behind = True
        for exporter in self._exporters.started:
            self._attempt(f"exporter {exporter.name!r}", exporter.stop)
        if not alive:
            self._attempt("sources", self._poller.close)
        if self._store is not None and written:
            self.left_behind |= not self._in_time("store", self._store.close)

    def _in_time(self, what: str, act: Callable[[], object]) -> bool:
        """Attempt an action that may hang on a disk; return True if it has ended."""

        def attempt() -> None:
            self.failure = self._attempt(what, act) or self.failure

        thread = threading.Thread(target=attempt, name=f"wattspan-last-{what}", daemon=True)
        thread.start()
        thread.join(WRITE_TIMEOUT)
        return not thread.is_alive()

    def _attempt(self, what: str, act: Callable[[], object]) -> Exception | None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - all other parts must be stopped as well
            self._log(f"Stopping the {what} failed: {type(error).__name__}: {error}.")
            return error
        return None

    def _run(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - a dead thread must end the agent
                self.fail(f"The {name}", error)

        thread = threading.Thread(target=guarded, name=f"wattspan-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()


# ------------------------------------------------------------------------------------ failures

SELF_REPORTING = {"store", "files", *(signal.name for signal in (SPANS, LOGS, METRICS))}
_NON_COUNTER_SOURCES = {
    "processes",
    "cost",
    "carbon",
    "capper",
    "tuner",
    "fleet",
    "pods",
    HISTORY,
    DEVICES,
    TUNING,
    "configuration",
    "engine",  # :LABEL, the page of a serving engine
    "threads",
    *SELF_REPORTING,
}


def require_readable_counters(sources: Iterable[SourceHealth]) -> None:
    """SourceError if access to every counter is denied: waiting does not help."""
    counters = [one for one in sources if one.source.split(":")[0] not in _NON_COUNTER_SOURCES]
    failures = [failure for health in counters for failure in health.failures]
    denied = [failure for failure in failures if failure.trouble is Trouble.DENIED]
    if denied and all(health.failures and not health.up for health in counters):
        raise SourceError(f"No energy counter can be read. {merge_failures(denied)[0]}")


def merge_failures(failures: Iterable[Failure]) -> list[Failure]:
    """Failures that differ only in the thing as one, which names one thing and counts the rest."""
    things: dict[Failure, list[str]] = {}
    for failure in failures:
        things.setdefault(replace(failure, thing="", domain_id=None), []).append(failure.thing)
    return [
        replace(kind, thing=first if not more else f"{first} and {len(more)} more")
        for kind, (first, *more) in things.items()
    ]
