"""Running somebody's command as a shell would: its terminal, its signals, its exit code."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

from wattspan.model import Consumer
from wattspan.ports import Clock, WattspanError
from wattspan.processes.procfs import ProcFs

_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_INTERRUPTING_SIGNALS = (*_TERMINAL_SIGNALS, signal.SIGTERM, signal.SIGHUP)


class CommandNotFoundError(WattspanError):
    """There is no such command."""

    exit_code = 127


class CommandNotExecutableError(WattspanError):
    """The command is there and cannot be executed."""

    exit_code = 126


class ChildExit(NamedTuple):
    """One run of a command: monotonic times, and what the kernel charged it and its children."""

    whom: Consumer
    start: int
    end: int
    code: int  # as a shell tells it: 128 and the signal's number for one that was killed
    cpu_seconds: float
    interrupted: bool  # somebody pressed Ctrl-C or asked it to end


def run_child(
    command: Sequence[str],
    clock: Clock,
    *,
    begun: Callable[[Consumer], object],
    meanwhile: Callable[[Consumer, int], object],
    every: int,
) -> ChildExit:
    """Run ``command`` to its end.

    ``begun`` is told who it is as soon as it runs, in a thread, so that a quick command is not
    taken for a slow one; ``meanwhile`` is called every so many nanoseconds with the time when
    it began. Signals reach the command, not us.
    """
    with _forward_signals() as signals:
        start = clock.monotonic()
        child = _spawn(command)
        signals.belong_to(child.pid)
        with ThreadPoolExecutor(1) as aside:
            whom = process_identity(child.pid)
            told = aside.submit(begun, whom)
            faults = _wait(child.pid, every, lambda: meanwhile(whom, start))
            end = clock.monotonic()
            signals.belong_to(None)
            wait([told])
            # Not earlier: until somebody takes note of its end, it can be asked whose it was.
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = code = os.waitstatus_to_exitcode(status)
    told.result()
    if faults:
        raise faults[0]
    return ChildExit(
        whom,
        start,
        end,
        code if code >= 0 else 128 - code,
        used.ru_utime + used.ru_stime,
        signals.interrupted or -code in _INTERRUPTING_SIGNALS,
    )


def process_identity(pid: int) -> Consumer:
    """A process of ours by pid and start time; a child is there to be asked even after its end."""
    procfs = ProcFs()
    try:
        stat = procfs.stat(pid)
    finally:
        procfs.close()
    if stat is None:
        raise WattspanError(
            "Cannot tell one process from another: /proc is not mounted here, or hides it. "
            "Mount it for the user that calls wattspan."
        )
    return Consumer(pid, stat.started)


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        # What we were given the command is given too, descriptors included: those of make, say.
        return subprocess.Popen(command, close_fds=False)  # noqa: S603 - it is what was asked for
    except FileNotFoundError as error:
        raise CommandNotFoundError(
            f"Cannot run {command[0]!r}: {_cause(error)}. Check its name, or write its whole path."
        ) from None
    except (OSError, ValueError) as error:
        raise CommandNotExecutableError(
            f"Cannot run {command[0]!r}: {_cause(error)}. It must be a program that you may run."
        ) from None


def _cause(error: Exception) -> str:
    return ((isinstance(error, OSError) and error.strerror) or str(error)).lower()


def _wait(pid: int, every: int, meanwhile: Callable[[], object]) -> list[Exception]:
    """Until the process has ended, which nobody takes note of yet; what went wrong meanwhile.

    Whatever goes wrong with us, the command goes on: it is somebody's work.
    """
    faults: list[Exception] = []
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll(every / 1e6):
            try:
                meanwhile()
            except Exception as error:  # noqa: BLE001 - told once the command has ended
                faults.append(error)
    finally:
        os.close(descriptor)
    return faults


class _SignalForwarder:
    """Passes on what is sent to us alone; what a terminal sends, it sends to the command too."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._early: list[int] = []
        self.interrupted = False

    def belong_to(self, child: int | None) -> None:
        """From now on signals are for ``child``, those that came before it included."""
        self._child = child
        while child is not None and self._early:
            os.kill(child, self._early.pop(0))

    def handle(self, number: int, frame: object) -> None:
        self.interrupted |= number in _INTERRUPTING_SIGNALS
        if self._child is None:
            self._early.append(number)
        elif not (number in _TERMINAL_SIGNALS and _is_foreground()):
            os.kill(self._child, number)  # ours until we take note of its end, so nobody else's


@contextmanager
def _forward_signals() -> Iterator[_SignalForwarder]:
    """Outlive the signals that are the command's. It inherits none of this: handlers reset."""
    signals = _SignalForwarder()
    numbers = [
        number
        for number in (*_TERMINAL_SIGNALS, *_FORWARDED_SIGNALS)
        if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup: the command's as well
    ]
    before = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_foreground() -> bool:
    """Whether our process group has the terminal, whose keys then reach all of the group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # there is none, and so no keys
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
