"""The exchange of records among the hosts of a job, and the turn of one host to explore.

Each host writes its own record under the job's key, at intervals, with a lease that ends with the
host. The exchange has no part in decisions: it is one thread that reads and writes, and the tuner
never waits for it. Without contact for the lifetime of a record, which is shorter than that of the
lease, a host has to do what is safe without the others.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from wattspan.fleet.coordination import (
    Coordination,
    CoordinationError,
    Election,
    KeyWrite,
    LeaseEndedError,
    StoredKey,
)
from wattspan.fleet.job_records import (
    MAX_HOSTS,
    RECORD_INTERVAL,
    RECORD_LIFETIME,
    JobRecord,
    JobView,
    RefusedRecordError,
    SeenRecord,
    decode_record,
    encode_record,
)
from wattspan.model import SECOND
from wattspan.ports import Clock, WattspanError
from wattspan.util.throttle import RateLimitedLog, RetryBackoff

LEASE_SECONDS: Final = 10
"""Time after which the records of a lost host end, and another host may explore."""

_LONGEST_DELAY: Final = 30 * SECOND
_LONGEST_NAME: Final = 100
"""Characters of a host's name in a fleet; keys and values may be anybody's, and hold any."""


@dataclass(slots=True)
class _Job:
    """This host's part in a job. ``written`` is the time of the record that was written last."""

    election: Election
    record: JobRecord | None = None
    explores: bool = False
    written: int = -1
    seen: dict[str, tuple[int, SeenRecord]] = field(default_factory=dict)  # with its revision
    explorer: str = ""
    may_explore: bool = False


