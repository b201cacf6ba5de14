"""Assembly of the capper, its end, and its work without it: restoring by the journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from wattspan.capper.audit import (
    GENERATIONS,
    AuditAction,
    AuditEvent,
    AuditLog,
    AuditRowLimiter,
)
from wattspan.capper.cap_manager import CapManager
from wattspan.capper.ceilings import PowerCeilings
from wattspan.capper.devices import ConcurrentActuator, ManagedDevices
from wattspan.capper.host_directory import (
    CapperHost,
    HostClaim,
    HostDirectoryError,
    HostHeldError,
    distrust_reason,
    has_journal,
    lock_capper,
)
from wattspan.capper.host_root import HostRoot
from wattspan.capper.journal import Journal, JournalError
from wattspan.capper.ownership import foreign_notices, unrecovered_notice
from wattspan.capper.planner import OperatorLimits
from wattspan.capper.protocol import CapperClient, RefusalReason
from wattspan.capper.server import CapperSocketServer, RequestHandler
from wattspan.config import Config, changed_keys
from wattspan.http.sockets import ListeningSocket, listen_unix
from wattspan.model import MILLISECOND, SECOND, CapRow, Knob
from wattspan.ports import CapsError, Clock
from wattspan.util.files import FileLock
from wattspan.util.unix_sockets import PeerCredentials, uids_of

SOCKET_MODE = 0o666
"""Every user may connect; the server accepts by the credentials that the kernel reports."""
_TRIES, _RETRY_INTERVAL = 5, 300 * MILLISECOND
_STUCK_TIMEOUT = 6 * SECOND
"""Longest wait of an ending capper for a hanging device. The first call on a GPU wakes its
driver, which can take seconds."""
_LOCK_TIMEOUT, _LOCK_INTERVAL = 10 * SECOND, 100 * MILLISECOND
"""Longest time that an ending capper may keep the lock."""

Log = Callable[[str], None]
_Lock = TypeVar("_Lock", HostClaim, FileLock)


def enabled_knobs(config: Config) -> frozenset[Knob]:
    """The knobs in use: those to be tuned, those of fixed caps, and all of power for a budget."""
    fixed = (one.knob for one in config.caps.fixed)
    return frozenset({*config.autotune.knobs, *fixed, Knob.GPU_POWER, Knob.CPU_POWER})


def needs_restart(old: Config, new: Config) -> tuple[str, ...]:
    """The changed keys that a running capper cannot apply."""
    fixed = {"agent.run_dir", "agent.state_dir", "caps.actuators", "caps.host_dir"}
    places = fixed & changed_keys(old, new)
    knobs = {"autotune.knobs"} if enabled_knobs(new) - enabled_knobs(old) else set()
    return tuple(sorted(places | knobs))


class CapEngine:
    """The capper without its socket."""

    def __init__(
        self,
        host: CapperHost,
        config: Config,
        actuators: Sequence[ConcurrentActuator],
        clock: Clock,
        log: Log,
        *,
        enumerate_devices: bool = True,
    ) -> None:
        """Read the journals, and find the devices that they name. The lock must be held.

        The journal names its devices: restoring them needs no enumeration, unless it is damaged.
        """
        self._clock, self._log = clock, log
        self.audit = AuditLog(
            host.audit, _file_size(config), outstanding=lambda: self.manager.outstanding()
        )
        self.rows = AuditRowLimiter(clock, self.audit.record)
        self._journal = Journal(host.directory, host.boot_id, host.audit, stamp=clock.monotonic)
        devices = ManagedDevices(actuators, clock)
        limits = _operator_limits(config)
        self.manager = CapManager(devices, self._journal, clock, self.rows.record, limits)
        if trouble := self._journal.trouble:
            log(trouble)
            self.record(AuditAction.FAIL, trouble)
        self.manager.start(enumerate_devices=enumerate_devices)

    def record(self, action: AuditAction, why: str = "") -> None:
        self.rows.record(AuditEvent(at=self._clock.now().wall, deed=action, why=why))

    def release(self, release: Callable[[], tuple[CapsError, ...]]) -> tuple[CapsError, ...]:
        """Call ``release`` until nothing fails, for a second or two; returns the last failures.

        ``release`` is the manager's ``restore`` or ``stop``. A device that hangs gets a few
        seconds.
        """
        clock = self._clock
        began, tries = clock.monotonic(), 0
        while errors := release():
            tries += 1
            waiting = (
                self.manager.devices.stuck_names and clock.monotonic() - began < _STUCK_TIMEOUT
            )
            hopeless = all(error.refusal == RefusalReason.UNRECOVERED for error in errors)
            if hopeless or (tries >= _TRIES and not waiting):
                break
            clock.sleep_until(clock.monotonic() + _RETRY_INTERVAL)
        for error in errors:
            self._log(str(error))
        if errors:
            self._log(
                f"{self._journal.path} keeps the limits that were not restored; `wattspan caps"
                " restore`, or the next capper, tries again."
            )
        return errors

    def close(self) -> None:
        self.rows.close()
        self.manager.devices.close()


def _operator_limits(config: Config) -> OperatorLimits:
    return OperatorLimits(
        config.autotune.floor,
        config.caps.floor_watts,
        config.caps.largest_step,
        longest_lease=int(config.caps.lease),
        tunable=config.autotune.gpus,
        knobs=config.autotune.knobs,
        ramp=config.caps.ramp_watts_per_second * 1000,
    )


def _file_size(config: Config) -> int:
    """Bytes of each file of the audit log: all of them take twice [caps] log_size."""
    return 2 * int(config.caps.log_size) // (GENERATIONS + 1)


def _permitted_users(config: Config, log: Log) -> frozenset[int]:
    """The users who may connect. Unknown names that the operator set are logged."""
    permitted = {0, os.geteuid()}
    for key, names in (("users", config.caps.users), ("ceiling_users", config.caps.ceiling_users)):
        uids, unknown = uids_of(names)
        permitted |= uids
        if unknown and f"caps.{key}" in config.origins:
            log(f"[caps] {key} names {', '.join(unknown)}: this host has no such user.")
    return frozenset(permitted)


def _is_root_named(config: Config) -> bool:
    """True if the operator accepts root of every container that has the socket."""
    return 0 in uids_of(config.caps.users)[0]


class Capper:
    """One capper, ready to ``run``."""

    def __init__(
        self,
        host: CapperHost,
        socket: Path,
        config: Config,
        actuators: Callable[[], Sequence[ConcurrentActuator]],
        clock: Clock,
        log: Log,
        *,
        alive: Callable[[], None] = lambda: None,
        inherited: ListeningSocket | None = None,
        claim: HostClaim | None = None,
        agent: int = 0,
    ) -> None:
        """Take the lock, read the journal, and listen.

        JournalError if there is another capper, or no place for a journal; ListenError. An
        ``inherited`` socket is served instead of one of our own, and is not removed. ``claim`` is
        for a real host, and is released by the caller. ``agent`` is the process of the agent that
        has started this one.
        """
        self._log, self._alive, self._claim = log, alive, claim
        self._troubles: set[str] = set()
        with ExitStack() as stack:
            stack.callback(lock_capper(host).release)
            listening = inherited or listen_unix(socket, SOCKET_MODE, what="requests for caps")
            stack.callback(listening.remove)
            stack.callback(listening.socket.close)
            self._engine = CapEngine(host, config, actuators(), clock, log)
            stack.callback(self._engine.close)
            if claim is not None:
                claim.publish(Path(listening.address), host.directory)
            self._stack = stack.pop_all()
        self.address, record = listening.address, self._engine.rows.record
        in_fleet = config.fleet.is_enabled
        ceilings = PowerCeilings(
            config.caps, host.ceilings, host.boot_id, clock, record=record, in_fleet=in_fleet
        )
        self._requests = RequestHandler(self._engine.manager, ceilings, clock, record, agent)
        permitted = _permitted_users(config, log)
        self._host_root, self._is_root_named = HostRoot(clock), _is_root_named(config)
        self.server = CapperSocketServer(
            listening.socket,
            self._requests,
            clock,
            permitted,
            alive=self._turned,
            refusal=self._root_refusal,
        )

    def _root_refusal(self, peer: PeerCredentials) -> str | None:
        return None if self._is_root_named else self._host_root.refusal(peer)

    @property
    def status(self) -> str:
        """The state of the capper in one line."""
        manager = self._engine.manager
        usable = sum(row.usable for row in manager.rows())
        knobs = f"{usable} knob{'s' * (usable != 1)} can be set" if usable else "no knob answers"
        capped = sum(not entry.lost for entry in manager.entries.values())
        caps = f"{capped} cap{'s' * (capped != 1)} in force"
        suspended = "; nothing is set before a restart, as requested" * manager.suspended
        stuck = ", ".join(manager.devices.stuck_names)
        hung = f"; {stuck} does not answer" if stuck else ""
        trouble = f" {'; '.join(sorted(self._troubles))}" if self._troubles else ""
        return f"Answering on {self.address}; {knobs}, {caps}{suspended}{hung}.{trouble}"

    def reconfigure(self, config: Config) -> None:
        """Apply another configuration from now on; for the thread that runs the capper.

        Limits stay, unless their user or their knob is not named any more.
        """
        self._engine.audit.size = _file_size(config)
        self.server.permit(_permitted_users(config, self._log))
        self._is_root_named = _is_root_named(config)
        self._engine.manager.reconfigure(_operator_limits(config))
        self._requests.ceilings.fleet.enabled = config.fleet.is_enabled
        self._requests.ceilings.reconfigure(config.caps)
        self._requests.turn()

    def run(self, *, ending: Callable[[], None] = lambda: None) -> tuple[CapsError, ...]:
        """Serve until stopped, then restore all tuned limits; the failures.

        Before the first request is answered, the limits of the former capper are restored, or
        stay because they are imposed. Limits of fixed caps and of a power budget stay in force at
        the end, and the next capper takes them over. ``ending`` is called when the end begins.
        """
        engine = self._engine
        engine.record(AuditAction.START)
        try:
            self.server.run()
        finally:
            fleet = self._requests.ceilings.fleet
            if fleet.limit is not None:  # nobody could lower the limits later
                engine.manager.hasten()
                fleet.lapse("the capper ends")
                self._requests.turn()
            self._requests.ending = True
            ending()
            errors = engine.release(engine.manager.stop)
            if retained := engine.manager.retained:
                self._log(
                    f"{retained} limit{'s' * (retained != 1)} of fixed caps or of the power budget"
                    " stay in force while no capper runs; `wattspan caps restore` lifts them."
                )
            engine.record(AuditAction.END)
            self.server.close()
            self._stack.close()
        return errors

    def _turned(self) -> None:
        """After every turn of the loop: log each trouble once, when it begins."""
        self._alive()
        self._keep_claim()
        engine = self._engine
        engine.rows.turn()
        entries = engine.manager.entries
        troubles = {
            engine.manager.journal_trouble,
            engine.audit.trouble,
            self._requests.ceilings.trouble,
            self._requests.trouble,
            unrecovered_notice(entries.values()),
            *self._requests.unmatched,
            *engine.manager.refused,
            *foreign_notices(entries.values()),
        } - {""}
        while engine.manager.news:
            self._log(engine.manager.news.pop(0))
        for trouble in sorted(troubles - self._troubles):
            self._log(trouble)
        self._troubles = troubles

    def _keep_claim(self) -> None:
        """Stay the only capper of the host; end if another one has replaced this one."""
        if self._claim is None:
            return
        try:
            self._claim.keep()
        except HostDirectoryError as error:
            self._log(f"The capper ends and restores its limits. {error}")
            self.server.stop()


def restore_former(
    claim: HostClaim,
    own: CapperHost,
    config: Config,
    actuators: Callable[[], Sequence[ConcurrentActuator]],
    clock: Clock,
    log: Log,
) -> None:
    """Restore the tuned limits of a capper of this host that had another journal.

    A capper that was killed leaves them, and this one would take them for the originals. Imposed
    limits stay. JournalError if that journal cannot be used, or a limit cannot be restored.
    """
    directory = claim.former_journal
    if directory is None or directory == own.directory or not has_journal(directory):
        return
    former = replace(own, directory=directory)
    remedy = f"Run `wattspan caps restore` with the configuration of the capper of {directory}."
    if distrust := distrust_reason(directory):
        raise JournalError(f"Cannot restore the limits of the capper of {directory}: {distrust}")
    with ExitStack() as stack:
        stack.callback(lock_capper(former).release)
        engine = CapEngine(former, config, actuators(), clock, log, enumerate_devices=False)
        stack.callback(engine.close)
        engine.manager.impose_retained()
        errors, restored = engine.release(engine.manager.stop), engine.manager.restores
    if errors:
        raise JournalError(
            f"The limits of the capper of {directory}, which has ended, are not restored:"
            f" {' '.join(map(str, errors))} {remedy}"
        )
    if restored:
        log(f"{restored} limit{'s' * (restored != 1)} of the capper of {directory} restored.")


# --------------------------------------------------------------------------- without a capper


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The numbers of restored and retained limits, the foreign limits, and the failures."""

    by: str  # "capper" or "journal"
    restored: int
    foreign: tuple[CapRow, ...] = ()
    troubles: tuple[str, ...] = ()
    retained: int = 0
    """Limits of fixed caps and of a power budget that stay in force."""
    devices: tuple[str, ...] = ()
    """The names of the capper's devices, or of those in the journal."""


