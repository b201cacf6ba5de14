"""A process of another user that attacks, or uses, the agent.

``python -m testbed.hostile.actor UID PROGRAM``: one of the programs in ``traffic``, with its
settings as a line of JSON on standard input. It ends with its standard input at the latest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from testbed.hostile import traffic
from testbed.requirements import ROOT


class Actor:
    """Such a process, from its starter's side."""

    def __init__(self, uid: int, program: str, **settings: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "testbed.hostile.actor", str(uid), program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def lines(self) -> Iterator[str]:
        """Its output until its end."""
        assert self._process.stdout is not None
        yield from self._process.stdout

    def said(self) -> str:
        """Its next line; "" at its end."""
        return self._process.stdout.readline().strip()

    def result(self, within: float, wanted: Callable[[], bool] = lambda: True) -> dict[str, int]:
        """Received responses by status; it is killed after some seconds, or when not needed."""
        over = threading.Event()

        def watch() -> None:
            deadline = time.monotonic() + within
            while not over.wait(0.2):
                if time.monotonic() > deadline or not wanted():
                    self._process.kill()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            line = self.said()
        finally:
            over.set()
            watcher.join()
        self.end()
        return dict(json.loads(line)) if line else {"(stopped)": 1}

    def tell(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self, number: int = signal.SIGKILL) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):  # output never read by the peer
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def main() -> None:
    uid, program = int(sys.argv[1]), sys.argv[2]
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    "localhost".encode("idna")  # another user may not be able to read Python's own modules
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    traffic.PROGRAMS[program](**settings)


if __name__ == "__main__":
    main()
