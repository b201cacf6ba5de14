"""From a snapshot to the bytes of a scrape, in either exposition format.

Not prometheus-client's own writer: it builds an object and several dictionaries for every
sample of every scrape, and 10,000 series take it many times the time they take here, where the
text before a value is made once in a series' life. What it writes and this does not: timestamps
(a scrape has one) and ``_created`` series (they double the counters, and the moment a counter
began is not what Prometheus detects a reset by).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from wattspan.model import Snapshot
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.metric import Instrument, Labels, Metric
from wattspan_exporters.prometheus.text import line_head, number


class Format(StrEnum):
    """The exposition formats, by their content types."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


END = "# EOF\n"
"""How an OpenMetrics document ends."""

SLACK = 64
"""Label texts a metric may keep beyond those in use, so that little churn costs nothing."""


class Renderer:
    """Renders snapshots; keeps the text of labels from one to the next.

    The cache holds at most about twice the series of the newest snapshot, so it is bounded by
    what the snapshot is bounded by. Not to be used by two threads at once.
    """

    def __init__(self, metrics: Sequence[Metric] = CATALOGUE) -> None:
        self._metrics = tuple(metrics)
        self._heads: dict[str, dict[Labels, str]] = {metric.series: {} for metric in metrics}

    @property
    def cached(self) -> int:
        return sum(map(len, self._heads.values()))

    def render(self, snapshot: Snapshot, form: Format, appendix: str = "") -> bytes:
        """One whole document; ``appendix`` is what else is to be said, in the same format."""
        preamble = _openmetrics_preamble if form is Format.OPENMETRICS else _text_preamble
        parts: list[str] = []
        for metric in self._metrics:
            if lines := self._lines(metric, snapshot):
                parts.append(preamble(metric))
                parts.extend(lines)
        parts.append(appendix)
        if form is Format.OPENMETRICS:
            parts.append(END)
        return "".join(parts).encode()

    def _lines(self, metric: Metric, snapshot: Snapshot) -> list[str]:
        """The metric's lines in halves, alternately head and value."""
        heads = self._heads[metric.series]
        decimals = metric.decimals
        one = 10**decimals if decimals else math.inf
        halves: list[str] = []
        add = halves.append
        for labels, value in metric.draw(snapshot):
            head = heads.get(labels)
            if head is None:
                head = heads[labels] = line_head(metric.series, metric.labels, labels)
            add(head)
            if value >= one:  # the hot path: a decimal point set into the integer's digits
                digits = str(value)
                add(f"{digits[:-decimals]}.{digits[-decimals:]}\n")
            else:
                add(f"{number(value, decimals)}\n")
        if len(heads) > len(halves) + SLACK:
            drawn = (labels for labels, _ in metric.draw(snapshot))
            self._heads[metric.series] = {labels: heads[labels] for labels in drawn}
        return _once_each(halves)


def _once_each(halves: list[str]) -> list[str]:
    """The lines without repeated heads: a series twice makes the whole scrape invalid."""
    if len(set(halves[::2])) * 2 == len(halves):
        return halves
    lines = dict(zip(halves[::2], halves[1::2], strict=True))
    return [half for line in lines.items() for half in line]


def _text_preamble(metric: Metric) -> str:
    kind = "counter" if metric.instrument is Instrument.COUNTER else "gauge"
    return f"# HELP {metric.series} {metric.help}\n# TYPE {metric.series} {kind}\n"


def _openmetrics_preamble(metric: Metric) -> str:
    """OpenMetrics names a family without the ``_total`` or ``_info`` of its samples."""
    family, kind = metric.series, "gauge"
    if metric.instrument is Instrument.COUNTER:
        family, kind = family.removesuffix("_total"), "counter"
    elif metric.instrument is Instrument.INFO:
        family, kind = family.removesuffix("_info"), "info"
    unit = f"# UNIT {family} {metric.unit_word}\n" if metric.unit_word else ""
    return f"# HELP {family} {metric.help}\n# TYPE {family} {kind}\n{unit}"
