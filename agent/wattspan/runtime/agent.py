"""The running agent: its threads, and the order in which they live and die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from wattspan.model import Snapshot
from wattspan.ports import Exporter
from wattspan.runtime.poller import Poller
from wattspan.runtime.recorder import Books, Recorder

STOP_WITHIN = 5.0
"""Seconds a thread is waited for. One that hangs in a driver is left behind: it is a daemon."""


class Agent:
    """One poller thread, one recorder thread, and whatever the exporters run.

    Nothing starts before ``start``; after ``stop`` nothing of the agent is left but threads that
    a driver holds. What was measured up to the stop is in the store.
    """

    def __init__(
        self,
        poller: Poller,
        exporters: Sequence[Exporter],
        *,
        books: Books | None = None,
        record_every: int = 5 * 10**9,
        log: Callable[[str], None],
    ) -> None:
        self._poller = poller
        self._exporters = exporters
        self._books = books
        self._recorder = None if books is None else Recorder(books, poller.checkpoint)
        self._record_every = record_every
        self._log = log
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._started: list[Exporter] = []
        self.failure: BaseException | None = None

    @property
    def view(self) -> Callable[[], Snapshot]:
        return self._poller.view

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the started exporters can be reached."""
        return tuple(one.address for one in self._started if one.address is not None)

    def start(self) -> None:
        """Begin. An exporter that cannot start is passed on, after those started are stopped."""
        self._poller.turn()
        try:
            for exporter in self._exporters:
                exporter.start(self._poller.view)
                self._started.append(exporter)
        except BaseException:
            self.stop()
            raise
        self._run("poller", lambda: self._poller.run(self._stop))
        recorder = self._recorder
        if recorder is not None:
            self._run("recorder", lambda: recorder.run(self._stop, self._record_every))

    def wait(self, timeout: float | None = None) -> bool:
        """Until ``request_stop``, or a thread's failure; True if so, False after ``timeout``."""
        return self._ended.wait(timeout)

    def request_stop(self) -> None:
        """Make ``wait`` return. Safe in a signal handler."""
        self._ended.set()

    def stop(self) -> None:
        """End everything, and keep what was measured."""
        self._ended.set()
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_WITHIN)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if "wattspan-poller" not in alive:
            self._poller.publish()
            self._poller.take_checkpoint()
        else:
            self._log("The poller does not return and is left behind; a driver call hangs.")
        if self._recorder is not None:
            self._recorder.turn()
        for exporter in self._started:
            exporter.stop()
        if not alive:
            self._poller.close()
        if self._books is not None:
            self._books.close()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - a dead thread must end the agent, loudly
                self.failure = error
                self._log(f"The {name} failed: {type(error).__name__}: {error}")
                self._ended.set()

        thread = threading.Thread(target=guarded, name=f"wattspan-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()
