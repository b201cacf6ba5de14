"""The division of the GPU energy of engines among their concurrent requests to language models.

Each step of a board's counter is divided once, exactly, in integer microjoules: the time without
active requests has *engine idle* energy, the rest belongs to the requests in proportion to the
energy of their work in the step by the coefficients of :mod:`wattspan.inference.token_power`. The
model thus sets shares only. Requests of models that are not identified share the rest of the step
by the numbers of tokens, or without tokens by the active times. Pooled models have common
coefficients: the share of all of them is learned, and the error of a single one's is not known.

An engine reports a request after its end, so a step waits as long as nearly all requests take from
their start to their receipt, at most two minutes. A request that is received later has no energy in
steps that were divided before: the requests beside it have that energy. What none of them has is
*missing*, as is the time of a gap of the counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import isfinite, sqrt
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from wattspan.attribution.division import fair_parts, split
from wattspan.inference.estimate import RequestEstimator, SharingMeans
from wattspan.inference.host_energy import (
    MOST_MISSING,
    NO_SHARE,
    EngineHost,
    HostCounter,
    HostShare,
    ReadMarks,
)
from wattspan.inference.requests import MAX_ACTIVE, DecodeProgress, InferenceRequest, work_in
from wattspan.inference.step_queue import StepQueue
from wattspan.inference.token_power import (
    NO_TOKEN_ENERGY,
    NO_WORK,
    POOL,
    Place,
    TokenPowerModel,
    TokenWork,
    expected_energies,
)
from wattspan.model import MILLISECOND, SECOND, Microjoules, ModelEnum
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.values import merged_periods
from wattspan.spans.waiting_spans import ReceiptDelay

T = TypeVar("T")

Board = Hashable
"""A board, or the part of its energy that one owner of engines has in it."""

MAX_REQUEST_HOLD = 120 * SECOND
"""The longest wait for the requests of a moment."""

FIRST_HOLD = 30 * SECOND
FIRST_REQUESTS = 500
"""Until so many requests were received, the wait is ``FIRST_HOLD`` at least."""

MAX_REQUESTS = 16_384
"""Requests that wait for their energy, max-min fair by owner and by engine; the oldest beyond an
engine's part are settled at once."""

BOARD_TIMEOUT = 10 * SECOND
"""A board without steps for this time, beyond the hold and one step, is not waited for."""

# Standard deviations of the stated uncertainty: the model is simpler than an engine.
_SURE = 2.5
_EDGE_TIME = 2 * MILLISECOND  # standard deviation of the edge of a request in a counter's step
_PREFILL_MEMORY = 500  # requests to which older ones fade in the mean duration of prefill
_RESOLUTION = 1 << 10  # parts of a microjoule in the weights of a division


class DivisionMethod(ModelEnum):
    """The rule by which the energy of a request was divided; the least precise of its steps."""

    MODEL = "model"  # identified coefficients of prefill and decode
    TOKENS = "tokens"  # token counts, or coefficients of pooled models: none of its own


class RequestEnergy(NamedTuple):
    """The GPU energy of one request. ``input`` and ``output`` add up to ``energy``.

    ``host`` is its share of the rest of the host.
    ``input`` is that of the prompt, ``output`` that of the generated tokens but the first, which
    is computed with the prompt. ``uncertainty`` is the half-width of the 95 % range; None if it is
    not known, which it is not for a division by tokens. ``measured`` is False if no step had energy
    for it, because its engine uses no known board, or not yet: no request needs 0 J. It is False,
    too, if more of its time is missing than one part in ``MOST_MISSING``.
    """

    request: InferenceRequest
    energy: Microjoules
    input: Microjoules
    output: Microjoules
    uncertainty: Microjoules | None
    method: DivisionMethod
    measured: bool = True
    host: HostShare = NO_SHARE


class SettledRequests(NamedTuple):
    """Requests with their final energy, and the energy of the engine without active requests.

    ``host_idle`` is that beyond GPUs, by part.
    """

    requests: Sequence[RequestEnergy]
    idle: Microjoules
    host_idle: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True)
