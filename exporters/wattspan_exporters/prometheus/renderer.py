"""Rendering of a snapshot in the exposition formats of Prometheus.

prometheus-client's writer builds an object and several dictionaries for every sample of every
scrape, and takes about ten times as long for ten thousand samples. Here the text before a value
is made once for each series, the text of a value only when it changes, and a metric is drawn only
when a field of the snapshot changes that it reads. Timestamps (a scrape has one) and ``_created``
series (they double the counters, and Prometheus does not detect resets by them) are omitted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import cast

from wattspan.model import Exemplar, Snapshot
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import (
    Histogram,
    Instrument,
    Labels,
    Metric,
    bound_texts,
    sanitize,
)
from wattspan_exporters.catalogue.series import ReadSnapshot, SeriesCache, changed_fields

_HEX = re.compile("[0-9a-f]{1,32}")


def format_number(value: int | float, decimals: int) -> str:
    """``value`` / 10**``decimals``, exact for integers."""
    if isinstance(value, float):
        return _format_float(value / 10**decimals)
    if decimals == 0:
        return f"{value:d}"  # not `str`: that of a duration has a unit
    whole, fraction = divmod(abs(value), 10**decimals)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole}.{fraction:0{decimals}d}" if fraction else f"{sign}{whole}"


def _format_float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def escape(value: str) -> str:
    """``value`` escaped for the quotes of a label."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def line_head(series: str, names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """The line of a sample before its value.

    Labels that are empty are left out: to Prometheus an empty label and none are the same.
    """
    labels = ",".join([_label_pair(*pair) for pair in zip(names, values, strict=True) if pair[1]])
    return f"{series}{{{labels}}} " if labels else f"{series} "


def exemplar_tail(exemplar: Exemplar, decimals: int) -> str:
    """The exemplar after a sample's value, with the end of the line; only that if ids are invalid.

    OpenMetrics allows 128 characters for all labels of an exemplar, names included; these take 63.
    """
    trace, span = exemplar.trace, exemplar.span
    if not (_HEX.fullmatch(trace) and _HEX.fullmatch(span)):
        return "\n"
    joules, at = format_number(exemplar.energy, decimals), format_number(exemplar.wall, 9)
    return f' # {{trace_id="{trace}",span_id="{span}"}} {joules} {at}\n'


@lru_cache(maxsize=1024)  # new series share most labels with older ones
def _label_pair(name: str, value: str) -> str:
    return f'{name}="{escape(sanitize(value))}"'


class ExpositionFormat(StrEnum):
    """The exposition formats, by their content types."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


OPENMETRICS_END = "# EOF\n"
"""The last line of an OpenMetrics document."""


class _SeriesLine:
    """The line of a series, kept between scrapes."""

    __slots__ = ("exemplar", "head", "tail", "text", "value")

    def __init__(self, head: str) -> None:
        self.head, self.text, self.tail = head, "", "\n"
        self.value: int | float | None = None
        self.exemplar: Exemplar | None = None


_UNWATCHED_AFTER, _WATCHED_EVERY = 3, 64
"""Consecutive drawings after which the fields that a metric reads are noted only now and then."""


