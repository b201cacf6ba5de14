"""The book of decisions: what was decided about which job, when and why, over restarts.

One JSON object a line, as :mod:`wattspan.tuning.serialization` tells a decision. When the file
is full it becomes ``NAME.1`` in place of the one before, and a new one is begun.

What was certified, on disk: a job that comes again need not be explored again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from wattspan.model import (
    SECOND,
    Decision,
    DecisionReason,
    Failure,
    Knob,
    Move,
    RecordedDecision,
    Trouble,
)
from wattspan.ports import Clock
from wattspan.tuning import CertifiedLevels, Fingerprint
from wattspan.tuning.decisions.certified import CertifiedSettings, from_json, to_json
from wattspan.tuning.serialization import recorded_decision_from_json, recorded_decision_to_json

MAX_LOG_BYTES = 2**20
"""Bytes of one file, of which there are two."""

REPEAT_INTERVAL = 3600 * SECOND
"""That decisions cannot be written is said no more often than this."""

MAX_UNWRITTEN = 200
"""Decisions that are kept in memory while they cannot be written."""

_MAX_JOBS = 1000  # whose last decision is remembered, so that it is not written twice
_MAX_LINE_BYTES = 64 * 1024

_DECODE_ERRORS = (
    *(LookupError, TypeError, ValueError, AttributeError),
    *(OverflowError, RecursionError),  # of numbers and of nesting without end
)

_DecisionIdentity = tuple[object, ...]


def decisions_path(state_dir: Path, *, emulated: bool = False) -> Path:
    """The book in ``state_dir``: what was decided on an emulated host is kept apart."""
    name = "decisions-emulated.jsonl" if emulated else "decisions.jsonl"
    return state_dir / "tuning" / name


class DecisionLog:
    """Adds decisions, from one thread, and tells them, to any. Neither ever raises."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        size: int = MAX_LOG_BYTES,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._clock, self._size, self._log = path, clock, size, log
        self._lock = threading.Lock()
        self._last: OrderedDict[tuple[str, Knob], _DecisionIdentity] | None = None
        self._unwritten: deque[RecordedDecision] = deque(maxlen=MAX_UNWRITTEN)
        self._said: int | None = None
        self.missed = 0
        """Decisions that could not be written when they were made."""
        self.failure: Failure | None = None
        """Why the last one could not; None if it was."""

    def add(self, decided: RecordedDecision) -> None:
        """Write ``decided`` down, unless it says no more than the job's last one.

        To compare is to go back and forth: the halves at the original setting are not told, nor
        is it told each time that a held setting is compared and held again. What cannot be
        written is kept in memory until it can.
        """
        with self._lock:
            last = self._known()
            key = (decided.job, decided.knob)
            same = _decision_identity(decided)
            if _is_routine(decided.decision, last.get(key)) or last.get(key) == same:
                return
            last[key] = same
            last.move_to_end(key)
            if len(last) > _MAX_JOBS:
                last.popitem(last=False)
            self._unwritten.append(decided)
            try:
                while self._unwritten:
                    self._append(self._unwritten[0])
                    self._unwritten.popleft()
            except OSError as error:
                self._miss(error)
            else:
                self.failure = None

    def recent(
        self, job: str = "", limit: int = 100, since: int | None = None
    ) -> list[RecordedDecision]:
        """The last ``limit`` decisions, oldest first: of ``job``, if one is named.

        ``since`` is Unix nanoseconds.
        """
        with self._lock:
            known = [*read_decisions(self._path, self._size), *self._unwritten]
        return select_decisions(known, job, limit, since)

    # ------------------------------------------------------------------------------- the files

    def _append(self, decided: RecordedDecision) -> None:
        line = msgspec.json.encode(recorded_decision_to_json(decided)) + b"\n"
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
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
                line = b"\n" + line  # the last one was torn, and tears no other
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def _known(self) -> OrderedDict[tuple[str, Knob], _DecisionIdentity]:
        """The last decision about each job: read when the first one is added."""
        if self._last is None:
            self._last = OrderedDict()
            for one in read_decisions(self._path, self._size):
                self._last[one.job, one.knob] = _decision_identity(one)
                self._last.move_to_end((one.job, one.knob))
            while len(self._last) > _MAX_JOBS:
                self._last.popitem(last=False)
        return self._last

    # --------------------------------------------------------------------------------- trouble

    def _miss(self, error: OSError) -> None:
        self.missed += 1
        self.failure = _failure(error, self._path)
        now = self._clock.monotonic()
        if self._said is None or now - self._said >= REPEAT_INTERVAL:
            self._said = now
            self._log(str(self.failure))


