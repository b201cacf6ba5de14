"""The joiner of requests to language models with the GPU energy of their engine's processes.

The sender of an engine's spans is its API server, but other processes use the GPUs: the workers of
tensor and pipeline parallelism. The energy of an engine is therefore that of the sender's container
and of its descendants. An *engine* here is such a group of processes. No process belongs to two
engines: the first one keeps it.

Applications send spans with token counts, too, when they call a model. Where the spans of a group
have latencies, those without are calls of other services and are left out; a group without GPU
energy has no energy to divide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from wattspan.config.settings import SPAN_PRESETS
from wattspan.ingest.export_request import ResourceSpanRecords
from wattspan.model import (
    SECOND,
    Checkpoint,
    Consumer,
    InferenceRow,
    Microjoules,
    Nanoseconds,
    Payer,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.sharing.fair_pool import SharePath
from wattspan.sharing.pools import POOL_RULES, PoolName, Pools
from wattspan.spans.inference_accounts import InferenceAccounts
from wattspan.spans.inference_requests import InferenceDetails, InferenceRequest
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.prefill_stages import PrefillStages
from wattspan.spans.request_division import RequestDivision, RequestEnergy
from wattspan.spans.request_estimate import RequestEstimate, RequestEstimator
from wattspan.spans.token_power import TokenPowerModel
from wattspan.spans.values import SpanColumns
from wattspan.spans.weights import GenerationalCache

TURN_EVERY = SECOND
"""The period of divisions."""

ENGINE_TIMEOUT = POOL_RULES[PoolName.ENGINES].lifetime
"""An engine without requests is released after this time."""

MAX_ENGINES = POOL_RULES[PoolName.ENGINES].limit
"""Engines that are watched; a further one replaces one of the user with most."""

_MAX_IDS = 32_768  # of requests, for the detection of repeated ones


@dataclass(slots=True)
class _EngineProcesses:
    """The processes of an engine."""

    sender: Consumer
    service: str
    members: frozenset[Payer]
    boards: set[str] = field(default_factory=set)
    latencies: bool = False  # True once a request had any


class InferenceJoiner:
    """Collects requests and divides the energy of their engines. For one thread.

    ``settled`` receives requests with their final energy. Totals continue from ``checkpoint``.
    ``presets`` are the engines whose spans are recognised.
    """

    def __init__(
        self,
        history: EnergyHistory,
        settled: Callable[[Iterable[RequestEnergy]], None] = lambda _: None,
        checkpoint: Checkpoint | None = None,
        presets: Collection[str] = SPAN_PRESETS,
        pools: Pools | None = None,
        now: int = 0,
    ) -> None:
        pools = pools or Pools()
        self._places = pools.make(PoolName.ENGINES)
        self._history = history
        self._settled = settled
        self._models: dict[str, TokenPowerModel] = {}
        self._division = RequestDivision(self._model)
        self._engines: dict[Consumer, _EngineProcesses] = {}
        self._stages = PrefillStages() if "sglang" in presets else None
        self._seen: GenerationalCache[bool] = GenerationalCache(_MAX_IDS)
        self._read: dict[str, int] = {}  # end of the last read step, by board
        earlier = checkpoint.inference if checkpoint is not None else ()
        self._accounts = InferenceAccounts(earlier, pools.make(PoolName.INFERENCE_ACCOUNTS), now)
        self._idle = int(checkpoint.inference_idle) if checkpoint is not None else 0
        self._turned = 0
        self._estimators: tuple[tuple[frozenset[Payer], str, RequestEstimator], ...] = ()
        self._since = 0  # the start of the newest engine's first request
        self._started: set[Consumer] = set()

    @property
    def rows(self) -> tuple[InferenceRow, ...]:
        """The totals of settled requests."""
        return self._accounts.rows()

    @property
    def idle(self) -> Microjoules:
        """The energy of engines without active requests."""
        return Microjoules(self._idle)

    @property
    def waiting(self) -> int:
        """Number of requests without their final energy."""
        return self._division.waiting

    def add(
        self,
        sender: Consumer,
        spans: SpanColumns,
        part: ResourceSpanRecords,
        now: int,
        owner: SharePath = (None,),
        label: str = "",
    ) -> dict[int, InferenceRequest]:
        """Add the requests among received spans of ``sender``; returns them by position.

        ``spans`` are those of ``part`` on the monotonic clock. Other spans are ignored. The places
        of the engine and of its accounts belong to ``owner``, whose label is ``label``.
        """
        claim, records = part
        if self._stages is not None:
            self._stages.add(spans)
        if not any(records.inference):
            return {}
        engine = self._engine(sender, claim.service, now, owner)
        if engine is None:
            return {}
        self._places.touch(engine.sender, now)
        reports = [
            (i, details) for i, details in enumerate(records.inference) if details is not None
        ]
        engine.latencies = engine.latencies or any(_has_latency(each) for _, each in reports)
        found: dict[int, InferenceRequest] = {}
        for i, details in reports:
            start, end = spans.start[i], spans.end[i]
            # Runs with the same random seed have the same ids.
            key = b"%b%b%d %d" % (spans.trace[i], spans.id[i], start, engine.sender.pid)
            if not start <= end <= now or key in self._seen:
                continue
            if engine.latencies and not _has_latency(details):
                continue
            self._seen[key] = True
            tokens = records.tokens_in[i], records.tokens_out[i]
            details = details._replace(
                model=details.model or claim.model,
                queue=self._queue(details, spans.trace[i], start, end),
            )
            found[i] = InferenceRequest.of(
                spans.id[i], start, end, tokens, details, service=claim.service
            )._replace(owner=label)
            self._accounts.open(found[i], owner, now)
        if found and engine.sender not in self._started:
            # Boards that no engine used were read without dividing their energy.
            self._started.add(engine.sender)
            self._since = min(each.start for each in found.values())
            used = set().union(*(each.boards for each in self._engines.values()))
            self._read = {board: end for board, end in self._read.items() if board in used}
        self._division.add(list(found.values()), now, engine=engine.sender)
        return found

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
        self, details: InferenceDetails, trace: bytes, start: int, end: int
    ) -> Nanoseconds | None:
        """The time in the queue that a request reports, or that the stages of its trace show."""
        if details.queue is not None or self._stages is None:
            return details.queue
        first = end if details.first_token is None else min(end, start + details.first_token)
        begin = self._stages.begin(trace, start, first)
        return None if begin is None else Nanoseconds(begin - start)

    def turn(self, now: int, *, wait: bool = True) -> None:
        """Read new energy and settle requests, once a second; all requests without ``wait``."""
        if not self._since or (wait and now - self._turned < TURN_EVERY):
            return
        self._turned = now
        self._refresh(now)
        self._read_steps()
        result = self._division.settle(now - self._division.hold if wait else 2 * now)
        self._idle += result.idle
        self._accounts.add(result.requests)
        self._estimators = tuple(
            (engine.members, engine.service, estimator)
            for engine in self._engines.values()
            if (estimator := self._division.estimator(engine.sender)) is not None
        )
        self._settled(result.requests)

    # --------------------------------------------------------------------------------- engines

    def _engine(
        self, sender: Consumer, service: str, now: int, owner: SharePath
    ) -> _EngineProcesses | None:
        """The engine that a process belongs to; None for want of room."""
        for engine in self._engines.values():
            if sender in engine.members:
                return engine
        admission = self._places.admit(sender, owner, now)
        for displaced in admission.displaced:
            self._release(displaced)
        if not admission:
            return None
        engine = _EngineProcesses(sender, service, self._free_members(sender))
        self._engines[sender] = engine
        return engine

    def _free_members(self, sender: Consumer) -> frozenset[Payer]:
        """The processes of a service that no other engine has."""
        members = self._history.service_group(sender)
        others = (each for each in self._engines.values() if each.sender != sender)
        return members.difference(*(each.members for each in others))

    def _refresh(self, now: int) -> None:
        """Find new workers; release engines without requests."""
        for expired in self._places.expire(now):
            self._release(expired)
        for engine in self._engines.values():
            # Workers that have exited remain: their energy may not have settled.
            engine.members |= self._free_members(engine.sender)

    def _release(self, sender: Consumer) -> None:
        del self._engines[sender]
        self._started.discard(sender)
        self._division.forget(sender)

    def _model(self, board: str) -> TokenPowerModel:
        return self._models.setdefault(board, TokenPowerModel())

    def _read_steps(self) -> None:
        engines = list(self._engines.values())
        found = self._history.gpu_steps(
            [each.members for each in engines], lambda key: self._read.get(key, self._since)
        )
        boards = {}
        for board, steps in found.items():
            for i, engine in enumerate(engines):
                if any(step.energies[i] for step in steps):
                    engine.boards.add(board)
            self._read[board] = steps[-1].end
            if any(board in engine.boards for engine in engines):
                boards[board] = [
                    CounterStep(step.start, step.end, sum(step.energies), False) for step in steps
                ]
        for engine in engines:
            self._division.assign(engine.sender, frozenset(engine.boards))
        self._division.add_steps(boards)


def _has_latency(details: InferenceDetails) -> bool:
    times = details.queue, details.first_token, details.prefill, details.decode
    return any(time is not None for time in times)