class _Engine:
    """An engine: its boards, its recent requests, and the clock of its decode."""

    owner: Hashable = None
    boards: frozenset[Board] = frozenset()
    joined: dict[Board, int] = field(default_factory=dict)  # end of the steps before its first one
    recent: list[InferenceRequest] = field(default_factory=list)
    progress: DecodeProgress = field(default_factory=DecodeProgress)
    means: SharingMeans = field(default_factory=SharingMeans)
    requests: int = 0
    prefill: float = 0.0  # mean nanoseconds of so many recent requests
    opened: list[InferenceRequest] = field(default_factory=list)
    delay: ReceiptDelay = field(
        default_factory=lambda: ReceiptDelay(longest=MAX_REQUEST_HOLD, held=MAX_REQUEST_HOLD)
    )
    received: int = 0  # requests
    host: EngineHost = field(default_factory=EngineHost)

    @property
    def hold(self) -> int:
        """The nanoseconds from a moment to the receipt of nearly all its requests."""
        learned = self.delay.hold
        return learned if self.received >= FIRST_REQUESTS else max(learned, FIRST_HOLD)

    def add_delay(self, requests: Sequence[InferenceRequest], received: int) -> None:
        """Learn how late requests are received."""
        self.delay.add([each.start for each in requests], [each.end for each in requests], received)
        self.received += len(requests)

    def add_prefill(self, requests: Iterable[InferenceRequest]) -> None:
        """Update the mean duration of prefill."""
        for each in requests:
            if each.known_phases:
                self.requests = min(self.requests + 1, _PREFILL_MEMORY)
                self.prefill += (each.first - each.start - self.prefill) / self.requests

    def keep(self, opened: list[InferenceRequest]) -> None:
        """Set the requests without their final energy; keep the recent ones beside them."""
        since = min((each.start for each in opened), default=None)
        self.opened = opened
        self.recent = [] if since is None else [each for each in self.recent if each.end >= since]

    @property
    def active(self) -> list[tuple[int, int]]:
        """The disjoint periods with active requests, in order."""
        return merged_periods([(each.start, each.end) for each in (*self.recent, *self.opened)])


@dataclass(slots=True)
class _OpenRequest:
    """A request whose last steps have not been divided."""

    request: InferenceRequest
    engine: _Engine
    late: bool = False  # the steps of its time were divided before
    energy: int = 0
    prefill: float = 0.0  # microjoules of `energy` for the prompt
    noise: float = 0.0  # variance from energy that work does not explain
    # By board and place: the change of the energy with each coefficient.
    slopes: dict[Board, dict[Place, list[float]]] = field(default_factory=dict)
    works: dict[Board, TokenWork] = field(default_factory=dict)  # by board
    method: DivisionMethod = DivisionMethod.MODEL

    def overlaps(self, start: int, end: int) -> bool:
        return self.request.start < end and self.request.end >= start


