"""`Metric`, its OpenTelemetry and Prometheus names, label sanitizing and cache limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from wattspan.model import Exemplar, Snapshot
from wattspan.util.text import MAX_LABEL, cut_with_digest

Labels = tuple[str, ...]
"""Label values of one series in the order of the metric's attributes; "" is absent."""

Sample = tuple[Labels, int | float]
"""Labels and value of one series; see `Metric` for the scale."""

Draw = Callable[[Snapshot], Iterable[Sample]]

DrawExemplars = Callable[[Snapshot], Mapping[Labels, Exemplar]]
"""Exemplars of counters by the labels of ``Draw``."""

StartTimes = Callable[[Snapshot], Callable[[Labels], int | None]]
"""Unix nanoseconds at which series of a counter were zero; None if unknown."""


class Instrument(StrEnum):
    """Instruments of OpenTelemetry, and Prometheus' Info, which is a gauge over OTLP."""

    COUNTER = "Counter"
    UPDOWN = "UpDownCounter"
    GAUGE = "Gauge"
    HISTOGRAM = "Histogram"
    INFO = "Info"  # facts as labels, the value always 1


DECIMALS = {
    "J": 6,
    "W": 3,
    "W/s": 3,
    "s": 9,
    "g": 9,
    "g/kWh": 9,
    "{currency}": 9,
    "{currency}/kWh": 9,
}
"""Decimal digits of units that the model holds as integers, such as microjoules."""


class Distribution(NamedTuple):
    """The observations of one series of a histogram since its start: it never falls.

    ``total`` is their sum in the model's unit; ``up_to`` has the number of observations up to each
    bound of the histogram.
    """

    observations: int
    total: int
    up_to: tuple[int, ...]

    def since(self, before: Distribution) -> Distribution:
        """The observations that ``before``, of the same series, has not."""
        up_to = tuple(map(sub, self.up_to, before.up_to))
        return Distribution(
            self.observations - before.observations, self.total - before.total, up_to
        )


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distributions of a metric, over increasing ``bounds`` in the model's unit."""

    bounds: tuple[int, ...]
    draw: Callable[[Snapshot], Iterable[tuple[Labels, Distribution]]]

    def drawn(self, snapshot: Snapshot) -> dict[Labels, Distribution]:
        """The distribution of each series; of a duplicate series the first."""
        found: dict[Labels, Distribution] = {}
        for labels, one in self.draw(snapshot):
            found.setdefault(labels, one)
        return found


def no_samples(_: Snapshot) -> Iterable[Sample]:
    """The samples of a histogram, whose series are distributions."""
    return ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: names, help, attributes and the function from a snapshot to its samples.

    ``draw`` yields integers of the model's unit where ``unit`` is in ``DECIMALS`` (microjoules for
    J, milliwatts for W, nanoseconds for s, billionths of grams and of money), so that exporters
    never round; for every other unit it yields the value itself.
    """

    name: str
    instrument: Instrument
    unit: str
    help: str
    attributes: tuple[str, ...]
    draw: Draw
    series: str = ""  # Prometheus name, if it differs from the translation
    exemplars: DrawExemplars | None = None  # the exemplar's value is its energy in ``unit``
    lasting: bool = False  # counts since ``Snapshot.since``, across restarts
    begins: StartTimes | None = None  # for series with start times of their own
    histogram: Histogram | None = None  # of the instrument Histogram, which draws no samples

    def __post_init__(self) -> None:
        if not self.series:
            translated = prometheus_name(self.name, self.unit, self.instrument)
            object.__setattr__(self, "series", translated)

    @property
    def decimals(self) -> int:
        return DECIMALS.get(self.unit, 0)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(attribute.replace(".", "_") for attribute in self.attributes)

    @property
    def unit_word(self) -> str:
        """Unit in the Prometheus name; "" for none."""
        if self.unit == "1":
            return "ratio" if self.instrument is Instrument.GAUGE else ""
        main, _, per = self.unit.partition("/")
        word = _unit_word(main)
        return f"{word}_per_{_unit_word(per, _PER_WORDS)}" if word and per else word


@cache
def declarations() -> dict[str, dict[str, Any]]:
    """The facts of every metric in ``metrics.toml``, as arguments of `Metric`, by its name."""
    text = Path(__file__).with_name("metrics.toml").read_bytes()
    found = msgspec.toml.decode(text, type=dict[str, dict[str, Any]])
    for facts in found.values():
        facts["instrument"] = Instrument(facts["instrument"])
        facts["attributes"] = tuple(facts.get("attributes", ()))
        facts.setdefault("unit", "")
    return found


def declared(
    name: str,
    draw: Draw = no_samples,
    *,
    exemplars: DrawExemplars | None = None,
    begins: StartTimes | None = None,
    histogram: Histogram | None = None,
) -> Metric:
    """The metric of ``metrics.toml`` with this name, drawn by ``draw`` or as a histogram."""
    how = {"draw": draw, "exemplars": exemplars, "begins": begins, "histogram": histogram}
    return Metric(**{"name": name, **declarations()[name], **how})


def bound_texts(metric: Metric) -> tuple[str, ...]:
    """The bounds of a histogram in the metric's unit, as Prometheus writes them in ``le``."""
    bounds = metric.histogram.bounds if metric.histogram is not None else ()
    return (*(f"{bound / 10**metric.decimals:g}" for bound in bounds), "+Inf")


