"""Actuator calls in worker processes: a driver call that hangs blocks one device and no other.

A call into a driver can hang and cannot be interrupted from within its process. So each device has
a worker process, forked before any driver is opened, and each call has a deadline. A worker that
is late keeps its call: while it is blocked, further calls on that device fail at once, and the
first call after the driver answers succeeds. A worker that has been blocked for long is killed
and replaced, in case only its session with the driver is broken.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from wattspan.capper.actuators import AwaitedActuator
from wattspan.model import MILLISECOND, SECOND, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock, SlottedActuator

CALL_TIMEOUT: Final = 2 * SECOND
"""A call takes 20 ms, and a write waits up to 200 ms for the device to obey. A first call may take
longer, for it opens the driver: it fails, and the next one after it is answered succeeds."""
REPLACE_AFTER: Final = 60 * SECOND
MAX_ABANDONED: Final = 16
"""Killed workers that have not ended: a process in an uninterruptible call ignores SIGKILL."""
_EXIT_TIMEOUT: Final = 500 * MILLISECOND
_MAX_MESSAGE_BYTES: Final = 64 * 1024
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
PROCESS_NAME: Final = "capper-worker"
"""Tells a worker from the capper itself, whose command line it has."""


class WorkerCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of an actuator: ``device`` and ``value`` of reads and writes, ``slot`` of the rest."""

    action: Literal["read", "write", "count", "identify"]
    knob: Knob
    device: str = ""
    value: int | None = None
    slot: int = 0


class WorkerReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a call: a state, a number of slots or an id; or ``error`` and ``trouble``."""

    result: KnobState | int | str | None = None
    error: str = ""
    trouble: Trouble | None = None
    locked: bool = False


_CALLS: Final = msgspec.json.Decoder(WorkerCall)
_REPLIES: Final = msgspec.json.Decoder(WorkerReply)


@dataclass(frozen=True, slots=True)
class _PendingCall:
    call: WorkerCall
    since: int
    deadline: int


class Worker:
    """One forked process that carries out calls, one at a time. Belongs to one thread."""

    def __init__(
        self,
        name: str,
        actuators: Mapping[Knob, SlottedActuator],
        clock: Clock,
        deadline: int = CALL_TIMEOUT,
    ) -> None:
        """``name`` is the device in error messages. The process starts with the first call."""
        self._name, self._actuators, self._clock = name, actuators, clock
        self._deadline = deadline
        self._channel: socket.socket | None = None
        self._pid = 0
        self._pending: _PendingCall | None = None
        self._abandoned: list[int] = []

    def begin(self, call: WorkerCall) -> None:
        """Send ``call``, unless the worker is busy; ``ask`` for the same call then takes it up."""
        with suppress(ActuatorError):
            if self._pending is not None:
                self._discard(wait=False)
            self._send(call)

    def ask(self, call: WorkerCall) -> Any:
        """The result of ``call``. ActuatorError: it failed, or STUCK if it is not answered."""
        if self._pending is not None and (self._pending.call != call or self.stuck):
            self._discard(wait=True)
        if self._pending is None:
            self._send(call)
        reply = self._receive(wait=True)
        if reply is None:
            raise self._stuck()
        if reply.trouble is not None:
            raise ActuatorError(reply.error, reply.trouble, locked=reply.locked)
        return reply.result

    @property
    def stuck(self) -> bool:
        """True if a call is past its deadline."""
        pending = self._pending
        return pending is not None and self._clock.monotonic() >= pending.deadline

    def replace(self) -> bool:
        """Kill the process, so that the next call starts another one; False if too many remain."""
        self.reap()
        if len(self._abandoned) >= MAX_ABANDONED:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """End the process: between two calls it holds nothing, and the driver cleans up."""
        if self._channel is not None:
            self._channel.close()
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._abandoned.append(self._pid)
        self._channel, self._pending = None, None

    def reap(self) -> bool:
        """Collect processes that have ended; True if none is left."""
        for pid in list(self._abandoned):
            try:
                ended, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                ended = pid
            if ended:
                self._abandoned.remove(pid)
        return not self._abandoned

    # --------------------------------------------------------------------------- inner workings

    def _discard(self, *, wait: bool) -> None:
        """Drop the reply of an earlier call; ActuatorError if that call still blocks the worker."""
        pending = self._pending
        if pending is None or self._receive(wait=wait) is not None:
            return
        blocked = self._clock.monotonic() - pending.since >= REPLACE_AFTER
        if not (blocked and self.replace()):
            raise self._stuck()

    def _send(self, call: WorkerCall) -> None:
        if self._channel is None:
            actuator = self._actuators[call.knob]
            if isinstance(actuator, AwaitedActuator):
                actuator.driver.require()
            self._channel, self._pid = _spawn(self._actuators)
        try:
            self._channel.send(msgspec.json.encode(call))
        except OSError:
            raise self._ended() from None
        now = self._clock.monotonic()
        allowed = self._deadline // 2 if call.action == "identify" else self._deadline
        self._pending = _PendingCall(call, now, now + allowed)

    def _receive(self, *, wait: bool) -> WorkerReply | None:
        """The reply to the pending call; None if there is none by its deadline."""
        pending = self._pending
        assert pending is not None  # noqa: S101 - every caller has looked
        assert self._channel is not None  # noqa: S101 - a call was sent on it
        left = max(0, pending.deadline - self._clock.monotonic()) if wait else 0
        ready, _, _ = select.select([self._channel], [], [], left / SECOND)
        if not ready:
            return None
        try:
            received = self._channel.recv(_MAX_MESSAGE_BYTES)
        except OSError:
            received = b""
        if not received:
            raise self._ended()
        self._pending = None
        return _REPLIES.decode(received)

    def _ended(self) -> ActuatorError:
        """The process has ended: a crash inside the driver's library, or a kill from outside."""
        self.replace()
        return ActuatorError(
            f"Cannot reach {self._name}: the worker process of this device ended unexpectedly."
            " Another one is started by the next call.",
            Trouble.RETRY,
        )

    def _stuck(self) -> ActuatorError:
        return ActuatorError(
            f"Cannot reach {self._name}: a driver call has not returned within its deadline of"
            f" {self._deadline / SECOND:g} s. The call is tried again until it works; if it"
            " does not, reset the device or reboot the host.",
            Trouble.STUCK,
        )


