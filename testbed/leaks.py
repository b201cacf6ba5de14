"""Resources that a test session must release: threads and processes."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

SESSION = "TEST_SESSION_OF_WATTSPAN"  # every process a test starts inherits it
# (not WATTSPAN_...: the program warns of such variables that it does not know)

LEFT_RUNNING = 9
"""The exit code of a session that passed and left something behind; pytest's own end at 5."""


class LeakWatch:
    """Records the running threads and processes before the first test and reports new ones
    after the last.

    A process is recognised by a variable in its environment, so one that was adopted by init
    is found as well as a child.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Watch from now on; later processes inherit ``environ``."""
        self._threads = frozenset(threading.enumerate())
        self._mark = environ[SESSION] = uuid.uuid4().hex

    def threads(self, patience: float = 2.0) -> list[str]:
        """Names of threads that outlive the session, after ``patience`` s each to finish."""
        leaked = [t for t in threading.enumerate() if t not in self._threads]
        for thread in leaked:
            if thread is not threading.current_thread():
                thread.join(patience)
        return [t.name for t in leaked if t.is_alive() and t is not threading.current_thread()]

    def processes(self, patience: float = 3.0) -> dict[int, str]:
        """Pid and command line of every process of this session that still runs.

        Orphans that are about to end have ``patience`` s for it.
        """
        until, pause = time.monotonic() + patience, threading.Event()
        while (found := self._running()) and time.monotonic() < until:
            pause.wait(0.05)
        return found

    def _running(self) -> dict[int, str]:
        mark = f"{SESSION}={self._mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):  # gone meanwhile, or somebody else's
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    found[int(entry.name)] = b" ".join(words).decode(errors="replace").strip()
        return found

    @staticmethod
    def end(pids: dict[int, str]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
