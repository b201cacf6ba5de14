"""The state of the tuner on disk: decisions, certified settings, and the state of running jobs.

The log has one JSON object per line, in the format of :mod:`wattspan.tuning.serialization`. A full
file replaces ``NAME.1``, and a new file starts. Certified settings let the tuner skip the search
for a job that it has tuned before.

Slowdown accounts and evidence about a server's load survive the agent, so that the budget of a run,
or the settings that were certified for a server, continue after a restart. An entry belongs to the
processes of a job: a process that is still running continues it, and a new run of the same program
begins a new one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgspec

from wattspan.model import (
    SECOND,
    Consumer,
    Decision,
    DecisionReason,
    Knob,
    Move,
    RecordedDecision,
)
from wattspan.ports import Clock
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.certified_settings import CertifiedSettings, from_json, to_json
from wattspan.tuning.decisions.load import MAX_BIN
from wattspan.tuning.decisions.load_cells import LatencyObjective, LoadCell, gates
from wattspan.tuning.decisions.load_tracking import TrackingEvidence, TrackingPolicy
from wattspan.tuning.decisions.values import CertifiedLevels, Fingerprint
from wattspan.tuning.serialization import recorded_decision_from_json, recorded_decision_to_json
from wattspan.util.files import make_directory, replace_file
from wattspan.util.text import printable
from wattspan.util.throttle import RateLimitedLog

MAX_LOG_BYTES = 2**20
"""Bytes of one of the two files."""

REPEAT_INTERVAL = 3600 * SECOND
"""Shortest interval of log messages about failed writes, in nanoseconds."""

MAX_UNWRITTEN = 200
"""Decisions in memory while writes fail."""

_MAX_JOBS = 1000  # jobs with a remembered last decision, against duplicate rows
_MAX_LINE_BYTES = 64 * 1024

_DECODE_ERRORS = (
    *(LookupError, TypeError, ValueError, AttributeError),
    *(OverflowError, RecursionError),  # of huge numbers and of deep nesting
)

_DecisionIdentity = tuple[object, ...]


def decisions_path(state_dir: Path, *, emulated: bool = False) -> Path:
    """Return the log in ``state_dir``; emulated hosts have their own."""
    name = "decisions-emulated.jsonl" if emulated else "decisions.jsonl"
    return state_dir / "tuning" / name


class DecisionLog:
    """The decision log: one thread adds, any thread reads. Neither raises."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        size: int = MAX_LOG_BYTES,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._size = path, size
        self._lock = threading.Lock()
        self._last: OrderedDict[tuple[str, Knob], _DecisionIdentity] = OrderedDict()
        self._read = False
        self._unwritten: deque[RecordedDecision] = deque(maxlen=MAX_UNWRITTEN)
        self._failures = RateLimitedLog(clock.monotonic, log, REPEAT_INTERVAL)

    def add(self, decision: RecordedDecision) -> None:
        """Append ``decision``, unless it repeats the last decision about the job.

        A paired comparison alternates between two settings: the log omits the half at the
        original setting, and repeated comparisons of a held setting. Decisions whose write
        fails stay in memory until a write succeeds.
        """
        with self._lock:
            last = self._last_decisions().get((decision.job, decision.knob))
            if last == _decision_identity(decision) or _is_routine(decision.decision, last):
                return
            self._remember(decision)
            self._unwritten.append(decision)
            try:
                while self._unwritten:
                    self._append(self._unwritten[0])
                    self._unwritten.popleft()
            except OSError as error:
                self._failures.write(_failure_sentence(error, self._path))

    def recent(
        self, job: str = "", limit: int = 100, since: int | None = None
    ) -> list[RecordedDecision]:
        """Return the last ``limit`` decisions, oldest first, of ``job`` if it is not empty.

        ``since`` is in Unix nanoseconds.
        """
        with self._lock:
            known = [*read_decisions(self._path, self._size), *self._unwritten]
        return select_decisions(known, job, limit, since)

    # ------------------------------------------------------------------------------- the files

    def _append(self, decision: RecordedDecision) -> None:
        line = msgspec.json.encode(recorded_decision_to_json(decision)) + b"\n"
        make_directory(self._path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o640)
        try:
            end = os.lseek(file, 0, os.SEEK_END)
            if end and end + len(line) > self._size:
                self._path.replace(_rotated_path(self._path))
                os.close(file)
                file = os.open(self._path, flags, 0o640)
                end = 0
            if end and os.pread(file, 1, end - 1) != b"\n":
                line = b"\n" + line  # end an incomplete last line
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def _last_decisions(self) -> OrderedDict[tuple[str, Knob], _DecisionIdentity]:
        """Return the last decision about each job; read at the first addition."""
        if not self._read:
            self._read = True
            for decision in read_decisions(self._path, self._size):
                self._remember(decision)
        return self._last

    def _remember(self, decision: RecordedDecision) -> None:
        self._last[decision.job, decision.knob] = _decision_identity(decision)
        self._last.move_to_end((decision.job, decision.knob))
        if len(self._last) > _MAX_JOBS:
            self._last.popitem(last=False)


