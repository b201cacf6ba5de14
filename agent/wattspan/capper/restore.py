"""Gives everything back, with a capper or without: for after it was killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wattspan.capper.client import CapperClient
from wattspan.capper.place import SOCKET, Lock, Place
from wattspan.capper.process import Log, end, open_workings
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


def restore(
    place: Callable[[], Place],
    run_dir: Path,
    config: Config,
    actuators: Callable[[], Sequence[Actuator]],
    clock: Clock,
    log: Log,
    *,
    accept: bool = False,
) -> Restored:
    """Ask the capper that runs; where none does, go by the journal of this boot.

    Only what is still as we wrote it is written. CapsError or JournalError if neither is possible.
    """
    client = CapperClient(run_dir / SOCKET, clock, who="wattspan caps restore", timeout=5.0)
    try:
        told = client.restore(accept=accept)
    except CapsError as error:
        if error.refusal:
            raise
    else:
        return Restored("capper", told.restored, _foreign(told.rows))
    finally:
        client.close()
    where = place()
    lock = Lock(where)
    try:
        workings = open_workings(where, config, actuators(), clock, log)
        try:
            if accept:
                workings.keeper.restore(accept=True)
            troubles = end(workings, clock, log)
            return Restored(
                "journal",
                workings.writer.restores,
                _foreign(workings.keeper.rows()),
                tuple(str(trouble) for trouble in troubles),
            )
        finally:
            workings.close()
    finally:
        lock.release()


def _foreign(rows: Sequence[CapRow]) -> tuple[CapRow, ...]:
    return tuple(row for row in rows if row.foreign)
