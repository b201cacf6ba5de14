"""Clients of an emulated host: a Unix socket by which other processes use its boards.

A program that is not a job of the profile attaches itself to a board here and sets its load, as a
program with a real GPU would by launching kernels. The host's directory is private to its user.

::

    with EmulatedGpu(0) as gpu:
        with gpu.busy(0.8):      # as a kernel that fills four fifths of the board
            time.sleep(0.05)

The program appears among the board's processes, draws energy by its load, and is detached when it
ends. It needs a running emulated host: ``wattspan run --emulate two-socket-h100``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from wattspan.ports import WattspanError


class Closeable:
    """A context manager that calls ``close`` at its end."""

    def close(self) -> None:
        """Release the resources. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


SOCKET_NAME = "engine.sock"
COUNTERS_SOCKET = "counters.sock"  # of the jobs' performance counters
HOST_VARIABLE = "WATTSPAN_EMULATED_HOST"  # the host's directory, where there are several
_HOST_DIRECTORIES = (Path("/dev/shm"), Path("/tmp"))  # noqa: S108 - where emulated hosts are


def running_host() -> Path:
    """The directory of the emulated host that runs here."""
    if chosen := os.environ.get(HOST_VARIABLE):
        return Path(chosen)
    found = [
        path.parent
        for where in _HOST_DIRECTORIES
        for path in where.glob(f"wattspan-emulated-*/{SOCKET_NAME}")
    ]
    if len(found) == 1:
        return found[0]
    how_many = "No emulated host runs" if not found else "Several emulated hosts run"
    raise WattspanError(
        f"{how_many} on this machine. Start one with `wattspan run --emulate two-socket-h100`, "
        f"or name its directory in {HOST_VARIABLE}."
    )


class ControlClient(Closeable):
    """Questions to a running emulated host, from any process of its user. Thread-safe."""

    def __init__(self, host: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str((host or running_host()) / SOCKET_NAME))
        except OSError as error:
            self._socket.close()
            raise WattspanError(
                f"Cannot reach the emulated host: {error.strerror or error}. "
                "Check that it is still running."
            ) from None
        self._file = self._socket.makefile("rw")

    def ask(self, **question: object) -> dict[str, Any]:
        try:
            with self._lock:
                self._file.write(json.dumps(question) + "\n")
                self._file.flush()
                line = self._file.readline()
        except (OSError, ValueError):  # the host has ended, or this client is closed
            line = ""
        if not line.endswith("\n"):
            raise WattspanError("The emulated host has ended.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WattspanError(f"The emulated host refuses: {answer['error']}.")
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):  # unsent data to a host that has ended
            self._file.close()
        self._socket.close()


class EmulatedGpu(Closeable):
    """This process on board ``index`` of the emulated host."""

    def __init__(self, index: int = 0, *, kernel: str = "decode", host: Path | None = None) -> None:
        """``kernel`` is ``train`` (bound by computing) or ``decode`` (bound by memory)."""
        self._index = index
        self._loads: list[float] = []
        self._lock = threading.Lock()
        self._host = ControlClient(host)
        try:
            self._host.ask(do="attach", gpu=index, load=0.0, kernel=kernel)
        except BaseException:
            self._host.close()
            raise

    @contextmanager
    def busy(self, load: float) -> Iterator[None]:
        """Keep ``load`` of the board busy for the length of the block; blocks add up, to 1."""
        self._change_load(self._loads.append, load)
        try:
            yield
        finally:
            self._change_load(self._loads.remove, load)

    def set(self, load: float) -> None:
        """Keep ``load`` of the board busy until the next call; not within ``busy``."""
        with self._lock:
            self._host.ask(do="load", gpu=self._index, load=load)

    def _change_load(self, change: Any, load: float) -> None:
        with self._lock:
            change(load)
            self._host.ask(do="load", gpu=self._index, load=min(1.0, sum(self._loads, 0.0)))

    def spent(self, times: Sequence[int]) -> list[int]:
        """The true energy of this process's GPU work at each time.

        Microjoules at monotonic nanoseconds of the last minutes. No real board provides it.
        """
        pid = str(os.getpid())
        answer = self._host.ask(do="truth", at=list(times))
        return [moment["gpus"][self._index]["processes"].get(pid, 0) for moment in answer["at"]]

    def close(self) -> None:
        self._host.close()
