"""The process under a service manager: notifications, signals and the inherited socket.

Without a service manager there are no notifications.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from wattspan.clock import SystemClock
from wattspan.model import SECOND, Snapshot
from wattspan.ports import Clock, ListenError
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.http.sockets import ListeningSocket

WATCHDOG_DIVISOR = 4
"""Keep-alive messages for each watchdog period, so that one may be late."""

LONGEST_STATUS = 400  # characters; `systemctl status` shows one line

_NOTIFY_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_WATCHDOG_MESSAGE = "WATCHDOG=1"
_SEND_TIMEOUT = 1.0  # seconds that a service manager may take to make room for a message


class SystemdNotifier:
    """Sends messages as datagrams to ``$NOTIFY_SOCKET``. Safe from any thread; never raises."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        where = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + where[1:] if where.startswith("@") else where
        self.period = _period(environ) if self._address else None
        """Nanoseconds of the watchdog period; None without a watchdog."""
        self._status = ""

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> SystemdNotifier:
        """The notifier of ``environ``; removes its variables: child processes must not notify."""
        notify = cls(dict(environ))
        for name in _NOTIFY_VARIABLES:
            environ.pop(name, None)
        return notify

    @property
    def available(self) -> bool:
        """True if there is a service manager."""
        return bool(self._address)

    def __call__(self, *lines: str) -> None:
        """Send ``READY=1``, ``STOPPING=1`` or the like; several lines are one message."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            # A keep-alive message may be lost, another follows; the others are sent once.
            out.settimeout(0.0 if lines == (_WATCHDOG_MESSAGE,) else _SEND_TIMEOUT)
            out.sendto("\n".join(lines).encode(), self._address)

    def alive(self) -> None:
        """Send a keep-alive message."""
        self(_WATCHDOG_MESSAGE)

    def status(self, sentence: str) -> None:
        """Set the status line, if it has changed."""
        if sentence != self._status:
            self._status = sentence
            self(status_assignment(sentence))

    def ready(self, sentence: str) -> None:
        """Report the end of a start or a reload."""
        self._status = sentence
        self("READY=1", status_assignment(sentence))

    def reloading(self, now: int) -> None:
        """Report the start of a reload; ``now`` is monotonic."""
        self("RELOADING=1", f"MONOTONIC_USEC={now // 1000}", status_assignment("Reloading."))

    def stopping(self) -> None:
        """Report the start of the end."""
        self("STOPPING=1", status_assignment("Stopping."))

    def extend_timeout(self, span: int) -> None:
        """Extend the timeout of a start or an end to ``span`` nanoseconds from now."""
        self(f"EXTEND_TIMEOUT_USEC={span // 1000}")


class Watchdog:
    """Sends keep-alive messages at most WATCHDOG_DIVISOR times in a watchdog period.

    One loop calls it at each turn; if that loop hangs, the messages stop.
    """

    def __init__(self, notify: SystemdNotifier, clock: Clock) -> None:
        self._notify, self._clock = notify, clock
        self._due = clock.monotonic()

    def __call__(self) -> None:
        period = self._notify.period
        if period is None:
            return
        now = self._clock.monotonic()
        if now >= self._due:
            self._due = now + period // WATCHDOG_DIVISOR
            self._notify.alive()


def status_assignment(sentence: str) -> str:
    """``sentence`` as a status of one printable line."""
    plain = printable(sentence, " ")
    if len(plain) > LONGEST_STATUS:
        plain = plain[: LONGEST_STATUS - 1] + "…"
    return f"STATUS={plain}"


def _period(environ: Mapping[str, str]) -> int | None:
    """``WATCHDOG_USEC`` in nanoseconds, if it is valid and of this process."""
    period, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if pid not in ("", str(os.getpid())) or not (period.isascii() and period.isdecimal()):
        return None
    return int(period) * (SECOND // 10**6) or None


_NAMED = 3  # addresses and sources that are named; the others are counted
_LONGEST_NOTE = 160


def agent_status(snapshot: Snapshot, addresses: Sequence[str], note: str = "") -> str:
    """The addresses, the number of counters and the failing sources; no figure that changes.

    ``note`` precedes them.
    """
    domains = [account.domain for account in snapshot.domains if account.present]
    down = [health.source for health in snapshot.health if not health.up]
    parts = [
        f"serving {_abbreviated_list(addresses)}" if addresses else "no listener",
        f"{len(domains)} energy counter{'s' * (len(domains) > 1)} of "
        + _abbreviated_list(sorted({domain.source for domain in domains}))
        if domains
        else "no energy counter answers",
        *([f"missing: {_abbreviated_list(down)}"] if down else []),
    ]
    label = "EMULATED: " if snapshot.emulated else ""
    if len(note) > _LONGEST_NOTE:
        note = note[: _LONGEST_NOTE - 1] + "…"
    return f"{note} {label}{'; '.join(parts)}.".lstrip()


def _abbreviated_list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


# -------------------------------------------------------------------------------------- signals

SignalHandler = Callable[[int, object], None]

REPEATED_SIGNAL_DELAY = SECOND
"""A signal that repeats after this delay ends the program at once. `timeout` and the process group
of a terminal repeat a request sooner."""


class StopRequest:
    """Requests to end the program or to reload its configuration.

    A command polls it while it starts, and registers callbacks once it waits.
    """

    def __init__(self, signals: int | None = None) -> None:
        """``signals``: the descriptor of ``signal_descriptor``; None where no signal arrives."""
        self._signals = signals
        self._wake: Callable[[], None] | None = None
        self.requested = False
        self.reload_requested = False
        self._on_stop: Callable[[], None] | None = None
        self._on_reload: Callable[[], None] | None = None

    def register(
        self,
        on_stop: Callable[[], None],
        on_reload: Callable[[], None] | None = None,
        *,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Set the callbacks, which may run in a signal handler; past requests call them at once.

        A main thread that waits for longer than a second gives ``wake``, which ends its wait once:
        another thread calls it after each signal.
        """
        self._on_stop, self._on_reload = on_stop, on_reload
        begun, self._wake = self._wake is not None, wake
        if self._signals is not None and wake is not None and not begun:
            followed = os.dup(self._signals)  # its thread closes it after the end of the block
            threading.Thread(
                target=self._follow, args=(followed,), name="wattspan-signals", daemon=True
            ).start()
        if self.requested:
            on_stop()
        if self.reload_requested and on_reload is not None:
            on_reload()

    def request_stop(self) -> None:
        """End the program."""
        self.requested = True
        if self._on_stop is not None:
            self._on_stop()

    def request_reload(self) -> None:
        """Reload the configuration."""
        self.reload_requested = True
        if self._on_reload is not None:
            self._on_reload()

    def _follow(self, descriptor: int) -> None:
        while os.read(descriptor, 64):
            if (wake := self._wake) is not None:
                wake()
        os.close(descriptor)

    def take_reload(self) -> bool:
        """True if a reload was requested since the last call."""
        asked, self.reload_requested = self.reload_requested, False
        return asked


