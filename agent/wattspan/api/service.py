"""The handler of the query API: energy, watches, snapshot, status and tuning.

Names of jobs and decision sentences are available to every user who may open the socket, as the
energy of devices is: they describe the host's power limits, not the computations of a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, Protocol

from wattspan.api import energy
from wattspan.api.authorization import Authorization, OwnerOf, may_read_counters, owner_of
from wattspan.api.energy import TimeGrid
from wattspan.api.requests import (
    EnergyQuery,
    ProblemError,
    ProcessReference,
    bad_request,
    energy_query,
    json_response,
    no_parameters,
    reject_unknown,
    sanitized,
    suggestion,
    time_parameter,
    watch_query,
)
from wattspan.api.snapshot import SNAPSHOT_PATH, restrict, snapshot_document
from wattspan.api.watches import ProcessCpuSampler, WatchList
from wattspan.http.connection_limiter import FairQuota
from wattspan.http.limits import FairLock
from wattspan.http.messages import Handler, HttpRequest, HttpResponse, Peer
from wattspan.model import (
    MILLISECOND,
    Consumer,
    Instant,
    Provenance,
    RecordedDecision,
    TuningAccounts,
)
from wattspan.ports import Clock, EnergyQueries, ProcessDirectory, SnapshotView
from wattspan.tuning.serialization import JsonObject, accounts_to_json, recorded_decision_to_json

TuningView = Callable[[], TuningAccounts]
"""Returns the newest accounts, without side effects."""

MAX_DECISIONS = 10_000
DEFAULT_DECISIONS = 100


class DecisionHistoryView(Protocol):
    """Returns decisions, oldest first; see ``wattspan.storage.tuning.DecisionLog.recent``."""

    def __call__(
        self, job: str = "", limit: int = DEFAULT_DECISIONS, since: int | None = None
    ) -> Sequence[RecordedDecision]: ...


class DecisionHistoryQuery(NamedTuple):
    """Query of decisions: job ("" for all), maximum number, start time (Unix nanoseconds)."""

    job: str
    limit: int
    since: int | None


def decision_history_query(query: Mapping[str, str], now: Instant) -> DecisionHistoryQuery:
    """The parsed ``query``. ProblemError names its first error."""
    reject_unknown(query, ("job", "limit", "since"))
    since = None
    if "since" in query:
        since = now.wall - (now.mono - time_parameter("since", query["since"], now))
    return DecisionHistoryQuery(
        query.get("job", ""), _limit(query.get("limit", str(DEFAULT_DECISIONS))), since
    )


def tuning_response(view: TuningView | None) -> JsonObject:
    """The state of every job; without a tuner the mode is ``off`` and there are no jobs."""
    return accounts_to_json(TuningAccounts() if view is None else view())


def decision_history_response(
    view: DecisionHistoryView | None, question: DecisionHistoryQuery
) -> JsonObject:
    """The requested decisions, oldest first."""
    told = () if view is None else view(question.job, question.limit, question.since)
    return {"decisions": [recorded_decision_to_json(decided) for decided in told]}


def _limit(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 9 and 0 < int(text) <= MAX_DECISIONS:
        return int(text)
    raise bad_request(
        f"limit={sanitized(text)}",
        f"that is no whole number from 1 to {MAX_DECISIONS}",
        "Write one.",
    )


SETTLE_POLL_INTERVAL = 20 * MILLISECOND
"""Interval between checks whether a window has settled."""

MAX_WAITING = 64
"""Queries that may wait for settlement at a time, half of them of one user at most.

