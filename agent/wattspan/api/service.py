"""The handler of the query API: energy, watches, snapshot, status, tuning and declared jobs.

Names of jobs and decision sentences are available to every user who may open the socket, as the
energy of devices is: they describe the host's power limits, not the computations of a process.

The capper's socket and the store belong to root and the agent's group. ``/v1/caps`` and
``/v1/report`` give every user who may open ``api.sock`` the parts that are for every user: the
limits with their holders, as ``/v1/tuning`` does, and past energy of the host and of the user's own
processes. :mod:`wattspan.api.authorization` says who may see which energy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import msgspec

from wattspan.api import energy
from wattspan.api.authorization import Authorization, problem_for, shown_user
from wattspan.api.energy import TimeGrid
from wattspan.api.estimates import (
    ADVICE_PARAMETERS,
    ADVICE_PATH,
    INFERENCE_PARAMETERS,
    INFERENCE_PATH,
    AdviceFacts,
    EstimateRequest,
    advice_response,
    estimate_response,
)
from wattspan.api.jobs import JOBS_PATH, JobsHandler
from wattspan.api.requests import (
    CAPS_PATH,
    PROCESS_PARAMETERS,
    RECURRING_PATH,
    REPORT_PARAMETERS,
    REPORT_PATH,
    SENDER,
    TIME_FORMATS,
    WAIT,
    Parameter,
    ProblemError,
    bad_request,
    json_response,
    read_query,
    required,
    suggestion,
    time_parameter,
    whole_number,
)
from wattspan.api.snapshot_document import SNAPSHOT_PATH, restrict, snapshot_document
from wattspan.api.watches import ProcessCpuSampler, WatchList
from wattspan.http.limits import FairTurns
from wattspan.http.messages import Handler, HttpRequest, HttpResponse
from wattspan.http.sockets import Peer
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Consumer,
    Provenance,
    RecordedDecision,
    TuningAccounts,
)
from wattspan.ports import (
    Clock,
    DeviceQueries,
    EnergyQueries,
    ProcessDirectory,
    SnapshotView,
    WattspanError,
)
from wattspan.processes.principals import PrincipalResolver
from wattspan.sharing.fair_pool import share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.tuning.declared_jobs import DeclaredJobs
from wattspan.tuning.serialization import recorded_decision_to_json, tuning_document

T = TypeVar("T")

TuningView = Callable[[], TuningAccounts]
"""Returns the newest accounts, without side effects."""

MAX_DECISIONS = 10_000
DEFAULT_DECISIONS = 100


CapsState = Callable[[], Mapping[str, Any]]
"""The state of the running capper; an empty mapping without one. WattspanError."""

StoredEnergy = Callable[[int, int, frozenset[str], int | None], Mapping[str, Any]]
"""The stored energy from one Unix second to another by kinds, as far as a user may see it.

Without a user, everything. WattspanError.
"""


class DecisionHistoryView(Protocol):
    """Returns decisions, oldest first; see ``wattspan.storage.tuning.DecisionLog.recent``."""

    def __call__(
        self, job: str = "", limit: int = DEFAULT_DECISIONS, since: int | None = None
    ) -> Sequence[RecordedDecision]: ...


SETTLE_POLL_INTERVAL = 20 * MILLISECOND
"""Interval between checks whether a window has settled."""

MAX_WAITING = PoolName.WAITING_QUERIES.limit
"""Queries that may wait for settlement at a time, half of them of one user at most.