class _Family:
    """The lines of one metric, written anew when a field of which they were drawn changes."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._preambles = {
            ExpositionFormat.TEXT: _text_preamble(metric),
            ExpositionFormat.OPENMETRICS: _openmetrics_preamble(metric),
        }
        self.series = SeriesCache(
            lambda labels: _SeriesLine(line_head(metric.series, metric.labels, labels))
        )
        self._read: frozenset[str] = frozenset()
        self._redrawn = 0  # consecutive drawings
        self._lines: list[str] = []
        self._exemplars: Mapping[Labels, Exemplar] = {}
        self._texts: dict[ExpositionFormat, str] = {}  # of the lines, as far as they were needed

    def text(self, snapshot: Snapshot, changed: frozenset[str], form: ExpositionFormat) -> str:
        """All lines with their head; "" without a series."""
        if self._read and self._read.isdisjoint(changed):  # what reads no field may change
            self._redrawn = 0
        else:
            read: set[str] = set()
            # A metric that changes with each snapshot is not watched: that takes twice the time.
            watched = self._redrawn < _UNWATCHED_AFTER or self._redrawn % _WATCHED_EVERY == 0
            self._lines = self._draw(
                cast(Snapshot, ReadSnapshot(snapshot, read)) if watched else snapshot
            )
            self._read, self._texts = frozenset(read), {}
            self._redrawn += 1
        if (text := self._texts.get(form)) is None:
            lines = self._lines
            if self._exemplars and form is ExpositionFormat.OPENMETRICS:
                lines = self._with_exemplars(lines, self._exemplars)
            text = self._texts[form] = self._preambles[form] + "".join(lines) if lines else ""
        return text

    def _draw(self, snapshot: Snapshot) -> list[str]:
        metric = self._metric
        if metric.histogram is not None:
            return _histogram_lines(metric, metric.histogram, snapshot)
        decimals = metric.decimals
        one = 10**decimals if decimals else math.inf
        lines: list[str] = []
        for line, value in self.series.drawn(metric.draw(snapshot)):
            if line.value != value:
                line.value = value
                # Hot path: insert a decimal point into the digits of the integer.
                if value >= one and isinstance(value, int):
                    digits = f"{value:d}"
                    line.text = f"{line.head}{digits[:-decimals]}.{digits[-decimals:]}\n"
                else:
                    line.text = f"{line.head}{format_number(value, decimals)}\n"
            lines.append(line.text)
        self.series.shrink()
        if metric.exemplars is not None:
            self._exemplars = metric.exemplars(snapshot)
        return lines

    def _with_exemplars(self, lines: list[str], exemplars: Mapping[Labels, Exemplar]) -> list[str]:
        """``lines`` with their exemplars; the kept lines stay without."""
        tails: dict[str, str] = {}
        for labels, exemplar in exemplars.items():
            if (line := self.series.get(labels)) is not None:
                if line.exemplar != exemplar:
                    line.exemplar = exemplar
                    line.tail = exemplar_tail(exemplar, self._metric.decimals)
                tails[line.text] = line.tail
        return [text[:-1] + tails[text] if text in tails else text for text in lines]


class Renderer:
    """Renders snapshots; keeps the line of each series, and rewrites only changed lines.

    At most about twice the lines of the newest snapshot are kept. For one thread at a time.
    """

    def __init__(self, metrics: Sequence[Metric] = CATALOGUE) -> None:
        self._families = [_Family(metric) for metric in metrics]
        self._rendered: Snapshot | None = None

    @property
    def kept(self) -> int:
        return sum(len(family.series) for family in self._families)

    def render(self, snapshot: Snapshot, form: ExpositionFormat, appendix: str = "") -> bytes:
        """One document; ``appendix`` is further text in the same format."""
        changed = changed_fields(self._rendered, snapshot)
        self._rendered = snapshot
        document = "".join([one.text(snapshot, changed, form) for one in self._families])
        return (
            document + appendix + OPENMETRICS_END * (form is ExpositionFormat.OPENMETRICS)
        ).encode()


def _histogram_lines(metric: Metric, histogram: Histogram, snapshot: Snapshot) -> list[str]:
    """The lines of a histogram; those of one series must not be interleaved with others."""
    series, names, bounds = metric.series, metric.labels, bound_texts(metric)
    lines: list[str] = []
    for labels, one in histogram.drawn(snapshot).items():
        for bound, count in zip(bounds, (*one.up_to, one.observations), strict=True):
            lines.append(
                f"{line_head(f'{series}_bucket', (*names, 'le'), (*labels, bound))}{count}\n"
            )
        total = format_number(one.total, metric.decimals)
        lines.append(f"{line_head(f'{series}_sum', names, labels)}{total}\n")
        lines.append(f"{line_head(f'{series}_count', names, labels)}{one.observations}\n")
    return lines


def _counter_family(series: str) -> tuple[str, str]:
    """OpenMetrics has no counter whose samples do not end in ``_total``; others stay untyped."""
    family = series.removesuffix("_total")
    return family, "unknown" if family == series else "counter"


_TYPES = {Instrument.COUNTER: "counter", Instrument.HISTOGRAM: "histogram"}


def _text_preamble(metric: Metric) -> str:
    kind = _TYPES.get(metric.instrument, "gauge")
    return f"# HELP {metric.series} {metric.help}\n# TYPE {metric.series} {kind}\n"


def _openmetrics_preamble(metric: Metric) -> str:
    """OpenMetrics names a family without the ``_total`` or ``_info`` of its samples."""
    family, kind = metric.series, _TYPES.get(metric.instrument, "gauge")
    if metric.instrument is Instrument.COUNTER:
        family, kind = _counter_family(family)
    elif metric.instrument is Instrument.INFO:
        family, kind = family.removesuffix("_info"), "info"
    unit = f"# UNIT {family} {metric.unit_word}\n" if metric.unit_word else ""
    return f"# HELP {family} {metric.help}\n# TYPE {family} {kind}\n{unit}"
