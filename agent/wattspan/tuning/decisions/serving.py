"""Serving: comparison of concurrent requests by their time per work and by their latency.

Clients choose the load, so that blocks with and without a cap are compared only at the same load.
Work per second alone is no measure: a server that is not overloaded does all requested work,
however slowly. By Little's law the requests in flight ``N`` are the work per second ``X`` times the
time per unit of work ``T``, so ``T = N/X`` measures both: at the same ``X`` how much longer work
stays, at the same ``N`` how much less is done.

Blocks of requests are periods of time, not numbers of units, because requests overlap. A block is
finished some time after its end, when the requests that began in it have ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wattspan.model import SECOND
from wattspan.tuning.decisions.blocks import Block, LevelTime, SampleBuffer
from wattspan.tuning.decisions.sequential_test import Evidence, MissCounts
from wattspan.tuning.decisions.values import TunerPolicy, WorkUnit

MAX_LOAD_DIFFERENCE = 0.2
"""Largest log ratio of equal loads: arrivals are random anyway."""

REFERENCE_LIFETIME = 900 * SECOND
"""Largest distance of compared blocks: the kind of work may change."""

MIN_REQUESTS = 8
"""Smallest number of requests in a block that is compared."""

_WAITING = 8  # blocks that wait for one of the other setting at the same load
_LATENCIES = 4  # minimum duration of a block in latency limits
_SPREAD = 0.005  # minimum standard deviation of a log ratio
_ORIGINAL = 0.2  # share of the error for the bound of the original's misses


def latency_limit(policy: TunerPolicy, units: Sequence[WorkUnit]) -> int | None:
    """The latency limit in nanoseconds: the operator's, or one from ``units`` at the original.

    The original exceeds its own percentile as often as permitted, so that no cap could be shown
    to hold it. The limit is therefore the latency that half as many requests exceed; under a
    cap, they may at most double. None without units.
    """
    if policy.latency is not None:
        return policy.latency
    if not units:
        return None
    latencies = sorted(unit.end - unit.start for unit in units)
    rank = math.ceil(len(latencies) * (1 - (1 - policy.percentile) / 2))
    return latencies[min(rank, len(latencies)) - 1]


def units_to_learn(policy: TunerPolicy) -> int:
    """Requests at the original that determine the latency limit; 0 if it is configured."""
    allowed = 1 - policy.percentile
    return 0 if policy.latency is not None else math.ceil(2 / max(allowed, 1e-4))


def block_times(policy: TunerPolicy, limit: int) -> tuple[int, int]:
    """Settling time and block time, where requests may take ``limit``.

    Requests that end while a setting settles began under another one.
    """
    return max(policy.settle_time, limit), max(policy.block_time, _LATENCIES * limit)


def is_comparable(block: Block) -> bool:
    """True if the block has enough requests for a comparison."""
    return min(block.arrived, block.work, block.busy) > 0 and block.units >= MIN_REQUESTS


def log_ratio(original: Block, capped: Block) -> float | None:
    """Log ratio of the time per unit of work; None for different loads.

    The load is the same if as many requests arrived, or were in flight: clients choose one of the
    two, and the other follows from the setting. Fewer arrivals with more in flight are the same
    load, too: the server falls behind.
    """
    if not (is_comparable(original) and is_comparable(capped)):
        return None
    rate = math.log(capped.rate / original.rate)
    concurrency = math.log(capped.concurrency / original.concurrency)
    if min(abs(rate), abs(concurrency)) > MAX_LOAD_DIFFERENCE and not rate < 0 < concurrency:
        return None
    return math.log((capped.busy / capped.work) / (original.busy / original.work))


class _RatioMoments(NamedTuple):
    """Running moments of log ratios (Welford)."""

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
    """One setting against the original, from blocks of both in the order of time.

    ``load`` is the highest concurrency under the cap in a compared block.
    """

    ratios: _RatioMoments = field(default_factory=_RatioMoments)
    original: MissCounts = field(default_factory=MissCounts)
    capped: MissCounts = field(default_factory=MissCounts)
    load: float = 0.0
    _waiting: tuple[tuple[Block, bool], ...] = ()

    def add(self, block: Block, capped: bool) -> ServingComparison:
        """Add a block; it is compared with one of the other setting at the same load."""
        if not is_comparable(block):
            return self
        fresh = tuple(one for one in self._waiting if block.start - one[0].end < REFERENCE_LIFETIME)
        for place in reversed(range(len(fresh))):
            other, other_capped = fresh[place]
            if other_capped == capped:
                continue
            first, second = (other, block) if capped else (block, other)
            ratio = log_ratio(first, second)
            if ratio is not None:
                return ServingComparison(
                    self.ratios.add(ratio),
                    self.original.add(first.units, first.late),
                    self.capped.add(second.units, second.late),
                    max(self.load, second.concurrency),
                    (*fresh[:place], *fresh[place + 1 :]),
                )
        return replace(self, _waiting=(*fresh, (block, capped))[-_WAITING:])

    def covers(self, block: Block) -> bool:
        """True if the setting was compared at such a load or a higher one.

        The effect at higher loads is unknown, because queues begin abruptly.
        """
        return block.concurrency <= self.load * math.exp(MAX_LOAD_DIFFERENCE)

    def passes(self, policy: TunerPolicy) -> bool:
        """True if the setting keeps the budget and the latency limit.

        Each is certain at the policy's confidence. The bound of misses assumes that they are
        correlated as observed so far; :class:`MissAlarm` detects later ones.
        """
        ratios = self.ratios.evidence
        return (
            ratios.n >= policy.least_pairs
            and ratios.upper(1 - policy.confidence) <= math.log1p(policy.max_slowdown)
            and self.miss_bound(policy) <= self.allowed(policy)
        )

    def fails(self, policy: TunerPolicy) -> bool:
        """True if the setting certainly exceeds the budget or the latency limit."""
        error, ratios = 1 - policy.confidence, self.ratios.evidence
        if not ratios.n:
            return False
        # The observed ratio of the original: failing needs less certainty than passing.
        allowed = _allowed(policy, self.original.ratio or 0.0)
        too_slow = ratios.lower(error) > math.log1p(policy.max_slowdown)
        return too_slow or self.capped.at_least(error) > allowed

    def miss_bound(self, policy: TunerPolicy) -> float:
        """Upper bound of the ratio of misses under the cap."""
        error = (1 - policy.confidence) * (1 - _ORIGINAL)
        return self.capped.at_most(error, self.original.dispersion)

    def allowed(self, policy: TunerPolicy) -> float:
        """The ratio of requests that may exceed the latency limit.

        It is the policy's, plus the lower bound of the original's own misses where that is larger.
        """
        return _allowed(policy, self.original.at_least((1 - policy.confidence) * _ORIGINAL))


def _allowed(policy: TunerPolicy, original: float) -> float:
    allowed = 1 - policy.percentile
    return original + allowed if original > allowed else allowed


LATE_ARRIVAL = 6 * SECOND
"""Delay of arriving spans: exporters send batches, seconds after the end of requests."""

_MAX_WINDOW = 60 * SECOND


def add_requests(
    samples: SampleBuffer,
    policy: TunerPolicy,
    units: Sequence[WorkUnit],
    now: int,
    limit: int,
    interval: float,
) -> tuple[SampleBuffer, list[Block], list[LevelTime]]:
    """Add requests; returns finished blocks and the elapsed times too.

    ``limit`` is the latency limit, ``interval`` the mean time between requests in nanoseconds.
    """
    level, since, number = samples.periods[-1]
    settle, duration = block_times(policy, limit)
    duration = max(duration, round(policy.block_units * interval))
    windows = [_with(one, units, limit) for one in samples.windows]
    start = since + settle
    if windows and windows[-1].period == number:
        start = windows[-1].end
    while level is not None and start < now:
        empty = Block(level, start, start + duration, 0, 0.0, 0, 0, 0.0, None, number)
        windows.append(_with(empty, units, limit))
        start += duration
    delay = LATE_ARRIVAL + min(limit, _MAX_WINDOW)
    finished: list[Block] = []
    left: list[Block] = []
    for one in windows:
        if one.period != number and one.end > since:
            continue  # the setting changed during the block
        if now < one.end + delay:
            left.append(one)
        elif one.units:
            finished.append(one)
    completed = samples.completed if samples.served_number == number else 0
    completed += sum(one.period == number and one.start >= since for one in windows) - sum(
        one.period == number for one in left
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
    return samples, finished, elapsed


def _with(window: Block, units: Sequence[WorkUnit], limit: int) -> Block:
    level, start, end, ended, work, time, _, squares, energy, number, arrived, late = window
    for unit in units:
        arrived += start <= unit.start < end
        if start <= unit.end < end:
            latency = unit.end - unit.start
            ended += 1
            work += unit.work
            time += latency
            late += latency > limit
            squares += (latency / unit.work) ** 2
    return Block(level, start, end, ended, work, time, time, squares, energy, number, arrived, late)


def merged(blocks: Sequence[Block]) -> Block:
    """Several blocks of requests at one setting as one."""
    return blocks[0]._replace(
        start=0,
        end=sum([one.end - one.start for one in blocks]),
        units=sum([one.units for one in blocks]),
        work=sum([one.work for one in blocks]),
        busy=sum([one.busy for one in blocks]),
        arrived=sum([one.arrived for one in blocks]),
        late=sum([one.late for one in blocks]),
    )