The next are answered at once, so that none crowds out spans.
"""

_READ = ("GET", "HEAD")


class QueryService:
    """Handler of ``/v1/energy``, ``watch``, ``snapshot``, ``status`` and ``tuning``.

    ``resolution`` is how finely users are told of devices whose counters they may not read.
    ``tuning`` and ``history`` are None where nothing tunes; ``history`` may take a while.
    """

    def __init__(
        self,
        past: EnergyQueries,
        directory: ProcessDirectory,
        clock: Clock,
        *,
        view: SnapshotView,
        host: str,
        version: str,
        resolution: int = 0,
        fine: ProcessCpuSampler | None = None,
        tuning: TuningView | None = None,
        history: DecisionHistoryView | None = None,
        owner: OwnerOf = owner_of,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._past, self._directory, self._clock = past, directory, clock
        self._view, self._host, self._version = view, host, version
        self._tuning_view, self._history_view = tuning, history
        self._authorization, self._grid = Authorization(owner), TimeGrid(resolution)
        self._watches = WatchList(past, directory, clock, fine)
        self._sleep = sleep
        self._started = clock.monotonic()
        self._waiting = FairQuota(MAX_WAITING)
        self._slow_lock = FairLock()
        self._paths: Mapping[str, tuple[tuple[str, ...], Handler]] = {
            "/v1/energy": (_READ, self._energy),
            "/v1/watch": ((*_READ, "POST"), self._watch),
            SNAPSHOT_PATH: (_READ, self._snapshot),
            "/v1/status": (_READ, self._status),
            "/v1/tuning": (_READ, self._tuning),
            "/v1/tuning/history": (_READ, self._history),
        }

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._handler(request)(request)
        except ProblemError as problem:
            return problem.response()

    def _handler(self, request: HttpRequest) -> Handler:
        methods, handler = self._paths.get(request.path, ((), None))
        if handler is None:
            raise ProblemError(
                HTTPStatus.NOT_FOUND,
                request.path[:100],
                "there is no such path",
                suggestion(request.path[:100], self._paths),
            )
        if request.method not in methods:
            raise ProblemError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{request.method} {request.path}",
                "that cannot be done with it",
                f"Use {methods[0]}.",
                {"allow": ", ".join(methods)},
            )
        return handler

    async def _energy(self, request: HttpRequest) -> HttpResponse:
        question = energy_query(request.query, self._clock.now())
        consumer = self._consumer(question.subject, request.peer)
        grid = energy.UNQUANTIZED if may_read_counters(request.peer) else self._grid
        await self._settle(question, consumer, grid, request.peer.quota_owner)
        facts = await self._energy_response(question, consumer, grid, request.peer.quota_owner)
        return json_response({"host_name": self._host, **facts})

    async def _energy_response(
        self, question: EnergyQuery, consumer: Consumer | None, grid: TimeGrid, whose: Hashable
    ) -> energy.JsonObject:
        tell = partial(
            energy.energy_response,
            self._past,
            question.start,
            question.end,
            consumer,
            family=question.family,
            grid=grid,
        )
        if consumer is None or consumer in self._watches:
            return tell()
        # A search of the whole history: in a worker thread, because spans arrive on this loop.
        async with self._slow_lock.of(whose):
            return await asyncio.to_thread(tell)

    async def _watch(self, request: HttpRequest) -> HttpResponse:
        subject, family = watch_query(request.query)
        consumer = self._consumer(subject, request.peer)
        assert consumer is not None  # noqa: S101 - the query names a process
        self._watches.add(consumer, family=family, owner=request.peer.quota_owner)
        return json_response({"pid": consumer.pid, "started": consumer.started, "watched": True})

    async def _snapshot(self, request: HttpRequest) -> HttpResponse:
        no_parameters(request.query)
        async with self._slow_lock.of(
            request.peer.quota_owner
        ):  # large, and it may look into /proc
            return await asyncio.to_thread(self._snapshot_for, request.peer)

    def _snapshot_for(self, peer: Peer) -> HttpResponse:
        document = snapshot_document(self._view(), self._version)
        if not may_read_counters(peer):
            coarse = self._grid.latest_powers(self._past)
            document = restrict(document, partial(self._authorization.permits, peer), coarse)
        return json_response(document)

    async def _status(self, request: HttpRequest) -> HttpResponse:
        no_parameters(request.query)
        now, settled = self._clock.monotonic(), self._past.settled()
        domains = energy.sorted_domains(self._past.domains().values())
        provenance = energy.provenances(domains)
        return json_response(
            {
                "host_name": self._host,
                "version": self._version,
                "uptime_seconds": (now - self._started) / 1e9,
                "now_mono_ns": now,
                "settled_mono_ns": settled,
                "emulated": Provenance.EMULATED in provenance.values(),
                "provenance": provenance,
                "devices": [
                    {
                        "hw_id": domain.id,
                        "hw_type": domain.hw_type,
                        "hw_name": domain.name,
                        "source": domain.source,
                        "provenance": domain.provenance,
                        "method": domain.method,
                    }
                    for domain in domains
                ],
            }
        )

    async def _tuning(self, request: HttpRequest) -> HttpResponse:
        no_parameters(request.query)
        return json_response(
            {
                "host_name": self._host,
                "now_mono_ns": self._clock.monotonic(),
                "emulated": self._emulated(),
                **tuning_response(self._tuning_view),
            }
        )

    async def _history(self, request: HttpRequest) -> HttpResponse:
        question = decision_history_query(request.query, self._clock.now())
        async with self._slow_lock.of(request.peer.quota_owner):  # it reads files
            told = await asyncio.to_thread(decision_history_response, self._history_view, question)
        return json_response({"host_name": self._host, "emulated": self._emulated(), **told})

    def _emulated(self) -> bool:
        provenance = energy.provenances(self._past.domains().values())
        return Provenance.EMULATED in provenance.values()

    async def _settle(
        self, question: EnergyQuery, consumer: Consumer | None, grid: TimeGrid, whose: Hashable
    ) -> None:
        """Wait until the whole window is settled, at most as long as the query permits."""
        if not self._waiting.acquire(whose):
            return
        try:
            deadline = self._clock.monotonic() + question.wait
            while not self._settled(question.end, consumer, grid):
                if self._clock.monotonic() >= deadline:
                    return
                await self._sleep(SETTLE_POLL_INTERVAL / 1e9)
        finally:
            self._waiting.release(whose)

    def _settled(self, end: int, consumer: Consumer | None, grid: TimeGrid) -> bool:
        if self._past.settled(consumer) < end:
            return False
        hidden = any(map(grid.hides, self._past.domains().values()))
        return not hidden or self._past.settled() >= grid.up(end)

    def _consumer(self, subject: ProcessReference | None, peer: Peer) -> Consumer | None:
        """The process in the query, if ``peer`` may see it. ProblemError."""
        if subject is None:
            return None
        pid = subject.pid
        if pid is None:
            pid = peer.pid
            if not pid:
                raise bad_request(
                    "pid=self",
                    "the kernel does not say who asks",
                    "Ask on the agent's Unix socket, or write the process id.",
                )
        named = ProcessReference(pid, subject.started).consumer or self._directory.identify(pid)
        if named is None:
            raise ProblemError(
                HTTPStatus.NOT_FOUND,
                f"process {pid}",
                "there is none now",
                "Of a process that has ended, give its start time too: started=TICKS.",
            )
        self._authorization.require(peer, named)
        return named
