"""Units of work become blocks: settled stretches of work under one setting, with their energy.

A unit counts if it began after the setting had settled and ended before it changed. Energy comes
later than units do; a block waits for it, but whoever plans the next setting need not: ``done``
tells how many blocks of the present stretch are full.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from wattspan.model import SECOND
from wattspan.tuning.decisions.values import EnergyPoint, TunerPolicy, WorkUnit

ENERGY_TIMEOUT = 30 * SECOND
"""How long a block waits for its energy."""

_POINTS = 512


class Block(NamedTuple):
    """Work at one level, from the start of its first unit to the end of its last.

    ``busy`` is what the units say they took, ``span`` what they took together with what lay
    between them; longer pauses are in neither, and then energy is unknown.
    """

    level: int
    start: int
    end: int
    units: int
    work: float
    busy: int
    span: int
    squares: float  # of each unit's time per work
    energy: float | None
    run: int  # which stretch it is of: stretches are counted
    arrived: int = 0  # requests that began in it
    late: int = 0  # and those that took longer than the latency that must hold


class LevelPeriod(NamedTuple):
    """A level from when it was in force on."""

    level: int | None  # None: what is in force is not what was asked for
    since: int
    number: int


class BlockTotals(NamedTuple):
    """A block in the making."""

    start: int = 0
    units: int = 0
    work: float = 0.0
    busy: int = 0
    span: int = 0
    squares: float = 0.0
    paused: bool = False


_NO_TOTALS = BlockTotals()


class LevelTime(NamedTuple):
    """Time at a level, settled or not: for the account of what was lost."""

    level: int | None
    span: int
    units: int


class SampleBuffer(NamedTuple):
    """What is not yet told as blocks."""

    periods: tuple[LevelPeriod, ...]
    sums: BlockTotals = _NO_TOTALS
    skipped: int = 0
    last_end: int = 0  # the end of the latest unit
    elapsed: int = 0  # time in the first stretch that is not told yet
    elapsed_units: int = 0
    completed: int = 0  # blocks that are full, of the first stretch
    waiting: tuple[Block, ...] = ()
    points: tuple[EnergyPoint, ...] = ()
    windows: tuple[Any, ...] = ()  # of requests, in the making
    served_to: int = 0
    served_number: int = 0

    @property
    def level(self) -> int | None:
        """The level that is in force."""
        return self.periods[-1].level

    @property
    def full_blocks(self) -> int:
        """How many blocks of the level in force are full, with or without energy."""
        return self.completed if len(self.periods) == 1 else 0


def empty_buffer(level: int, now: int) -> SampleBuffer:
    """A tape of a job that has this level."""
    return SampleBuffer((LevelPeriod(level, now, 0),))


def set_level(samples: SampleBuffer, level: int | None, since: int) -> SampleBuffer:
    """What is in force, and since when."""
    last = samples.periods[-1]
    if last.level == level and since <= last.since:
        return samples
    stretch = LevelPeriod(level, max(since, last.since), last.number + 1)
    return samples._replace(periods=(*samples.periods[-7:], stretch))


def add_units(
    samples: SampleBuffer,
    policy: TunerPolicy,
    units: Sequence[WorkUnit],
    points: Sequence[EnergyPoint],
    now: int,
) -> tuple[SampleBuffer, list[Block], list[LevelTime]]:
    """The tape after these units, the blocks that are finished, and the time that passed."""
    times: list[LevelTime] = []
    waiting = list(samples.waiting)
    if units:
        samples = _run(samples, policy, units, waiting, times)
    samples, blocks = add_energy(samples, waiting, points, now)
    return samples, blocks, times


def add_energy(
    samples: SampleBuffer, waiting: list[Block], points: Sequence[EnergyPoint], now: int
) -> tuple[SampleBuffer, list[Block]]:
    """The tape with more energy readings, and those that wait whose energy is known by now."""
    if points:
        samples = samples._replace(points=_thinned(samples.points + tuple(points)))
    if not waiting:
        return _drop_used_points(samples) if points else samples, []
    told = [_with_energy(one, samples.points) for one in waiting]
    count = 0
    while count < len(told) and (
        told[count] is not None or now - waiting[count].end > ENERGY_TIMEOUT
    ):
        count += 1
    blocks = [told[at] or waiting[at] for at in range(count)]
    return _drop_used_points(samples._replace(waiting=tuple(waiting[count:]))), blocks


def _run(
    samples: SampleBuffer,
    policy: TunerPolicy,
    units: Sequence[WorkUnit],
    waiting: list[Block],
    times: list[LevelTime],
) -> SampleBuffer:
    periods = list(samples.periods)
    level, since, number = periods[0]
    until = periods[1].since if len(periods) > 1 else None
    settled = since + policy.settle_time
    start, n, work, busy, span, squares, paused = samples.sums
    skipped, last_end, completed = samples.skipped, samples.last_end, samples.completed
    elapsed, elapsed_units = samples.elapsed, samples.elapsed_units
    wanted, lasting = policy.block_units, policy.block_time
    for unit in units:
        begun, ended, amount, _, _ = unit
        while until is not None and begun >= until:
            if 2 * n >= wanted and level is not None:
                sums = BlockTotals(start, n, work, busy, span, squares, paused)
                waiting.append(_block(level, number, sums, last_end))
            times.append(LevelTime(level, elapsed, elapsed_units))
            del periods[0]
            level, since, number = periods[0]
            until = periods[1].since if len(periods) > 1 else None
            settled = since + policy.settle_time
            n = work = busy = span = skipped = completed = elapsed = elapsed_units = 0
            squares, paused = 0.0, False
        took = ended - begun
        gap = begun - last_end
        if gap <= 0:  # another unit was under way: what is new of it
            more = max(ended - last_end, 0)
        elif gap * 2 <= took:
            more = took + gap
        else:
            more = took
        elapsed += more
        elapsed_units += 1
        if begun < settled or (until is not None and ended > until):
            last_end = max(last_end, ended)
            continue
        if skipped < policy.settle_units:
            skipped += 1
            last_end = max(last_end, ended)
            continue
        if n == 0:
            if gap >= 0 and gap * 2 <= took and last_end >= settled:
                start = last_end  # what lay before the unit is of the work too
            else:
                start, more = begun, took
        elif gap * 2 > took:
            paused = True
        last_end = max(last_end, ended)
        n += 1
        work += amount
        busy += took
        span += more
        per = took / amount
        squares += per * per
        if n >= wanted and ended - start >= lasting:
            if level is not None:
                sums = BlockTotals(start, n, work, busy, span, squares, paused)
                waiting.append(_block(level, number, sums, ended))
            completed += 1
            n = busy = span = 0
            work = squares = 0.0
            paused = False
            times.append(LevelTime(level, elapsed, elapsed_units))
            elapsed = elapsed_units = 0
    return samples._replace(
        periods=tuple(periods),
        sums=BlockTotals(start, n, work, busy, span, squares, paused) if n else _NO_TOTALS,
        skipped=skipped,
        last_end=last_end,
        elapsed=elapsed,
        elapsed_units=elapsed_units,
        completed=completed,
    )


def _block(level: int, number: int, sums: BlockTotals, end: int) -> Block:
    start, n, work, busy, span, squares, paused = sums
    energy = -1.0 if paused else None
    return Block(level, start, end, n, work, busy, span, squares, energy, number)


def _with_energy(block: Block, points: tuple[EnergyPoint, ...]) -> Block | None:
    """The block with its energy, if that is known by now."""
    if block.energy is not None:  # there was a pause in it: what it spent is not the work's alone
        return block._replace(energy=None)
    if not points or points[-1].at < block.end:
        return None
    if points[0].at > block.start:
        return block
    energy = _energy_at(points, block.end) - _energy_at(points, block.start)
    return block._replace(energy=energy if energy > 0 else None)


def _energy_at(points: tuple[EnergyPoint, ...], at: int) -> float:
    """By a straight line between the two points around."""
    right = bisect_left(points, (at, -1))
    if points[right].at == at or right == 0:
        return points[right].energy
    (before, low), (after, high) = points[right - 1], points[right]
    return low + (high - low) * (at - before) / (after - before)


def _thinned(points: tuple[EnergyPoint, ...]) -> tuple[EnergyPoint, ...]:
    """Never too many: of the older half every other one goes."""
    if len(points) <= _POINTS:
        return points
    half = len(points) // 2
    return points[:half:2] + points[half:]


def _drop_used_points(samples: SampleBuffer) -> SampleBuffer:
    """The points that no block will ask for again."""
    points = samples.points
    if len(points) < 64:
        return samples
    oldest = min(
        [one.start for one in (*samples.waiting, *samples.windows)]
        + [samples.sums.start if samples.sums.units else samples.last_end]
    )
    first = bisect_left(points, (oldest, -1)) - 1
    return samples._replace(points=points[first:]) if first > 16 else samples
