"""The capper from its first line to its last: what is put together, and in which order it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.access import allowed_users, uids_of
from wattspan.capper.activation import InheritedSocket
from wattspan.capper.audit import (
    GENERATIONS,
    AuditAction,
    AuditEvent,
    AuditHook,
    AuditLog,
    AuditRowLimiter,
    ignore_event,
)
from wattspan.capper.ceilings import PowerCeilings
from wattspan.capper.devices import ManagedDevices
from wattspan.capper.journal import Journal
from wattspan.capper.limits import OperatorLimits
from wattspan.capper.manager import CapManager
from wattspan.capper.paths import CapperHost, CapperLock
from wattspan.capper.protocol import RefusalReason
from wattspan.capper.requests import RequestHandler
from wattspan.capper.server import CapperSocketServer
from wattspan.capper.writer import LimitWriter
from wattspan.config import Config, changed_keys
from wattspan.http.sockets import ListeningSocket, listen_unix
from wattspan.model import MILLISECOND, SECOND, Knob
from wattspan.ports import Actuator, CapsError, Clock

SOCKET_MODE = 0o666
"""Anybody may knock: who is let in is decided by what the kernel says of them."""
_TRIES, _BETWEEN = 5, 300 * MILLISECOND
_STUCK_WITHIN = 6 * SECOND
"""How long the end of a capper waits for a device that hangs. The first call on a GPU wakes its
driver, which can take seconds."""

Log = Callable[[str], None]


def enabled_knobs(config: Config) -> frozenset[Knob]:
    """The knobs in use: those that may be tuned, those of fixed caps, all of power for a budget."""
    caps = config.caps
    power = {Knob.GPU_POWER, Knob.CPU_POWER}
    return frozenset({*config.autotune.knobs, *(one.knob for one in caps.fixed), *power})


def needs_restart(old: Config, new: Config) -> tuple[str, ...]:
    """Which keys that differ a running capper cannot take over."""
    places = {"agent.run_dir", "agent.state_dir"} & changed_keys(old, new)
    knobs = {"autotune.knobs"} if enabled_knobs(new) - enabled_knobs(old) else set()
    return tuple(sorted(places | knobs))


@dataclass(frozen=True, slots=True)
class CapEngine:
    """A keeper with its journal and its record, and nobody who asks."""

    keeper: CapManager
    writer: LimitWriter
    journal: Journal
    audit: AuditLog
    rows: AuditRowLimiter

    @property
    def stuck(self) -> tuple[str, ...]:
        """The names of devices whose driver call does not return."""
        devices = self.writer.devices
        names = {state.name for key, state in devices.states.items() if devices.stuck(key)}
        return tuple(sorted(names))

    @property
    def retained(self) -> int:
        """The number of limits that stay in force when the capper ends."""
        return sum(entry.imposed is not None for entry in self.writer.entries.values())

    def close(self) -> None:
        self.rows.close()
        self.writer.devices.close()


def open_engine(
    place: CapperHost,
    config: Config,
    actuators: Sequence[Actuator],
    clock: Clock,
    log: Log,
    hook: AuditHook = ignore_event,
    *,
    enumerate_devices: bool = True,
) -> CapEngine:
    """Read the journals, and find the devices that they name. The lock must be held.

    The journal names its devices: restoring them needs no enumeration, unless it is damaged.
    """
    audit = AuditLog(place.audit, _file_size(config), hook)
    rows = AuditRowLimiter(clock, audit.record)
    journal = Journal(place.directory, place.boot_id, place.audit, stamp=clock.monotonic)
    if journal.trouble:
        log(journal.trouble)
        audit.record(AuditEvent(at=clock.now().wall, deed=AuditAction.FAIL, why=journal.trouble))
    devices = ManagedDevices(actuators)
    writer = LimitWriter(devices, journal, clock, rows.record)
    audit.outstanding = writer.outstanding
    keeper = CapManager(
        writer,
        clock,
        _operator_limits(config),
        longest=int(config.caps.lease),
        record=rows.record,
        tunable=config.autotune.gpus,
        knobs=config.autotune.knobs,
    )
    writer.assume_recorded()
    if enumerate_devices or writer.needs_enumeration:
        devices.look()
    writer.name_lost()
    return CapEngine(keeper, writer, journal, audit, rows)


def retry_release(
    workings: CapEngine, clock: Clock, log: Log, release: Callable[[], tuple[CapsError, ...]]
) -> tuple[CapsError, ...]:
    """Call ``release`` until nothing fails, for a second or two; returns the last failures.

    ``release`` is the keeper's ``restore`` or ``stop``. A device that hangs gets a few seconds.
    """
    began, tries = clock.monotonic(), 0
    while troubles := release():
        tries += 1
        patient = workings.stuck and clock.monotonic() - began < _STUCK_WITHIN
        hopeless = all(trouble.refusal == RefusalReason.UNRECOVERED for trouble in troubles)
        if hopeless or (tries >= _TRIES and not patient):
            break
        clock.sleep_until(clock.monotonic() + _BETWEEN)
    for trouble in troubles:
        log(str(trouble))
    if troubles:
        log(
            f"{workings.journal.path} keeps what was not given back; `wattspan caps restore`, or"
            " the next capper, tries again."
        )
    return troubles


def _operator_limits(config: Config) -> OperatorLimits:
    return OperatorLimits(config.autotune.floor, config.caps.floor_watts, config.caps.largest_step)


def _file_size(config: Config) -> int:
    """Bytes of each file of the record: all of them together take twice [caps] log_size."""
    return 2 * int(config.caps.log_size) // (GENERATIONS + 1)


def _permitted_users(config: Config, log: Log) -> frozenset[int]:
    """Who may speak; names that were set and are nobody's are told."""
    for key, names in (("users", config.caps.users), ("ceiling_users", config.caps.ceiling_users)):
        _, unknown = uids_of(names)
        origin = config.origins.get(f"caps.{key}")
        if unknown and origin is not None and origin.kind != "default":
            log(f"[caps] {key} names {', '.join(unknown)}, whom this host does not know.")
    return allowed_users((*config.caps.users, *config.caps.ceiling_users))[0]


