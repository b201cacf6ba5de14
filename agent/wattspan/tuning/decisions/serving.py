"""Serving: requests side by side, judged by the time of their work and by the tail.

What the clients ask for is not ours to choose, so what is done under a cap is compared with what
was done without one only where the load was the same. Work per second alone says nothing: until
a server is overrun it does all that is asked of it, however slowly. By Little's law the requests
in flight ``N`` are the work per second ``X`` times the time per unit of work ``T``, so ``T = N/X``
tells both: at the same ``X`` how much longer work stays, at the same ``N`` how much less is done.

Requests become blocks: stretches of time under one setting, and what was served in them.

Requests run side by side, so it is time that is cut, not units. A stretch is told some time after
its end: requests that came in it may not have ended yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wattspan.model import SECOND
from wattspan.tuning.decisions.blocks import Block, LevelTime, SampleBuffer
from wattspan.tuning.decisions.sequential_test import Evidence, MissAlarm, MissCounts
from wattspan.tuning.decisions.values import TunerPolicy, WorkUnit

MAX_LOAD_DIFFERENCE = 0.2
"""Loads whose ratio has a smaller logarithm are the same: requests come by chance as it is."""

REFERENCE_LIFETIME = 900 * SECOND
"""A stretch is not compared with one so much earlier: the work may be of another kind by then."""

MIN_REQUESTS = 8
"""A stretch with fewer requests says nothing."""

_WAITING = 8  # stretches kept until one of the other setting comes that had the same load
_LATENCIES = 4  # a block lasts so many times the latency that must hold
_SPREAD = 0.005  # no ratio is known better than so: what a pair shares is not what differs
_ORIGINAL = 0.2  # the part of the error that goes to what the original misses by itself


class LoadSample(NamedTuple):
    """What was served between two moments at one setting.

    ``arrived`` requests began in it and ``ended`` ended; of these are the sums of ``work`` and
    of latency in ``time``, and ``late`` of them took longer than the latency that must hold.
    """

    start: int
    end: int
    arrived: int
    ended: int
    work: float
    time: int
    late: int = 0

    @property
    def sufficient(self) -> bool:
        """Whether it says anything of speed."""
        return self.ended >= MIN_REQUESTS and self.arrived > 0 and self.work > 0 and self.time > 0

    @property
    def throughput(self) -> float:
        """Work per second."""
        return self.work / (self.end - self.start) * SECOND

    @property
    def rate(self) -> float:
        """Requests that came per second."""
        return self.arrived / (self.end - self.start) * SECOND

    @property
    def concurrency(self) -> float:
        """Requests in flight at once, on average (Little)."""
        return self.time / (self.end - self.start)

    @property
    def time_per_work(self) -> float:
        """Nanoseconds that a unit of work stayed; of a token, where work is tokens."""
        return self.time / self.work


def load_sample(units: Iterable[WorkUnit], start: int, end: int, limit: int) -> LoadSample:
    """What ``units`` tell of the time from ``start`` to before ``end``; ``limit`` is in ns.

    Units that ended later may be among them: they tell of arrivals.
    """
    arrived = ended = time = late = 0
    work = 0.0
    for unit in units:
        arrived += start <= unit.start < end
        if start <= unit.end < end:
            ended += 1
            work += unit.work
            time += unit.end - unit.start
            late += unit.end - unit.start > limit
    return LoadSample(start, end, arrived, ended, work, time, late)


def latency_limit(policy: TunerPolicy, units: Sequence[WorkUnit]) -> int | None:
    """The latency that must hold, in ns: the operator's, or what the original shows.

    ``units`` are the original setting's. Their own percentile is missed by just as many as may
    miss it, and nothing could be told from that; so it is the latency that half as many miss,
    and the promise is that under a cap they at most double. None without units.
    """
    if policy.latency is not None:
        return policy.latency
    if not units:
        return None
    latencies = sorted(unit.end - unit.start for unit in units)
    rank = math.ceil(len(latencies) * (1 - (1 - policy.percentile) / 2))
    return latencies[min(rank, len(latencies)) - 1]


def units_to_learn(policy: TunerPolicy) -> int:
    """How many of the original's requests show the latency that must hold; 0 if it is given."""
    allowed = 1 - policy.percentile
    return 0 if policy.latency is not None else math.ceil(2 / max(allowed, 1e-4))


def block_times(policy: TunerPolicy, limit: int) -> tuple[int, int]:
    """How long to let a setting settle, and then to watch it, where requests may take ``limit``.

    What ends while a setting settles was begun under another one.
    """
    return max(policy.settle_time, limit), max(policy.block_time, _LATENCIES * limit)


