"""All kinds of energy side by side in one integer, each in a lane of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from struct import Struct

from wattspan.model import HwType, Microjoules

KINDS = (HwType.CPU, HwType.MEMORY, HwType.GPU, HwType.ENCLOSURE)
LANE_OF = {kind: lane for lane, kind in enumerate(KINDS)}

# Sizes are whole bytes, so that lanes can be read by `struct`.
_CLOCK_BYTES = 12  # the lowest lane holds nanoseconds; the others begin above it
_LANE_BYTES = 24
_FRACTION_BYTES = 4  # energies are in microjoules times 2**32
_SHARE_BYTES = 13  # microjoules times 2**104: see `joining`
CLOCK_MASK = (1 << 8 * _CLOCK_BYTES) - 1
FRACTION = 8 * _FRACTION_BYTES
SHARE = 8 * (_SHARE_BYTES - _FRACTION_BYTES)


def shift_of(kind: HwType) -> int:
    """How far the lane of ``kind`` is shifted: its microjoules times 2**32 begin there."""
    return 8 * (_CLOCK_BYTES + _LANE_BYTES * LANE_OF[kind])


_SHIFTS = tuple(shift_of(kind) + FRACTION for kind in KINDS)
WHOLE = sum(((1 << 8 * (_LANE_BYTES - _FRACTION_BYTES)) - 1) << shift for shift in _SHIFTS)
SHARE_WHOLE = sum(
    ((1 << 8 * (_LANE_BYTES - _SHARE_BYTES)) - 1) << shift + SHARE for shift in _SHIFTS
)
_LANE_MASK = (1 << 8 * _LANE_BYTES) - 1
GPU_MASK = ((1 << 8 * _LANE_BYTES) - 1) << shift_of(HwType.GPU)


def _naming(kinds: tuple[HwType, ...]) -> Callable[..., dict[HwType, Microjoules]]:
    """What turns values into a dictionary by kind. A display is five times faster than dict()."""
    match kinds:
        case (one,):
            return lambda x: {one: x}
        case (one, two):
            return lambda x, y: {one: x, two: y}
        case (one, two, three):
            return lambda x, y, z: {one: x, two: y, three: z}
    return lambda *values: dict(zip(kinds, values, strict=True))


class Lanes:
    """Reads the lanes of some kinds of energy out of an integer."""

    def __init__(self, kinds: frozenset[HwType]) -> None:
        self.kinds = tuple(kind for kind in KINDS if kind in kinds)
        self.numbers = tuple(LANE_OF[kind] for kind in self.kinds)
        self.named = _naming(self.kinds)
        self._size = _CLOCK_BYTES + _LANE_BYTES * len(KINDS)
        self._energy = Struct(self._layout(_FRACTION_BYTES))
        self._share = Struct(self._layout(_SHARE_BYTES))

    def _layout(self, begin: int) -> str:
        layout, at = "<", 0
        for number in self.numbers:
            place = _CLOCK_BYTES + _LANE_BYTES * number + begin
            layout, at = f"{layout}{place - at}xQ", place + 8
        return f"{layout}{self._size - at}x"

    def energies(self, packed: int) -> tuple[Microjoules, ...]:
        """Whole microjoules of each kind, rounded down."""
        return self._energy.unpack(packed.to_bytes(self._size, "little"))

    def shares(self, packed: int) -> tuple[Microjoules, ...]:
        """Whole microjoules of each kind in a product of energy and a share times 2**72."""
        return self._share.unpack(packed.to_bytes(self._size, "little"))

    def each_energy(self, packed: Iterable[int]) -> Iterable[dict[HwType, Microjoules]]:
        """As ``energies``, of many at once and by kind."""
        return self._each(self._energy, packed)

    def each_share(self, packed: Iterable[int]) -> Iterable[dict[HwType, Microjoules]]:
        """As ``shares``, of many at once and by kind."""
        return self._each(self._share, packed)

    def _each(self, layout: Struct, packed: Iterable[int]) -> Iterable[dict[HwType, Microjoules]]:
        # Column by column, for speed: nearly all of it happens in C.
        size = self._size
        line = b"".join([each.to_bytes(size, "little") for each in packed])
        return map(self.named, *zip(*layout.iter_unpack(line), strict=True))

    def pack(self, energies: Iterable[int]) -> int:
        """Microjoules of each kind, put side by side."""
        pairs = zip(energies, self.numbers, strict=True)
        return sum(energy << _SHIFTS[number] for energy, number in pairs)

    def clamp(self, energy: int, least: int, most: int) -> int:
        """In each lane ``energy``, but not below ``least`` and not above ``most``."""
        clamped = 0
        for number in self.numbers:
            shift = _SHIFTS[number] - FRACTION
            low, here, high = (lane >> shift & _LANE_MASK for lane in (least, energy, most))
            clamped |= max(low, min(here, high)) << shift
        return clamped

    def pack_rates(self, rates: Iterable[int]) -> int:
        """Microjoules times 2**32 a nanosecond, likewise."""
        return self.pack(rates) >> FRACTION


lanes_of = functools.cache(Lanes)
