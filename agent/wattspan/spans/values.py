"""Spans and their energy, as values.

:mod:`wattspan.spans.profiles` has the energy of a process over time;
:mod:`wattspan.spans.energy_division` divides it among the spans of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from itertools import chain, repeat
from operator import itemgetter, sub
from typing import Any, ClassVar, Generic, NamedTuple, Self, SupportsIndex, TypeVar, overload

from wattspan.model import HwType, Microjoules, ModelEnum, Nanoseconds, StaticBasis, StaticSplit

Row = TypeVar("Row", bound=tuple[Any, ...])
_Pick = Callable[[Sequence[Any]], Sequence[Any]]


class Columns(Sequence[Row], Generic[Row]):
    """Rows of one named tuple, stored as one sequence for each field.

    A row is made when it is read. The columns are attributes with the names of the fields. The
    column of a field with a default is empty, (), where no row has another value.
    """

    __slots__ = ()

    row: ClassVar[Any]
    """The class of the rows."""

    def __init__(self, *columns: Sequence[Any], **named: Sequence[Any]) -> None:
        fields = self.row._fields
        for name, column in zip(fields, columns, strict=False):
            setattr(self, name, column)
        for name in fields[len(columns) :]:
            setattr(self, name, named.get(name, ()))

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """``rows`` by column; the same object if they are."""
        if isinstance(rows, cls):
            return rows
        columns = dict(zip(cls.row._fields, zip(*rows, strict=True), strict=False))
        for name, default in cls.row._field_defaults.items() if columns else ():
            if columns[name].count(default) == len(rows):
                columns[name] = ()
        return cls(**columns)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            *(
                list(chain.from_iterable(part.full(name) for part in parts))
                if any(getattr(part, name) for part in parts)
                else ()
                for name in cls.row._fields
            )
        )

    def full(self, name: str) -> Sequence[Any]:
        """The column ``name``, with the default of its field where it is empty."""
        column: Sequence[Any] = getattr(self, name)
        return column or [self.row._field_defaults.get(name)] * len(self)

    def replaced(self, **columns: Sequence[Any]) -> Self:
        """The same rows with other ``columns``."""
        return type(self)(*(columns.get(name, getattr(self, name)) for name in self.row._fields))

    def picked(self, pick: _Pick) -> Self:
        """The rows that ``pick`` chooses of each column."""
        columns = (getattr(self, name) for name in self.row._fields)
        return type(self)(*(pick(column) if column else () for column in columns))

    def chosen(self, indices: Sequence[int]) -> Self:
        """The rows at ``indices``."""
        return self.picked(lambda column: [column[i] for i in indices])

    def __len__(self) -> int:
        return len(getattr(self, self.row._fields[0]))

    def __iter__(self) -> Iterator[Row]:
        columns = zip(*map(self.full, self.row._fields), strict=True)
        return map(partial(tuple.__new__, self.row), columns)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.picked(itemgetter(index))
        (row,) = self.chosen([range(len(self))[index]])
        return row


class Outcome(ModelEnum):
    """The result of a span; each span is counted once."""

    JOINED = "joined"  # the whole span was measured
    PARTIAL = "partial"  # a part of it, or of its devices, is in gaps or before the history
    LATE = "late"  # its energy had been divided among other spans, except for a rest
    NO_ENERGY = "no_energy"  # its process is known, its time is completely outside the history
    UNKNOWN_PROCESS = "unknown_process"  # no evidence of its process
    NOT_BELIEVED = "not_believed"  # it claims a process that cannot be the sender
    INVERTED = "inverted"  # it ends before it begins, or lasts longer than MAX_DURATION
    FUTURE = "future"  # it ends later than now
    DUPLICATE = "duplicate"  # the process has sent the same span id before
    ABANDONED = "abandoned"  # announced and not received: its process is gone or it timed out
    CROWDED_OUT = "crowded_out"  # no room to wait for its energy


MAX_DURATION = 366 * 86_400 * 10**9
"""Nanoseconds of the longest span. Start and end of a longer one are times of different clocks, as
where a start since boot or in seconds becomes one in 1970."""


class TokenRole(IntEnum):
    """The evidence about a span with tokens, from the model's computation outwards."""

    ENGINE = 0  # it has latencies that only an engine knows
    SERVER = 1  # kind SERVER: an engine or a gateway
    PLAIN = 2  # no evidence: an application's own attributes
    CALL = 3  # it names an operation or a provider
    CLIENT = 4  # kind CLIENT
    REMOTE = 5  # it names a server on another host
    AGGREGATE = 6  # an agent, a tool or a workflow: its tokens are those of the calls in it

    @property
    def is_call(self) -> bool:
        """True if the span is of a caller by its evidence, unless its process uses a GPU."""
        return self not in (TokenRole.ENGINE, TokenRole.PLAIN)

    @property
    def is_model_call(self) -> bool:
        """True if the span is that of one call of a model, as its caller sees it."""
        return self in (TokenRole.CALL, TokenRole.CLIENT, TokenRole.REMOTE)

    def encloses(self, other: TokenRole) -> bool:
        """True if a span of this role that contains one of ``other`` in time repeats its tokens."""
        if self is TokenRole.AGGREGATE:
            return other is not TokenRole.AGGREGATE
        return other <= TokenRole.SERVER and other < self


UNKNOWN_MODEL = ""
"""The model of requests that name none."""


