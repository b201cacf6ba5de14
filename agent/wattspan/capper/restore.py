"""What an operator may ask for, with a capper or without: for after it was killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from wattspan.capper.ceilings import PowerCeilings
from wattspan.capper.client import CapperClient
from wattspan.capper.journal import JournalError
from wattspan.capper.paths import CapperHost, CapperLock
from wattspan.capper.process import CapEngine, Log, open_engine, retry_release
from wattspan.capper.protocol import RefusalReason
from wattspan.config import Config
from wattspan.model import MILLISECOND, SECOND, CapRow
from wattspan.ports import Actuator, CapsError, Clock
from wattspan.util.peer_credentials import PeerCredentials

_PATIENCE, _BETWEEN = 10 * SECOND, 100 * MILLISECOND
"""How long whoever has the lock, while its socket says that it ends, is let end."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What came of it: how many were given back, what is somebody else's, what failed and why."""

    by: str  # "capper" or "journal"
    restored: int
    foreign: tuple[CapRow, ...] = ()
    troubles: tuple[str, ...] = ()
    retained: int = 0
    """Limits of fixed caps and of a power budget that stay in force."""


@dataclass(frozen=True, slots=True)
class RestoreContext:
    """Where a capper is, or was; what is needed to do its work in its place."""

    place: Callable[[], CapperHost]
    socket: Path
    config: Config
    actuators: Callable[[], Sequence[Actuator]]
    clock: Clock
    log: Log
    ended: bool = False
    """Whether the capper has ended, or is about to: its socket may be open all the same."""

    def client(self, who: str) -> CapperClient:
        return CapperClient(self.socket, self.clock, who=who, timeout=5.0)

    @contextmanager
    def workings(self) -> Iterator[CapEngine]:
        """The journal and the devices, with nobody else at them. JournalError if there is."""
        place = self.place()
        lock = self._lock(place)
        try:
            workings = open_engine(
                place,
                self.config,
                self.actuators(),
                self.clock,
                self.log,
                enumerate_devices=False,
            )
            try:
                yield workings
            finally:
                workings.close()
        finally:
            lock.release()

    def _lock(self, place: CapperHost) -> CapperLock:
        deadline = self.clock.monotonic() + (_PATIENCE if self.ended else 0)
        while True:
            try:
                return CapperLock(place)
            except JournalError:
                if self.clock.monotonic() >= deadline:
                    raise
            self.clock.sleep_until(self.clock.monotonic() + _BETWEEN)


def restore_limits(here: RestoreContext, *, tuned_only: bool = False) -> RestoreReport:
    """Ask the capper that runs; where none does, go by the journal of this boot.

    ``tuned_only`` is for the moment after a capper has ended: limits of fixed caps and of a power
    budget stay in force, and a running capper has nothing to do.

    Only what is still as we wrote it is written. What cannot be written down afterwards is told,
    and was given back all the same. CapsError or JournalError if neither is possible.
    """
    tuned_only = tuned_only or here.ended  # as a service manager runs it after the capper's end
    if not tuned_only:
        try:
            return _restore_by_capper(here)
        except CapsError as error:
            here = _context_without_capper(here, error)
    with here.workings() as workings:
        keeper = workings.keeper
        if tuned_only:
            keeper.impose_retained()
        troubles = retry_release(
            workings, here.clock, here.log, keeper.stop if tuned_only else keeper.restore
        )
        if not tuned_only:
            _lift_ceilings(here, workings)
        for unwritten in filter(None, (workings.keeper.journal_trouble, workings.audit.trouble)):
            here.log(unwritten)
        return RestoreReport(
            "journal",
            workings.writer.restores,
            _foreign_rows(workings.keeper.rows()),
            tuple(str(trouble) for trouble in troubles),
            workings.retained,
        )


def _lift_ceilings(here: RestoreContext, workings: CapEngine) -> None:
    """Remove the ceilings that were asked for on the socket of the capper that is not there."""
    place = here.place()
    ceilings = PowerCeilings(
        here.config.caps, place.ceilings, place.boot_id, here.clock, record=workings.audit.record
    )
    try:
        ceilings.lift_all(PeerCredentials(os.getpid(), os.getuid()))
    except JournalError as error:
        here.log(str(error))


def _restore_by_capper(here: RestoreContext) -> RestoreReport:
    """What the capper that runs has given back."""
    client = here.client("wattspan caps restore")
    try:
        told = client.restore()
    finally:
        client.close()
    return RestoreReport("capper", told.restored, _foreign_rows(told.rows))


def accept_foreign_limits(here: RestoreContext) -> int:
    """Take what somebody else has set as the original from now on; for how many knobs."""
    client = here.client("wattspan caps accept")
    try:
        before = sum(row.foreign for row in client.rows())
        return before - sum(row.foreign for row in client.accept())
    except CapsError as error:
        here = _context_without_capper(here, error)
    finally:
        client.close()
    with here.workings() as workings:
        return workings.keeper.accept()


def _context_without_capper(here: RestoreContext, error: CapsError) -> RestoreContext:
    """How to go on if no capper does it; ``error`` itself if one has refused.

    One that came up only to say that it cannot start, or that ends, is none. What a service
    manager runs after its end has the lock for a moment, and gives back as well.
    """
    if error.refusal == RefusalReason.ENDING:
        return replace(here, ended=True)
    if error.refusal:
        raise error
    return here


def _foreign_rows(rows: Sequence[CapRow]) -> tuple[CapRow, ...]:
    return tuple(row for row in rows if row.foreign and not row.lost)
