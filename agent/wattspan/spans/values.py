"""Spans and their energy, as values.

:mod:`wattspan.spans.profiles` has the energy of a process over time;
:mod:`wattspan.spans.energy_division` divides it among the spans of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar, Generic, NamedTuple, Self, SupportsIndex, TypeVar, overload

from wattspan.model import HwType, Microjoules, ModelEnum, StaticBasis, StaticSplit

Row = TypeVar("Row", bound=tuple[Any, ...])


class Columns(Sequence[Row], Generic[Row]):
    """Rows of one named tuple, stored as one sequence for each field.

    A row is made when it is read. The columns are attributes with the names of the fields.
    """

    __slots__ = ()

    row: ClassVar[Any]
    """The class of the rows."""

    def __init__(self, *columns: Sequence[Any]) -> None:
        for name, column in zip(self.row._fields, columns, strict=True):
            setattr(self, name, column)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """``rows`` by column; the same object if they are."""
        if isinstance(rows, cls):
            return rows
        return cls(*zip(*rows, strict=True)) if rows else cls(*[()] * len(cls.row._fields))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, of which there is at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part.columns() for part in parts), strict=True)
        return cls(*(list(chain.from_iterable(each)) for each in columns))

    def columns(self) -> list[Sequence[Any]]:
        """All columns in the order of the fields."""
        return [getattr(self, name) for name in self.row._fields]

    def chosen(self, indices: Sequence[int]) -> Self:
        """The rows at ``indices``."""
        return type(self)(*([column[i] for i in indices] for column in self.columns()))

    def __len__(self) -> int:
        return len(getattr(self, self.row._fields[0]))

    def __iter__(self) -> Iterator[Row]:
        return map(partial(tuple.__new__, self.row), zip(*self.columns(), strict=True))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        chosen = [column[index] for column in self.columns()]
        return type(self)(*chosen) if isinstance(index, slice) else self.row._make(chosen)


class Outcome(ModelEnum):
    """The result of a span; each span is counted once."""

    JOINED = "joined"  # the whole span was measured
    PARTIAL = "partial"  # a part of it, or of its devices, is in gaps or before the history
    LATE = "late"  # its energy had been divided among other spans, except for a rest
    NO_ENERGY = "no_energy"  # its process is known, its time is completely outside the history
    UNKNOWN_PROCESS = "unknown_process"  # no evidence of its process
    NOT_BELIEVED = "not_believed"  # it claims a process that cannot be the sender
    INVERTED = "inverted"  # it ends before it begins
    FUTURE = "future"  # it ends later than now
    DUPLICATE = "duplicate"  # the process has sent the same span id before
    ABANDONED = "abandoned"  # announced and not received: its process is gone or it timed out
    CROWDED_OUT = "crowded_out"  # no room to wait for its energy


class Span(NamedTuple):
    """One ended span of a known process. Times are monotonic nanoseconds.

    ``weight`` is None for the mean weight.
    """

    trace: bytes  # 16
    id: bytes  # 8
    parent: bytes  # 8, or b"" for none
    service: str
    name: str
    start: int
    end: int
    weight: int | None = None
    tokens_in: int = 0
    tokens_out: int = 0


class SpanColumns(Columns[Span]):
    """Spans by column."""

    __slots__ = Span._fields
    row = Span

    trace: Sequence[bytes]
    id: Sequence[bytes]
    parent: Sequence[bytes]
    service: Sequence[str]
    name: Sequence[str]
    start: Sequence[int]
    end: Sequence[int]
    weight: Sequence[int | None]
    tokens_in: Sequence[int]
    tokens_out: Sequence[int]


class SpanStart(NamedTuple):
    """The start of a span, announced by its process."""

    id: bytes  # 8
    parent: bytes  # 8, or b"" for none or a parent in another process
    at: int  # monotonic nanoseconds
    thread: int
    cpu: int  # CPU time of the thread since its start, nanoseconds; 0 if not read


class SpanEnd(NamedTuple):
    """The end of a span, announced by its process before the export."""

    id: bytes
    at: int
    thread: int
    cpu: int


class IntervalEnergy(NamedTuple):
    """The energy of a period, by hardware type.

    ``covered`` nanoseconds of it were measured, for all hardware types. ``uncertainty`` is the
    half-width of the 95 % range of each energy, from the steps of counters and the unknown power
    curve inside intervals at the edges. ``split`` are the static and the dynamic part of the GPU
    energy, and the basis of the static power; None if it was unknown, or was not asked for.
    """

    energy: Mapping[HwType, Microjoules]
    uncertainty: Mapping[HwType, Microjoules]
    covered: int
    split: tuple[StaticSplit, StaticBasis] | None = None


class IntervalEnergyColumns(Columns[IntervalEnergy]):
    """The energies of periods by column."""

    __slots__ = IntervalEnergy._fields
    row = IntervalEnergy

    energy: Sequence[Mapping[HwType, Microjoules]]
    uncertainty: Sequence[Mapping[HwType, Microjoules]]
    covered: Sequence[int]
    split: Sequence[tuple[StaticSplit, StaticBasis] | None]


class SpanEnergy(NamedTuple):
    """The energy of one span. Exclusive energies of a process add up; inclusive ones overlap.

    ``static`` is the static part of the exclusive GPU energy, and ``basis`` that of the static
    power; None while it was unknown. The rest of the GPU energy is dynamic.
    """

    span: Span
    exclusive: Mapping[HwType, Microjoules]
    inclusive: IntervalEnergy
    outcome: Outcome
    static: Microjoules | None = None
    basis: StaticBasis | None = None

    @property
    def coverage(self) -> float:
        """The measured fraction of the span's time (0–1)."""
        length = self.span.end - self.span.start
        return self.inclusive.covered / length if length > 0 else 0.0


