"""The joiner of requests to language models with the GPU energy of their engine's processes.

The sender of an engine's spans is its API server, but other processes use the GPUs: the workers of
tensor and pipeline parallelism. The energy of an engine is therefore that of the service that the
sender belongs to (:mod:`wattspan.service.process_families`). No process belongs to two engines: the
first one keeps it. Engines of related senders below one launcher are one. Processes are found again
every second, and a family with senders of two services belongs to neither.

Applications send spans with token counts, too, when they call a model. A request counts once: that
of the innermost span of its trace with tokens. Where the spans of a group have latencies of an
engine, those without are calls of other services; where a span of a server has tokens, those of
clients are. Requests of a group that uses no GPU, and such calls, have tokens and no energy: they
are counted apart, and nothing is decided before their energy would have settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter
from typing import NamedTuple

from wattspan.attribution.packed_attributions import GroupStep
from wattspan.config.settings import SPAN_PRESETS
from wattspan.inference.accounts import InferenceAccounts, UnmeteredAccounts, UnmeteredRole
from wattspan.inference.division import MAX_REQUEST_HOLD, Board, RequestDivision, RequestEnergy
from wattspan.inference.estimate import RequestEstimate, RequestEstimator
from wattspan.inference.requests import InferenceRequest
from wattspan.inference.token_power import TokenPowerModel
from wattspan.inference.traces import PrefillStages, SpanPlace, TokenTraces
from wattspan.model import (
    SECOND,
    Checkpoint,
    Consumer,
    InferenceRow,
    Microjoules,
    Nanoseconds,
    Payer,
    SpanAccounts,
    UnmeteredRow,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.host_steps import HostStepReader
from wattspan.service.serving_engines import Engine, ServingEngines
from wattspan.sharing.fair_pool import FairCache, FairPool, Overflow, SharePath
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.values import MAX_DURATION, TOKENS, InferenceDetails, SpanColumns, TokenRole

TURN_EVERY = SECOND
"""The period of divisions."""

MAX_FUTURE = 5 * SECOND
"""Time after its receipt at which a request may end: clocks of runtimes drift, and are set."""

_MAX_IDS = 16_384  # of requests, for the detection of repeated ones
_MAX_PROMPTS = 4096
_HANDOVER = 10 * SECOND  # from the end of a prompt in one engine to its continuation in another
_REREAD = 2 * MAX_REQUEST_HOLD  # steps from before that have been divided

_WIDEST = {TokenRole.ENGINE: TokenRole.ENGINE, TokenRole.SERVER: TokenRole.CALL}
"""The widest role of an engine's own spans once it has spans of these roles."""


class _WaitingRequest(NamedTuple):
    """A request whose energy has not settled, and its sender's part in it."""

    request: InferenceRequest
    sender: Consumer
    place: SpanPlace
    role: TokenRole
    owner: SharePath
    principal: Hashable
    continues: bool = False  # another engine has computed the prompt, and counts it


