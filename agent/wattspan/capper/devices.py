"""The devices behind the actuators: the last state of each knob, and the processes that are asked.

A call into a driver can hang and cannot be interrupted from within its process. So each device has
a worker process, forked before any driver is opened, and each call has a deadline. A worker that
is late keeps its call: while it is blocked, further calls on that device fail at once, and the
first call after the driver answers succeeds. A worker that has been blocked for long is killed
and replaced, in case only its session with the driver is broken.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from wattspan.attribution.metering import SUSPENDED
from wattspan.capper.actuators import AwaitedActuator
from wattspan.capper.protocol import RefusalReason
from wattspan.capper.workers import MAX_MESSAGE_BYTES, WorkerCall, WorkerReply, spawn
from wattspan.model import (
    MILLISECOND,
    SECOND,
    CapKey,
    DevicePresence,
    Instant,
    Knob,
    KnobState,
    ModelEnum,
    Trouble,
)
from wattspan.ports import Actuator, ActuatorError, CapsError, Clock, SlottedActuator

CALL_TIMEOUT: Final = 2 * SECOND
"""A call takes 20 ms, and a write waits up to 200 ms for the device to obey. A first call may take
longer, for it opens the driver: it fails, and the next one after it is answered succeeds."""
REPLACE_AFTER: Final = 60 * SECOND
MAX_ABANDONED: Final = 16
"""Killed workers that have not ended: a process in an uninterruptible call ignores SIGKILL."""
_EXIT_TIMEOUT: Final = 500 * MILLISECOND
_REPLIES: Final = msgspec.json.Decoder(WorkerReply)


class ConcurrentActuator(Actuator, Protocol):
    """An actuator that reads several devices at once, and lists them although some hang."""

    @property
    def unidentified(self) -> int | None:
        """Number of all devices if some of them hang and cannot be identified; else None."""
        ...

    def prefetch(self, devices: Iterable[str]) -> None:
        """Begin to read ``devices``; ``read`` then takes up the result."""
        ...


_FIRST_DELAY, _MAX_DELAY = SECOND, 60 * SECOND
_MAX_ABSENT_DELAY = 5 * SECOND
_RESUMING = 30 * SECOND
"""Firmware may set its limits this long after the host resumed."""
_FIRST_PERSISTENT_DELAY, _MAX_PERSISTENT_DELAY = 60 * SECOND, 3600 * SECOND
_PERSISTENT = (RefusalReason.NO_PERMISSION, RefusalReason.LOCKED, RefusalReason.NOT_HONOURED)
"""A missing permission is not corrected within seconds; a locked register stays so until boot."""


class _RetryDelay(NamedTuple):
    until: int
    length: int
    error: CapsError


_NO_ANSWER = (Trouble.RETRY, Trouble.ABSENT, Trouble.STUCK)


class Absence(ModelEnum):
    """The evidence that a device may have lost its settings since they were last confirmed."""

    NONE = "none"
    UNANSWERED = "unanswered"  # a call failed: it may have been absent, or busy
    RESET = "reset"  # the device, its driver or the host was gone, and has returned


class ManagedDevices:
    """Calls the actuator of a knob. Errors are CapsErrors.

    Keeps the last state of each knob, the delay after which a failed one is tried again, and
    whether its device was absent.
    """

    def __init__(self, actuators: Sequence[ConcurrentActuator], clock: Clock) -> None:
        self.knobs: dict[CapKey, KnobState] = {}
        """Every known knob as last read."""
        self.stuck: set[CapKey] = set()
        """Knobs whose last call did not return within its deadline."""
        self._clock = clock
        self._delays: dict[CapKey, _RetryDelay] = {}
        self._unanswered: set[CapKey] = set()
        self._resumed: dict[CapKey, int] = {}
        self._confirmed: dict[CapKey, tuple[DevicePresence, Instant]] = {}
        self._actuators = {actuator.knob: actuator for actuator in actuators}
        self._unlisted: dict[Knob, ActuatorError] = {}

    def find(self) -> None:
        """List the devices; one that does not answer now keeps its last state."""
        for knob, actuator in self._actuators.items():
            try:
                self.knobs.update((state.key, state) for state in actuator.devices())
            except ActuatorError as error:
                self._unlisted[knob] = error
            else:
                self._unlisted.pop(knob, None)

    def is_listed(self, knob: Knob) -> bool:
        """True if the devices of the knob could be listed last time."""
        return knob in self._actuators and knob not in self._unlisted

    @property
    def listing_stuck(self) -> bool:
        """True if the devices of a knob are unknown because the driver does not answer."""
        return any(error.trouble is Trouble.STUCK for error in self._unlisted.values())

    @property
    def stuck_names(self) -> tuple[str, ...]:
        """The names of devices with a driver call that does not return."""
        return tuple(sorted({self.knobs[key].name for key in self.stuck & self.knobs.keys()}))

    @property
    def hidden(self) -> bool:
        """True if there are devices that hang and are not among the known ones."""
        known = [key.knob for key in self.knobs]
        return self.listing_stuck or any(
            (count := actuator.unidentified) is not None and count > known.count(knob)
            for knob, actuator in self._actuators.items()
        )

    def prefetch(self, keys: Iterable[CapKey]) -> None:
        """Begin to read ``keys``, so that several devices that hang share one deadline."""
        for knob, group in groupby(sorted(keys), key=lambda key: key.knob):
            if knob in self._actuators:
                self._actuators[knob].prefetch(key.device for key in group)

    def read(self, key: CapKey) -> KnobState:
        try:
            return self._call(key, lambda actuator: actuator.read(key.device))
        except DeviceError as error:
            if error.trouble in _NO_ANSWER:
                self._unanswered.add(key)
            raise

    def write(self, key: CapKey, value: int | None) -> KnobState:
        """Set one knob, and read it back."""
        return self._call(key, lambda actuator: actuator.write(key.device, value))

    # ----------------------------------------------------------------------------- presence

    def absence(self, key: CapKey, recorded: DevicePresence) -> Absence:
        """The evidence since ``confirm``; before the first one, since ``recorded``."""
        now, (confirmed, at) = self.knobs[key].presence, self._confirmed.get(key, (None, None))
        if confirmed is None or at is None:
            was_reset = now.was_reset(recorded, same_process=False)
        else:
            was_reset = self._has_slept(at) or now.was_reset(confirmed, same_process=True)
        if was_reset:
            return Absence.RESET
        resumed = self._resumed.get(key)
        settling = resumed is not None and self._clock.monotonic() - resumed < _RESUMING
        return Absence.UNANSWERED if settling or key in self._unanswered else Absence.NONE

    def confirm(self, key: CapKey) -> None:
        """Begin to look for an absence anew: the knob's setting is known."""
        _, before = self._confirmed.get(key, (None, None))
        if before is not None and self._has_slept(before):
            self._resumed[key] = self._clock.monotonic()
        self._confirmed[key] = self.knobs[key].presence, self._clock.now()
        self._unanswered.discard(key)

    def confirmed(self, key: CapKey, recorded: DevicePresence) -> DevicePresence:
        """The presence at the last ``confirm``; ``recorded`` before the first one."""
        return self._confirmed[key][0] if key in self._confirmed else recorded

    def _has_slept(self, since: Instant) -> bool:
        return self._clock.now().asleep - since.asleep > SUSPENDED

    # ------------------------------------------------------------------------- retry delays

    def resting(self, key: CapKey) -> CapsError | None:
        """The error of a knob that is not tried before its retry delay ends."""
        delay = self._delays.get(key)
        return delay.error if delay and self._clock.monotonic() < delay.until else None

    def failure(self, key: CapKey) -> CapsError | None:
        """The error of a knob that failed when it was last tried, also once it is due again."""
        return self._delays[key].error if key in self._delays else None

    @property
    def failing(self) -> frozenset[CapKey]:
        """Knobs that failed when they were last tried."""
        failed = self._delays.items()
        return frozenset(k for k, d in failed if d.error.refusal != RefusalReason.NO_JOURNAL)

    def fail(self, key: CapKey, error: CapsError) -> bool:
        """Do not try a knob before a delay that grows with each failure; True if it is new."""
        persistent = error.refusal in _PERSISTENT
        first = _FIRST_PERSISTENT_DELAY if persistent else _FIRST_DELAY
        longest = _MAX_PERSISTENT_DELAY if persistent else _MAX_DELAY
        if key in self.stuck:  # another call costs nothing: its worker still waits
            longest = _FIRST_DELAY
        elif key in self._unanswered:  # once it returns, it has no cap
            longest = _MAX_ABSENT_DELAY
        earlier = self._delays.get(key)
        length = first if earlier is None else max(first, min(2 * earlier.length, longest))
        self._delays[key] = _RetryDelay(self._clock.monotonic() + length, length, error)
        return earlier is None or str(earlier.error) != str(error)

    def succeed(self, key: CapKey) -> None:
        """End the retry delay of a knob."""
        self._delays.pop(key, None)

    def retry_now(self) -> None:
        """End all retry delays."""
        self._delays.clear()

    def close(self) -> None:
        for actuator in self._actuators.values():
            actuator.close()

    def _call(self, key: CapKey, call: Callable[[ConcurrentActuator], KnobState]) -> KnobState:
        self.stuck.discard(key)
        if key.knob not in self._actuators:
            raise CapsError(
                f"Cannot set {key.knob} of {key.device}: the knob is not in use; name it in"
                " [autotune] knobs.",
                RefusalReason.LOST,
                key.device,
            )
        try:
            state = self.knobs[key] = call(self._actuators[key.knob])
        except ActuatorError as error:
            if error.trouble is Trouble.STUCK:
                self.stuck.add(key)
            raise DeviceError(key, error) from None
        return state


_REASONS = {
    Trouble.DENIED: RefusalReason.NO_PERMISSION,
    Trouble.MALFORMED: RefusalReason.NOT_HONOURED,
}


class DeviceError(CapsError):
    """The error of a device as a refusal."""

    def __init__(self, key: CapKey, error: ActuatorError) -> None:
        reason = _REASONS.get(error.trouble, RefusalReason.LOST)
        super().__init__(str(error), RefusalReason.LOCKED if error.locked else reason, key.device)
        self.trouble = error.trouble


# ----------------------------------------------------------------------- devices of the workers


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
            self._channel, self._pid = spawn(self._actuators)
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
            received = self._channel.recv(MAX_MESSAGE_BYTES)
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
    actuators: Sequence[SlottedActuator], clock: Clock, deadline: int = CALL_TIMEOUT
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
        pool = WorkerPool(driver, clock, deadline)
        for actuator in driver:
            pools.setdefault(actuator.knob, []).append(pool)
    return tuple(IsolatedActuator(knob, *those) for knob, those in pools.items())
