"""What spans spent between two closings of the same books, name by name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from wattspan.grouping import OTHER
from wattspan.model import HwType, Opening, SpanRow

SPAN = "span"
"""The kind of a section of a report that is about spans."""

MOST = 2**61
"""Of seconds and tokens, which spans only claim: two of these still fit a database's integer."""


class SpanRole(StrEnum):
    """What energy is kept for."""

    NAMED = "named"  # the spans of one name in one service
    REST = "rest"  # those of all names that have no account, or no room in the bucket
    OUTSIDE = "outside"  # a service's processes while none of their spans was open


class SpanName(NamedTuple):
    role: SpanRole
    service: str = ""
    name: str = ""


REST = SpanName(SpanRole.REST)

_NO_ENERGY: Mapping[HwType, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Use:
    """What was done under one name: spans that ended, and what they spent and told of."""

    energy: Mapping[HwType, int] = field(default_factory=lambda: _NO_ENERGY)
    calls: int = 0
    nanoseconds: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    def __add__(self, other: Use) -> Use:
        energy = dict(self.energy)
        for kind, amount in other.energy.items():
            energy[kind] = energy.get(kind, 0) + amount
        return Use(
            energy,
            self.calls + other.calls,
            min(MOST, self.nanoseconds + other.nanoseconds),
            min(MOST, self.tokens_in + other.tokens_in),
            min(MOST, self.tokens_out + other.tokens_out),
        )

    def only(self, kind: HwType) -> Use:
        """The same spans, of whose energy only one type is looked at."""
        return replace(self, energy={k: e for k, e in self.energy.items() if k is kind})

    def __bool__(self) -> bool:
        return bool(self.calls or any(self.energy.values()))


def spans_between(earlier: Opening | None, later: Opening) -> dict[SpanName, Use]:
    """What every name spent; from the very beginning if there are no earlier books.

    Energy is booked when its span has ended and settled, so it may have been spent long before.
    """
    before = {(row.service, row.name): row for row in earlier.spans} if earlier else {}
    found: dict[SpanName, Use] = {}
    for row in later.spans:
        if use := _rise(before.get((row.service, row.name)), row):
            name = SpanName(SpanRole.NAMED, row.service, row.name)
            found[REST if (row.service, row.name) == (OTHER, OTHER) else name] = use
    left = earlier.outside if earlier else {}
    for (service, kind), energy in later.outside.items():
        if rise := _more(left.get((service, kind), 0), energy):
            name = SpanName(SpanRole.OUTSIDE, service)
            found[name] = found.get(name, Use()) + Use({kind: rise})
    return found


def total(uses: Iterable[Use]) -> Use:
    return sum(uses, Use())


def _rise(before: SpanRow | None, after: SpanRow) -> Use:
    if before is None or after.count < before.count:  # let go meanwhile, and back at zero
        before = SpanRow(after.service, after.name, {})
    energy = {
        kind: rise
        for kind, amount in after.energy.items()
        if (rise := _more(before.energy.get(kind, 0), amount))
    }
    tokens = [_more(before.tokens.get(d, 0), after.tokens.get(d, 0)) for d in ("input", "output")]
    return Use(energy, after.count - before.count, _more(before.time, after.time), *tokens)


def _more(before: int, after: int) -> int:
    return min(MOST, after - before if after >= before else after)