class InferenceDetails(NamedTuple):
    """The report of a span about a request to a language model, besides its token counts.

    ``cached`` counts tokens of the prompt that were in the cache. Times are nanoseconds from the
    start of the span, ``prefill`` and ``decode`` durations; None where the span does not tell.
    """

    model: str = UNKNOWN_MODEL
    cached: int = 0
    queue: Nanoseconds | None = None
    first_token: Nanoseconds | None = None
    prefill: Nanoseconds | None = None
    decode: Nanoseconds | None = None


class RequestLatency(NamedTuple):
    """Latencies that a request reports in nanoseconds; None where it reports none.

    ``first`` is the time to the first token, ``between`` the mean time between tokens.
    """

    first: int | None = None
    between: int | None = None


class ReportedInstruction(NamedTuple):
    """The pass of one micro-batch through one stage of a pipeline; both are numbered from 0.

    ``kind`` is ``forward`` or ``backward``. ``replica`` names the pipeline among data-parallel
    ones, "" if no setting asks for it.
    """

    stage: int
    microbatch: int
    kind: str
    replica: str = ""


class Span(NamedTuple):
    """One ended span.

    Times are nanoseconds: Unix time as received, monotonic time once the process is known.
    ``weight`` is None for the mean weight. ``role`` is the evidence about a span with tokens, and
    ``inference`` the report of a request to a language model. ``work`` is the amount of work as
    reported, so 0 and negative numbers occur. The three from it on are None where no setting asks.
    ``scope`` is the instrumentation scope of spans with tokens.
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
    role: TokenRole = TokenRole.PLAIN
    inference: InferenceDetails | None = None
    work: float | None = None
    latency: RequestLatency | None = None
    instruction: ReportedInstruction | None = None
    scope: str = ""


TOKENS = "tokens_in", "tokens_out"
"""The columns of tokens."""


class SpanColumns(Columns[Span]):
    """Spans by column, from the decoder to the totals."""

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
    role: Sequence[TokenRole]
    inference: Sequence[InferenceDetails | None]
    work: Sequence[float | None]
    latency: Sequence[RequestLatency | None]
    instruction: Sequence[ReportedInstruction | None]
    scope: Sequence[str]


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


Period = tuple[int, int]
"""Begin and end in monotonic nanoseconds."""


def merged_periods(*periods: Iterable[Period]) -> list[Period]:
    """The time in any of some lists of periods: disjoint, in order, without empty ones."""
    found: list[Period] = []
    for start, end in sorted(chain.from_iterable(periods)):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


class IntervalEnergy(NamedTuple):
    """The energy of a period, by hardware type.

    ``covered`` nanoseconds of it were measured, for all hardware types. ``uncertainty`` is the
    half-width of the 95 % range of each energy, from the steps of counters and the unknown power
    curve inside intervals at the edges. ``split`` are the static and the dynamic part of the GPU
    energy, and the basis of the static power; None if it was unknown, or was not asked for.
    ``whole`` are the types that were measured all the time, although not all types were.
    """

    energy: Mapping[HwType, Microjoules]
    uncertainty: Mapping[HwType, Microjoules]
    covered: int
    split: tuple[StaticSplit, StaticBasis] | None = None
    whole: Collection[HwType] = ()


class IntervalEnergyColumns(Columns[IntervalEnergy]):
    """The energies of periods by column."""

    __slots__ = IntervalEnergy._fields
    row = IntervalEnergy

    energy: Sequence[Mapping[HwType, Microjoules]]
    uncertainty: Sequence[Mapping[HwType, Microjoules]]
    covered: Sequence[int]
    split: Sequence[tuple[StaticSplit, StaticBasis] | None]
    whole: Sequence[Collection[HwType]]


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

    def picked(self, pick: _Pick) -> Self:
        """The rows that ``pick`` chooses of each column."""
        return type(self)(
            self.spans.picked(pick),
            {kind: pick(column) for kind, column in self.exclusive.items()},
            None if self.known is None else pick(self.known),
            self.inclusive.picked(pick),
            pick(self.outcome),
            pick(self.static) if self.static else (),
            pick(self.basis) if self.basis else (),
        )

    @property
    def coverages(self) -> Iterator[float]:
        """The measured fraction of the time of each span (0–1)."""
        lengths = map(sub, self.spans.end, self.spans.start)
        return (
            covered / length if length > 0 else 0.0
            for covered, length in zip(self.inclusive.covered, lengths, strict=True)
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
        if isinstance(index, slice):
            return self.picked(itemgetter(index))
        (row,) = self.picked(lambda column: [column[index]])
        return row


class RequestEnergies(Sequence[SpanEnergy | None]):
    """The energies of the spans of a request; None for a span without a process.

    ``parts`` are those that are known, by column, each with the positions of its spans.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.parts: list[tuple[Sequence[int], SpanEnergyColumns]] = []

    @classmethod
    def of(cls, rows: Sequence[SpanEnergy | None]) -> RequestEnergies:
        """``rows`` by column; the same object if they are."""
        if isinstance(rows, cls):
            return rows
        found = cls(len(rows))
        known = {at: row for at, row in enumerate(rows) if row is not None}
        found.parts.append((list(known), SpanEnergyColumns.of(list(known.values()))))
        return found

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: SupportsIndex) -> SpanEnergy | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[SpanEnergy | None]: ...
    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[SpanEnergy | None]:
        rows: dict[int, SpanEnergy] = {}
        for positions, energies in self.parts:
            rows.update(zip(positions, energies, strict=True))
        return map(rows.get, range(self._count))
