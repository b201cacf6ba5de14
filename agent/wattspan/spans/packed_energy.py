"""The energies of all hardware types in one integer, and the rows of profiles with uncertainties.

Each hardware type has a *lane* of bits, wide enough that sums, differences and products by one
number never carry into the next. One operation therefore computes all types, which makes it
possible to join a span in microseconds.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, hypot, sqrt
from struct import Struct
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND, HwType, Microjoules
from wattspan.spans.values import dict_builder

KINDS = (HwType.CPU, HwType.MEMORY, HwType.GPU, HwType.ENCLOSURE)
LANE_OF = {kind: lane for lane, kind in enumerate(KINDS)}
_STATIC_LANE = len(KINDS)
"""The lane of the static part of GPU energy, which is in the lane of GPUs as well."""

LANES = len(KINDS) + 1

# Sizes are whole bytes, so that `struct` can read lanes.
_CLOCK_BYTES = 12  # the lowest lane holds nanoseconds; the others begin above it
_LANE_BYTES = 24
_FRACTION_BYTES = 4  # energies are in microjoules times 2**32
_SHARE_BYTES = 13  # microjoules times 2**104: see `joining`
_ROWS = 256  # that are unpacked at once
CLOCK_MASK = (1 << 8 * _CLOCK_BYTES) - 1
FRACTION = 8 * _FRACTION_BYTES
SHARE = 8 * (_SHARE_BYTES - _FRACTION_BYTES)


def shift_of(kind: HwType) -> int:
    """The lowest bit of the lane of ``kind``, which holds microjoules times 2**32."""
    return 8 * (_CLOCK_BYTES + _LANE_BYTES * LANE_OF[kind])


_SHIFTS = tuple(8 * (_CLOCK_BYTES + _LANE_BYTES * lane) + FRACTION for lane in range(LANES))
WHOLE = sum(((1 << 8 * (_LANE_BYTES - _FRACTION_BYTES)) - 1) << shift for shift in _SHIFTS)
_LANE_MASK = (1 << 8 * _LANE_BYTES) - 1
GPU_MASK = _LANE_MASK << shift_of(HwType.GPU)
GPU_LANES_MASK = GPU_MASK | _LANE_MASK << _SHIFTS[_STATIC_LANE] - FRACTION
"""GPU energy and its static part, which are divided by the same weights."""


class Lanes:
    """Packs and unpacks the lanes of some hardware types.

    With ``static`` the values of a sequence have one more at the end, the static part of the GPU
    energy; ``named`` takes those of the hardware types.
    """

    def __init__(self, kinds: frozenset[HwType], static: bool = False) -> None:
        self.kinds = tuple(kind for kind in KINDS if kind in kinds)
        self.measured = tuple(LANE_OF[kind] for kind in self.kinds)
        self.static = static
        self.numbers = (*self.measured, _STATIC_LANE) if static else self.measured
        self.named = dict_builder(self.kinds)
        self._size = _CLOCK_BYTES + _LANE_BYTES * (1 + max(self.numbers, default=0))
        energy, share = self._layout(_FRACTION_BYTES), self._layout(_SHARE_BYTES)
        self._energy, self._share = Struct(f"<{energy}"), Struct(f"<{share}")
        self._energies, self._shares = Struct(f"<{energy * _ROWS}"), Struct(f"<{share * _ROWS}")

    def _layout(self, begin: int) -> str:
        layout, at = "", 0
        for number in self.numbers:
            place = _CLOCK_BYTES + _LANE_BYTES * number + begin
            layout, at = f"{layout}{place - at}xQ", place + 8
        return f"{layout}{self._size - at}x"

    def energies(self, packed: int) -> tuple[Microjoules, ...]:
        """Whole microjoules of each type, rounded down."""
        return self._energy.unpack(packed.to_bytes(self._size, "little"))

    def shares(self, packed: int) -> tuple[Microjoules, ...]:
        """Whole microjoules of each type in a product of energy and a share times 2**72."""
        return self._share.unpack(packed.to_bytes(self._size, "little"))

    def energy_columns(self, packed: Iterable[int]) -> list[list[Microjoules]]:
        """As ``energies``, for one or more values: a column for each type."""
        return self._columns(self._energy, self._energies, packed)

    def share_columns(self, packed: Iterable[int]) -> list[list[Microjoules]]:
        """As ``shares``, for one or more values: a column for each type."""
        return self._columns(self._share, self._shares, packed)

    def _columns(self, row: Struct, rows: Struct, packed: Iterable[int]) -> list[list[Microjoules]]:
        size, width = self._size, len(self.numbers)
        line = b"".join([each.to_bytes(size, "little") for each in packed])
        values: list[Microjoules] = []
        at = 0
        while at + rows.size <= len(line):  # many at once take half the time
            values += rows.unpack_from(line, at)
            at += rows.size
        for one in row.iter_unpack(line[at:]):
            values += one
        return [values[number::width] for number in range(width)]

    def pack(self, energies: Iterable[int]) -> int:
        """Microjoules of each type, packed."""
        pairs = zip(energies, self.numbers, strict=True)
        return sum(energy << _SHIFTS[number] for energy, number in pairs)

    def slope(self, before: int, after: int, length: int) -> int:
        """The rise of each lane per nanosecond, rounded down, so that it never passes ``after``."""
        rise = 0
        for number in self.numbers:
            shift = _SHIFTS[number] - FRACTION
            rise += (
                (after >> shift & _LANE_MASK) - (before >> shift & _LANE_MASK)
            ) // length << shift
        return rise

    def clamp(self, energy: int, least: int, most: int) -> int:
        """``energy`` between ``least`` and ``most``, in each lane."""
        clamped = 0
        for number in self.numbers:
            shift = _SHIFTS[number] - FRACTION
            low, value, high = (lane >> shift & _LANE_MASK for lane in (least, energy, most))
            clamped |= max(low, min(value, high)) << shift
        return clamped


lanes_of = functools.cache(Lanes)

FULL_RESOLUTION_AGE = 20 * SECOND  # younger rows are thinned only for want of room


class ProfileRows(NamedTuple):
    """Cumulative energy over time, packed; the last row is the watermark.

    From ``times[i]`` on the energy is ``energy[i]`` and rises by ``slope[i]`` per nanosecond.
    """

    times: list[int]
    energy: list[int]
    slope: list[int]


class RowUncertainties(NamedTuple):
    """The uncertainties of one lane for each row, with the fields of an EnergySlice."""

    step: array[float]
    curve: array[float]
    rate: array[float]
    walk: array[float]
    baseline: array[float]


def empty_uncertainties() -> tuple[RowUncertainties, ...]:
    return tuple(
        RowUncertainties(array("f"), array("f"), array("f"), array("d"), array("d"))
        for _ in range(LANES)
    )


def thinned_indices(times: Sequence[int], scale: int, left: int, right: int) -> list[int]:
    """The rows from ``left`` to before ``right`` that remain; distances grow with their age."""
    kept = [right]
    for i in range(right - 1, left, -1):
        age = times[-1] - times[i]
        if age < FULL_RESOLUTION_AGE:
            apart = (scale - 1) * 10 * MILLISECOND
        else:
            apart = max(100 * MILLISECOND, age // 128) * scale
        if times[kept[-1]] - times[i - 1] > apart:
            kept.append(i)
    return [*kept[1:], left]


def merged_uncertainties(
    lanes: Lanes, old: ProfileRows, errors: Sequence[RowUncertainties], left: int, right: int
) -> list[tuple[float, ...]]:
    """The uncertainties of rows ``left`` to ``right`` replaced by one straight line.

    The deviation of the line from the rows adds to the uncertainties of the rows.
    """
    begin, length = old.times[left], old.times[right] - old.times[left]
    known = [lanes.energies(energy) for energy in old.energy[left : right + 1]]
    merged: list[tuple[float, ...]] = []
    for place, lane in enumerate(lanes.numbers):
        energies = [each[place] for each in known]
        power = (energies[-1] - energies[0]) / length
        offset = slope = 0.0
        for i in range(left, right):
            line = energies[0] + power * (old.times[i] - begin)
            offset = max(offset, abs(energies[i - left] - line))
            rise = energies[i - left + 1] - energies[i - left]
            slope = max(slope, abs(rise / (old.times[i + 1] - old.times[i]) - power))
        step, curve, rate, *sums = (max(values[left:right]) for values in errors[lane])
        merged.append((step, offset + curve, slope + rate, *sums))
    return merged


def merge_rows(
    lanes: Lanes, rows: ProfileRows, errors: Sequence[RowUncertainties], bounds: Sequence[int]
) -> int:
    """Merge the rows between each two of ``bounds``; returns the end of the last merged ones."""
    kept = bounds[:-1]
    columns = [column for lane in errors for column in lane]
    slopes = [rows.slope[i] for i in kept]
    chosen = [[column[i] for i in kept] for column in columns]
    until = -1
    for at, (first, last) in enumerate(pairwise(bounds)):
        if last - first > 1:
            until = rows.times[last]
            length = until - rows.times[first]
            slopes[at] = lanes.slope(rows.energy[first], rows.energy[last], length)
            merged = merged_uncertainties(lanes, rows, errors, first, last)
            for number, values in zip(lanes.numbers, merged, strict=True):
                for place, value in enumerate(values, number * len(values)):
                    chosen[place][at] = value
    part = slice(bounds[0], bounds[-1])
    rows.slope[part], rows.energy[part] = slopes, [rows.energy[i] for i in kept]
    rows.times[part] = [rows.times[i] for i in kept]
    for column, remaining in zip(columns, chosen, strict=True):
        column[part] = array(column.typecode, remaining)
    return until


UNCERTAINTY_CACHE_SIZE = 4096


class Uncertainty(NamedTuple):
    """The uncertainty in microjoules of periods between two rows.

    Errors of counter steps at two edges are independent. Errors of the power curve are not, because
    one activity between the edges affects both. ``edges`` combines the two. Within one slice the
    error grows with the length, by ``rates`` (times 2**32) per nanosecond; from the length ``far``
    on ``edges`` is the smaller one for all types. ``inside`` has the errors of the time between the
    slices of the two edges, also where these have no energy.
    """

    far: int
    edges: dict[HwType, Microjoules]
    rates: list[int]
    inside: list[int]
    near: dict[int, dict[HwType, Microjoules]]  # computed values, by minus the length


def uncertainty_between(
    lanes: Lanes, errors: Sequence[RowUncertainties], first: int, last: int, newest: int
) -> Uncertainty:
    """The uncertainty of periods from row ``first`` to row ``last``; ``newest`` is the last row."""
    # The newest row is empty: it only ends its predecessor.
    until = last - 1 if last == newest > first else last
    edges, rates, inside = [], [], []
    for lane in lanes.measured:
        steps, curves, slopes, walks, baselines = errors[lane]
        walked = sqrt(max(0.0, walks[until] - walks[first]))
        baseline = baselines[until] - (baselines[first - 1] if first else 0.0)
        step = hypot(steps[first], steps[until], walked, baseline)
        # One microjoule more, for rounding.
        edges.append(ceil(hypot(step, curves[first] + curves[until])) + 1)
        rates.append(ceil(max(slopes[first], slopes[until]) * 2**32) + 1)
        inside.append(ceil(baseline) if first < until else 0)
    far = max((e << 32) // r + 1 for e, r in zip(edges, rates, strict=True))
    return Uncertainty(far, lanes.named(*edges), rates, inside, {})


def short_period_uncertainty(
    lanes: Lanes, uncertainty: Uncertainty, length: int
) -> dict[HwType, Microjoules]:
    """The uncertainty of a period shorter than ``far``, its length rounded to three bits."""
    size = (length | 7).bit_length() - 3
    rounded = -length >> size << size  # away from zero, whichever sign
    errors = zip(uncertainty.edges.values(), uncertainty.rates, uncertainty.inside, strict=True)
    found = lanes.named(*(min(e, (r * -rounded >> 32) + 1 + i) for e, r, i in errors))
    uncertainty.near[rounded] = found
    return found