def _open_socket(path: Path, inherited: InheritedSocket | None) -> ListeningSocket:
    if inherited is None:
        return listen_unix(path, SOCKET_MODE, what="requests for caps")
    return ListeningSocket(inherited.socket, inherited.address, lambda: None)


class Capper:
    """One capper, ready to ``run``."""

    def __init__(
        self,
        place: CapperHost,
        socket: Path,
        config: Config,
        actuators: Callable[[], Sequence[Actuator]],
        clock: Clock,
        log: Log,
        *,
        hook: AuditHook = ignore_event,
        alive: Callable[[], None] = lambda: None,
        inherited: InheritedSocket | None = None,
    ) -> None:
        """Take the lock, give back or take over what the last one left, and listen.

        JournalError if there is another capper, or no place for a journal; ListenError. An
        ``inherited`` socket is served in place of one of our own, and stays where it is.
        """
        self._clock, self._log = clock, log
        self._troubles: set[str] = set()
        with ExitStack() as stack:
            lock = CapperLock(place)
            stack.callback(lock.release)
            listening = _open_socket(socket, inherited)
            stack.callback(listening.remove)
            stack.callback(listening.socket.close)
            workings = open_engine(place, config, actuators(), clock, log, hook)
            stack.callback(workings.close)
            self._stack = stack.pop_all()
        self._workings, self.address = workings, listening.address
        ceilings = PowerCeilings(
            config.caps, place.ceilings, place.boot_id, clock, record=workings.rows.record
        )
        self._desk = RequestHandler(
            workings.keeper, workings.writer, ceilings, config.caps, clock, workings.rows.record
        )

        def turned() -> None:
            alive()
            workings.rows.turn()
            self._tell_troubles(ceilings)

        self.server = CapperSocketServer(
            listening.socket, self._desk, clock, _permitted_users(config, log), alive=turned
        )

    @property
    def status(self) -> str:
        """How it stands, in one sentence."""
        keeper = self._workings.keeper
        usable = sum(row.usable for row in keeper.rows())
        knobs = f"{usable} knob{'s' * (usable != 1)} can be turned" if usable else "no knob answers"
        capped = sum(not entry.lost for entry in self._workings.writer.entries.values())
        caps = f"{capped} cap{'s' * (capped != 1)} in force"
        suspended = "; nothing is set before a restart, as asked" * keeper.suspended
        stuck = self._workings.stuck
        hung = f"; {', '.join(stuck)} does not answer" if stuck else ""
        trouble = f" {'; '.join(sorted(self._troubles))}" if self._troubles else ""
        return f"Answering on {self.address}; {knobs}, {caps}{suspended}{hung}.{trouble}"

    def settle_for(self, config: Config) -> None:
        """Keep to another configuration from now on; for the thread that runs it.

        What is held stays, unless its user or its knob is not named any more.
        """
        caps, workings = config.caps, self._workings
        workings.audit.size = _file_size(config)
        self.server.admit(_permitted_users(config, self._log))
        workings.keeper.settle_for(
            _operator_limits(config),
            longest=int(caps.lease),
            tunable=config.autotune.gpus,
            knobs=config.autotune.knobs,
        )
        self._desk.settle_for(caps)
        self._desk.turn()

    def run(self, *, ending: Callable[[], None] = lambda: None) -> tuple[CapsError, ...]:
        """Serve until stopped, then restore all tuned limits; what could not be restored.

        Limits of fixed caps and of a power budget stay in force: the next capper takes them over.

        ``ending`` is called when the end begins.

        Before anybody is answered, what the last capper left is given back, or stays because it
        is imposed.
        """
        self._record(AuditAction.START)
        try:
            self.server.run()
        finally:
            self._desk.ending = True
            ending()
            workings = self._workings
            troubles = retry_release(workings, self._clock, self._log, workings.keeper.stop)
            if retained := workings.retained:
                self._log(
                    f"{retained} limit{'s' * (retained != 1)} of fixed caps or of the power budget"
                    " stay in force while no capper runs; `wattspan caps restore` lifts them."
                )
            self._desk.close()
            self._record(AuditAction.END)
            self.server.close()
            self._stack.close()
        return troubles

    def _record(self, deed: AuditAction) -> None:
        self._workings.rows.record(AuditEvent(at=self._clock.now().wall, deed=deed))

    def _tell_troubles(self, ceilings: PowerCeilings) -> None:
        """Say once what has begun to go wrong."""
        workings = self._workings
        now = {
            workings.keeper.journal_trouble,
            workings.audit.trouble,
            ceilings.trouble,
            self._desk.trouble,
            workings.writer.unrecovered,
        } - {""}
        for trouble in sorted(now - self._troubles):
            self._log(trouble)
        self._troubles = now