The next are answered at once, so that none crowds out spans.
"""

ANSWER_WITHIN = SECOND // 4
"""Time after which an answer begins no further period: others wait, and its process waits 2 s."""

ACKNOWLEDGED_EVERY = 0.5
"""Seconds between two acknowledgements of a query: to the sdk, 2 s of silence are a hang."""

_READ = ("GET", "HEAD")


class QueryService:
    """Handler of ``/v1/energy``, ``watch``, ``snapshot``, ``status``, ``advice`` and ``tuning``.

    ``resolution`` is that of device energy for users who may not read the counters, and ``edges``
    are those of the windows of a process, which they may know of their own. ``registered``
    is called with each process that measures windows and its owner, ``awaits_readings`` by each
    query that waits for them.
    ``tuning``, ``history`` and ``jobs`` are None where nothing tunes; ``history`` may take a while.
    ``inference`` estimates requests to language models. ``advice`` has the facts about GPUs, None
    without any. ``recurring`` answers for recurring jobs, None without a file of them. ``caps``
    asks the capper, ``stored`` reads the store; both may take a while. ``authorization`` is that
    of this host by default.
    """

    def __init__(
        self,
        energy_history: EnergyQueries,
        directory: ProcessDirectory,
        clock: Clock,
        *,
        devices: DeviceQueries,
        view: SnapshotView,
        host: str,
        version: str,
        resolution: int = 0,
        edges: Callable[[int], Sequence[int]] = lambda pid: (),
        sampler: ProcessCpuSampler | None = None,
        registered: Callable[[Consumer, Hashable], None] = lambda process, owner: None,
        awaits_readings: Callable[[], None] = lambda: None,
        tuning: TuningView | None = None,
        history: DecisionHistoryView | None = None,
        jobs: DeclaredJobs | None = None,
        inference: EstimateRequest | None = None,
        advice: AdviceFacts | None = None,
        recurring: Callable[[HttpRequest], HttpResponse] | None = None,
        caps: CapsState | None = None,
        stored: StoredEnergy | None = None,
        authorization: Authorization | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        pools: Pools | None = None,
    ) -> None:
        self._energy_history, self._directory, self._clock = energy_history, directory, clock
        self._devices = devices
        self._view, self._host, self._version = view, host, version
        self._tuning_view, self._history_view = tuning or TuningAccounts, history
        self._estimate_request = inference or (lambda process, request: None)
        self._authorization = authorization or Authorization.of_host(PrincipalResolver.of_host())
        self._grid, self._edges = TimeGrid(resolution), edges
        self._watches = WatchList(energy_history, directory, clock, sampler)
        self._sleep = sleep
        self._registered, self._awaits_readings = registered, awaits_readings
        self._started = clock.monotonic()
        self._waiting = (pools or Pools()).make(PoolName.WAITING_QUERIES)
        self._slow_lock = FairTurns(1)
        self._paths: dict[str, tuple[tuple[str, ...], Handler]] = {
            "/v1/energy": ((*_READ, "POST"), self._energy),
            "/v1/watch": ((*_READ, "POST"), self._watch),
            SNAPSHOT_PATH: (_READ, self._snapshot),
            "/v1/status": (_READ, self._status),
            INFERENCE_PATH: (_READ, self._inference),
            "/v1/tuning": (_READ, self._tuning),
            "/v1/tuning/history": (_READ, self._history),
        }
        if jobs is not None:
            handler = JobsHandler(
                jobs,
                directory,
                self._authorization.principal_of,
                host=host,
                tuning=self._tuning_view,
            )
            self._paths[JOBS_PATH] = (*_READ, "POST"), handler.declare_or_list
            self._paths[f"{JOBS_PATH}/"] = ("DELETE",), handler.withdraw

        if advice is not None:
            self._facts = advice
            self._paths[ADVICE_PATH] = _READ, self._advise
        if recurring is not None:
            self._recurring = recurring
            for name in ("next", "report", "forget"):
                self._paths[f"{RECURRING_PATH}/{name}"] = ("POST",), self._recur
            self._paths[f"{RECURRING_PATH}/status"] = _READ, self._recur
        if caps is not None:
            self._caps_state = caps
            self._paths[CAPS_PATH] = _READ, self._caps
        if stored is not None:
            self._stored_energy = stored
            self._paths[REPORT_PATH] = _READ, self._report

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._handler(request)(request)
        except ProblemError as problem:
            return problem_for(request.peer, problem).response()

    def _handler(self, request: HttpRequest) -> Handler:
        named = f"{JOBS_PATH}/"
        path = named if request.path.startswith(named) else request.path
        methods, handler = self._paths.get(path, ((), None))
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
                "the path does not support this method",
                f"Use {methods[0]}.",
                {"allow": ", ".join(methods)},
            )
        return handler

    async def _energy(self, request: HttpRequest) -> HttpResponse:
        if "of" in request.query:
            return await self._device_energy(request)
        values, periods = self._periods(request, {"wait": WAIT, **PROCESS_PARAMETERS})
        consumer = self._consumer(values, request.peer) if "pid" in values else None
        grid = self._grid_for(request.peer)
        owner = request.peer.quota_owner
        if consumer is not None and (values["pid"] == SENDER or consumer in self._watches):
            self._registered(consumer, owner)
            self._watches.renew(consumer)
        end, wait = periods[0][1], values.get("wait", 0)
        self._energy_history.expect(end)
        await self._wait_until(lambda: self._settled(end, consumer, grid), wait, request)
        answer = partial(energy.energy_response, self._energy_history, self._devices, grid=grid)
        family = values.get("family", False)

        def respond() -> HttpResponse:
            found = [answer(*one, consumer, family=family) for one in self._answered(periods)]
            facts = {"windows": found} if request.method == "POST" else found[0]
            return json_response({"host_name": self._host, **facts})

        if len(periods) == 1 and (consumer is None or consumer in self._watches):
            return respond()
        # A search of the whole history, or of many periods; others may have the turn.
        return await _acknowledged(request, self._in_thread(owner, respond))

    async def _device_energy(self, request: HttpRequest) -> HttpResponse:
        values, periods = self._periods(request, energy.DEVICE_PARAMETERS)
        query = energy.DeviceEnergyQuery(
            self._devices,
            energy.selected_domains(
                self._devices, values.get("hw_id"), parts=values.get("parts", False)
            ),
            *periods[0],
            self._grid_for(request.peer),
            values.get("timeline", False),
        )
        wait = values.get("wait", energy.DEFAULT_WAIT)
        if not all(domain.in_cover for domain in query.domains):  # parts have no readings
            self._energy_history.expect(query.end)
        owner = request.peer.quota_owner
        await self._wait_until(lambda: query.answerable, wait, request)
        facts = {"host_name": self._host, **query.response()}
        if request.method != "POST":
            return json_response(facts)

        def respond() -> HttpResponse:
            asked = (query._replace(start=one[0], end=one[1]) for one in self._answered(periods))
            found = [list(map(one.figures, query.domains)) for one in asked]
            return json_response({**facts, "windows": found})

        return await _acknowledged(request, self._in_thread(owner, respond))

    def _answered(self, periods: Sequence[energy.Period]) -> Iterator[energy.Period]:
        """The first of ``periods``, at least one, while the answer is not late."""
        until = self._clock.monotonic() + ANSWER_WITHIN
        return takewhile(lambda _: self._clock.monotonic() < until, periods)

    def _grid_for(self, peer: Peer) -> TimeGrid:
        """The grid of the energy of devices for ``peer``."""
        if self._authorization.may_read_counters(peer):
            return energy.UNQUANTIZED
        return self._grid._replace(own=self._edges(peer.pid or 0))

    def _periods(
        self, request: HttpRequest, known: Mapping[str, Parameter]
    ) -> tuple[dict[str, Any], list[energy.Period]]:
        """The values of a query, and the begin and end of its period, or of those in its body."""
        if request.method == "POST":
            return read_query(request.query, known), energy.decoded_periods(request.body)
        now = self._clock.now()
        time = time_parameter(now)
        values = read_query(request.query, {"start": time, "end": time, **known})
        start, end = required(values, "start", TIME_FORMATS), values.get("end", now.mono)
        if end < start:
            remedy = "Swap them, or write both by the same clock."
            raise bad_request("end", "it lies before start", remedy)
        return values, [(start, end)]

    async def _inference(self, request: HttpRequest) -> HttpResponse:
        values = read_query(request.query, INFERENCE_PARAMETERS)
        process = self._consumer({"pid": SENDER, **values}, request.peer)
        found = estimate_response(
            self._estimate_request, process, values, emulated=self._emulated()
        )
        return json_response({"host_name": self._host, **found})

    async def _in_thread(self, owner: Hashable, work: Callable[[], T]) -> T:
        """The result of slow ``work``, one at a time: spans arrive on the loop meanwhile."""
        async with self._slow_lock.of(owner):
            return await asyncio.to_thread(work)

    async def _watch(self, request: HttpRequest) -> HttpResponse:
        values = read_query(request.query, PROCESS_PARAMETERS)
        required(values, "pid", PROCESS_PARAMETERS["pid"].remedy)
        consumer = self._consumer(values, request.peer)
        family = values.get("family", False)
        owner = request.peer.quota_owner
        self._watches.add(consumer, family=family, owner=owner)
        self._registered(consumer, owner)
        return json_response({"pid": consumer.pid, "started": consumer.started, "watched": True})

    async def _snapshot(self, request: HttpRequest) -> HttpResponse:
        read_query(request.query, {})
        respond = partial(self._snapshot_for, request.peer)  # large, and it may read /proc
        return await self._in_thread(request.peer.quota_owner, respond)

    def _snapshot_for(self, peer: Peer) -> HttpResponse:
        document = snapshot_document(self._view(), self._version)
        if not self._authorization.may_read_counters(peer):
            coarse = self._grid.latest_powers(self._energy_history, self._devices)
            document = restrict(document, partial(self._authorization.permits, peer), coarse)
        return json_response(document)

    async def _status(self, request: HttpRequest) -> HttpResponse:
        read_query(request.query, {})
        now, settled = self._clock.monotonic(), self._energy_history.settled()
        domains = energy.sorted_domains(self._energy_history.domains().values())
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
        read_query(request.query, {})
        return json_response(
            {
                "host_name": self._host,
                "now_mono_ns": self._clock.monotonic(),
                "emulated": self._emulated(),
                **msgspec.structs.asdict(tuning_document(self._tuning_view())),
            }
        )

    async def _history(self, request: HttpRequest) -> HttpResponse:
        now = self._clock.now()
        limit = Parameter(whole_number(MAX_DECISIONS), "Write one.")
        known = {"job": Parameter(str, ""), "limit": limit, "since": time_parameter(now)}
        values = read_query(request.query, known)
        if "since" in values:
            values["since"] += now.wall - now.mono
        decided: Sequence[RecordedDecision] = ()
        if self._history_view is not None:
            view = partial(self._history_view, **values)  # it reads files
            decided = await self._in_thread(request.peer.quota_owner, view)
        return json_response(
            {
                "host_name": self._host,
                "emulated": self._emulated(),
                "decisions": list(map(recorded_decision_to_json, decided)),
            }
        )

    async def _advise(self, request: HttpRequest) -> HttpResponse:
        values = read_query(request.query, ADVICE_PARAMETERS)
        peer = request.peer
        permits = partial(self._authorization.permits, peer)
        everything = self._authorization.may_read_counters(peer)
        boards = self._facts((lambda _: True) if everything else permits)
        found = advice_response(boards, values.get("service"))
        return json_response({"host_name": self._host, "restricted": not everything, **found})

    async def _recur(self, request: HttpRequest) -> HttpResponse:
        respond = partial(self._recurring, request)  # it reads and writes a file
        return await self._in_thread(request.peer.quota_owner, respond)

    async def _caps(self, request: HttpRequest) -> HttpResponse:
        read_query(request.query, {})
        ask = partial(_asked, "the state of the capper", self._caps_state)
        state = await self._in_thread(request.peer.quota_owner, ask)
        return json_response({"host_name": self._host, "capper": state or None})

    async def _report(self, request: HttpRequest) -> HttpResponse:
        peer = request.peer
        user = shown_user(peer, privileged=self._authorization.may_read_counters(peer))
        values = read_query(request.query, REPORT_PARAMETERS)
        start, end = (required(values, name, "Write Unix seconds.") for name in ("start", "end"))
        kinds = values.get("kinds", frozenset())
        stored = partial(self._stored_energy, start, end, kinds, user)
        facts = await self._in_thread(peer.quota_owner, partial(_asked, "the report", stored))
        return json_response({"host_name": self._host, "restricted": user is not None, **facts})

    def _emulated(self) -> bool:
        provenance = energy.provenances(self._energy_history.domains().values())
        return Provenance.EMULATED in provenance.values()

    async def _wait_until(
        self, reached: Callable[[], bool], wait: int, request: HttpRequest
    ) -> None:
        """Wait until ``reached`` returns true, at most for ``wait`` nanoseconds."""
        path, told = share_path(request.peer.quota_owner), False
        if not self._waiting.acquire(path):
            return
        try:
            deadline = self._clock.monotonic() + wait
            while not reached() and self._clock.monotonic() < deadline:
                if not told:
                    request.acknowledge()
                told = True
                self._awaits_readings()
                await self._sleep(SETTLE_POLL_INTERVAL / 1e9)
        finally:
            self._waiting.release(path)

    def _settled(self, end: int, consumer: Consumer | None, grid: TimeGrid) -> bool:
        if self._energy_history.settled(consumer) < end:
            return False
        hidden = any(map(grid.hides, self._energy_history.domains().values()))
        return not hidden or self._energy_history.settled() >= grid.up(end)

    def _consumer(self, values: Mapping[str, Any], peer: Peer) -> Consumer:
        """The process in the query, if ``peer`` may see it. ProblemError."""
        pid, started = values["pid"], values.get("started")
        if pid == SENDER:
            pid = peer.pid
            if not pid:
                raise bad_request(
                    "pid=self",
                    "the kernel does not identify the caller",
                    "Ask on the agent's Unix socket, or write the process id.",
                )
        named = self._directory.identify(pid) if started is None else Consumer(pid, started)
        if named is None:
            raise ProblemError(
                HTTPStatus.NOT_FOUND,
                f"process {pid}",
                "there is none now",
                "Of a process that has ended, give its start time too: started=TICKS.",
            )
        self._authorization.require(peer, named)
        return named


async def _acknowledged(request: HttpRequest, answer: Awaitable[T]) -> T:
    """``answer``; until then the client hears at intervals that it will come."""
    task = asyncio.ensure_future(answer)
    try:
        while not task.done():
            request.acknowledge()
            await asyncio.wait((task,), timeout=ACKNOWLEDGED_EVERY)
        return task.result()
    finally:
        task.cancel()


def _asked(thing: str, ask: Callable[[], T]) -> T:
    """The answer of another part of the agent. ProblemError if it cannot answer."""
    try:
        return ask()
    except WattspanError as error:
        cause, _, remedy = str(error).partition(". ")
        raise ProblemError(
            HTTPStatus.SERVICE_UNAVAILABLE, thing, cause.rstrip("."), remedy or "Try again."
        ) from None
