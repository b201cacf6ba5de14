"""The log file of windows, with Zeus's columns: one line per window, once its energy is known.

A thread looks the energies up, so that no line delays the program. Lines are in the order of the
windows' ends. An energy that cannot be known is an empty field. A signal may end the program at
once: then a process of its own, which ignores signals, writes the lines that are missing.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from select import PIPE_BUF, select
from subprocess import DEVNULL, Popen
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, Protocol

from wattspan.sdk import AgentUnavailableError, MeasurementError
from wattspan.sdk.client import read_devices
from wattspan.sdk.ring import OwnedDescriptor
from wattspan.sdk.window import RESULT_TIMEOUT

EXIT_TIMEOUT = 10.0
"""Seconds to wait at exit for the lines of the last windows."""

RESTART_TIMEOUT = 5.0
"""Seconds for which an agent that does not answer may be restarting."""

_RETRY_PAUSE = 0.2

THREAD = "wattspan-zeus-log"

_MAX_LINES = 10_000  # of the newest windows, which the process for missing lines knows

_FINISH = (
    "import os, sys; os.fork() and os._exit(0); sys.path.append(sys.argv[1]); "
    "from wattspan.compat.zeus.log_file import finish; finish(sys.argv[2], int(sys.argv[3]))"
)


class LoggedWindow(Protocol):
    """A window whose energies may have to be waited for."""

    @property
    def time(self) -> float: ...

    @property
    def period(self) -> tuple[int, int]: ...

    @property
    def gpu_energy(self) -> dict[int, float]: ...


class WindowLog:
    """Writes the windows of one process.

    The columns are those of ``gpu_indices``, or of the first window if none are known at first.
    ``boards`` returns the ids of the devices with these indices, as far as they are known.
    """

    def __init__(
        self,
        path: Path,
        gpu_indices: Sequence[int],
        boards: Callable[[], Mapping[int, str]] = dict,
        *,
        append: bool = False,
    ) -> None:
        self._path = path.absolute()  # the program may change its directory
        self._indices, self._boards = list(gpu_indices), boards
        self._told: OwnedDescriptor | None = None  # to the process for missing lines
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
        if self._told is not None:
            self._told.close()  # else it would wait for the end of this process, too
        return WindowLog(self._path, self._indices, self._boards, append=True)

    def add(self, began: float, key: str, measurement: LoggedWindow) -> None:
        """Log a window that began at the Unix time ``began``; returns at once."""
        key = str(key)  # programs may give anything
        if self._thread is None:
            self._start()
        if self._told is not None and self._told.is_ours:
            told = [began, key, measurement.time, measurement.period, [*self._boards().items()]]
            line = json.dumps(told).encode() + b"\n"
            with suppress(OSError):  # it has ended, or reads slowly
                if len(line) <= PIPE_BUF:  # others may be written in part
                    os.write(self._told.number, line)
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
            if self._told is not None and self._told.is_ours:
                with suppress(OSError):  # it has ended
                    os.write(self._told.number, b"null\n")
                self._told.close()

    def _start(self) -> None:
        # Now: a thread that imports while the program forks leaves the child with an import lock
        # that is never released.
        import http.client  # noqa: F401
        from multiprocessing.util import Finalize

        with self._starting:
            if self._thread is None:
                # At exit; a child of multiprocessing leaves the functions of atexit out.
                Finalize(None, self.close, exitpriority=0)
                is_python = "python" in Path(sys.executable or "").name  # else it is embedded
                # The first process of a container would not wait for orphans.
                rest = self._start_rest() if is_python and self._pid != 1 else None
                thread = Thread(target=self._work, args=(rest,), name=THREAD, daemon=True)
                thread.start()
                self._thread = thread

    def _start_rest(self) -> Popen[Any] | None:
        """Start the process that writes missing lines, in a session without this terminal.

        The one that it is started by ends at once, so that it is no child of this program.
        """
        place = str(Path(__file__).parents[3]), str(self._path), str(self._pid)
        with suppress(OSError, ValueError):
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            with os.fdopen(reading) as told:
                start = partial(Popen, [sys.executable, "-c", _FINISH, *place], stdin=told)
                started = start(stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
            self._told = OwnedDescriptor(writing)
            return started
        return None

    def _work(self, started: Popen[Any] | None) -> None:
        early: list[tuple[float, str, float]] = []  # windows before the columns are known
        while (entry := self._queue.get()) is not None:
            began, key, measurement = entry
            energies = self._energies_of(partial(getattr, measurement, "gpu_energy"))
            if not self._headed and not energies:
                early.append((began, key, measurement.time))
            else:
                try:
                    self._write_early(early, energies)
                    self._write([began, key, measurement.time, *map(energies.get, self._indices)])
                except OSError as error:  # such as a full disk: later lines may have room
                    with suppress(RuntimeWarning):  # a warning that is an error in the program
                        text = f"Window {key!r} is missing in {self._path}: {error}."
                        warnings.warn(text, RuntimeWarning, stacklevel=1)
            if started is not None:
                started.wait()
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

    def _energies_of(self, read: Callable[[], dict[int, float]]) -> dict[int, float]:
        """The energies of a window; empty if they cannot be known.

        An agent that has answered before may be restarting, so it is asked again for a while.
        """
        deadline = monotonic() + (RESTART_TIMEOUT if self._answered else 0.0)
        while True:
            try:
                found = read()
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
        with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(_line(fields))

    def finish(self, told: Iterable[bytes]) -> None:
        """Write those lines of windows of another process that are missing."""
        written = self._path.read_text("utf-8")
        columns = written.partition("\n")[0].split(",")[3:]
        self._indices = [int(name[len("gpu") : -len("_energy")]) for name in columns]
        self._headed, self._answered = bool(written), True
        for began, key, seconds, period, boards in map(json.loads, told):
            if _line([began, key, seconds])[:-1] not in written:
                energies = self._energies_of(partial(_energies, period, dict(boards)))
                self._write_early([], dict(boards))
                self._write([began, key, seconds, *map(energies.get, self._indices)])


def finish(path: str, parent: int) -> None:
    """Once the process ``parent`` has ended, write its missing lines."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # they are for the program
        signal.signal(number, signal.SIG_IGN)
    running = list[int]()
    with suppress(OSError):  # it has ended
        running.append(os.pidfd_open(parent))
    told = deque(sys.stdin.buffer, _MAX_LINES)
    if told and told[-1] != b"null\n":
        if running:
            select(running, [], [])  # a daemon closes its descriptors
        WindowLog(Path(path), (), append=True).finish(told)


def _energies(period: Sequence[int], boards: Mapping[int, str]) -> dict[int, float]:
    """The joules of some boards, without those that are not known."""
    found = read_devices(period[0], period[1], tuple(boards.values()), timeout=RESULT_TIMEOUT)
    known = {one.id: one.joules for one in found if one.joules is not None and one.complete}
    return {i: known[key] for i, key in boards.items() if key in known}


def _line(fields: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(fields)
    return line.getvalue()
