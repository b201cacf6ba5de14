"""The tuner's thread: decides for every job, lets one job explore at a time, and renews leases.

The capper restores the original limits when this thread stops renewing the lease. It therefore
renews only after a pass over all jobs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.config.tuning_settings import matching_job
from wattspan.model import (
    SECOND,
    CapKey,
    CapperFigures,
    CapRow,
    DecisionReason,
    Failure,
    Instant,
    RecordedDecision,
    SourceHealth,
    Trouble,
    TuningAccounts,
)
from wattspan.ports import Caps, CapsError, CapTotals, Clock, ProcessDirectory
from wattspan.sharing.fair_pool import FairPool, share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.tuning.decisions.engine_load import EnginePageRead
from wattspan.tuning.decisions.values import WorkloadKind
from wattspan.tuning.declared_jobs import DeclaredJob, MissingJobs
from wattspan.tuning.engine_pages import SEVERAL_OWNERS
from wattspan.tuning.host_view import HostView, refusal_reason
from wattspan.tuning.job import TuningJob
from wattspan.tuning.job_context import Strategy, TuningContext
from wattspan.tuning.permissions import JobOwner, JobTerms, TuningPermissions
from wattspan.tuning.strategies import SearchStrategy, TrackingStrategy, share_devices
from wattspan.tuning.work_units import ReceivedSpanQueue, ReceivedSpans, UnitSearch
from wattspan.util.throttle import RateLimitedLog

TUNER_INTERVAL = SECOND // 2

_TRANSIENT_REFUSALS = frozenset({"", "ending"})
"""Refusals of a capper that does not run, or will soon be replaced."""

TROUBLE_LOG_INTERVAL = 600 * SECOND
"""Minimum time between two log lines of the same trouble with the capper."""

HANG_TIMEOUT = 30 * SECOND
"""A pass takes milliseconds, and a second more if the capper does not answer."""

Log = Callable[[str], None]


class Tuner:
    """``run`` is the thread, ``step`` one pass; ``accounts`` and ``health`` are for any thread."""

    def __init__(
        self,
        clock: Clock,
        settings: AutotuneSettings,
        spans: ReceivedSpanQueue,
        context: TuningContext,
        *,
        host: Callable[[], HostView],
        directory: ProcessDirectory,
        caps: Caps | None,
        record: Callable[[RecordedDecision], object],
        declared: Callable[[], Sequence[DeclaredJob]] = tuple,
        pages: Callable[[], Sequence[EnginePageRead]] = tuple,
        pools: Pools | None = None,
        log: Log = lambda _: None,
    ) -> None:
        """``host`` returns the view without rows of the capper, ``record`` stores a decision.

        ``pages`` returns the newest page of each engine that a job names.
        """
        self._clock, self._settings, self._spans = clock, settings, spans
        self._context, self._host, self._declared = context, host, declared
        self._directory, self._caps = directory, caps
        self._record, self._log, self._pages = record, log, pages
        self._pages_read: dict[str, int] = {}  # the time of the last page of an engine
        self._declarations: dict[tuple[JobOwner, str, str], DeclaredJob] = {}
        pools = pools or Pools()
        self._places = pools.make(PoolName.TUNED_JOBS)
        self._searching: FairPool[JobOwner] = pools.make(PoolName.JOB_SEARCHES)
        self._searches: dict[JobOwner, UnitSearch] = {}
        self._permissions = TuningPermissions(directory, settings.groups)
        self._missing = MissingJobs(settings, clock.now(), log)
        self._jobs: dict[str, TuningJob] = {}
        self._held: dict[str, Mapping[CapKey, int]] = {}  # by the capper, by the job's name
        self._explorer: TuningJob | None = None
        self._rows: Mapping[CapKey, CapRow] = {}
        self._trouble: DecisionReason | None = None
        self._trouble_text = ""
        self._trouble_log = RateLimitedLog(clock.monotonic, log, TROUBLE_LOG_INTERVAL)
        self._failures = RateLimitedLog(clock.monotonic, log)
        self._logged_full = False
        self._accounts = TuningAccounts(settings.mode)
        self._completed_at: int | None = None
        self._pass_completed = False

    def accounts(self) -> TuningAccounts:
        return self._accounts

    # ------------------------------------------------------------------------------ the thread

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set, then restore every cap."""
        self._completed_at = self._clock.monotonic()
        while not stop.wait(TUNER_INTERVAL / 1e9):
            self._guarded(self.step)
            self._completed_at = self._clock.monotonic()
        self._guarded(self.finish)

    def health(self) -> tuple[SourceHealth, ...]:
        """A failure if the thread hangs or has ended; its caps are restored then."""
        now = self._clock.monotonic()
        if self._completed_at is None or now - self._completed_at < HANG_TIMEOUT:
            return ()
        failure = Failure(
            "tuner",
            "the tuner",
            Trouble.STUCK,
            f"its thread has not completed a pass for {HANG_TIMEOUT // SECOND} s; the capper has "
            "restored its caps",
            "Restart the agent, and report its log messages.",
            verb="use",
        )
        return (SourceHealth("tuner", False, 0, 1, (failure,)),)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - caps expire if the lease is not renewed
            self._failures.failure("A pass of the tuner", error)

    def step(self) -> None:
        """One pass over every job."""
        now = self._clock.now()
        declared = self._declared()
        self._declarations = {(one.owner, one.service, one.span): one for one in declared}
        received_spans = self._spans.drain()
        # After the spans: every announcement of these spans is in the queue.
        for announced in self._spans.drain_announced():
            owner = self._context.owner_of(announced.consumer)
            for job in self._jobs.values():
                if job.owner == owner:
                    job.work.in_flight.add(announced.consumer, announced.records, now.mono)
        for received in received_spans:
            try:
                self._add_spans(received, now)
            except Exception as error:  # noqa: BLE001 - one sender must not affect other jobs
                self._failures.failure(f"Reading spans of {received.service}", error)
        for page in self._pages():
            try:
                self._add_page(page, now)
            except Exception as error:  # noqa: BLE001 - likewise
                self._failures.failure(f"Reading the page of {page.engine}", error)
        self._read_capper()
        host = replace(self._host(), now=now, rows=self._rows, trouble=self._trouble)
        for job in self._jobs.values():
            job.update_living(self._directory, now.mono)
            # The terms of a job whose processes have ended stay, so that its setting is stored.
            if job.ranks and not job.ended:
                job.use(self._terms(job.owner, job.service, job.span))
        self._share_devices(host)
        self._choose_explorer()
        for job in self._jobs.values():
            self._step_job(job, host)
        self._pass_completed = True
        self._update_accounts()

    def finish(self) -> None:
        """Restore every original limit, and store certified settings and evidence."""
        for job in self._jobs.values():
            job.strategy.store(None)
        self._held = {}
        if self._caps is not None:
            try:
                self._caps.release()
            except CapsError as error:
                self._log(f"The capper restores the limits when their lease expires: {error}")
            finally:
                self._caps.close()
        self._update_accounts()

    # --------------------------------------------------------------------------------- jobs

    def _search(self, owner: JobOwner) -> UnitSearch:
        """The search for units of work in the spans of one owner."""
        admission = self._searching.admit(owner, share_path(owner.principal))
        for displaced in admission.displaced:
            del self._searches[displaced]
        search = self._searches.get(owner) or UnitSearch()
        if admission:
            self._searches[owner] = search
        return search

    def _terms(self, owner: JobOwner, service: str, span: str) -> JobTerms:
        declared = self._declarations.get((owner, service, span))
        if declared is not None:
            return declared.terms
        named = matching_job(self._settings.job, service, span)
        job = named or TunedJobSettings(service=service, span=span)
        return JobTerms(self._settings, job, chosen=named is not None)

    def _add_spans(self, received: ReceivedSpans, now: Instant) -> None:
        """Add spans to the jobs of their process's owner; without an owner they steer nothing."""
        self._missing.add(received)
        owner = self._context.owner_of(received.consumer)
        if owner is None:
            return
        search = self._search(owner)
        declared = (one.terms.job for one in self._declarations.values() if one.owner == owner)
        search.add(received, (*declared, *self._settings.job), now.mono)
        for span, kind in search.of(received.service):
            self._add_job(received.service, span, kind, owner, now)
        for job in self._jobs.values():
            if (job.service, job.owner) == (received.service, owner) and not job.ended:
                job.work.add(received, now.mono)

    def _add_page(self, page: EnginePageRead, now: Instant) -> None:
        """Add a new page to the job that names its engine; the first one adds the job.

        The job has the owner of the process that answers, or else the only owner of all, and only
        this owner's processes.
        """
        if page.at <= self._pages_read.get(page.engine, 0):
            return
        self._pages_read[page.engine] = page.at
        named = next((one for one in self._settings.job if one.engine == page.engine), None)
        if named is None:
            return
        owners = {one: self._context.owner_of(one) for one in page.processes}
        listeners = owners.values() if page.listener is None else [owners[page.listener]]
        possible = {one for one in listeners if one is not None}
        declined = self._missing.declined[page.engine] = SEVERAL_OWNERS * (len(possible) > 1)
        service, span = named.unit
        if len(possible) == 1:
            self._add_job(service, span, WorkloadKind.REQUESTS, next(iter(possible)), now)
        own = tuple(one for one, owner in owners.items() if owner in possible)
        for job in self._jobs.values():
            if (job.service, job.span) != (service, span) or job.ended:
                continue
            if declined and job.work.engine is not None:
                job.work.engine.decline(declined)
            elif job.owner in possible:
                job.work.add_page(page._replace(processes=own), now.mono)

    def _add_job(
        self, service: str, span: str, kind: WorkloadKind, owner: JobOwner, now: Instant
    ) -> None:
        """Add a job, or replace it if it has ended."""
        if any(
            (one.service, one.span, one.owner) == (service, span, owner) and not one.ended
            for one in self._jobs.values()
        ):
            return
        name = self._free_name(service, span, owner)
        previous = self._jobs.get(name)
        if not self._has_room(name, owner):
            return
        terms = self._terms(owner, service, span)
        strategy, turns = _strategy(terms.job), None
        if strategy is SearchStrategy and terms.job.hosts > 1:
            from wattspan.tuning.host_turns import HostTurns

            turns = HostTurns(name, terms.job.hosts, self._context.records)
        self._jobs[name] = TuningJob(
            name,
            service,
            span,
            terms,
            self._context,
            strategy,
            kind=kind,
            now=now,
            owner=owner,
            turns=turns,
            savings=previous.savings if previous is not None else None,
        )

    def _free_name(self, service: str, span: str, owner: JobOwner) -> str:
        """The name of a new job, with its owner if another job has the name.

        With a number, too, if another owner has named a span like that.
        """
        name = f"{service}/{span}" if span else service
        owned, numbers = f"{name}@{owner.label}", range(2, len(self._jobs) + 2)
        names = name, owned, *(f"{owned}#{number}" for number in numbers)
        return next(one for one in names if one not in self._jobs or self._jobs[one].ended)

    def _has_room(self, name: str, owner: JobOwner) -> bool:
        """Take a place for a job; the ended jobs that it replaces or that must go lose theirs."""
        ended = [known for known, job in self._jobs.items() if job.ended]
        path = share_path(owner.principal)
        own = [known for known in ended if self._jobs[known].owner == owner]
        if name in self._jobs:
            self._remove(name)
        for known in (*own, *ended):
            if self._places.permits(path):
                break
            if known in self._jobs:
                self._remove(known)
        if self._places.acquire(path):
            return True
        if not self._logged_full:
            self._logged_full = True
            self._log(
                f"{name} and further jobs are not tuned: {len(self._jobs)} jobs are known, of "
                f"{self._places.limit}, which all users share, and none of them has ended. Name "
                "the important ones as [[autotune.job]]."
            )
        return False

    def _remove(self, name: str) -> None:
        """Remove an ended job, and free its place."""
        self._held.pop(name, None)
        self._places.release(share_path(self._jobs.pop(name).owner.principal))

    def _share_devices(self, host: HostView) -> None:
        """Let jobs that share their GPUs be tuned by one search."""
        may: list[TuningJob] = []
        for job in self._jobs.values():
            if not job.shares_devices:
                continue
            refusal = self._permissions.refusal(job.name, job.ranks)
            if job.may_share(refusal, host.now.mono):
                may.append(job)
            else:
                job.share(None, ())
        share_devices(may, host)

    def _choose_explorer(self) -> None:
        """One job explores at a time, until it has finished or another one has a higher claim."""
        explorer, jobs = self._explorer, list(self._jobs.values())
        start = jobs.index(explorer) if explorer in jobs else 0
        first = max(jobs[start:] + jobs[:start], key=lambda one: one.claim, default=None)
        self._explorer = first if first is not None and first.claim else None

    # ---------------------------------------------------------------------------- decisions

    def _step_job(self, job: TuningJob, host: HostView) -> None:
        before = job.decision.same_as
        try:
            job.decide(
                host,
                may_explore=self._explorer in (None, job),
                refusal=self._permissions.refusal(job.name, job.ranks),
            )
        except Exception as error:  # noqa: BLE001 - one job must not affect the others
            self._failures.failure(f"Tuning {job.name}", error)
            job.fail(DecisionReason.CHANGED, f"Tuning {job.name} failed; see the log.", host.now)
        self._apply(job, host.now)
        decision = job.decision
        if decision.same_as == before:
            return
        self._record(RecordedDecision(host.now, job.name, job.decided_knob, decision, job.applied))
        job.strategy.store(decision)  # it has been applied

    def _apply(self, job: TuningJob, now: Instant) -> None:
        """Let the capper hold the job's caps, or restore the limits."""
        caps, wanted, held = self._caps, job.caps, self._held.get(job.name, {})
        if caps is None or (not wanted and not held):
            return
        try:
            if not wanted:
                self._held.pop(job.name)
                caps.release(job.name)
            elif wanted != held or not self._is_reached(wanted):
                self._held[job.name] = wanted
                self._rows = _by_key(caps.hold(job.name, wanted, job.decision.sentence))
        except CapsError as error:
            # The end of the lease restores the other limits.
            self._held.pop(job.name, None)
            # A capper that does not answer is retried anyway; one that refuses will do so again.
            back_off = error.refusal not in _TRANSIENT_REFUSALS
            job.fail(refusal_reason(error.refusal), str(error), now, back_off=back_off)

    def _is_reached(self, wanted: Mapping[CapKey, int]) -> bool:
        """True if every cap is in force; the capper limits the size of one step."""
        rows = self._rows
        return all(key in rows and rows[key].reaches(value) for key, value in wanted.items())

    # ------------------------------------------------------------------------------- capper

    def _read_capper(self) -> None:
        """Read every knob, and renew the lease if the last pass was completed."""
        if self._caps is None:
            return
        try:
            # A pass that fails renews nothing, so that its caps expire.
            renew = self._pass_completed and bool(self._held)
            self._pass_completed = False
            self._rows = _by_key(self._caps.rows(renew=renew))
        except CapsError as error:
            self._rows, self._trouble = {}, refusal_reason(error.refusal)
            if str(error) != self._trouble_text:
                self._trouble_text = str(error)
                self._trouble_log.write(
                    f"The tuner only advises until the capper answers. {error}", key=str(error)
                )
        else:
            self._trouble, self._trouble_text = None, ""

    def _update_accounts(self) -> None:
        jobs = self._jobs.values()
        totals = self._caps.totals if self._caps is not None else CapTotals()
        rows = [one.row() for one in jobs]
        missing = self._missing.rows(rows, self._declarations.values(), self._clock.now())
        self._accounts = TuningAccounts(
            mode=self._settings.mode,
            rows=(*rows, *missing),
            caps=tuple(self._rows.values()),
            capper=CapperFigures(
                None if self._caps is None else self._trouble is None,
                self._trouble_text,
                totals.shared,
                totals.writes,
                totals.restores,
                totals.resets,
            ),
            ceiling=totals.ceiling,
        )


def _strategy(job: TunedJobSettings) -> Callable[[TuningJob], Strategy]:
    """The strategy of a job by its settings; that of pipelines is loaded if there are any."""
    if job.pipeline:
        from wattspan.tuning.pipeline_strategy import PipelineStrategy

        return PipelineStrategy
    return TrackingStrategy if job.tracked else SearchStrategy


def _by_key(rows: Sequence[CapRow]) -> dict[CapKey, CapRow]:
    return {row.state.key: row for row in rows}