class WorkerPool:
    """The workers of a host: one for each device, and one for each kind of knob that lists."""

    def __init__(
        self, actuators: Sequence[SlottedActuator], clock: Clock, deadline: int = CALL_TIMEOUT
    ) -> None:
        """No actuator may have been used yet: each worker opens its own session with the driver."""
        self.clock = clock
        self._actuators = {actuator.knob: actuator for actuator in actuators}
        self._deadline = deadline
        self._workers: dict[str, Worker] = {}

    def worker(self, name: str) -> Worker:
        """The worker of the device ``name``."""
        if name not in self._workers:
            self._workers[name] = Worker(name, self._actuators, self.clock, self._deadline)
        return self._workers[name]

    def close(self) -> None:
        """End every worker. A process in an uninterruptible call is not waited for."""
        workers, self._workers = tuple(self._workers.values()), {}
        for worker in workers:
            worker.kill()
        deadline = self.clock.monotonic() + _EXIT_TIMEOUT
        while sum(not worker.reap() for worker in workers) and self.clock.monotonic() < deadline:
            self.clock.sleep_until(self.clock.monotonic() + MILLISECOND)


class _DeviceList:
    """The devices of one driver, by the worker that lists those of a kind of knob."""

    def __init__(self, knob: Knob, pool: WorkerPool) -> None:
        self.pool = pool
        self.unidentified: int | None = None
        """Number of all devices if some of them hang and cannot be identified; else None."""
        self._knob = knob
        self._blocked_slots: dict[int, int] = {}  # slot: when it is tried again

    def identify(self) -> list[str]:
        """The ids of all devices; a slot that blocks is left out. ActuatorError."""
        lister, clock = self.pool.worker(f"the list of {self._knob} devices"), self.pool.clock
        count = lister.ask(WorkerCall("count", self._knob))
        self.unidentified = None
        found = []
        for slot in range(count):
            if clock.monotonic() < self._blocked_slots.get(slot, 0):
                self.unidentified = count
                continue
            try:
                identified = lister.ask(WorkerCall("identify", self._knob, slot=slot))
            except ActuatorError as error:
                if error.trouble is not Trouble.STUCK:
                    raise
                self._blocked_slots[slot] = clock.monotonic() + REPLACE_AFTER
                self.unidentified = count
                if not lister.replace():
                    raise
                continue
            if identified is not None:
                found.append(identified)
        return found


