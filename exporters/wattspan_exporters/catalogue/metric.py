"""What a metric is: one entry of the catalogue, and its name in each world.

Text that comes from outside, made fit to be shown.

How much of what was made for series is kept when they are no longer drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2s
from typing import NamedTuple

from wattspan.model import Exemplar, Snapshot

Labels = tuple[str, ...]
"""The label values of one series, in the order of its metric's attributes; "" is absent."""

Sample = tuple[Labels, int | float]
"""One series' value; see Metric for its scale."""

Draw = Callable[[Snapshot], Iterable[Sample]]

DrawExemplars = Callable[[Snapshot], Mapping[Labels, Exemplar]]
"""The spans that stand for series, by the labels that ``Draw`` gives those. Only of counters."""

StartTimes = Callable[[Snapshot], Callable[[Labels], int | None]]
"""When series of a counter were zero, in Unix nanoseconds; None where nobody can tell."""


class Instrument(StrEnum):
    """OpenTelemetry's instruments, and one that Prometheus has, which is a gauge over OTLP."""

    COUNTER = "Counter"
    UPDOWN = "UpDownCounter"
    GAUGE = "Gauge"
    INFO = "Info"  # facts as labels, the value always 1


DECIMALS = {"J": 6, "W": 3, "s": 9, "g": 9, "g/kWh": 9, "{currency}": 9, "{currency}/kWh": 9}
"""Quantities the model holds as whole microjoules, milliwatts, nanoseconds and billionths."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its names, its meaning, and how it is drawn from a snapshot.

    ``draw`` yields whole numbers of the model's own unit where ``unit`` is in ``DECIMALS``
    (microjoules for J, milliwatts for W, nanoseconds for s, billionths of grams and of money), so
    that no value is ever rounded on its way out; for every other unit it yields the value itself.
    """

    name: str
    instrument: Instrument
    unit: str
    help: str
    attributes: tuple[str, ...]
    draw: Draw
    series: str = ""  # the Prometheus name where it is fixed otherwise than by the rules
    exemplars: DrawExemplars | None = None  # their energy is the exemplar's value, in ``unit``
    lasting: bool = False  # counts on over restarts, since ``Snapshot.since``; else since a start
    begins: StartTimes | None = None  # for series that count neither since the books nor a start

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
        """The unit as Prometheus spells it in a name; "" if the name carries none."""
        if self.unit == "1":
            return "ratio" if self.instrument is Instrument.GAUGE else ""
        main, _, per = self.unit.partition("/")
        word = _unit_word(main)
        return f"{word}_per_{_unit_word(per, _PER_WORDS)}" if word and per else word


class Chapter(NamedTuple):
    """Metrics that belong together, and what must be known to use them."""

    title: str
    prose: str
    metrics: tuple[Metric, ...]


# ------------------------------------------------- OpenTelemetry's names as Prometheus names

_UNIT_WORDS = {
    "d": "days", "h": "hours", "min": "minutes",
    "s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds",
    "By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes", "GiBy": "gibibytes",
    "TiBy": "tibibytes", "KBy": "kilobytes", "MBy": "megabytes", "GBy": "gigabytes",
    "TBy": "terabytes",
    "m": "meters", "V": "volts", "A": "amperes", "J": "joules", "W": "watts", "g": "grams",
    "Cel": "celsius", "Hz": "hertz", "1": "", "%": "percent",
}  # fmt: skip
_PER_WORDS = {
    "s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week", "mo": "month", "y": "year",
    "kWh": "kwh",
}  # fmt: skip


def prometheus_name(name: str, unit: str, instrument: Instrument) -> str:
    """``name`` as OpenTelemetry's translation to Prometheus spells it.

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


MAX_LABEL_LENGTH = 128
"""Characters of a label value; whatever is longer is cut and marked with a digest."""

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def sanitize(value: str, most: int = MAX_LABEL_LENGTH) -> str:
    """``value`` as it is, unless it is too long or holds what no page should show.

    Control characters could rewrite the terminal of whoever looks at a scrape, or turn the
    direction of what is read, and half a
    surrogate pair (a file name that is not UTF-8) cannot be encoded at all.
    """
    return truncate_with_digest(value, _UNPRINTABLE.sub("\ufffd", value), most)


def truncate_with_digest(value: str, fit: str, most: int) -> str:
    """``fit``, which is ``value`` as it may be shown, in at most ``most`` characters.

    What had to be changed is marked with a digest of the original, so that two names stay two
    series.
    """
    if fit == value and len(value) <= most:
        return value
    digest = blake2s(value.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{fit[: most - 9]}~{digest}"


CACHE_SLACK = 64
"""Series a metric may keep beyond those in use, so that little churn costs nothing."""


def cache_must_shrink(kept: int, used: int) -> bool:
    """Whether what is kept must shrink to what is used: about twice as much never stays."""
    return kept > 2 * used + CACHE_SLACK