@dataclass(frozen=True, slots=True)
class RestoreContext:
    """The host of a present or former capper, with its devices and files."""

    host: Callable[[], CapperHost]
    client: Callable[[str], CapperClient]
    config: Config
    actuators: Callable[[], Sequence[ConcurrentActuator]]
    clock: Clock
    log: Log
    ended: bool = False
    """True if the capper has ended, or is about to: its socket may be open all the same."""
    host_dir: Path | None = None
    """The directory of the host-wide lock; None for an emulated host."""

    @contextmanager
    def engine(self) -> Iterator[CapEngine]:
        """The journal and the devices, under the locks.

        JournalError or HostHeldError if another process has one. A host directory that cannot be
        used is logged only: restoring must not depend on it.
        """
        host = self.host()
        with ExitStack() as stack:
            if self.host_dir is not None:
                path = self.host_dir
                try:
                    stack.callback(self._wait_for(lambda: HostClaim(path)).release)
                except HostHeldError:
                    raise
                except HostDirectoryError as error:
                    self.log(f"Limits are restored without the lock of the host. {error}")
            stack.callback(self._wait_for(lambda: lock_capper(host)).release)
            actuators = self.actuators()
            engine = CapEngine(
                host, self.config, actuators, self.clock, self.log, enumerate_devices=False
            )
            stack.callback(engine.close)
            yield engine

    def without(self, error: CapsError) -> RestoreContext:
        """The context to go on in after no capper has answered; ``error`` if one has refused.

        A capper that refuses because it ends, or cannot start, has the lock for a moment and
        restores as well.
        """
        if error.refusal == RefusalReason.ENDING:
            return replace(self, ended=True)
        if error.refusal:
            raise error
        return self

    def _wait_for(self, take: Callable[[], _Lock]) -> _Lock:
        """Take a lock that an ending capper may hold for a moment."""
        deadline = self.clock.monotonic() + (_LOCK_TIMEOUT if self.ended else 0)
        while True:
            try:
                return take()
            except (JournalError, HostHeldError):
                if self.clock.monotonic() >= deadline:
                    raise
            self.clock.sleep_until(self.clock.monotonic() + _LOCK_INTERVAL)