class IsolatedActuator:
    """One knob of the devices of one or several drivers, whose calls workers carry out.

    A driver that hangs or is not loaded does not affect the devices of the others.
    """

    def __init__(self, knob: Knob, *pools: WorkerPool) -> None:
        """``pools`` are those of the drivers."""
        self.knob = knob
        self._lists = [_DeviceList(knob, pool) for pool in pools]
        self._pools: dict[str, WorkerPool] = {}  # by device

    @property
    def unidentified(self) -> int | None:
        """Number of all devices if some of them hang and cannot be identified; else None."""
        if all(one.unidentified is None for one in self._lists):
            return None
        known = list(self._pools.values())
        return sum(
            known.count(one.pool) if one.unidentified is None else one.unidentified
            for one in self._lists
        )

    def devices(self) -> tuple[KnobState, ...]:
        """The state of every device that answers. ActuatorError if no driver lists any."""
        listed: list[str] = []
        errors: list[ActuatorError] = []
        for one in self._lists:
            try:
                found = one.identify()
            except ActuatorError as error:
                errors.append(error)
            else:
                self._pools.update(dict.fromkeys(found, one.pool))
                listed += found
        if len(errors) == len(self._lists):
            raise most_telling(errors)
        self.prefetch(listed)
        states = []
        for device in listed:
            with suppress(ActuatorError):
                states.append(self.read(device))
        return tuple(states)

    def prefetch(self, devices: Iterable[str]) -> None:
        """Begin to read ``devices`` at once, so that the deadlines of all run together."""
        for device in devices:
            if len(pools := self._pools_of(device)) == 1:
                pools[0].worker(device).begin(WorkerCall("read", self.knob, device))

    def read(self, device: str) -> KnobState:
        """The state from the device's driver; of an unknown device, from the one that has it."""
        errors: list[ActuatorError] = []
        for pool in self._pools_of(device):
            try:
                state: KnobState = pool.worker(device).ask(WorkerCall("read", self.knob, device))
            except ActuatorError as error:
                errors.append(error)
            else:
                self._pools[device] = pool
                return state
        raise most_telling(errors)

    def write(self, device: str, value: int | None) -> KnobState:
        if device not in self._pools:
            self.read(device)
        call = WorkerCall("write", self.knob, device, value)
        state: KnobState = self._pools[device].worker(device).ask(call)
        return state

    def close(self) -> None:
        for one in self._lists:
            one.pool.close()

    def _pools_of(self, device: str) -> list[WorkerPool]:
        """The pool of the device's driver, or all of them while that is not known."""
        pool = self._pools.get(device)
        return [one.pool for one in self._lists] if pool is None else [pool]


def most_telling(errors: Sequence[ActuatorError]) -> ActuatorError:
    """An error other than that the device is absent, if there is one."""
    return next((error for error in errors if error.trouble is not Trouble.ABSENT), errors[0])


def isolate_actuators(
    actuators: Sequence[SlottedActuator], clock: Clock
) -> tuple[IsolatedActuator, ...]:
    """``actuators``, none of which has been used yet, with every call in a worker process.

    Those of one knob become one; they belong to different drivers, whose workers are separate.
    """
    drivers: list[list[SlottedActuator]] = []
    for actuator in actuators:
        for driver in drivers:
            if all(other.knob is not actuator.knob for other in driver):
                driver.append(actuator)
                break
        else:
            drivers.append([actuator])
    pools: dict[Knob, list[WorkerPool]] = {}
    for driver in drivers:
        pool = WorkerPool(driver, clock)
        for actuator in driver:
            pools.setdefault(actuator.knob, []).append(pool)
    return tuple(IsolatedActuator(knob, *those) for knob, those in pools.items())


# ------------------------------------------------------------------------------ in the worker


def _spawn(actuators: Mapping[Knob, SlottedActuator]) -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _detach(theirs, parent)
            _serve(theirs, actuators)
        finally:
            os._exit(0)
    theirs.close()
    return ours, pid


def _detach(channel: socket.socket, parent: int) -> None:
    """Keep nothing of the parent: a worker that hangs must hold no lock and no listener of it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # The parent restores limits through its workers after these signals reach the group.
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, PROCESS_NAME.encode())
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    gc.freeze()  # the parent's objects are never collected here, and their pages stay shared


def _serve(channel: socket.socket, actuators: Mapping[Knob, SlottedActuator]) -> None:
    """Answer calls until the parent closes its end."""
    while message := channel.recv(_MAX_MESSAGE_BYTES):
        reply = _carry_out(_CALLS.decode(message), actuators)
        channel.send(msgspec.json.encode(reply))


def _carry_out(call: WorkerCall, actuators: Mapping[Knob, SlottedActuator]) -> WorkerReply:
    actuator = actuators[call.knob]
    try:
        match call.action:
            case "read":
                return WorkerReply(actuator.read(call.device))
            case "write":
                return WorkerReply(actuator.write(call.device, call.value))
            case "count":
                return WorkerReply(actuator.slots())
            case "identify":
                return WorkerReply(actuator.id_at(call.slot))
    except ActuatorError as error:
        return WorkerReply(None, str(error), error.trouble, error.locked)