def read_decisions(path: Path, size: int = MAX_LOG_BYTES) -> list[RecordedDecision]:
    """What the book at ``path`` holds, in the order in which it was written down."""
    return [*_read_file(_rotated_path(path), size), *_read_file(path, size)]


def select_decisions(
    decisions: Iterable[RecordedDecision], job: str = "", limit: int = 100, since: int | None = None
) -> list[RecordedDecision]:
    """The last ``limit`` of them, oldest first: of ``job``, if one is named, from ``since`` on."""
    found = [
        one for one in decisions if job in ("", one.job) and (since is None or one.at.wall >= since)
    ]
    found.sort(key=lambda one: one.at.wall)
    return found[-limit:] if limit > 0 else []


def _rotated_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _decision_identity(decided: RecordedDecision) -> _DecisionIdentity:
    return (*decided.decision.same_as, decided.applied)


def _is_routine(decision: Decision, last: _DecisionIdentity | None) -> bool:
    """Whether ``decision`` is but a step of what the ``last`` one said."""
    if last is None or decision.move is not Move.PROBE:
        return False
    if decision.reason is DecisionReason.SENTINEL:
        return last[0] == Move.HOLD
    return not decision.caps and last[:2] == (decision.move, decision.reason)


def _read_file(path: Path, size: int) -> Iterator[RecordedDecision]:
    """Those that can be read: a line that was torn, or that a later version wrote, cannot."""
    try:
        with path.open("rb") as file:
            # Somebody else may have made it longer than we ever would; the end is what is told.
            start = max(0, file.seek(0, os.SEEK_END) - size - _MAX_LINE_BYTES)
            file.seek(start)
            lines = file.read(size + _MAX_LINE_BYTES).split(b"\n")
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(*_DECODE_ERRORS):
            yield recorded_decision_from_json(msgspec.json.decode(line))


def _failure(error: OSError, path: Path) -> Failure:
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    denied = error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}
    cause = "the disk is full" if full else (error.strerror or str(error)).lower()
    remedy = (
        f"Free some space for {path.parent}."
        if full
        else "Make it writable for the user of the agent, or choose another state_dir in [agent]."
    )
    return Failure(
        "tuning",
        f"the history of decisions {path}",
        Trouble.DENIED if denied else Trouble.RETRY,
        cause,
        f"{remedy} Tuning goes on without it.",
        verb="write",
    )


class CertificationStore:
    """Belongs to the tuner's thread. What cannot be read or written is done without, and said."""

    def __init__(self, path: Path, memory: CertifiedSettings, log: Callable[[str], None]) -> None:
        self._path, self._memory, self._log = path, memory, log
        self._said = False

    @classmethod
    def open(
        cls, state_dir: Path, *, emulated: bool, log: Callable[[str], None]
    ) -> CertificationStore:
        """The book in ``state_dir``; an emulated host's settings are no real host's."""
        path = state_dir / "tuning" / ("certified-emulated.json" if emulated else "certified.json")
        try:
            memory = from_json(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            memory = CertifiedSettings()
        except (OSError, ValueError, RecursionError) as error:
            log(f"Jobs are explored anew: {path} cannot be read ({error}). It is written afresh.")
            memory = CertifiedSettings()
        return cls(path, memory, log)

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None:
        """What was certified for it; None for nothing."""
        return self._memory.recall(fingerprint, knob)

    def certified(self, fingerprint: Fingerprint, remembered: CertifiedLevels) -> None:
        """A job's setting was proved to keep its budget."""
        self._become(self._memory.certified(fingerprint, remembered))

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> None:
        """It did not, later: trust it less, or no more."""
        self._become(self._memory.failed(fingerprint, knob))

    def _become(self, memory: CertifiedSettings) -> None:
        if memory == self._memory:
            return
        self._memory = memory
        new = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w", encoding="utf-8") as file:
                json.dump(to_json(memory), file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            if not self._said:
                self._said = True
                self._log(
                    f"What is certified is forgotten at the next start: {self._path} cannot be "
                    f"written ({error.strerror})."
                )
