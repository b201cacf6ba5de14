"""Requests become blocks: stretches of time under one setting, and what was served in them.

Requests run side by side, so it is time that is cut, not units. A stretch is told some time after
its end: requests that came in it may not have ended yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wattspan.model import SECOND
from wattspan.tuning.blocks import Block, Tape, Time
from wattspan.tuning.serving import Served, block_times
from wattspan.tuning.values import Policy, Unit

LATE = 6 * SECOND
"""Exporters tell of requests in batches, seconds after their end."""

_LONGEST = 60 * SECOND


class Window(NamedTuple):
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


def serve(
    tape: Tape, policy: Policy, units: Sequence[Unit], now: int, limit: int, apart: float
) -> tuple[Tape, list[Block], list[Time]]:
    """The tape after these requests, which blocks they finish, and the time that passed.

    ``limit`` is the latency that must hold, ``apart`` how many nanoseconds lie between requests
    on average.
    """
    level, since, number = tape.stretches[-1]
    settle, watch = block_times(policy, limit)
    watch = max(watch, round(policy.block_units * apart))
    windows = [_with(one, units, limit) for one in tape.windows]
    start = since + settle
    if windows and windows[-1].number == number:
        start = windows[-1].end
    while level is not None and start < now:
        windows.append(_with(Window(level, number, start, start + watch), units, limit))
        start += watch
    grace = LATE + min(limit, _LONGEST)
    told: list[Block] = []
    left: list[Window] = []
    for one in windows:
        if one.number != number and one.end > since:
            continue  # the setting changed in it
        if now < one.end + grace:
            left.append(one)
        elif one.ended:
            told.append(_block(one))
    done = tape.done if tape.served_number == number else 0
    done += sum(one.number == number and one.start >= since for one in windows) - sum(
        one.number == number for one in left
    )
    passed = [] if not units else [Time(level, now - tape.served_to, len(units))]
    reached = max([tape.reached, *(unit.end for unit in units)])
    tape = tape._replace(
        stretches=tape.stretches[-1:],
        windows=tuple(left),
        done=done,
        served_number=number,
        served_to=now if units else tape.served_to,
        reached=reached,
    )
    return tape, told, passed


def _with(window: Window, units: Sequence[Unit], limit: int) -> Window:
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
    return Window(level, number, start, end, arrived, ended, work, time, late, squares)


def _block(one: Window) -> Block:
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


def as_served(block: Block) -> Served:
    """What a block of requests tells of serving."""
    return Served(
        block.start, block.end, block.arrived, block.units, block.work, block.busy, block.late
    )


def together(blocks: Sequence[Block]) -> Served:
    """Several blocks of one setting as one, as long as all of them."""
    lasted = sum([one.end - one.start for one in blocks])
    return Served(
        0,
        lasted,
        sum([one.arrived for one in blocks]),
        sum([one.units for one in blocks]),
        sum([one.work for one in blocks]),
        sum([one.busy for one in blocks]),
        sum([one.late for one in blocks]),
    )