class JobExchange:
    """The records of all jobs of this host. ``round`` is one pass, ``run`` repeats it.

    ``publish``, ``withdraw`` and ``view`` are for any thread, and never wait for the service.
    """

    def __init__(
        self,
        prefix: str,
        name: str,
        coordination: Coordination,
        clock: Clock,
        log: Callable[[str], None],
    ) -> None:
        """``prefix`` is the fleet's, ``name`` that of this host in it."""
        # Beside the fleet's own keys, which its leader reads and watches as a whole.
        self._prefix = f"{prefix.removesuffix('/')}-jobs/"
        self._name, self._coordination, self._clock = name, coordination, clock
        self._log = RateLimitedLog(clock.monotonic, log)
        self._backoff = RetryBackoff(2 * RECORD_INTERVAL, _LONGEST_DELAY, random.random)
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._ended: dict[str, _Job] = {}
        self._lease = 0
        self._due = 0
        self._succeeded: int | None = None  # time of the latest pass without an error
        self._trouble = ""

    # -------------------------------------------------------------------------- for the tuner

    def publish(self, job: str, record: JobRecord, *, explores: bool) -> None:
        """Tell other hosts the newest record; ``explores`` asks for the turn to explore."""
        with self._lock:
            known = self._jobs.get(job)
            if known is None:
                key = f"{self._place(job)}explorer"
                election = Election(self._coordination, key, self._name)
                known = self._jobs[job] = _Job(election)
            known.record, known.explores = record, explores

    def withdraw(self, job: str) -> None:
        """End this host's part in a job. Idempotent."""
        with self._lock:
            known = self._jobs.pop(job, None)
            if known is not None:
                self._ended[job] = known

    def view(self, job: str) -> JobView:
        """The other hosts of a job by the latest pass.

        ``may_explore`` is True without contact for the lifetime of a record.
        """
        with self._lock:
            known, trouble, succeeded = self._jobs.get(job), self._trouble, self._succeeded
            if known is None:
                view = JobView(may_explore=False, trouble=trouble)
            else:
                records = tuple(one for _, one in known.seen.values())
                view = JobView(records, known.explorer, known.may_explore, trouble)
        now = self._clock.monotonic()
        lost = succeeded is None or now - succeeded > RECORD_LIFETIME
        if trouble and lost:
            return view._replace(explorer="", may_explore=True, contact=False)
        return view._replace(contact=not lost)

    # ---------------------------------------------------------------------------- the thread

    def run(self, stop: threading.Event) -> None:
        """Exchange records until ``stop``, and withdraw every record then."""
        while not stop.wait(RECORD_INTERVAL / SECOND / 4):
            try:
                self.round()
            except Exception as error:  # noqa: BLE001 - jobs would never be exchanged again
                self._log.failure("The exchange of jobs", error)
        self.close()

    def round(self) -> None:
        """Write and read all records that are due. Never raises a WattspanError."""
        now = self._clock.monotonic()
        if now < self._due or not (self._jobs or self._ended or self._lease):
            return
        self._due = now + RECORD_INTERVAL
        try:
            self._exchange(now)
        except WattspanError as error:
            self._due = self._backoff.failed(now)
            with self._lock:
                self._trouble = str(error)
            self._log.write(f"The jobs of the fleet: {error}", type(error).__name__)
        else:
            self._backoff.reset()
            with self._lock:
                self._trouble, self._succeeded = "", now

    def close(self) -> None:
        """End every part in a job; for the thread that calls ``round``."""
        with suppress(CoordinationError):
            if self._lease:
                self._coordination.revoke(self._lease)  # and all keys with it
        self._coordination.close()

    # --------------------------------------------------------------------------- inner workings

    def _place(self, job: str) -> str:
        return f"{self._prefix}{quote(job, safe='', errors='replace')}/"

    def _record_key(self, job: str) -> str:
        return f"{self._place(job)}hosts/{self._name}"

    def _exchange(self, now: int) -> None:
        with self._lock:
            jobs, ended = dict(self._jobs), self._ended
            self._ended = {}
        self._end(ended)
        if not jobs:
            if self._lease:
                lease, self._lease = self._lease, 0
                self._coordination.revoke(lease)
            return
        self._renew(jobs)
        for name, job in jobs.items():
            self._write(name, job, now)
            self._read(name, job, now)

    def _renew(self, jobs: dict[str, _Job]) -> None:
        try:
            if self._lease:
                self._coordination.renew(self._lease)
                return
        except LeaseEndedError:
            self._lease = 0
            with self._lock:  # another host may have the turn
                for job in jobs.values():
                    job.may_explore = False
        self._lease = self._coordination.grant(LEASE_SECONDS)
        for job in jobs.values():
            job.written = -1

    def _end(self, ended: dict[str, _Job]) -> None:
        for name, job in ended.items():
            job.election.resign()
            if job.written >= 0 and name not in self._jobs:
                try:
                    self._coordination.commit((KeyWrite(self._record_key(name), None),))
                except CoordinationError as error:  # other jobs may renew its lease
                    self._log.write(f"The record of {name}: {error}", type(error).__name__)
                    with self._lock:
                        self._ended.setdefault(name, job)

    def _write(self, name: str, job: _Job, now: int) -> None:
        """Write a newer record than the last, and take or leave the turn to explore."""
        record = job.record
        if record is None or record.sent <= job.written:
            if now - job.written > RECORD_LIFETIME:
                self._leave_turn(job)  # the tuner hangs
            return
        try:
            value = encode_record(record)
        except RefusedRecordError as error:
            self._log.write(f"{name} is not told to other hosts: {error}", name)
            self._leave_turn(job)
            return
        write = KeyWrite(self._record_key(name), value, self._lease)
        self._coordination.commit((write,))
        job.written = record.sent
        with self._lock:
            explores = job.explores
            job.may_explore = job.may_explore and explores  # before another host has the turn
        if explores:
            job.election.campaign(self._lease)
        else:
            job.election.resign()

    def _leave_turn(self, job: _Job) -> None:
        with self._lock:
            job.may_explore = False
        job.election.resign()

    def _read(self, name: str, job: _Job, now: int) -> None:
        place = self._place(name)
        entries = {entry.key: entry for entry in self._coordination.read(place).entries}
        explorer, hosts = entries.get(f"{place}explorer"), f"{place}hosts/"
        names = [key.removeprefix(hosts) for key in entries if key.startswith(hosts)]
        others = [one for one in names if one != self._name and len(one) <= _LONGEST_NAME]
        seen: dict[str, tuple[int, SeenRecord]] = {}
        for host in others[:MAX_HOSTS]:
            entry, before = entries[f"{hosts}{host}"], job.seen.get(host)
            if before is not None and before[0] == entry.revision:
                seen[host] = before
            else:
                seen[host] = entry.revision, _seen(host, entry, now)
        leads = job.election.fence is not None
        host = "" if explorer is None or leads else explorer.value.decode("utf-8", "replace")
        with self._lock:
            job.seen, job.explorer, job.may_explore = seen, host[:_LONGEST_NAME], leads


def _seen(host: str, entry: StoredKey, now: int) -> SeenRecord:
    try:
        return SeenRecord(host, now, decode_record(entry.value))
    except RefusedRecordError as error:
        return SeenRecord(host, now, None, str(error))