class InferenceJoiner:
    """Collects requests and divides the energy of their engines. For one thread.

    ``settled`` receives requests with their final energy. Totals continue from ``checkpoint``.
    ``presets`` are the engines whose spans are recognised. With ``share_idle``, requests have the
    engine's part of the idle energy of devices.
    """

    def __init__(
        self,
        history: EnergyHistory,
        settled: Callable[[Iterable[RequestEnergy]], None] = lambda _: None,
        checkpoint: Checkpoint | None = None,
        presets: Collection[str] = SPAN_PRESETS,
        pools: Pools | None = None,
        now: int = 0,
        traces: TokenTraces | None = None,
        *,
        share_idle: bool = False,
    ) -> None:
        pools = pools or Pools()
        self._traces = traces or TokenTraces()
        self._history = history
        self._settled = settled
        self._models: dict[Board, TokenPowerModel] = {}
        self._division = RequestDivision(self._model)
        self._engines = ServingEngines(
            history,
            pools.make(PoolName.ENGINES),
            merged=self._engine_merged,
            released=self._division.forget,
        )
        self._stages = PrefillStages() if "sglang" in presets else None
        self._seen: FairCache[bytes, None] = FairCache(FairPool(_MAX_IDS, Overflow.REPLACE))
        prompts = FairPool[Hashable](_MAX_PROMPTS, Overflow.REPLACE)
        self._prompts: FairCache[Hashable, InferenceRequest] = FairCache(prompts)
        self._read: dict[str, int] = {}  # end of the last read step, by board
        self._host = HostStepReader(history, share_idle=share_idle)
        earlier = checkpoint.inference if checkpoint is not None else ()
        self._accounts = InferenceAccounts(earlier, pools.make(PoolName.INFERENCE_ACCOUNTS), now)
        self._idle = int(checkpoint.inference_idle) if checkpoint is not None else 0
        self._host_idle = Counter[str](checkpoint.inference_host_idle if checkpoint else {})
        self._unmetered = UnmeteredAccounts(
            checkpoint.unmetered if checkpoint is not None else (),
            pools.make(PoolName.UNMETERED_ACCOUNTS),
            now,
        )
        self._waiting: dict[int, _WaitingRequest] = {}  # by the identity of the request
        self._calls: dict[int, tuple[int, _WaitingRequest]] = {}  # certain ones, by receipt
        self._call_places: FairPool[int] = pools.make(PoolName.MODEL_CALLS)
        self._call_count = 0
        self._turned = 0
        self._estimators: tuple[tuple[frozenset[Payer], str, RequestEstimator], ...] = ()
        self._since = 0  # the start of the newest engine's first request

    @property
    def rows(self) -> tuple[InferenceRow, ...]:
        """The totals of settled requests with known energy."""
        return self._accounts.rows()

    @property
    def unmetered(self) -> tuple[UnmeteredRow, ...]:
        """The totals of requests whose energy is unknown."""
        return self._unmetered.rows()

    @property
    def idle(self) -> Microjoules:
        """The energy of engines without active requests."""
        return Microjoules(self._idle)

    @property
    def host_idle(self) -> dict[str, Microjoules]:
        """The energy of engines without active requests beyond their GPUs, by part."""
        return {part: Microjoules(energy) for part, energy in self._host_idle.items()}

    @property
    def waiting(self) -> int:
        """Number of requests without their final energy."""
        return self._division.waiting + len(self._calls)

    def add_totals(self, accounts: SpanAccounts) -> SpanAccounts:
        """The accounts with all totals of requests."""
        return replace(
            accounts,
            inference=self.rows,
            inference_idle=self.idle,
            inference_host_idle=self.host_idle,
            inference_waiting=self.waiting,
            unmetered=self.unmetered,
        )

    def add(
        self,
        sender: Consumer,
        spans: SpanColumns,
        now: int,
        owner: SharePath = (None,),
        label: str = "",
        principal: Hashable = None,
    ) -> dict[int, InferenceRequest]:
        """Add the requests among spans of ``sender`` and one service; returns them by position.

        Other spans are ignored. The places
        of the engine and of its accounts belong to ``owner``, whose label is ``label``. Spans of
        one trace are compared within one ``principal``, by default within the sender.
        """
        principal = sender if principal is None else principal
        self._withdraw(self._traces.add(principal, spans, sender), principal)
        if self._stages is not None:
            self._stages.add(principal, spans)
        roles = spans.full("role")
        reports = [
            (i, _role(details, roles[i]), details)
            for i, details in enumerate(spans.inference)
            if details is not None
            # The tokens of an agent that computes them itself are those of its span.
            if roles[i] is not TokenRole.AGGREGATE or self.is_call(sender, roles[i])
        ]
        if not reports:
            return {}
        service, tokens = spans.service[0], list(zip(*map(spans.full, TOKENS), strict=True))
        engine = self._engines.find(sender, service, now, owner)
        if engine is None:
            return {}
        found: dict[int, InferenceRequest] = {}
        mine: list[InferenceRequest] = []
        for i, role, details in reports:
            start, end = spans.start[i], spans.end[i]
            # Runs with the same random seed have the same ids.
            key = b"%b%b%d %d" % (spans.trace[i], spans.id[i], start, engine.sender.pid)
            place = SpanPlace(spans.trace[i], spans.id[i])
            if not start <= end <= now + MAX_FUTURE or key in self._seen:
                continue
            self._seen.store(key, None, principal, now)
            if self._traces.has_inner(principal, place):
                continue
            self._narrow(engine, role, now)
            queue = self._queue(details, principal, spans.trace[i], start, end)
            details = details._replace(queue=queue)
            request = InferenceRequest.of(
                spans.id[i], start, end, tokens[i], details, service=service
            )._replace(owner=label)
            waiting = _WaitingRequest(request, engine.sender, place, role, owner, principal)
            # Without tokens, or with a start and an end of two clocks, the energy is unknown.
            if role > engine.widest or not any(tokens[i]) or end - start > MAX_DURATION:
                self._call(now, waiting)
                continue
            self._waiting[id(request)] = waiting
            if role is TokenRole.ENGINE:
                self._pair(waiting)
            found[i] = request
            mine.append(request)
        # A later span of the same request may have narrowed the engine.
        kept = [each for each in mine if id(each) in self._waiting]
        if kept and (first := min(each.start for each in kept)) < engine.since:
            self._start(engine, first)
        self._division.add(kept, now, engine=engine.sender, owner=engine.owner)
        return {i: each for i, each in found.items() if id(each) in self._waiting}

    def is_call(self, sender: Consumer, role: TokenRole) -> bool:
        """True if the tokens of a sender's span of this role are computed by another service.

        As far as is known now.
        """
        engine = self._engines.of(sender)
        members = (sender,) if engine is None else engine.members
        if not (engine is not None and engine.boards) and not self._history.uses_gpu(members):
            return role.is_call
        widest = TokenRole.CLIENT if engine is None else engine.widest
        return role is TokenRole.REMOTE or (widest < TokenRole.CLIENT and role > widest)

    def _start(self, engine: Engine, since: int) -> None:
        """Read the energy of an engine from ``since`` on.

        Boards that no engine used were read without dividing their energy. Requests may arrive in
        any order: boards of which nothing was divided are read again.
        """
        was, self._since = engine.since, since
        engine.since = since
        used = set().union(*(each.boards for each in self._engines.values()))
        fresh = self._division.restart(engine.parts, since)
        again = {board for board in engine.boards if (board, engine.owner) in fresh}
        kept = self._read.keys() - again
        self._read = {board: end for board, end in self._read.items() if board in used - again}
        # Senders choose times: an engine without boards reads no steps beyond them yet, and what
        # was read from the earliest possible time on is not read again.
        if engine.boards and was > self._turned - _REREAD:
            domains = self._division.restart_host(engine.sender, engine.members, kept)
            self._host.reread(since, domains)

    def _narrow(self, engine: Engine, role: TokenRole, now: int) -> None:
        """Leave out the calls of others once an engine has spans that are certainly its own."""
        engine.serves = engine.serves or role < TokenRole.CLIENT
        widest = _WIDEST.get(role, TokenRole.CLIENT)
        if widest >= engine.widest:
            return
        engine.widest = widest
        calls = [
            each
            for each in self._waiting.values()
            if each.sender == engine.sender and each.role > widest
        ]
        self._remove(calls)
        for each in calls:
            self._call(now, each)

    def _call(self, now: int, waiting: _WaitingRequest) -> None:
        """Count a request as a client's, once spans in it may have arrived."""
        self._call_count += 1
        number = self._call_count
        self._calls[number] = now + MAX_REQUEST_HOLD // 4, waiting
        admission = self._call_places.admit(number, waiting.owner, now)
        for early in admission.displaced if admission else (number,):
            self._count_call(self._calls.pop(early)[1], now)

    def _count_call(self, waiting: _WaitingRequest, now: int, *, computes: bool = False) -> None:
        """Count a request without known energy; ``computes``: its engine uses a GPU."""
        place, request = (waiting.principal, waiting.place), waiting.request
        known = request.context or request.generated or not self._traces.has_outer(*place)
        if known and not self._traces.is_repeated(*place):
            of_engine = computes or waiting.role is TokenRole.ENGINE
            role = UnmeteredRole.ENGINE if of_engine else UnmeteredRole.CLIENT
            self._unmetered.add(waiting.request, role, waiting.owner, now)

    def _pair(self, waiting: _WaitingRequest) -> None:
        """Count a prompt once that one engine computes and another one continues, in one trace.

        Requests of one token at most, as embeddings and scores, continue none.
        """
        one = waiting.request
        key = waiting.principal, waiting.place.trace, one.model, one.context
        # The cache holds the request itself: its identity becomes no other's.
        other = self._waiting.get(id(self._prompts.get(key)))
        self._prompts.store(key, one, waiting.principal, 0)
        if other is None or other.sender == waiting.sender:
            return
        pair = [(each.request.generated, each.request.end, each) for each in (other, waiting)]
        (tokens, end, _), (more, until, rest) = sorted(pair, key=itemgetter(0, 1))
        if tokens <= 1 < more and end <= until and rest.request.start <= end + _HANDOVER:
            self._waiting[id(rest.request)] = rest._replace(continues=True)

    def _withdraw(self, places: set[SpanPlace], principal: Hashable) -> None:
        """Remove waiting requests whose tokens are those of spans in them."""
        if places:
            self._remove(
                [
                    each
                    for each in self._waiting.values()
                    if each.place in places and each.principal == principal
                ]
            )

    def _remove(self, waiting: Sequence[_WaitingRequest]) -> None:
        if waiting:
            for each in waiting:
                del self._waiting[id(each.request)]
            self._division.withdraw(each.request for each in waiting)

    def estimate(self, process: Consumer, request: InferenceRequest) -> RequestEstimate | None:
        """The provisional energy of a request of the engine that ``process`` belongs to.

        None if no engine or no identified model is known. Safe from any thread.
        """
        for members, service, estimator in self._estimators:
            if process in members:
                # The spans of an engine without names of models: its service is the model.
                unnamed = request._replace(model="", service=service)
                return estimator.estimate(request) or estimator.estimate(unnamed)
        return None

    def _queue(
        self, details: InferenceDetails, principal: Hashable, trace: bytes, start: int, end: int
    ) -> Nanoseconds | None:
        """The time in the queue that a request reports, or that the stages of its trace show."""
        if details.queue is not None or self._stages is None:
            return details.queue
        first = end if details.first_token is None else min(end, start + details.first_token)
        begin = self._stages.begin(principal, trace, start, first)
        return None if begin is None else Nanoseconds(begin - start)

    @property
    def in_use(self) -> bool:
        """True while there are engines or requests."""
        return bool(self._since or self._calls)

    def turn(self, now: int, *, wait: bool = True) -> None:
        """Read new energy and settle requests, once a second; all requests without ``wait``."""
        if not self.in_use or (wait and now - self._turned < TURN_EVERY):
            return
        self._turned = now
        self._refresh(now)
        self._read_steps()
        result = self._division.settle(now, held=True) if wait else self._division.settle(2 * now)
        self._idle += result.idle
        self._host_idle.update(result.host_idle)
        measured: list[RequestEnergy] = []
        for each in result.requests:
            waiting = self._waiting.pop(id(each.request))
            if waiting.continues:
                request = each.request._replace(context=0)
                each, waiting = each._replace(request=request), waiting._replace(request=request)
            if not (each.measured and each.host.known):
                self._host_idle.update(each.host.energy)
            if each.measured:
                measured.append(each)
                self._accounts.open(each.request, waiting.owner, now)
            else:  # what is known of it is the energy of no other request
                self._idle += each.energy
                # One from before the first use of its engine's GPU is a client's no more.
                engine = self._engines.get(waiting.sender)
                computes = each.energy > 0 or (engine is not None and bool(engine.boards))
                self._count_call(waiting, now, computes=computes)
        while self._calls:
            number, (due, call) = next(iter(self._calls.items()))
            if wait and due > now:
                break
            del self._calls[number]
            self._call_places.remove(number)
            self._count_call(call, now)
        self._accounts.add(measured)
        self._estimators = tuple(
            (engine.members, engine.service, estimator)
            for engine in self._engines.values()
            if (estimator := self._division.estimator(engine.sender)) is not None
        )
        self._settled(measured)

    # --------------------------------------------------------------------------------- engines

    def _engine_merged(self, part: Engine, into: Engine) -> None:
        for key, each in self._waiting.items():
            if each.sender == part.sender:
                self._waiting[key] = each._replace(sender=into.sender)
        self._division.merge(part.sender, into.sender)

    def _refresh(self, now: int) -> None:
        """Find new workers; release engines without requests."""
        for engine in self._engines.refresh(now):
            own = (one for one in self._waiting.values() if one.sender == engine.sender)
            self._start(engine, min((one.request.start for one in own), default=now))

    def _model(self, board: Board) -> TokenPowerModel:
        return self._models.setdefault(board, TokenPowerModel())

    def _read_steps(self) -> None:
        engines = list(self._engines.values())
        groups = [each.members for each in engines]
        found = self._history.group_steps(groups, lambda key: self._read.get(key, self._since))
        boards: dict[Board, list[CounterStep]] = {}
        for board, steps in found.items():
            owners: dict[SharePath, list[int]] = {}
            for i, engine in enumerate(engines):
                if any(step.energies[i] for step in steps):
                    if not engine.boards and engine.since < inf:
                        until = self._division.host_read_until(engine.sender, engine.members)
                        self._host.reread(max(int(engine.since), until))
                    engine.boards.add(board)
                if board in engine.boards:
                    owners.setdefault(engine.owner, []).append(i)
            self._read[board] = steps[-1].end
            # The engines of an owner have the energy of their own processes, whatever tokens the
            # spans of another owner claim.
            for owner, own in owners.items():
                # Steps may be read for an earlier request of another owner.
                since = min(engines[i].since for i in own)
                boards[board, owner] = [
                    CounterStep(step.start, step.end, sum(step.energies[i] for i in own), False)
                    for step in steps
                    if step.end > since or since == inf
                ]
        self._division.expire_marks(self._turned - _REREAD)
        for engine in engines:
            parts = frozenset(engine.parts)
            self._division.assign(engine.sender, parts, engine.owner, engine.members)
        self._division.add_steps(boards)
        self._read_host(engines, found)

    def _read_host(self, engines: Sequence[Engine], gpus: Mapping[str, list[GroupStep]]) -> None:
        """Read the energy beyond their GPUs of the engines that use some."""
        groups = [each.members if each.boards else frozenset[Payer]() for each in engines]
        if not any(groups):
            return
        boards = [each.boards for each in engines]
        least = self._turned - _REREAD  # senders choose times
        host = self._host.read(groups, boards, gpus, self._since, least)
        for engine, counters in zip(engines, host, strict=True):
            if engine.boards and engine.since < inf:
                since, left = int(engine.since), self._host.left
                self._division.add_host_steps(engine.sender, counters, since, left)


def _role(details: InferenceDetails, role: TokenRole) -> TokenRole:
    """The role of a request: latencies are an engine's unless other evidence contradicts."""
    times = details.queue, details.first_token, details.prefill, details.decode
    if role is TokenRole.PLAIN and any(time is not None for time in times):
        return TokenRole.ENGINE
    return role