class RequestDivision:
    """The requests and the boards of all engines. ``model`` returns the model of a board.

    Engines of one owner may share a board: its steps are the energy of all of them, which requests
    divide by what their spans claim. Another owner's engines have a board of their own.
    """

    def __init__(self, model: Callable[[Board], TokenPowerModel]) -> None:
        self._model = model
        self._boards: dict[Board, StepQueue] = {}
        self._models: dict[Board, TokenPowerModel] = {}
        self._engines: dict[Hashable, _Engine] = {}
        self._open: list[_OpenRequest] = []
        self._since: int | None = None
        self._withdrawn = 0
        self._host_withdrawn = Counter[str]()
        self._marks = ReadMarks()
        self.received = 0
        """The microjoules of all steps: the sum of requests, idle energy and waiting steps."""

    def hold(self, board: Board) -> int:
        """The longest hold of the engines that use ``board``, in nanoseconds.

        Requests of one engine never delay those of engines on other boards.
        """
        return max((one.hold for one in self._engines.values() if board in one.boards), default=0)

    @property
    def waiting(self) -> int:
        """Number of requests without their final energy."""
        return len(self._open)

    def add(
        self,
        requests: Sequence[InferenceRequest],
        received: int,
        *,
        engine: Hashable,
        owner: Hashable = None,
    ) -> None:
        """Add ended requests of an engine of ``owner`` that were received at ``received``."""
        if not requests:
            return
        if self._since is None:
            self._since = min(each.start for each in requests)
        own = self._engines.setdefault(engine, _Engine(owner))
        own.add_delay(requests, received)
        own.add_prefill(requests)
        divided = [self._boards[name].divided for name in own.boards if name in self._boards]
        front = min(divided, default=0)
        self._open += (_OpenRequest(each, own, each.end <= front) for each in requests)

    def assign(
        self,
        engine: Hashable,
        boards: frozenset[Board],
        owner: Hashable = None,
        members: frozenset[Hashable] = frozenset(),
    ) -> None:
        """Set the boards and processes of an engine of ``owner``, also for its waiting requests.

        All engines are assigned before steps are added.
        """
        own, known = self._engines.setdefault(engine, _Engine(owner)), self._boards
        joined = {name: known[name].received if name in known else 0 for name in boards}
        own.boards, own.joined = boards, joined | own.joined
        own.host.assign(members, self._marks)

    def withdraw(self, requests: Iterable[InferenceRequest]) -> None:
        """Remove these very requests: they are none of the engine's, or other spans report them.

        Energy that they have so far becomes idle energy.
        """
        identities = set(map(id, requests))
        for each in self._open:
            if id(each.request) in identities:
                self._withdrawn += each.energy
                self._host_withdrawn.update(each.engine.host.take(each.request).energy)
        self._open = [each for each in self._open if id(each.request) not in identities]

    def merge(self, engine: Hashable, into: Hashable) -> None:
        """Add the requests of an engine to another one, which it is a part of."""
        part = self._engines.pop(engine, None)
        if part is not None:
            whole = self._engines.setdefault(into, _Engine(part.owner))
            for each in self._open:
                if each.engine is part:
                    each.engine = whole
            whole.recent += part.recent
            self._host_withdrawn.update(whole.host.merge(part.host))

    def forget(self, engine: Hashable) -> None:
        """Release an engine; its requests remain. Idempotent."""
        known = self._engines.pop(engine, None)
        if known is not None:
            self._host_withdrawn.update(known.host.release(self._marks))

    def add_steps(self, boards: Mapping[Board, Sequence[CounterStep]]) -> None:
        """Add the newest steps of boards, in order of time; known ones are ignored.

        Energy before the first request is not divided.
        """
        if self._since is None:
            return
        for name, steps in boards.items():
            if name not in self._boards:
                self._boards[name] = StepQueue.since(steps, self._since)
                self._models.setdefault(name, self._model(name))
            self.received += self._boards[name].add(steps)

    def add_host_steps(
        self,
        engine: Hashable,
        counters: Mapping[HostCounter, Sequence[CounterStep]],
        since: int,
        left: Collection[str] = (),
    ) -> None:
        """Add the newest steps of an engine's processes on counters beyond its boards.

        ``since`` is the start of its first request, ``left`` the domains that others measure by
        now. The engine was assigned.
        """
        host = self._engines[engine].host
        host.add_steps(counters, since, left, self._marks.latest(host.members))

    def host_read_until(self, engine: Hashable, members: frozenset[Hashable]) -> int:
        """The time from which an engine of these processes needs steps beyond its boards."""
        marks, known = self._marks.latest(members), self._engines.get(engine)
        until = min(marks.values(), default=0)
        return until if known is None else max(until, known.host.read_until)

    def restart_host(
        self, engine: Hashable, members: frozenset[Hashable], kept: Collection[str]
    ) -> set[str]:
        """Forget the steps of an engine beyond its boards of which none was divided.

        Returns their domains, whose steps are to be added again; ``kept`` are not read again.
        """
        known, marks = self._engines.get(engine), self._marks.latest(members)
        return set() if known is None else known.host.restart(kept, marks)

    def expire_marks(self, before: int) -> None:
        """No step of a process from before a time will be added."""
        self._marks.expire(before)

    def restart(self, boards: Iterable[Board], since: int) -> list[Board]:
        """Forget the steps of an engine's boards of which none was divided; returns these boards.

        Their steps are to be added again, from ``since`` on: requests of an earlier time arrived.
        """
        fresh = []
        for name in boards:
            board = self._boards.get(name)
            if board is not None and board.is_undivided:
                self.received -= board.waiting
                del self._boards[name]
                fresh.append(name)
        self._since = since if self._since is None else min(self._since, since)
        return fresh

    # ---------------------------------------------------------------------------------- settle

    def settle(self, now: int, *, held: bool = False) -> SettledRequests:
        """Divide the steps that end by ``now``, and return the requests that are final.

        ``held``: the steps of each board wait for its :meth:`hold`.
        """
        self._update_clocks()
        idle, self._withdrawn = self._withdrawn, 0
        for name, board in self._boards.items():
            until = now - self.hold(name) if held else now
            reached, ready = board.divided, board.take(until)
            if not ready:
                continue
            users = [each for each in self._engines.values() if name in each.boards]
            self._models[name].set_prefill_time(max((each.prefill for each in users), default=0.0))
            near = [each for each in self._open if name in each.engine.boards]
            near = [each for each in near if each.overlaps(ready[0].start, board.divided)]
            near.sort(key=lambda each: id(each.engine))
            for step in ready:
                inside = [each for each in near if each.overlaps(step.start, step.end)]
                edge = step.start if inside else step.end
                if reached < edge:
                    board.leave(reached, edge)
                reached = step.end
                idle += self._divide(name, step, _fair(inside, MAX_ACTIVE))
        host_idle, self._host_withdrawn = self._host_withdrawn, Counter()
        for engine in self._engines.values():
            until = now - engine.hold if held else now
            host_idle.update(engine.host.settle(until, engine.opened))
        return SettledRequests(self._final(now, held=held), Microjoules(idle), host_idle)

    def _update_clocks(self) -> None:
        """Set the clocks of all engines, before some steps are divided."""
        opened: dict[int, list[InferenceRequest]] = {}
        for each in self._open:
            opened.setdefault(id(each.engine), []).append(each.request)
        engines = list(self._engines.values())
        for engine in engines:
            engine.keep(opened.get(id(engine), []))
        for engine in engines:
            others = [
                each.active
                for each in engines
                if each is not engine and not each.boards.isdisjoint(engine.boards)
            ]
            engine.progress.update([*engine.recent, *engine.opened], merged_periods(*others))

    def _final(self, now: int, *, held: bool) -> list[RequestEnergy]:
        """Remove and return the requests that have ended before all waiting steps."""
        lost = now - BOARD_TIMEOUT  # a board that has disappeared is not waited for
        fronts = {
            name: board.front(lost - (self.hold(name) if held else 0))
            for name, board in self._boards.items()
        }
        done: list[_OpenRequest] = []
        left: list[_OpenRequest] = []
        engines = {id(each.engine): each.engine for each in self._open}
        hosts = {
            at: engine.host.front(lost - (engine.hold if held else 0))
            for at, engine in engines.items()
        }
        for each in self._open:
            own = [fronts[name] for name in each.engine.boards if name in fronts]
            if (host := hosts[id(each.engine)]) is not None:
                own.append(host)
            front = min(own, default=lost - (each.engine.hold if held else 0))
            (done if each.request.end <= front else left).append(each)
        self._open = _fair(left[::-1], MAX_REQUESTS)[::-1]
        if len(self._open) < len(left):
            kept = set(map(id, self._open))
            done += [each for each in left if id(each) not in kept]
        for engine in self._engines.values():
            own_requests = [each.request for each in done if each.engine is engine]
            engine.progress.learn(own_requests)
            engine.recent += own_requests
        estimators = {id(each): self._estimator(each) for each in self._engines.values()}
        for each in done:
            if each.works and (estimator := estimators.get(id(each.engine))) is not None:
                self._compare(each, estimator)
        return list(map(self._result, done))

    def _compare(self, done: _OpenRequest, estimator: RequestEstimator) -> None:
        """Learn the parts of common work, and the error of an estimate."""
        estimate = estimator.estimate(done.request)
        if estimate is not None and done.method is DivisionMethod.MODEL:
            done.engine.means.compare(estimate, done.energy)
        done.engine.means.add(done.request, next(iter(done.works.values())))

    def estimator(self, engine: Hashable) -> RequestEstimator | None:
        """The estimator of the energy of requests before it has settled; None for no engine."""
        known = self._engines.get(engine)
        return None if known is None else self._estimator(known)

    def _estimator(self, engine: _Engine) -> RequestEstimator:
        boards = [self._models[name] for name in engine.boards if name in self._boards]
        names = {name for model in boards for name in model.names}
        energies = {}
        for name in names:
            if all(model.identified([name]) for model in boards):
                total = NO_TOKEN_ENERGY
                for model in boards:
                    total = total.plus(model.coefficients(name))
                energies[name] = total
        return engine.means.estimator(energies)

    def _result(self, done: _OpenRequest) -> RequestEnergy:
        energy = done.energy
        start, end = done.request.start, done.request.end
        names = self._boards.keys() & {*done.engine.boards, *done.works}
        # A board that was lost before has no energy of it, and none before the engine used it.
        early, later = [], [0]
        for name in {each for each in names if self._boards[each].received > start} or names:
            board = self._boards[name]
            used = min(end, max(start, board.began, done.engine.joined.get(name, 0)))
            early.append(board.missing(start, used))
            later.append(board.missing(used, end))
        missing = min(early, default=0) + max(later)
        prompt = min(energy, max(0, round(done.prefill)))
        uncertainty = None
        if done.method is DivisionMethod.MODEL:
            variance = done.noise + sum(
                self._models[board].variance(slopes) for board, slopes in done.slopes.items()
            )
            if isfinite(variance):
                uncertainty = Microjoules(round(_SURE * sqrt(variance)))
        return RequestEnergy(
            done.request,
            Microjoules(energy),
            Microjoules(prompt),
            Microjoules(energy - prompt),
            uncertainty,
            done.method,
            (energy > 0 or done.late) and missing * MOST_MISSING <= end - start,
            done.engine.host.take(done.request),
        )

    # ---------------------------------------------------------------------------------- divide

    def _divide(self, board: Board, step: CounterStep, inside: Sequence[_OpenRequest]) -> int:
        """Divide a step among the requests in it; returns the engine's idle energy."""
        model = self._models[board]
        start, end, energy, _ = step
        works = _works(inside, start, end)
        names = [each.request.cost_model for each in inside]
        places = list(map(model.place, names))
        # Before it is learned: the step must not be divided by its own energy.
        weights = expected_energies(model, places, works, energy, end - start)
        model.learn(_sums(names, works), energy, end - start)
        whole = weights.whole
        parts = [round(each * _RESOLUTION) for each in (weights.idle, *map(sum, weights.requests))]
        if not any(parts):
            return energy
        idle, *shares = split(energy, parts)
        divided = zip(inside, places, works, weights.requests, shares, strict=True)
        for each, place, work, (prompt, rest), share in divided:
            each.energy += share
            each.prefill += share * prompt / (prompt + rest) if prompt else 0.0
            each.works[board] = each.works.get(board, NO_WORK).plus(work)
            if place not in weights.learned or place is POOL:
                each.method = DivisionMethod.TOKENS
        if weights.learned and whole > 0:
            noise = model.residual_variance * (end - start) / SECOND
            # Requests that have the rest take the errors of all others.
            totals = _sums(places, works) if not weights.rest else {}
            divided = zip(inside, places, works, weights.requests, shares, strict=True)
            for each, place, work, own, share in divided:
                if place not in weights.learned:
                    continue
                fraction, scale = sum(own) / whole, energy / whole
                others = 1.0 if weights.rest else 1 - fraction
                each.noise += noise * fraction * others + _edge_variance(each, step, share)
                of_board = each.slopes.setdefault(board, {})
                for other, total in {place: NO_WORK, **totals}.items():
                    if other not in weights.learned:
                        continue
                    amounts = work if other == place else NO_WORK
                    slopes = of_board.setdefault(other, [0.0] * len(total))
                    for i, (amount, sum_of_all) in enumerate(zip(amounts, total, strict=True)):
                        slopes[i] += scale * (amount - fraction * sum_of_all)
        return idle


