"""Clients of an emulated host: a Unix socket by which other processes use its boards.

A program that is not a job of the profile attaches itself to a board here and sets its load, as a
program with a real GPU would by launching kernels. The protocol is JSON, one line for each request
and answer, with one thread for each client. The kernel proves the client's pid, so no client can
act for another. The host's directory is private to its user.

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
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from wattspan.ports import WattspanError
from wattspan.util.peer_credentials import peer_credentials


class Closeable:
    """A context manager that calls ``close`` at its end."""

    def close(self) -> None:
        """End it; again: nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


SOCKET_NAME = "engine.sock"

QuestionHandler = Callable[[int, str], dict[str, Any]]
"""The answer to a line that the process with this pid has written."""


class ControlServer:
    """Answers guests at ``directory / NAME`` until it is closed."""

    def __init__(self, directory: Path, answer: QuestionHandler) -> None:
        self._server = _ControlSocketServer(str(directory / SOCKET_NAME), _ControlHandler)
        self._server.answer = answer
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="emulated-door", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _ControlSocketServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False  # a guest that stays is no reason to
    answer: QuestionHandler


class _ControlHandler(socketserver.StreamRequestHandler):
    server: _ControlSocketServer
    timeout = None

    def handle(self) -> None:
        pid = peer_credentials(self.request).pid or 0
        for line in self.rfile:
            answer = self.server.answer(pid, line.decode(errors="replace"))
            try:
                self.wfile.write(json.dumps(answer).encode() + b"\n")
            except OSError:
                return  # it left without waiting for the answer


HOST_VARIABLE = "WATTSPAN_EMULATED_HOST"  # the host's directory, where there are several
_HOST_DIRECTORIES = (Path("/dev/shm"), Path("/tmp"))  # noqa: S108 - where emulated hosts are


def running_host() -> Path:
    """The directory of the emulated host that runs here."""
    if chosen := os.environ.get(HOST_VARIABLE):
        return Path(chosen)
    found = [
        door.parent
        for where in _HOST_DIRECTORIES
        for door in where.glob(f"wattspan-emulated-*/{SOCKET_NAME}")
    ]
    if len(found) == 1:
        return found[0]
    how_many = "No emulated host runs" if not found else "Several emulated hosts run"
    raise WattspanError(
        f"{how_many} on this machine. Start one with `wattspan run --emulate two-socket-h100`, "
        f"or name its directory in {HOST_VARIABLE}."
    )


class ControlClient:
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
        except OSError:  # it ended between two questions, or in the midst of one
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


class EmulatedTraining(Closeable):
    """This process trains on board ``index``: steps as long as the board is slow.

    ::

        with EmulatedTraining(step=0.1) as training:
            while True:
                with tracer.start_as_current_span("train_step"):
                    training.step()
    """

    def __init__(
        self,
        index: int = 0,
        *,
        step: float = 0.1,
        host_part: float = 0.03,
        noise: float = 0.02,
        seed: int = 0,
        kernel: str = "large-model",
        host: Path | None = None,
    ) -> None:
        """``step`` is in seconds at full speed; ``host_part`` of it is done without the board."""
        self._index, self._done = index, 0
        self._host = ControlClient(host)
        steps = {"step": step, "host": host_part, "noise": noise, "seed": seed}
        try:
            self._host.ask(do="attach", gpu=index, load=1.0, kernel=kernel, steps=steps)
        except BaseException:
            self._host.close()
            raise
        self._pause = min(0.005, step / 50)

    def step(self) -> tuple[int, int]:
        """Return when the next step is done: when exactly it began and ended, monotonic."""
        waiting = threading.Event()
        while not (finished := self._ask_units(self._done)["finished"]):
            waiting.wait(self._pause)
        self._done += 1
        began, _, ended, *_ = finished[0]
        return began, ended

    def truth(self) -> dict[str, Any]:
        """The truth about the steps so far: ``units``, and nanoseconds ``took`` and ``ideal``."""
        return self._ask_units(1 << 62)

    def _ask_units(self, since: int) -> dict[str, Any]:
        return self._host.ask(do="finished", gpu=self._index, since=since)

    def close(self) -> None:
        self._host.close()


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
