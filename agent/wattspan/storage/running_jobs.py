"""State of running tuning jobs on disk: slowdown accounts, and evidence about a server's load.

It survives the agent, so that the budget of a run, or the settings that were certified for a
server, continue after a restart. An entry belongs to the processes of a job: a process that is
still running continues it, and a new run of the same program begins a new one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgspec

from wattspan.model import Consumer
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.load import MAX_BIN
from wattspan.tuning.decisions.load_cells import LatencyObjective, LoadCell, gates
from wattspan.tuning.decisions.load_tracking import TrackingEvidence, TrackingPolicy
from wattspan.util.files import replace_file

MAX_JOBS = 256
"""Entries; the one that was stored longest ago is removed first."""

_MAX_BYTES = 2**24
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Amount = Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)]


class _Entry(msgspec.Struct, frozen=True):
    """One job, as in the file."""

    processes: list[tuple[_Count, _Count]]


class StoredAccount(_Entry, frozen=True):
    """The closed slowdown account of one job; nanoseconds and microjoules."""

    elapsed: _Count
    units: _Count
    lost: _Amount
    bound: _Amount
    explored: _Amount
    saved: tuple[_Amount, _Amount, _Amount]

    def account(self) -> SlowdownAccount:
        """The account to continue."""
        return SlowdownAccount(
            elapsed=self.elapsed,
            units=self.units,
            closed_lost=self.lost,
            closed_bound=self.bound,
            closed_saved=self.saved,
            closed_explored=self.explored,
        )


class StoredEvidence(_Entry, frozen=True):
    """The evidence about the load of one server, and the policy under which it was collected."""

    objectives: list[LatencyObjective]
    settings: list[_Count]
    by_length: bool
    confidence: _Amount
    cells: list[tuple[_Count, _Count, LoadCell]]
    certified: list[tuple[_Count, _Count]]
    failed: list[tuple[_Count, _Count, _Count]]
    doublings: _Count

    @classmethod
    def of(
        cls, processes: Collection[Consumer], policy: TrackingPolicy, evidence: TrackingEvidence
    ) -> StoredEvidence:
        return cls(
            _identities(processes),
            list(policy.objectives),
            list(policy.settings),
            policy.by_length,
            policy.confidence,
            [(*place, cell) for place, cell in evidence.cells.items()],
            list(evidence.certified.items()),
            [(*place, until) for place, until in evidence.failed.items()],
            evidence.doublings,
        )

    def evidence(self, policy: TrackingPolicy) -> TrackingEvidence | None:
        """The evidence to continue; None if it is about another policy, or is inconsistent."""
        if (tuple(self.objectives), tuple(self.settings), self.by_length, self.confidence) != (
            policy.objectives,
            policy.settings,
            policy.by_length,
            policy.confidence,
        ):
            return None
        size = len(gates(policy.objectives, by_length=policy.by_length))
        places = [
            *((number, setting) for number, setting, _ in self.cells),
            *self.certified,
            *((number, setting) for number, setting, _ in self.failed),
        ]
        if any(number > MAX_BIN or setting >= len(self.settings) for number, setting in places):
            return None
        if not all(_is_consistent(cell, size) for _, _, cell in self.cells):
            return None
        return TrackingEvidence(
            {(number, setting): cell for number, setting, cell in self.cells},
            dict(self.certified),
            {(number, setting): until for number, setting, until in self.failed},
            self.doublings,
        )


def _is_consistent(cell: LoadCell, gate_count: int) -> bool:
    counts = [one for each in cell.counts for one in each]
    return len(cell.counts) == gate_count and all(
        0 <= one.misses <= one.requests and one.groups >= 0 and one.spread >= 0 for one in counts
    )


def _identities(processes: Collection[Consumer]) -> list[tuple[int, int]]:
    return [(one.pid, one.started) for one in processes]


_EntryType = TypeVar("_EntryType", bound=_Entry)


class _RunningJobs(Generic[_EntryType]):
    """The entries of one file, for the thread of the tuner. Logs errors and never raises."""

    _file: ClassVar[str]
    _entry: ClassVar[type[Any]]
    _contents: ClassVar[str]
    _loss: ClassVar[str]

    def __init__(
        self, path: Path, entries: Mapping[str, _EntryType], log: Callable[[str], None]
    ) -> None:
        self._path, self._entries, self._log = path, dict(entries), log
        self._logged = False

    @classmethod
    def open(cls, state_dir: Path, *, emulated: bool, log: Callable[[str], None]) -> Self:
        """Open the file in ``state_dir``; emulated hosts have their own."""
        path = state_dir / "tuning" / f"{cls._file}{'-emulated' if emulated else ''}.json"
        entries: dict[str, _EntryType] = {}
        try:
            with path.open("rb") as file:
                found = msgspec.json.decode(file.read(_MAX_BYTES))
            for job, one in msgspec.convert(found, dict[str, object]).items():
                with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
                    entries[job] = msgspec.convert(one, cls._entry, strict=False)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            log(
                f"Cannot read the {cls._contents} in {path} ({error}). {cls._loss} now, and the "
                "tuner writes a new file."
            )
        return cls(path, entries, log)

    def _recall(self, job: str, processes: Collection[Consumer]) -> _EntryType | None:
        """The entry of a job that at least one of these processes belongs to; None without."""
        stored = self._entries.get(job)
        if stored is None or not {*stored.processes}.intersection(map(tuple, processes)):
            return None
        return stored

    def _store(self, job: str, entry: _EntryType) -> None:
        self._entries.pop(job, None)
        self._entries[job] = entry
        while len(self._entries) > MAX_JOBS:
            del self._entries[next(iter(self._entries))]
        new = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(self._entries), new, 0o640)
        except (OSError, UnicodeEncodeError) as error:
            if not self._logged:
                self._logged = True
                self._log(
                    f"Cannot write {self._contents} to {self._path} ({error}). {self._loss} after "
                    "each restart of the agent."
                )


class RunningAccounts(_RunningJobs[StoredAccount]):
    """The slowdown accounts of running jobs."""

    _file, _entry, _contents = "accounts", StoredAccount, "slowdown accounts"
    _loss = "The budget of running jobs begins anew"

    def recall(self, job: str, processes: Collection[Consumer]) -> SlowdownAccount | None:
        """The account of a job that at least one of these processes belongs to; None without."""
        stored = self._recall(job, processes)
        return None if stored is None else stored.account()

    def store(self, job: str, processes: Collection[Consumer], account: SlowdownAccount) -> None:
        """Store the closed account of a job with these processes."""
        entry = StoredAccount(
            _identities(processes),
            account.elapsed,
            account.units,
            account.closed_lost,
            account.closed_bound,
            account.closed_explored,
            account.closed_saved,
        )
        self._store(job, entry)


class RunningEvidence(_RunningJobs[StoredEvidence]):
    """The evidence about the loads of running servers."""

    _file, _entry, _contents = "load-evidence", StoredEvidence, "evidence about loads"
    _loss = "The settings of running servers are certified anew"

    def recall(
        self, job: str, processes: Collection[Consumer], policy: TrackingPolicy
    ) -> TrackingEvidence | None:
        """The evidence of a job with one of these processes, under the same policy; else None."""
        stored = self._recall(job, processes)
        return None if stored is None else stored.evidence(policy)

    def store(
        self,
        job: str,
        processes: Collection[Consumer],
        policy: TrackingPolicy,
        evidence: TrackingEvidence,
    ) -> None:
        """Store the evidence of a job with these processes."""
        self._store(job, StoredEvidence.of(processes, policy, evidence))
