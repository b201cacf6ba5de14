"""The tuner's thread: it looks at every job, lets one of them explore, and keeps the caps alive.

The capper gives the originals back when this thread stops renewing, so it renews only after a
turn in which every job was looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import (
    SECOND,
    CapKey,
    CapRow,
    Consumer,
    Decision,
    DecisionReason,
    Failure,
    Instant,
    Knob,
    Move,
    RecordedDecision,
    Snapshot,
    SourceHealth,
    Trouble,
    TuningAccounts,
)
from wattspan.ports import Caps, CapsError, CapTotals, Clock, EnergyQueries, ProcessDirectory
from wattspan.tuning import CertifiedLevels, Fingerprint, WorkloadKind
from wattspan.tuning.host_view import DeviceUsers, HostView, gpu_indices, refusal_reason
from wattspan.tuning.job import TuningJob
from wattspan.tuning.job_policy import JobPolicy, TuningPermissions
from wattspan.tuning.missing_jobs import MissingJobs
from wattspan.tuning.work_units import ReceivedSpanQueue, ReceivedSpans, UnitSearch, matching_job
from wattspan.util.rate_limited_log import RateLimitedLog

TUNER_INTERVAL = SECOND // 2
PROCESS_GONE_AFTER = 5 * SECOND
"""A job whose last process ended so long ago has ended: its last spans have come by then."""

_TRANSIENT_REFUSALS = frozenset({"", "ending"})
"""Refusals of a capper that is not there, or soon will be another one."""

TROUBLE_LOG_INTERVAL = 600 * SECOND
"""The same trouble with the capper is told no more often than this."""

HANG_TIMEOUT = 30 * SECOND
"""A turn takes milliseconds, and a second more where the capper does not answer."""

MAX_JOBS = 64
"""Jobs that are known at once; beyond, those that have ended go first, then nobody new comes."""

Log = Callable[[str], None]


class DecisionStore(Protocol):
    """Keeps decisions, each once."""

    def add(self, decided: RecordedDecision) -> object: ...


class CertifiedStore(Protocol):
    """Keeps what was certified, by fingerprint."""

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None: ...

    def certified(self, fingerprint: Fingerprint, remembered: CertifiedLevels) -> None: ...

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> None: ...


class Tuner:
    """``turn`` is one pass and can be called by a test; ``accounts`` may be called by anybody."""

    def __init__(
        self,
        clock: Clock,
        settings: AutotuneSettings,
        tap: ReceivedSpanQueue,
        *,
        past: EnergyQueries,
        tenants: DeviceUsers,
        view: Callable[[], Snapshot],
        directory: ProcessDirectory,
        caps: Caps | None,
        book: DecisionStore,
        memory: CertifiedStore,
        command: Callable[[Consumer], str] = lambda _: "",
        floor: int = 0,
        seed: int = 0,
        log: Log = lambda _: None,
    ) -> None:
        self._clock, self._settings, self._tap = clock, settings, tap
        self._past, self._tenants, self._view = past, tenants, view
        self._directory, self._caps = directory, caps
        self._search, self._book, self._memory = UnitSearch(settings.job), book, memory
        self._command, self._log = command, log
        self._terms = JobPolicy(settings, floor, seed)
        self._courses: dict[str, TuningJob] = {}
        self._alive: dict[TuningJob, int] = {}
        self._held: dict[str, dict[CapKey, int]] = {}
        self._rows: Mapping[CapKey, CapRow] = {}
        self._trouble: DecisionReason | None = None
        self._told_trouble = ""
        self._told_at: dict[str, int] = {}
        self._permitted = TuningPermissions(directory, settings.groups)
        self._awaited = MissingJobs(settings, clock.now(), log)
        self._turn_of: TuningJob | None = None
        self._told_unknown = self._told_full = False
        self._totals = CapTotals()
        self._accounts = TuningAccounts(settings.mode)
        self._failures = RateLimitedLog(clock.monotonic, log)
        self._turned: int | None = None
        self._pass_completed = False

    def accounts(self) -> TuningAccounts:
        """The newest state of everything. Safe from any thread."""
        return self._accounts

    # ------------------------------------------------------------------------------ the thread

    def run(self, stop: threading.Event) -> None:
        """Turn until ``stop``, then give everything back."""
        self._turned = self._clock.monotonic()
        while not stop.wait(TUNER_INTERVAL / 1e9):
            self._guarded(self.turn)
            self._turned = self._clock.monotonic()
        self._guarded(self.finish)

    def health(self) -> tuple[SourceHealth, ...]:
        """That the thread hangs or has ended, if so. Safe from any thread.

        Nothing is harmed by it: caps that nobody renews are given back. But nobody tunes.
        """
        if self._turned is None or self._clock.monotonic() - self._turned < HANG_TIMEOUT:
            return ()
        failure = Failure(
            "tuner",
            "the tuner",
            Trouble.STUCK,
            f"it has not turned for {HANG_TIMEOUT // SECOND} s; caps were given back meanwhile",
            "Restart the agent, and report what it logged.",
            verb="use",
        )
        return (SourceHealth("tuner", False, 0, 1, (failure,)),)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - not renewing gives the originals back
            self._failures.failure("A turn of the tuner", error)

    def turn(self) -> None:
        """One pass over every job."""
        now = self._clock.now()
        self._listen(now)
        sight = self._look(now)
        self._see_who_lives(now)
        self._pass_the_turn()
        for course in self._courses.values():
            self._tune(course, sight)
        self._pass_completed = True
        self._show()

    def finish(self) -> None:
        """Give back what is held; nothing is decided any more."""
        for course in self._courses.values():
            self._keep_in_mind(course)
        self._held.clear()
        if self._caps is not None:
            try:
                self._caps.release()
            except CapsError as error:
                self._log(f"Caps are given back when their lease lapses: {error}")
            finally:
                self._caps.close()
        self._show()

    # --------------------------------------------------------------------------- what is heard

    def _listen(self, now: Instant) -> None:
        for handed in self._tap.drain():
            try:
                self._hear(handed, now)
            except Exception as error:  # noqa: BLE001 - one sender's fault is not every job's
                self._failures.failure(f"Hearing spans of {handed.service}", error)

    def _hear(self, handed: ReceivedSpans, now: Instant) -> None:
        self._awaited.hear(handed)
        self._search.look(handed, now.mono)
        for span, kind in self._search.of(handed.service):
            self._meet(handed.service, span, kind, now)
        for course in self._courses.values():
            if course.service == handed.service:
                course.take(handed, now.mono)
                if course.heard:
                    self._alive[course] = now.mono

    def _meet(self, service: str, span: str, kind: WorkloadKind, now: Instant) -> None:
        name = f"{service}/{span}"
        course = self._courses.get(name)
        if course is not None and not course.ended:
            return
        job = matching_job(self._settings.job, service, span)
        if course is None and not self._room(name):
            return
        found = TuningJob(
            name,
            service,
            span,
            job or TunedJobSettings(service=service, span=span),
            self._terms,
            kind=kind,
            found=job is None,
            now=now,
            earned=course.earned if course is not None else None,
        )
        if course is not None:
            self._alive.pop(course, None)
        self._courses[name], self._alive[found] = found, now.mono

    def _room(self, name: str) -> bool:
        """Whether one more job may be known, if need be in place of one that has ended."""
        if len(self._courses) < MAX_JOBS:
            return True
        ended = next((name for name, one in self._courses.items() if one.ended), None)
        if ended is not None:
            self._alive.pop(self._courses.pop(ended), None)
        elif not self._told_full:
            self._told_full = True
            self._log(
                f"{name} is not tuned, nor any job after it: {MAX_JOBS} jobs are known "
                "already, and none of them has ended. Name those that matter as [[autotune.job]]."
            )
        return ended is not None

    def _see_who_lives(self, now: Instant) -> None:
        for course in self._courses.values():
            alive = [one for one in course.ranks if self._directory.identify(one.pid) == one]
            if len(alive) < len(course.ranks):
                course.keep_only(alive)
            if alive:
                self._alive[course] = now.mono
            if (
                not course.ended
                and now.mono - self._alive.get(course, now.mono) > PROCESS_GONE_AFTER
            ):
                course.ended = True
                self._keep_in_mind(course)

    # -------------------------------------------------------------------------- what is decided

    def _look(self, now: Instant) -> HostView:
        self._ask_capper()
        snapshot = self._view()
        domains = self._past.domains()
        sight = HostView(
            now,
            snapshot,
            domains,
            self._past.settled(),
            self._rows,
            self._trouble,
            gpu_indices(domains, snapshot.gpus),
        )
        if sight.index and not self._told_unknown:
            self._told_unknown = True
            unknown = sight.unknown(self._settings.gpus)
            if unknown:
                self._log(
                    f"[autotune] gpus names {', '.join(unknown)}, which this host does not have; "
                    f"it has {', '.join(map(sight.called, sight.index))}."
                )
        return sight

    def _pass_the_turn(self) -> None:
        """One explorer a host: whoever has the turn keeps it until it needs it no more."""
        if self._turn_of is not None and self._turn_of.exploring and not self._turn_of.ended:
            return
        courses = list(self._courses.values())
        at = courses.index(self._turn_of) + 1 if self._turn_of in courses else 0
        waiting = [one for one in courses[at:] + courses[:at] if one.exploring]
        self._turn_of = waiting[0] if waiting else None

    def _tune(self, course: TuningJob, sight: HostView) -> None:
        before = course.decision.same_as
        held = self._held.get(course.name, {})
        try:
            course.turn(
                sight,
                self._past,
                self._tenants,
                may_explore=self._turn_of in (None, course),
                remembered=self._recall,
                barred=self._permitted.refusal(course.name, course.ranks),
            )
        except Exception as error:  # noqa: BLE001 - one job's fault is not every job's
            self._failures.failure(f"Tuning {course.name}", error)
            course.failed(
                DecisionReason.CHANGED, f"Tuning {course.name} failed; see the log.", sight.now
            )
        self._carry_out(course, held, sight.now)
        decision = course.decision
        if decision.same_as != before:
            self._book.add(
                RecordedDecision(sight.now, course.name, course.decided, decision, course.applied)
            )
            if decision.reason is DecisionReason.CERTIFIED:
                self._keep_in_mind(course)
            if decision.move is Move.RELEASE and course.fingerprint is not None:
                self._forgive_or_forget(course, decision)

    def _carry_out(self, course: TuningJob, held: Mapping[CapKey, int], now: Instant) -> None:
        """Have the capper hold what was decided, or give back what was held."""
        caps, wanted = self._caps, course.caps()
        if caps is None or (not wanted and not held):
            return
        try:
            if not wanted:
                del self._held[course.name]
                caps.release(course.name)
            elif wanted != held or not self._stands(wanted):
                self._held[course.name] = wanted
                self._know(caps.hold(course.name, wanted, course.decision.sentence))
        except CapsError as error:
            # The lease ends what could not be given back.
            self._held.pop(course.name, None)
            # Whoever does not answer is looked for anyway; whoever refuses will do so again.
            course.failed(
                refusal_reason(error.refusal),
                str(error),
                now,
                rest=error.refusal not in _TRANSIENT_REFUSALS,
            )

    def _stands(self, wanted: Mapping[CapKey, int]) -> bool:
        """Whether the largest step has let every cap arrive."""
        for key, value in wanted.items():
            row = self._rows.get(key)
            if row is None or row.wanted is None or row.wanted > value:
                return False
            most = value if row.ceiling is None else min(value, row.ceiling)
            # A register rounds down, never up.
            if row.state.requested is not None and row.state.requested > most:
                return False
        return True

    # ---------------------------------------------------------------------------- the capper

    def _ask_capper(self) -> None:
        if self._caps is None:
            return
        try:
            # A turn that fails on its way renews nothing, so that its caps lapse.
            renew, self._pass_completed = self._pass_completed and bool(self._held), False
            self._know(self._caps.rows(renew=renew))
        except CapsError as error:
            self._rows, self._trouble = {}, refusal_reason(error.refusal)
            self._tell_trouble(str(error))
        else:
            self._trouble, self._told_trouble = None, ""

    def _tell_trouble(self, sentence: str) -> None:
        """Each once, and one that comes and goes not all the time."""
        now = self._clock.monotonic()
        told = (
            self._told_at.get(sentence, now - TROUBLE_LOG_INTERVAL)
            if sentence != self._told_trouble
            else now
        )
        if now - told >= TROUBLE_LOG_INTERVAL:
            self._told_at = {
                one: at for one, at in self._told_at.items() if now - at < TROUBLE_LOG_INTERVAL
            }
            self._told_at[sentence] = now
            self._log(f"Only advice is given meanwhile. {sentence}")
        self._told_trouble = sentence

    def _know(self, rows: Sequence[CapRow]) -> None:
        self._rows = {row.state.key: row for row in rows}
        if self._caps is not None:
            self._totals = self._caps.totals

    # ---------------------------------------------------------------------------- the memory

    def _recall(self, course: TuningJob) -> CertifiedLevels | None:
        if course.fingerprint is None:
            gpus = [one for one in self._view().gpus if one.domain_id in course.devices]
            leader = next(iter(course.ranks), None)
            course.identify(
                Fingerprint(
                    command=self._command(leader) if leader is not None else "",
                    model=gpus[0].model if gpus else "",
                    driver=gpus[0].driver if gpus else "",
                    devices=len(course.devices),
                )
            )
        assert course.fingerprint is not None  # noqa: S101 - identified above
        return self._memory.recall(course.fingerprint, course.knob)

    def _keep_in_mind(self, course: TuningJob) -> None:
        remembered = course.remember()
        if remembered is not None and course.fingerprint is not None:
            self._memory.certified(course.fingerprint, remembered)

    def _forgive_or_forget(self, course: TuningJob, decision: Decision) -> None:
        """What broke the budget is not begun with again."""
        if course.fingerprint is not None and decision.reason in {
            DecisionReason.OVER_BUDGET,
            DecisionReason.TAIL,
        }:
            self._memory.failed(course.fingerprint, course.knob)

    def _show(self) -> None:
        capper = None if self._caps is None else self._trouble is None
        courses = self._courses.values()
        known = [(one.service, one.span) for one in courses]
        awaited = self._awaited.rows(known, self._clock.now())
        self._accounts = TuningAccounts(
            mode=self._settings.mode,
            rows=(*(one.row() for one in courses), *awaited),
            caps=tuple(self._rows.values()),
            capper=capper,
            capper_trouble=self._told_trouble,
            writes=self._totals.writes,
            restores=self._totals.restores,
            ceiling=self._totals.ceiling,
        )