def dict_builder(kinds: tuple[HwType, ...]) -> Callable[..., dict[HwType, Microjoules]]:
    """A function from energies to a dictionary; a display is five times faster than dict()."""
    match kinds:
        case (one,):
            return lambda x: {one: x}
        case (one, two):
            return lambda x, y: {one: x, two: y}
        case (one, two, three):
            return lambda x, y, z: {one: x, two: y, three: z}
    return lambda *values: dict(zip(kinds, values, strict=True))


class SpanEnergyColumns(Sequence[SpanEnergy]):
    """The energies of spans by column.

    ``exclusive`` has one column of microjoules for each hardware type. ``known`` are the types with
    known energy of each span, None for all types in all spans; other values are 0. ``static`` and
    ``basis`` are columns, empty without a known static power in any of the spans.
    """

    __slots__ = ("basis", "exclusive", "inclusive", "known", "outcome", "spans", "static")

    def __init__(
        self,
        spans: SpanColumns,
        exclusive: Mapping[HwType, Sequence[Microjoules]],
        known: Sequence[Collection[HwType]] | None,
        inclusive: IntervalEnergyColumns,
        outcome: Sequence[Outcome],
        static: Sequence[Microjoules | None] = (),
        basis: Sequence[StaticBasis | None] = (),
    ) -> None:
        self.spans, self.exclusive, self.known = spans, exclusive, known
        self.inclusive, self.outcome = inclusive, outcome
        self.static, self.basis = static, basis

    @classmethod
    def of(cls, rows: Sequence[SpanEnergy]) -> Self:
        """``rows`` by column; the same object if they are."""
        if isinstance(rows, cls):
            return rows
        known = [tuple(row.exclusive) for row in rows]
        none = Microjoules(0)
        split = any(row.basis for row in rows)
        return cls(
            SpanColumns.of([row.span for row in rows]),
            {
                kind: [row.exclusive.get(kind, none) for row in rows]
                for kind in dict.fromkeys(chain.from_iterable(known))
            },
            known if len(set(known)) > 1 else None,
            IntervalEnergyColumns.of([row.inclusive for row in rows]),
            [row.outcome for row in rows],
            [row.static for row in rows] if split else (),
            [row.basis for row in rows] if split else (),
        )

    def missing_before(self, until: int) -> Self:
        """The same energies; a part of that of every span that began before ``until`` is missing.

        Spans with a measured energy are partial then.
        """
        outcome = [
            Outcome.PARTIAL if one is Outcome.JOINED and start < until else one
            for one, start in zip(self.outcome, self.spans.start, strict=True)
        ]
        columns = self.spans, self.exclusive, self.known, self.inclusive
        return type(self)(*columns, outcome, self.static, self.basis)

    def __len__(self) -> int:
        return len(self.outcome)

    def __iter__(self) -> Iterator[SpanEnergy]:
        columns = zip(
            self.spans,
            self._exclusive(),
            self.inclusive,
            self.outcome,
            self.static or repeat(None, len(self)),
            self.basis or repeat(None, len(self)),
            strict=True,
        )
        return map(partial(tuple.__new__, SpanEnergy), columns)  # four times as fast as `_make`

    def _exclusive(self) -> Iterator[dict[HwType, Microjoules]]:
        """The exclusive energies of each span by hardware type."""
        kinds = tuple(self.exclusive)
        if not kinds:
            return ({} for _ in self.outcome)
        rows = zip(*self.exclusive.values(), strict=True)
        if self.known is None:
            return map(dict_builder(kinds), *self.exclusive.values())
        return (
            {kind: energy for kind, energy in zip(kinds, row, strict=True) if kind in known}
            for row, known in zip(rows, self.known, strict=True)
        )

    @overload
    def __getitem__(self, index: SupportsIndex) -> SpanEnergy: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            at = range(len(self))[index]
            (row,) = self[at : at + 1]
            return row
        return type(self)(
            self.spans[index],
            {kind: column[index] for kind, column in self.exclusive.items()},
            None if self.known is None else self.known[index],
            self.inclusive[index],
            self.outcome[index],
            self.static[index],
            self.basis[index],
        )
