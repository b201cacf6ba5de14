"""The log file of windows, with Zeus's columns: one line per window, once its energy is known.

A thread looks the energies up, so that no line delays the program. Lines are in the order of the
windows' ends. An energy that cannot be known is an empty field.
"""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Protocol

from wattspan.sdk import AgentUnavailableError, MeasurementError

EXIT_TIMEOUT = 10.0
"""Seconds to wait at exit for the lines of the last windows."""

RESTART_TIMEOUT = 5.0
"""Seconds for which an agent that does not answer may be restarting."""

_RETRY_PAUSE = 0.2


class LoggedWindow(Protocol):
    """A window whose energies may have to be waited for."""

    @property
    def time(self) -> float: ...

    @property
    def gpu_energy(self) -> dict[int, float]: ...


class WindowLog:
    """Writes the windows of one process.

    The columns are those of ``gpu_indices``, or of the first window if none are known at first.
    """

    def __init__(self, path: Path, gpu_indices: Sequence[int], *, append: bool = False) -> None:
        self._path = path.absolute()  # the program may change its directory
        self._indices = list(gpu_indices)
        self._headed = append
        self._answered = bool(self._indices)
        self._queue: SimpleQueue[tuple[float, str, LoggedWindow] | None] = SimpleQueue()
        self._starting = Lock()
        self._thread: Thread | None = None
        self._pid = os.getpid()
        if not append:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
            if self._indices:
                self._write_header()

    def reopened(self) -> WindowLog:
        """The log of a forked process, which appends its own windows."""
        return WindowLog(self._path, self._indices, append=True)

    def add(self, began: float, key: str, measurement: LoggedWindow) -> None:
        """Log a window that began at the Unix time ``began``; returns at once."""
        if self._thread is None:
            self._start()
        self._queue.put((began, key, measurement))

    def close(self) -> None:
        """Write the remaining lines, in at most EXIT_TIMEOUT seconds."""
        thread = self._thread
        if thread is not None and os.getpid() == self._pid:
            self._queue.put(None)
            thread.join(EXIT_TIMEOUT)
            if thread.is_alive():
                warnings.warn(
                    f"The last windows are missing in {self._path}: their energy was not known "
                    f"{EXIT_TIMEOUT:g} s after the end of the program.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _start(self) -> None:
        # Now: a thread that imports while the program forks leaves the child with an import lock
        # that is never released.
        import http.client  # noqa: F401
        from multiprocessing.util import Finalize

        with self._starting:
            if self._thread is None:
                # At exit; a child of multiprocessing leaves the functions of atexit out.
                Finalize(None, self.close, exitpriority=0)
                thread = Thread(target=self._work, name="wattspan-zeus-log", daemon=True)
                thread.start()
                self._thread = thread

    def _work(self) -> None:
        early: list[tuple[float, str, float]] = []  # windows before the columns are known
        while (entry := self._queue.get()) is not None:
            began, key, measurement = entry
            energies = self._energies_of(measurement)
            if not self._headed and not energies:
                early.append((began, key, measurement.time))
                continue
            try:
                self._write_early(early, energies)
                self._write([began, key, measurement.time, *map(energies.get, self._indices)])
            except OSError as error:  # such as a full disk: later lines may have room
                with suppress(RuntimeWarning):  # a warning that is an error in the program
                    text = f"Window {key!r} is missing in {self._path}: {error}."
                    warnings.warn(text, RuntimeWarning, stacklevel=1)
        if early:
            self._write_early(early, {})

    def _write_early(
        self, early: list[tuple[float, str, float]], energies: Mapping[int, float]
    ) -> None:
        """The header with the columns of ``energies``, and the windows that waited for it."""
        if not self._headed:
            self._indices = list(energies)
            self._write_header()
            for fields in early:
                self._write([*fields, *[None] * len(self._indices)])
            early.clear()

    def _energies_of(self, measurement: LoggedWindow) -> dict[int, float]:
        """The energies of a window; empty if they cannot be known.

        An agent that has answered before may be restarting, so it is asked again for a while.
        """
        deadline = monotonic() + (RESTART_TIMEOUT if self._answered else 0.0)
        while True:
            try:
                found = measurement.gpu_energy
            except AgentUnavailableError:
                self._answered = monotonic() < deadline
                if not self._answered:
                    return {}
                sleep(_RETRY_PAUSE)
            except (MeasurementError, RuntimeWarning):  # a warning that is an error in the program
                return {}
            else:
                self._answered = True
                return found

    def _write_header(self) -> None:
        columns = [f"gpu{i}_energy" for i in self._indices]
        self._write(["start_time", "window_name", "elapsed_time", *columns])
        self._headed = True

    def _write(self, fields: Sequence[object]) -> None:
        """Append one line. One write, so that lines of several processes do not mix."""
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(fields)
        with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line.getvalue())