def restore_limits(context: RestoreContext, *, tuned_only: bool = False) -> RestoreReport:
    """Ask the running capper to restore; where none runs, restore by the journal of this boot.

    ``tuned_only`` is for the moment after a capper has ended: limits of fixed caps and of a power
    budget stay in force, and a running capper has nothing to do. Only limits that are still the
    capper's are written. CapsError or JournalError if neither way is possible.
    """
    tuned_only = tuned_only or context.ended  # as a service manager runs it after the end
    if not tuned_only:
        try:
            with closing(context.client("wattspan caps restore")) as client:
                restored, rows = client.restore()
                return RestoreReport(
                    "capper", restored, _foreign_rows(rows), devices=device_names(rows)
                )
        except CapsError as error:
            context = context.without(error)
    with context.engine() as engine:
        manager = engine.manager
        if tuned_only:
            manager.impose_retained()
        devices = device_names(manager.rows())
        errors = engine.release(manager.stop if tuned_only else manager.restore)
        if not tuned_only:
            _lift_ceilings(context, engine)
        for unwritten in filter(None, (manager.journal_trouble, engine.audit.trouble)):
            context.log(unwritten)
        return RestoreReport(
            "journal",
            manager.restores,
            _foreign_rows(manager.rows()),
            tuple(map(str, errors)),
            manager.retained,
            devices,
        )


def device_names(rows: Iterable[CapRow]) -> tuple[str, ...]:
    """The name of each device, in the order of the rows."""
    return tuple(dict.fromkeys(row.state.name or row.state.key.device for row in rows))


def _lift_ceilings(context: RestoreContext, engine: CapEngine) -> None:
    """Remove the ceilings that users set on the socket of the missing capper."""
    host, record = context.host(), engine.audit.record
    ceilings = PowerCeilings(
        context.config.caps, host.ceilings, host.boot_id, context.clock, record=record
    )
    try:
        ceilings.lift_all(PeerCredentials(os.getpid(), os.getuid()))
    except JournalError as error:
        context.log(str(error))


def accept_foreign_limits(context: RestoreContext) -> int:
    """Take foreign limits as the originals from now on; the number of knobs."""
    try:
        with closing(context.client("wattspan caps accept")) as client:
            before = sum(row.foreign for row in client.rows())
            return before - sum(row.foreign for row in client.accept())
    except CapsError as error:
        context = context.without(error)
    with context.engine() as engine:
        return engine.manager.accept()


def _foreign_rows(rows: Sequence[CapRow]) -> tuple[CapRow, ...]:
    return tuple(row for row in rows if row.foreign and not row.lost)
