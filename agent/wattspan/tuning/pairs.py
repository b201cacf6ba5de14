"""Blocks become comparisons: a run of blocks at one setting against the runs around it.

What lies in the middle is compared with what came before and after, so a steady drift of the
job cancels: A B A, in the order in which the blocks happened to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from wattspan.tuning.blocks import Block
from wattspan.tuning.serving import log_ratio
from wattspan.tuning.windows import together

_APART = 12
"""Blocks that lie further apart than so many of their lengths are not compared."""


class Pair(NamedTuple):
    """A capped stretch against an uncapped one, as logarithms of their ratios per work."""

    level: int
    at: int
    busy: float  # of the time that units say they took
    span: float  # of the time from unit to unit
    power: float | None
    weight: float  # variance of one unit's noise that is left in it
    apart: float = 0.0  # log ratio of time per work of what lay around, after over before


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one stretch: the first few and the last few."""

    head: tuple[Block, ...]
    tail: tuple[Block, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Pairing:
    """The two runs before, and the present one; ``told``: the middle one was compared."""

    before: Run | None = None
    middle: Run | None = None
    present: Run | None = None
    told: bool = False


def follow(
    pairing: Pairing, block: Block, top: int, *, reach: int, screening: bool
) -> tuple[Pairing, Pair | None]:
    """The pairing after one more block, and the comparison that it completes, if it does.

    ``reach`` blocks on each side are used. While ``screening`` a capped run lies in the middle
    of two uncapped ones, otherwise an uncapped run in the middle of two capped ones, so that
    no block is used twice.
    """
    present = pairing.present
    if present is not None and present.tail[-1].run == block.run:
        if not _near(present.tail[-1], block):
            return Pairing(present=Run((block,), (block,), 1)), None
        head = (*present.head, block) if present.count < 4 else present.head
        present = Run(head, (*present.tail[-3:], block), present.count + 1)
        pairing = replace(pairing, present=present)
    elif present is not None and _near(present.tail[-1], block):
        pairing = Pairing(pairing.middle, present, Run((block,), (block,), 1))
    else:
        return Pairing(present=Run((block,), (block,), 1)), None
    return _compare(pairing, top, reach, screening=screening)


def _near(one: Block, other: Block) -> bool:
    return other.start - one.end <= _APART * (one.end - one.start)


def _compare(
    pairing: Pairing, top: int, reach: int, *, screening: bool
) -> tuple[Pairing, Pair | None]:
    before, middle, present = pairing.before, pairing.middle, pairing.present
    if pairing.told or before is None or middle is None or present is None:
        return pairing, None
    level, around = middle.head[0].level, present.head[0].level
    if before.head[0].level != around or (level == top) == (around == top):
        return pairing, None
    if (around == top) is not screening or present.count < reach:
        return pairing, None
    # Of the run before, what the comparison before it has not used.
    first = before.tail[-min(reach, max(1, before.count // 2)) :]
    flank = first + present.head[:reach]
    core = middle.head + middle.tail[len(middle.tail) - min(middle.count - len(middle.head), 4) :]
    capped, free = (core, flank) if screening else (flank, core)
    if core[0].arrived:
        pair = _served(capped, free)
        return replace(pairing, told=True), pair
    pair = _pair(capped, free)
    apart = math.log(_rates(present.head[:reach])[0] / _rates(first)[0])
    return replace(pairing, told=True), pair._replace(apart=apart)


def _served(capped: Sequence[Block], free: Sequence[Block]) -> Pair | None:
    """Of requests; None where the load was not the same."""
    ratio = log_ratio(together(free), together(capped))
    if ratio is None:
        return None
    return _pair(capped, free)._replace(busy=ratio, span=ratio)


def _pair(capped: Sequence[Block], free: Sequence[Block]) -> Pair:
    busy1, span1, power1, units1 = _rates(capped)
    busy0, span0, power0, units0 = _rates(free)
    power = None if power1 is None or power0 is None else math.log(power1 / power0)
    return Pair(
        capped[0].level,
        max(capped[-1].end, free[-1].end),
        math.log(busy1 / busy0),
        math.log(span1 / span0),
        power,
        1 / units1 + 1 / units0,
    )


def _rates(blocks: Sequence[Block]) -> tuple[float, float, float | None, int]:
    """Time per work, both ways, mean power where it is known, and the number of units."""
    work = math.fsum([one.work for one in blocks])
    busy = sum([one.busy for one in blocks]) / work
    span = sum([one.span for one in blocks]) / work
    known = [one for one in blocks if one.energy is not None]
    power = None
    if known:
        lasted = sum([one.end - one.start for one in known])
        power = math.fsum([one.energy or 0.0 for one in known]) / lasted
    return busy, span, power, sum([one.units for one in blocks])