def hangup_reloads(*, managed: bool) -> bool:
    """True if SIGHUP requests a reload: under a service manager, or without a terminal.

    On a terminal, SIGHUP means that the terminal has closed, and ends the program.
    """
    if managed:
        return True
    with terminal() as descriptor:
        return descriptor is None


@contextmanager
def terminal() -> Iterator[int | None]:
    """A descriptor of the controlling terminal during the block; None without one."""
    try:
        descriptor = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def stop_on_signals(*, patiently: bool = False, reload: bool = False) -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGINT and SIGHUP into requests during the block.

    ``patiently``: a repeated signal does not end the program.
    ``reload``: SIGHUP requests a reload instead of the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    with signal_descriptor() as signals:
        request = StopRequest(signals)
        with signal_handlers(_stop_handlers(request, patiently=patiently, reload=reload)):
            yield request


def _stop_handlers(
    request: StopRequest, *, patiently: bool, reload: bool
) -> dict[signal.Signals, SignalHandler]:
    clock = SystemClock()
    asked_at: int | None = None

    def handle(number: int, frame: object) -> None:
        nonlocal asked_at
        now = clock.monotonic()
        if asked_at is None:
            asked_at = now
            request.request_stop()
        elif not patiently and now - asked_at >= REPEATED_SIGNAL_DELAY:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def handle_hangup(number: int, frame: object) -> None:
        if reload:
            request.request_reload()
        else:
            handle(number, frame)

    handlers: dict[signal.Signals, SignalHandler] = {signal.SIGTERM: handle, signal.SIGINT: handle}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # it is ignored under nohup
        handlers[signal.SIGHUP] = handle_hangup
    return handlers


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, SignalHandler]) -> Iterator[None]:
    """Handle signals by ``handlers`` during the block. A child process does not inherit them."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signal_descriptor() -> Iterator[int]:
    """A descriptor that a byte reaches for each signal that arrives during the block.

    The interpreter calls a handler only between two of its instructions: a signal that arrives
    after the last of them and before a system call that waits does not end that call. So a wait in
    the main thread that may last includes this descriptor, or another thread reads it and ends the
    wait. It is at its end after the block.
    """
    signals, written = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(before)
        os.close(written)
        os.close(signals)


# ---------------------------------------------------------------------------- inherited sockets

FIRST_DESCRIPTOR = 3  # by the protocol sd_listen_fds
_MAX_DESCRIPTORS = 1024
_SOCKET_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def inherited_unix_socket(
    environ: MutableMapping[str, str], *, first: int = FIRST_DESCRIPTOR
) -> ListeningSocket | None:
    """The Unix socket that systemd passed to this process, if any. ListenError.

    systemd passes it to the next start as well, so this process never removes it. Its variables
    are removed from ``environ``: child processes must not use them.
    """
    from wattspan.http.sockets import ListeningSocket  # imports ssl

    passed = _descriptors(environ, first)
    if not passed:
        return None
    try:
        listener = _listening_unix_socket(passed)
    except ValueError as error:
        raise ListenError(
            f"Cannot serve the socket of the service manager: {error}. Its unit must name one"
            " ListenStream= with a path, and Accept=no."
        ) from None
    name = listener.getsockname()
    address = "@" + name[1:].decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
    return ListeningSocket(listener, address, lambda: None)


def _descriptors(environ: MutableMapping[str, str], first: int) -> list[int]:
    """The passed descriptors, made uninheritable."""
    count, pid = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_PID", "")
    for name in _SOCKET_VARIABLES:
        environ.pop(name, None)
    if pid != str(os.getpid()) or not (count.isascii() and count.isdecimal()):
        return []
    passed = []
    for descriptor in range(first, first + min(int(count), _MAX_DESCRIPTORS)):
        with suppress(OSError):  # a descriptor that is not open
            os.set_inheritable(descriptor, False)
            passed.append(descriptor)
    return passed


def _listening_unix_socket(passed: Sequence[int]) -> socket.socket:
    """The socket of the only descriptor, which systemd owns; ValueError."""
    if len(passed) > 1:
        raise ValueError(f"{len(passed)} sockets were passed, and one is served")
    try:
        listener = socket.socket(fileno=passed[0])
    except OSError:
        raise ValueError("the passed descriptor is no socket") from None
    kind = (listener.family, listener.type)
    listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if kind != (socket.AF_UNIX, socket.SOCK_STREAM) or not listening:
        listener.detach()
        raise ValueError("the passed descriptor is no listening Unix stream socket")
    return listener
