"""From a snapshot to the lines of a file, in either format of text."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from wattspan.model import Instant, Snapshot
from wattspan.util.tabular import escape_formula
from wattspan_exporters.catalogue.metric import Labels, Metric, cache_must_shrink, sanitize
from wattspan_exporters.files.columns import ATTRIBUTES, COLUMNS, OTHER_ATTRIBUTES, ColumnType
from wattspan_exporters.prometheus.renderer import format_number

_LARGEST = 2**63

_NUMERIC = frozenset(column.name for column in COLUMNS if column.kind is not ColumnType.TEXT)


class EncodedRows(NamedTuple):
    """What one snapshot adds to a file: whole lines."""

    data: bytes
    lines: int


class RowEncoder(ABC):
    """Writes a snapshot's series as lines; the text around a value is made once in a series' life.

    Not to be used by two threads at once.
    """

    header: bytes = b""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = tuple(metrics)
        self._kept: dict[str, dict[Labels, tuple[str, str]]] = {m.name: {} for m in metrics}

    @property
    def kept(self) -> int:
        return sum(map(len, self._kept.values()))

    def encode(self, snapshot: Snapshot) -> EncodedRows:
        """Every series once. What a scrape would show at this moment, these lines hold."""
        stamp = self._stamp(snapshot.at, sanitize(snapshot.host))
        lines: list[str] = []
        for metric in self._metrics:
            lines.extend(self._lines(metric, snapshot, stamp))
        return EncodedRows("".join(lines).encode(), len(lines))

    def _lines(self, metric: Metric, snapshot: Snapshot, stamp: str) -> Iterator[str]:
        kept, decimals = self._kept[metric.name], metric.decimals
        between = self._between
        seen: dict[Labels, tuple[str, str]] = {}
        for labels, value in metric.draw(snapshot):
            if labels in seen:  # a series has one value at a time
                continue
            around = kept.get(labels)
            if around is None:
                around = kept[labels] = self._around(metric, labels)
            seen[labels] = around
            shown, whole = self._figures(value, decimals)
            yield f"{stamp}{around[0]}{shown}{between}{whole}{around[1]}"
        if cache_must_shrink(len(kept), len(seen)):
            self._kept[metric.name] = seen

    def _figures(self, value: int | float, decimals: int) -> tuple[str, str]:
        if isinstance(value, int):  # bool is one
            whole = int(value)
            exact = str(whole) if -_LARGEST <= whole < _LARGEST else self._null
            return format_number(whole, decimals), exact
        if not math.isfinite(value):  # neither JSON nor arithmetic has a use for it
            return self._null, self._null
        return format_number(value, decimals), self._null

    @property
    @abstractmethod
    def _null(self) -> str: ...

    @property
    @abstractmethod
    def _between(self) -> str:
        """What stands between ``value`` and ``whole``."""

    @abstractmethod
    def _stamp(self, at: Instant, host: str) -> str:
        """A line's columns up to ``host``."""

    @abstractmethod
    def _around(self, metric: Metric, labels: Labels) -> tuple[str, str]:
        """A line's text from ``metric`` to before the value, and from after ``whole``."""


class JsonLinesEncoder(RowEncoder):
    """One JSON object a line, every column in every one of them."""

    _null = "null"
    _between = ',"whole":'

    def _stamp(self, at: Instant, host: str) -> str:
        named = f'"host":{_json(host)}'
        return f'{{"timestamp":"{format_time(at.wall)}","monotonic_ns":{at.mono},{named}'

    def _around(self, metric: Metric, labels: Labels) -> tuple[str, str]:
        series = {"metric": metric.name, "instrument": metric.instrument, "unit": metric.unit}
        before = "".join(f',"{name}":{self._cell(name, text)}' for name, text in series.items())
        cells = attributes(metric, labels)
        after = "".join(f',"{name}":{self._cell(name, text)}' for name, text in cells.items())
        return f'{before},"value":', f"{after}}}\n"

    def _cell(self, name: str, text: str) -> str:
        if not text:
            return self._null
        return text if name in _NUMERIC else _json(text)


class CsvEncoder(RowEncoder):
    """RFC 4180 with a heading; null is an empty cell, and no cell is a formula."""

    header = (",".join(column.name for column in COLUMNS) + "\n").encode()

    _null = ""
    _between = ","

    def _stamp(self, at: Instant, host: str) -> str:
        return f"{format_time(at.wall)},{at.mono},{_csv(host)}"

    def _around(self, metric: Metric, labels: Labels) -> tuple[str, str]:
        before = ",".join(map(_csv, (metric.name, metric.instrument, metric.unit)))
        after = ",".join(map(_csv, attributes(metric, labels).values()))
        return f",{before},", f",{after}\n"


def attributes(metric: Metric, labels: Labels) -> Mapping[str, str]:
    """Every attribute's column and ``attributes``, "" for null; numbers as their digits."""
    given = {name: sanitize(text) for name, text in zip(metric.labels, labels, strict=True) if text}
    cells = {name: given.pop(name, "") for name in ATTRIBUTES}
    cells["pid"] = _number(cells["pid"])
    return {**cells, OTHER_ATTRIBUTES.name: _json(given) if given else ""}


def _number(text: str) -> str:
    return str(int(text)) if text.isascii() and text.isdecimal() and len(text) < 19 else ""


def format_time(wall: int) -> str:
    """Unix nanoseconds as RFC 3339 in UTC, to the microsecond, rounded down."""
    seconds, nanoseconds = divmod(wall, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds // 1000:06d}Z"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _csv(text: str) -> str:
    cell = escape_formula(text)
    return f'"{cell.replace(chr(34), chr(34) * 2)}"' if set(cell) & set(',"\r\n') else cell