def read_decisions(path: Path, size: int = MAX_LOG_BYTES) -> list[RecordedDecision]:
    """Return the decisions of the log at ``path`` in order of writing."""
    return [*_read_file(_rotated_path(path), size), *_read_file(path, size)]


def select_decisions(
    decisions: Iterable[RecordedDecision], job: str = "", limit: int = 100, since: int | None = None
) -> list[RecordedDecision]:
    """Return the last ``limit`` of ``decisions``, oldest first, filtered by job and time."""
    found = [
        one for one in decisions if job in ("", one.job) and (since is None or one.at.wall >= since)
    ]
    found.sort(key=lambda one: one.at.wall)
    return found[-limit:] if limit > 0 else []


def _rotated_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _decision_identity(decision: RecordedDecision) -> _DecisionIdentity:
    return (*decision.decision.same_as, decision.applied)


def _is_routine(decision: Decision, last: _DecisionIdentity | None) -> bool:
    """Return True if ``decision`` is a routine step of the ``last`` one."""
    if last is None or decision.move is not Move.PROBE:
        return False
    if decision.reason is DecisionReason.SENTINEL:
        return last[0] == Move.HOLD
    return not decision.caps and last[:2] == (decision.move, decision.reason)


def _read_file(path: Path, size: int) -> Iterator[RecordedDecision]:
    """Yield the readable decisions; skip incomplete lines and lines of later versions."""
    try:
        with path.open("rb") as file:
            # Another program may have made the file longer; read its end.
            start = max(0, file.seek(0, os.SEEK_END) - size - _MAX_LINE_BYTES)
            file.seek(start)
            lines = file.read(size + _MAX_LINE_BYTES).split(b"\n")
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(*_DECODE_ERRORS):
            yield recorded_decision_from_json(msgspec.json.decode(line))


def _failure_sentence(error: OSError, path: Path) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        cause, remedy = "the disk is full", f"Free some space for {path.parent}."
    else:
        cause = (error.strerror or str(error)).lower()
        remedy = "Make it writable for the user of the agent, or set another state_dir in [agent]."
    return printable(
        f"Cannot write the decision log {path}: {cause}. {remedy} Tuning continues without it."
    )


class CertificationStore:
    """Certified settings on disk, for the thread of the tuner. Logs errors and never raises."""

    def __init__(self, path: Path, memory: CertifiedSettings, log: Callable[[str], None]) -> None:
        self._path, self._memory, self._log = path, memory, log
        self._logged = False

    @classmethod
    def open(
        cls, state_dir: Path, *, emulated: bool, log: Callable[[str], None]
    ) -> CertificationStore:
        """Open the file in ``state_dir``; emulated hosts have their own."""
        path = state_dir / "tuning" / ("certified-emulated.json" if emulated else "certified.json")
        try:
            memory = from_json(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            memory = CertifiedSettings()
        except (OSError, ValueError, RecursionError) as error:
            memory = CertifiedSettings()
            log(
                f"Cannot read certified settings from {path} ({error}). The tuner searches "
                "again and writes a new file."
            )
        return cls(path, memory, log)

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None:
        """Return the certified levels, or None."""
        return self._memory.recall(fingerprint, knob)

    def certified(self, fingerprint: Fingerprint, knob: Knob, setting: CertifiedLevels) -> None:
        """Record a setting that keeps the budget of a job."""
        self._save(self._memory.certified(fingerprint, knob, setting))

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> None:
        """Record a later failure of the certified setting; it loses trust or is removed."""
        self._save(self._memory.failed(fingerprint, knob))

    def _save(self, memory: CertifiedSettings) -> None:
        if memory == self._memory:
            return
        self._memory = memory
        new = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            make_directory(self._path.parent)
            replace_file(self._path, json.dumps(to_json(memory)).encode(), new, 0o666)
        except OSError as error:
            if not self._logged:
                self._logged = True
                self._log(
                    f"Cannot write certified settings to {self._path} ({error.strerror}): "
                    "the tuner loses them at its next start."
                )


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
            make_directory(self._path.parent)
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