def log_ratio(original: LoadSample, capped: LoadSample) -> float | None:
    """The logarithm of how much longer a unit of work stayed; None where the load differed.

    The load is the same if as many requests came, or as many were in flight: one of the two is
    the clients' choice, and what becomes of the other is the setting's doing. Fewer served with
    more in flight is no other load either: it is the server that falls behind.
    """
    if not (original.sufficient and capped.sufficient):
        return None
    rate = math.log(capped.rate / original.rate)
    concurrency = math.log(capped.concurrency / original.concurrency)
    if min(abs(rate), abs(concurrency)) > MAX_LOAD_DIFFERENCE and not rate < 0 < concurrency:
        return None
    return math.log(capped.time_per_work / original.time_per_work)


class LatencyAssessment(NamedTuple):
    """What is known of a setting. ``passes`` and ``fails`` are both False while it is not.

    ``slowdown`` is of the time per unit of work at the same load, ``bound`` what it does not
    exceed; ``tail`` is the part of requests beyond the latency that must hold, ``tail_bound``
    what that does not exceed, and ``allowed`` what it may be. None is unknown.
    """

    passes: bool
    fails: bool
    pairs: int
    slowdown: float | None = None
    bound: float | None = None
    tail: float | None = None
    tail_bound: float | None = None
    allowed: float | None = None


class _RatioMoments(NamedTuple):
    """Logarithms of ratios, added up as they come (Welford)."""

    pairs: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> _RatioMoments:
        pairs = self.pairs + 1
        mean = self.mean + (value - self.mean) / pairs
        return _RatioMoments(pairs, mean, self.squares + (value - self.mean) * (value - mean))

    @property
    def evidence(self) -> Evidence:
        variance = self.squares / (self.pairs - 1) if self.pairs > 1 else 0.0
        return Evidence(self.pairs, self.mean, max(math.sqrt(variance), _SPREAD))


@dataclass(frozen=True, slots=True)
class ServingComparison:
    """One setting against the original, from stretches of both in the order of time.

    ``load`` is the most that was in flight under the cap in any stretch that counts.
    """

    ratios: _RatioMoments = field(default_factory=_RatioMoments)
    original: MissCounts = field(default_factory=MissCounts)
    capped: MissCounts = field(default_factory=MissCounts)
    unmatched: int = 0
    load: float = 0.0
    _waiting: tuple[tuple[LoadSample, bool], ...] = ()

    def add(self, block: LoadSample, capped: bool) -> ServingComparison:
        """With one more stretch; it counts once one of the other setting had the same load."""
        if not block.sufficient:
            return replace(self, unmatched=self.unmatched + 1)
        fresh = tuple(one for one in self._waiting if block.start - one[0].end < REFERENCE_LIFETIME)
        for place in reversed(range(len(fresh))):
            other, other_capped = fresh[place]
            if other_capped == capped:
                continue
            first, second = (other, block) if capped else (block, other)
            ratio = log_ratio(first, second)
            if ratio is not None:
                left = fresh[:place] + fresh[place + 1 :]
                return self._paired(first, second, ratio, left)
        kept = (*fresh, (block, capped))[-_WAITING:]
        lost = len(self._waiting) + 1 - len(kept)
        return replace(self, unmatched=self.unmatched + lost, _waiting=kept)

    def _paired(
        self,
        original: LoadSample,
        capped: LoadSample,
        ratio: float,
        left: tuple[tuple[LoadSample, bool], ...],
    ) -> ServingComparison:
        return ServingComparison(
            self.ratios.add(ratio),
            self.original.add(original.ended, original.late),
            self.capped.add(capped.ended, capped.late),
            self.unmatched + len(self._waiting) - len(left) - 1,
            max(self.load, capped.concurrency),
            left,
        )

    def covers(self, block: LoadSample) -> bool:
        """Whether the setting was judged at such a load, or a higher one.

        What it does at a higher one nobody knows: a queue begins all at once.
        """
        return block.concurrency <= self.load * math.exp(MAX_LOAD_DIFFERENCE)

    def verdict(self, policy: TunerPolicy) -> LatencyAssessment:
        """Whether the setting keeps the budget and the tail, at the policy's confidence.

        It passes only if both are sure, each at that confidence; one that surely breaks is
        enough to fail. Of the tail that is sure as far as misses come as they did so far, with
        the original's too: for crowds that nobody saw there is :meth:`alarm`.
        """
        error = 1 - policy.confidence
        ratios = self.ratios.evidence
        if not ratios.n:
            return LatencyAssessment(passes=False, fails=False, pairs=0)
        bound = _growth(ratios.upper(error))
        allowed = self.allowed(policy)
        tail_bound = self.capped.at_most(error * (1 - _ORIGINAL), self.original.dispersion)
        enough = ratios.n >= policy.least_pairs
        return LatencyAssessment(
            passes=enough and bound <= policy.max_slowdown and tail_bound <= allowed,
            fails=_growth(ratios.lower(error)) > policy.max_slowdown
            or self.capped.at_least(error) > self._likely_allowed(policy),
            pairs=ratios.n,
            slowdown=_growth(ratios.mean),
            bound=bound,
            tail=self.capped.ratio,
            tail_bound=tail_bound,
            allowed=allowed,
        )

    def allowed(self, policy: TunerPolicy) -> float:
        """The part of requests that may miss the latency.

        What the policy says; and where the original surely misses more than that by itself, as
        much again as the original misses at least.
        """
        allowed = 1 - policy.percentile
        own = self.original.at_least((1 - policy.confidence) * _ORIGINAL)
        return own + allowed if own > allowed else allowed

    def _likely_allowed(self, policy: TunerPolicy) -> float:
        """As :meth:`allowed`, by what the original seems to miss: enough for giving up."""
        allowed, own = 1 - policy.percentile, self.original.ratio or 0.0
        return own + allowed if own > allowed else allowed

    def miss_alarm(self, policy: TunerPolicy) -> MissAlarm:
        """What to feed every request to while the setting is held, to release it at once."""
        return MissAlarm(self.allowed(policy))