def _fair(requests: list[_OpenRequest], most: int) -> list[_OpenRequest]:
    """The first requests of each engine, ``most`` in all by owner and by engine, in their order."""
    if len(requests) <= most:
        return requests
    engines: dict[Hashable, Counter[int]] = {}
    for each in requests:
        engines.setdefault(each.engine.owner, Counter())[id(each.engine)] += 1
    parts = fair_parts([counts.total() for counts in engines.values()], most)
    left: dict[int, int] = {}
    for counts, part in zip(engines.values(), parts, strict=True):
        left |= zip(counts, fair_parts(list(counts.values()), part), strict=True)
    found = []
    for each in requests:
        if left[id(each.engine)]:
            left[id(each.engine)] -= 1
            found.append(each)
    return found


def _sums(keys: Sequence[T], works: Sequence[TokenWork]) -> dict[T, TokenWork]:
    """The sums of works by their keys."""
    totals: dict[T, TokenWork] = {}
    for key, work in zip(keys, works, strict=True):
        totals[key] = totals.get(key, NO_WORK).plus(work)
    return totals


def _works(inside: Sequence[_OpenRequest], start: int, end: int) -> list[TokenWork]:
    """The work of each request in a period; ``inside`` is sorted by engine."""
    engines = [list(own) for _, own in groupby(inside, key=lambda each: id(each.engine))]
    found = work_in(
        [([each.request for each in own], own[0].engine.progress.at) for own in engines],
        start,
        end,
    )
    return list(chain.from_iterable(found))


def _edge_variance(each: _OpenRequest, step: CounterStep, share: int) -> float:
    """The variance of the energy at the edges of a request that lie inside a step."""
    begin, until = each.request.start, each.request.end
    edges = (step.start < begin <= step.end) + (step.start < until <= step.end)
    time = min(step.end, until) - max(step.start, begin)
    return edges * (share * _EDGE_TIME / max(time, _EDGE_TIME)) ** 2