def counters(metric: Metric) -> tuple[Metric, ...]:
    """The counters that hold a histogram, as Prometheus names them; any other metric itself."""
    histogram = metric.histogram
    if histogram is None:
        return (metric,)
    bounds, draw = bound_texts(metric), histogram.draw

    def buckets(snapshot: Snapshot) -> Iterator[Sample]:
        for labels, one in draw(snapshot):
            for bound, count in zip(bounds, (*one.up_to, one.observations), strict=True):
                yield (*labels, bound), count

    def totals(snapshot: Snapshot) -> Iterator[Sample]:
        return ((labels, one.total) for labels, one in draw(snapshot))

    def counts(snapshot: Snapshot) -> Iterator[Sample]:
        return ((labels, one.observations) for labels, one in draw(snapshot))

    def counter(part: str, unit: str, attributes: tuple[str, ...], samples: Draw) -> Metric:
        return Metric(
            f"{metric.name}.{part}",
            Instrument.COUNTER,
            unit,
            metric.help,
            attributes,
            samples,
            f"{metric.series}_{part}",
            lasting=metric.lasting,
        )

    return (
        counter("bucket", "1", (*metric.attributes, "le"), buckets),
        counter("sum", metric.unit, metric.attributes, totals),
        counter("count", "1", metric.attributes, counts),
    )


Row = TypeVar("Row")


def each(
    rows: Callable[[Snapshot], Iterable[Row]],
    labels: Callable[[Row], Labels],
    value: Callable[[Row], int | float | None],
) -> Draw:
    """Return a function that draws the value of every row, except values that are None."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in rows(snapshot):
            if (figure := value(row)) is not None:
                yield labels(row), figure

    return draw


def each_item(
    rows: Callable[[Snapshot], Iterable[Row]],
    labels: Callable[[Row], Labels],
    items: Callable[[Row], Mapping[str, int | float]],
) -> Draw:
    """Return a function that draws every value of a mapping of every row; its key is a label."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in rows(snapshot):
            known = labels(row)
            for key, figure in items(row).items():
                yield (*known, key), figure

    return draw


def items_of(items: Callable[[Snapshot], Mapping[str, int | float]]) -> Draw:
    """Return a function that draws every value of a mapping of the snapshot; its key is a label."""
    return each_item(lambda snapshot: (snapshot,), lambda _: (), items)


def single(value: Callable[[Snapshot], int | float | None]) -> Draw:
    """Return a function that draws one value without labels."""
    return each(lambda snapshot: (snapshot,), lambda _: (), value)


# ------------------------------------------------- OpenTelemetry's names as Prometheus names

_UNIT_WORDS = {
    "s": "seconds", "By": "bytes", "J": "joules", "W": "watts", "g": "grams", "Cel": "celsius",
    "Hz": "hertz", "1": "",
}  # fmt: skip
_PER_WORDS = {"s": "second", "kWh": "kwh"}


def prometheus_name(name: str, unit: str, instrument: Instrument) -> str:
    """Return ``name`` translated to Prometheus by the rules of OpenTelemetry.

    Separators become single underscores, the unit's word is appended unless the name has it,
    counters end in ``total``, gauges of unit 1 in ``ratio``; units in braces are dropped.
    Source: the OpenTelemetry specification, "Prometheus and OpenMetrics compatibility".
    """
    tokens = [token for token in re.split(r"[^A-Za-z0-9:]+", name) if token]
    main, _, per = unit.partition("/")
    words = [_unit_word(main)]
    if per and (word := _unit_word(per, _PER_WORDS)):
        words.append(f"per_{word}")
    tokens += [word for word in words if word and word not in tokens]
    if instrument is Instrument.COUNTER:
        words_at_end = ["total"]
    elif instrument is Instrument.GAUGE and unit == "1":
        words_at_end = ["ratio"]
    else:
        words_at_end = []
    translated = "_".join([t for t in tokens if t not in words_at_end] + words_at_end)
    return f"_{translated}" if translated[:1].isdigit() else translated


def _unit_word(unit: str, words: dict[str, str] = _UNIT_WORDS) -> str:
    if "{" in unit or "}" in unit:
        return ""
    return words.get(unit, re.sub(r"[^A-Za-z0-9]+", "_", unit).strip("_"))


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def sanitize(value: str, most: int = MAX_LABEL) -> str:
    """Return ``value`` with replaced control characters and limited length.

    Control characters could manipulate a terminal or reverse the reading direction, and a lone
    surrogate (a file name that is not UTF-8) cannot be encoded.
    """
    return cut_with_digest(value, most, _UNPRINTABLE.sub("\ufffd", value))
