"""Running a command as a shell does: its terminal, its signals, its exit code."""

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
from wattspan.service.systemd import signal_descriptor, signal_handlers, terminal

_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_INTERRUPTING_SIGNALS = (*_TERMINAL_SIGNALS, signal.SIGTERM, signal.SIGHUP)


class CommandNotFoundError(WattspanError):
    """The command does not exist."""

    exit_code = 127


class CommandNotExecutableError(WattspanError):
    """The command exists and cannot be executed."""

    exit_code = 126


class ChildExit(NamedTuple):
    """One run of a command: monotonic times, and the CPU time of it and its children."""

    consumer: Consumer
    start: int
    end: int
    code: int  # 128 and the number of the signal that ended it, as in a shell
    cpu_seconds: float
    interrupted: bool  # by Ctrl-C or a signal


def run_child(
    command: Sequence[str],
    clock: Clock,
    *,
    on_start: Callable[[Consumer], object],
    on_period: Callable[[Consumer, int], object],
    period: int,
) -> ChildExit:
    """Run ``command`` to its end; signals reach it instead of this process.

    ``on_start`` is called with its identity in a thread, so that a slow call does not lengthen the
    run. ``on_period`` is called every ``period`` nanoseconds with its identity and start time.
    """
    with signal_descriptor() as signalled, _forward_signals() as signals:
        start = clock.monotonic()
        child = _spawn(command)
        signals.forward_to(child.pid)
        with ThreadPoolExecutor(1) as executor:
            consumer = process_identity(child.pid)
            registration = executor.submit(on_start, consumer)
            faults = _wait(child.pid, signalled, clock, period, lambda: on_period(consumer, start))
            end = clock.monotonic()
            signals.forward_to(None)
            wait([registration])
            # Reaped only now: until then, /proc has its identity.
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = code = os.waitstatus_to_exitcode(status)
    registration.result()
    if faults:
        raise faults[0]
    return ChildExit(
        consumer,
        start,
        end,
        code if code >= 0 else 128 - code,
        used.ru_utime + used.ru_stime,
        signals.interrupted or -code in _INTERRUPTING_SIGNALS,
    )


def process_identity(pid: int) -> Consumer:
    """A process of this program by pid and start time; works for a child until it is reaped."""
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
        # The command inherits open descriptors, such as those of make.
        return subprocess.Popen(command, close_fds=False)  # noqa: S603 - the user's command
    except FileNotFoundError as error:
        raise CommandNotFoundError(
            f"Cannot run {command[0]!r}: {_cause(error)}. Check its name, or give its path."
        ) from None
    except (OSError, ValueError) as error:
        raise CommandNotExecutableError(
            f"Cannot run {command[0]!r}: {_cause(error)}. Give an executable program."
        ) from None


def _cause(error: Exception) -> str:
    return ((isinstance(error, OSError) and error.strerror) or str(error)).lower()


def _wait(
    pid: int, signalled: int, clock: Clock, period: int, on_period: Callable[[], object]
) -> list[Exception]:
    """Wait until the process has ended, without reaping it; returns the errors of ``on_period``.

    The command continues whatever these errors are. ``signalled`` is readable after a signal, so
    that its handler need not wait for the end of the period.
    """
    faults: list[Exception] = []
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        for one in (descriptor, signalled):
            poll.register(one, select.POLLIN)
        due = clock.monotonic() + period
        while True:
            ready = {one for one, _ in poll.poll(max(0, due - clock.monotonic()) / 1e6)}
            if descriptor in ready:
                return faults
            if ready:
                os.read(signalled, 64)
                continue
            try:
                on_period()
            except Exception as error:  # noqa: BLE001 - raised when the command has ended
                faults.append(error)
            due = clock.monotonic() + period
    finally:
        os.close(descriptor)


class _SignalForwarder:
    """Forwards signals, except those that a terminal sends to its whole process group."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._early: list[int] = []
        self.interrupted = False

    def forward_to(self, child: int | None) -> None:
        """Forward signals to ``child`` from now on, including earlier ones."""
        self._child = child
        while child is not None and self._early:
            os.kill(child, self._early.pop(0))

    def handle(self, number: int, frame: object) -> None:
        self.interrupted |= number in _INTERRUPTING_SIGNALS
        if self._child is None:
            self._early.append(number)
        elif not (number in _TERMINAL_SIGNALS and _is_foreground()):
            os.kill(self._child, number)  # not reaped yet, so the pid is its own


@contextmanager
def _forward_signals() -> Iterator[_SignalForwarder]:
    """Forward signals during the block."""
    signals = _SignalForwarder()
    handlers = {
        number: signals.handle
        for number in (*_TERMINAL_SIGNALS, *_FORWARDED_SIGNALS)
        if signal.getsignal(number) is not signal.SIG_IGN  # by nohup: the command ignores it too
    }
    with signal_handlers(handlers):
        yield signals


def _is_foreground() -> bool:
    """True if this process group has the terminal, whose keys reach the whole group."""
    with terminal() as descriptor:
        return descriptor is not None and os.tcgetpgrp(descriptor) == os.getpgrp()
