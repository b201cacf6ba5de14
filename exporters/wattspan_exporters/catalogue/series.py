"""The kept state of series between two exports, and the fields that a metric is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from wattspan.model import AgentStats, DomainAccount, GpuStatus, Snapshot, SourceHealth
from wattspan_exporters.catalogue.definition import Labels, Sample

T = TypeVar("T")

CACHE_SLACK = 64
"""Unused series that a cache may keep, so that small changes are cheap."""


class SeriesCache(Generic[T]):
    """One item for each series of a metric: at most about twice those that were drawn last."""

    def __init__(self, make: Callable[[Labels], T]) -> None:
        """``make`` returns the item of a new series."""
        self._make = make
        self._items: dict[Labels, T] = {}
        self.last: dict[Labels, int | float] = {}
        """The series that were drawn last, with their values."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> Iterable[tuple[Labels, T]]:
        """All series with their items, absent ones too."""
        return self._items.items()

    def get(self, labels: Labels) -> T | None:
        """The item of a series; None if it is unknown."""
        return self._items.get(labels)

    def drawn(self, samples: Iterable[Sample]) -> list[tuple[T, int | float]]:
        """The item and the value of each series, in order.

        Of a duplicate series, which would make an export invalid, the first sample counts.
        """
        found = list(samples)
        values = dict(found)
        if len(values) < len(found):
            values = dict(reversed(found))
            values = {labels: values[labels] for labels, _ in found}
        self.last = values
        items, make = self._items, self._make
        drawn: list[tuple[T, int | float]] = []
        for labels, value in values.items():
            item = items.get(labels)
            if item is None:
                item = items[labels] = make(labels)
            drawn.append((item, value))
        return drawn

    def shrink(self) -> bool:
        """Forget the series that were not drawn last, if they are many; True if it did."""
        if len(self._items) <= 2 * len(self.last) + CACHE_SLACK:
            return False
        self._items = {labels: self._items[labels] for labels in self.last}
        return True


_ROWS: Mapping[str, type] = {"domains": DomainAccount, "health": SourceHealth, "gpus": GpuStatus}
_RECORDS: Mapping[str, type] = {"stats": AgentStats, **_ROWS}
"""The fields of a snapshot of which each part is a field by itself, such as ``stats.ticks``.

Those of rows are the columns: ``domains.power`` is that of all domains, and ``domains`` says which
rows there are.
"""


class _Fields(NamedTuple):
    names: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]


def _fields(of: type, prefix: str = "") -> _Fields:
    names = [field.name for field in fields(of) if f"{prefix}{field.name}" not in _RECORDS]
    return _Fields(tuple(f"{prefix}{name}" for name in names), attrgetter(*names))


_WHOLE = _fields(Snapshot)
_PARTS = {name: _fields(of, f"{name}.") for name, of in _RECORDS.items()}
_NAMES = frozenset((*_WHOLE.names, *(name for part in _PARTS.values() for name in part.names)))


def changed_fields(before: Snapshot | None, after: Snapshot) -> frozenset[str]:
    """The names of the fields whose values differ."""
    if before is None:
        return _NAMES | _ROWS.keys()
    changed = set(_differing(_WHOLE, before, after))
    for name, part in _PARTS.items():
        old, new = getattr(before, name), getattr(after, name)
        if name not in _ROWS:
            changed.update(_differing(part, old, new))
        elif len(old) != len(new):
            changed.update((name, *part.names))
        else:
            for rows in zip(old, new, strict=True):
                changed.update(_differing(part, *rows))
    return frozenset(changed)


def _differing(part: _Fields, before: object, after: object) -> Iterable[str]:
    if before is after:
        return ()
    values = zip(part.names, part.values(before), part.values(after), strict=True)
    return [name for name, old, new in values if old is not new and old != new]


class ReadSnapshot:
    """A snapshot that adds the names of the fields that are read of it to ``read``.

    A result that is computed from it stays valid as long as none of these fields changes.
    """

    def __init__(self, of: Any, read: set[str], prefix: str = "") -> None:
        self._of = of, read, prefix

    def __getattr__(self, name: str) -> Any:
        of, read, prefix = self._of
        field = f"{prefix}{name}"
        if field in _NAMES:
            read.add(field)
            return getattr(of, name)
        if field in _ROWS:
            read.add(field)
            return tuple([ReadSnapshot(row, read, f"{field}.") for row in getattr(of, name)])
        if field in _RECORDS:
            return ReadSnapshot(getattr(of, name), read, f"{field}.")
        return getattr(type(of), name).__get__(self)  # a property or a method reads fields
