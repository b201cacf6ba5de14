"""The running agent: its threads, and the order in which they live and die."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from wattspan.model import Snapshot
from wattspan.ports import Exporter, ExporterError, WattspanError
from wattspan.runtime.past import RecentPast
from wattspan.runtime.poller import Poller
from wattspan.runtime.recorder import Books, Recorder

STOP_WITHIN = 1.5
"""Seconds a thread is waited for. One that hangs in a driver is left behind: it is a daemon."""


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
        books: Books | None = None,
        record_every: int = 5 * 10**9,
        log: Callable[[str], None],
    ) -> None:
        self._poller = poller
        self._exporters = exporters
        self._services = services
        self._books = books
        self._recorder = None if books is None else Recorder(books, poller.checkpoint)
        self._record_every = record_every
        self._log = log
        self._stop = threading.Event()
        self._ended = False
        # Not an Event: its lock is no place for a signal handler to find the main thread in.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._started: list[Exporter] = []
        self._serving: list[Service] = []
        self.failure: BaseException | None = None

    @property
    def view(self) -> Callable[[], Snapshot]:
        return self._poller.view

    @property
    def past(self) -> RecentPast:
        """What was spent in stretches of the recent past; implements ports.Past."""
        return self._poller.past

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the started exporters and services can be reached."""
        exporters = tuple(one.address for one in self._started if one.address is not None)
        return exporters + tuple(each for one in self._serving for each in one.addresses)

    def start(self) -> None:
        """Begin. An exporter that cannot start is passed on, after those started are stopped."""
        try:
            self._poller.turn()
            self._poller.publish()
            for exporter in self._exporters:
                self._open(exporter)
            for service in self._services:
                service.start()
                self._serving.append(service)
        except BaseException:
            self.stop()
            raise
        self._run("poller", lambda: self._poller.run(self._stop))
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

        For one thread at a time.
        """
        if not self._ended:
            with suppress(queue.Empty):
                self._bell.get(timeout=timeout)
                self._ended = True
        return self._ended

    def request_stop(self) -> None:
        """Make ``wait`` return. Safe in a signal handler."""
        self._bell.put(None)

    def stop(self) -> None:
        """End everything, and keep what was measured, whatever of it fails. Again: nothing."""
        if self._stop.is_set():
            return
        # What runs beside the poller ends while energy still settles for it.
        for service in reversed(self._serving):
            self._attempt(f"service {service.name!r}", service.stop)
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_WITHIN)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if "wattspan-poller" in alive:
            self._log("The poller does not return and is left behind; a driver call hangs.")
        else:
            self.failure = self._attempt("last books", self._poller.finish) or self.failure
        if self._recorder is not None:
            self.failure = self._attempt("recorder", self._recorder.turn) or self.failure
        for exporter in self._started:
            self._attempt(f"exporter {exporter.name!r}", exporter.stop)
        if not alive:
            self._attempt("sources", self._poller.close)
        if self._books is not None:
            self._attempt("store", self._books.close)

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
                self.failure = error
                self._log(f"The {name} failed: {type(error).__name__}: {error}.")
                self.request_stop()

        thread = threading.Thread(target=guarded, name=f"wattspan-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()
