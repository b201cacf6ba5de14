"""One scrape as exact numbers: one scrape as any observer sees it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NANO = 1_000_000_000
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Series:
    """The name and the labels of a line of a scrape."""

    name: str
    labels: Mapping[str, str]

    def has(self, **labels: str) -> bool:
        return all(self.labels.get(key) == value for key, value in labels.items())


@functools.lru_cache(maxsize=20_000)
def series_of(key: str) -> Series:
    name, _, rest = key.partition("{")
    return Series(name, dict(_LABEL.findall(rest)))


@dataclass(frozen=True)
class Sight:
    """A scrape taken ``at`` some monotonic nanosecond. Values are whole billionths of their unit.

    So sums are compared exactly, like the agent's own totals.
    """

    at: int
    values: Mapping[str, int]
    counters: frozenset[str] = frozenset()  # the names of those
    twice: tuple[str, ...] = ()  # series that are there more than once, which must not be

    def pick(self, name: str, **labels: str) -> Iterator[tuple[Series, int]]:
        """The series called ``name`` that have ``labels``, and their values."""
        for key, value in self.values.items():
            if key.startswith(name):
                series = series_of(key)
                if series.name == name and series.has(**labels):
                    yield series, value

    def total(self, name: str, **labels: str) -> int:
        """Their sum."""
        return sum(value for _, value in self.pick(name, **labels))

    def domains(self) -> dict[str, int]:
        """The energy of every domain of the cover, by its id."""
        return {
            series.labels["hw_id"]: value
            for series, value in self.pick("hw_energy_joules_total")
            if "hw_parent" not in series.labels
        }


def parse(text: str, at: int) -> Sight:
    """A scrape in Prometheus' text format."""
    values: dict[str, int] = {}
    counters = set()
    twice = []
    for line in text.splitlines():
        if line.startswith("#"):
            words = line.split(" ")
            if words[1] == "TYPE" and words[3] == "counter":
                counters.add(words[2])
            continue
        key, _, value = line.rpartition(" ")
        if key in values:
            twice.append(key)
        values[key] = billionths(value)
    return Sight(at, values, frozenset(counters), tuple(twice))


def billionths(value: str) -> int:
    """A decimal number in whole billionths, exactly where it is written with nine digits at most.

    >>> billionths("12.000000001")
    12000000001
    """
    whole, _, part = value.partition(".")
    if whole.lstrip("-").isdigit() and (not part or part.isdigit()) and len(part) <= 9:
        sign = -1 if whole.startswith("-") else 1
        return int(whole) * NANO + sign * int(part.ljust(9, "0"))
    return round(float(value) * NANO)
