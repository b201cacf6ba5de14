"""What an operator may ask for, with a capper or without: for after it was killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.client import CapperClient
from wattspan.capper.place import SOCKET, Lock, Place
from wattspan.capper.process import Log, Workings, end, open_workings
from wattspan.config import Config
from wattspan.model import CapRow
from wattspan.ports import Actuator, CapsError, Clock


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of it: how many were given back, what is somebody else's, what failed and why."""

    by: str  # "capper" or "journal"
    restored: int
    foreign: tuple[CapRow, ...] = ()
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Here:
    """Where a capper is, or was; what is needed to do its work in its place."""

    place: Callable[[], Place]
    run_dir: Path
    config: Config
    actuators: Callable[[], Sequence[Actuator]]
    clock: Clock
    log: Log

    def client(self, who: str) -> CapperClient:
        return CapperClient(self.run_dir / SOCKET, self.clock, who=who, timeout=5.0)

    @contextmanager
    def workings(self) -> Iterator[Workings]:
        """The journal and the devices, with nobody else at them. JournalError if there is."""
        place = self.place()
        lock = Lock(place)
        try:
            workings = open_workings(place, self.config, self.actuators(), self.clock, self.log)
            try:
                yield workings
            finally:
                workings.close()
        finally:
            lock.release()


def restore(here: Here) -> Restored:
    """Ask the capper that runs; where none does, go by the journal of this boot.

    Only what is still as we wrote it is written. CapsError or JournalError if neither is possible.
    """
    client = here.client("wattspan caps restore")
    try:
        told = client.restore()
        return Restored("capper", told.restored, _foreign(told.rows))
    except CapsError as error:
        if error.refusal:
            raise
    finally:
        client.close()
    with here.workings() as workings:
        troubles = end(workings, here.clock, here.log)
        return Restored(
            "journal",
            workings.writer.restores,
            _foreign(workings.keeper.rows()),
            tuple(str(trouble) for trouble in troubles),
        )


def accept(here: Here) -> int:
    """Take what somebody else has set as the original from now on; for how many knobs."""
    client = here.client("wattspan caps accept")
    try:
        before = _foreign(client.rows())
        return len(before) - len(_foreign(client.accept()))
    except CapsError as error:
        if error.refusal:
            raise
    finally:
        client.close()
    with here.workings() as workings:
        return workings.keeper.accept()


def _foreign(rows: Sequence[CapRow]) -> tuple[CapRow, ...]:
    return tuple(row for row in rows if row.foreign)