def _growth(logarithm: float) -> float:
    return math.expm1(min(logarithm, 700.0))  # beyond, a float has no room


LATE_ARRIVAL = 6 * SECOND
"""Exporters tell of requests in batches, seconds after their end."""

_MAX_WINDOW = 60 * SECOND


class ServingWindow(NamedTuple):
    """A stretch in the making."""

    level: int
    number: int
    start: int
    end: int
    arrived: int = 0
    ended: int = 0
    work: float = 0.0
    time: int = 0
    late: int = 0
    squares: float = 0.0


def add_requests(
    samples: SampleBuffer,
    policy: TunerPolicy,
    units: Sequence[WorkUnit],
    now: int,
    limit: int,
    apart: float,
) -> tuple[SampleBuffer, list[Block], list[LevelTime]]:
    """The tape after these requests, which blocks they finish, and the time that passed.

    ``limit`` is the latency that must hold, ``apart`` how many nanoseconds lie between requests
    on average.
    """
    level, since, number = samples.periods[-1]
    settle, watch = block_times(policy, limit)
    watch = max(watch, round(policy.block_units * apart))
    windows = [_with(one, units, limit) for one in samples.windows]
    start = since + settle
    if windows and windows[-1].number == number:
        start = windows[-1].end
    while level is not None and start < now:
        windows.append(_with(ServingWindow(level, number, start, start + watch), units, limit))
        start += watch
    grace = LATE_ARRIVAL + min(limit, _MAX_WINDOW)
    told: list[Block] = []
    left: list[ServingWindow] = []
    for one in windows:
        if one.number != number and one.end > since:
            continue  # the setting changed in it
        if now < one.end + grace:
            left.append(one)
        elif one.ended:
            told.append(_block(one))
    completed = samples.completed if samples.served_number == number else 0
    completed += sum(one.number == number and one.start >= since for one in windows) - sum(
        one.number == number for one in left
    )
    elapsed = [] if not units else [LevelTime(level, now - samples.served_to, len(units))]
    last_end = max([samples.last_end, *(unit.end for unit in units)])
    samples = samples._replace(
        periods=samples.periods[-1:],
        windows=tuple(left),
        completed=completed,
        served_number=number,
        served_to=now if units else samples.served_to,
        last_end=last_end,
    )
    return samples, told, elapsed


def _with(window: ServingWindow, units: Sequence[WorkUnit], limit: int) -> ServingWindow:
    level, number, start, end, arrived, ended, work, time, late, squares = window
    for unit in units:
        arrived += start <= unit.start < end
        if start <= unit.end < end:
            took = unit.end - unit.start
            ended += 1
            work += unit.work
            time += took
            late += took > limit
            squares += (took / unit.work) ** 2
    return ServingWindow(level, number, start, end, arrived, ended, work, time, late, squares)


def _block(one: ServingWindow) -> Block:
    return Block(
        one.level,
        one.start,
        one.end,
        one.ended,
        one.work,
        one.time,
        one.time,
        one.squares,
        None,
        one.number,
        one.arrived,
        one.late,
    )


def block_load(block: Block) -> LoadSample:
    """What a block of requests tells of serving."""
    return LoadSample(
        block.start, block.end, block.arrived, block.units, block.work, block.busy, block.late
    )


def merged_load(blocks: Sequence[Block]) -> LoadSample:
    """Several blocks of one setting as one, as long as all of them."""
    lasted = sum([one.end - one.start for one in blocks])
    return LoadSample(
        0,
        lasted,
        sum([one.arrived for one in blocks]),
        sum([one.units for one in blocks]),
        sum([one.work for one in blocks]),
        sum([one.busy for one in blocks]),
        sum([one.late for one in blocks]),
    )
