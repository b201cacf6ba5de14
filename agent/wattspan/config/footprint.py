"""Configuration tables of energy cost and carbon: [cost] and [carbon].

The agent sends no network request for a rate unless ``url`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from wattspan.model import MAX_RATE
from wattspan.model.settings import Duration, Table, about, quoted

_CURRENCY = re.compile(r"[A-Za-z]{1,12}")


class RateSettings(Table, frozen=True):
    """Source of a rate per kilowatt-hour: at most one of a constant, `schedule`, `url`, `file`.

    Keys:
        schedule: Absolute path of a tariff file with rates by time of day. The agent reads a
            changed file again within half a minute.
        url: Prometheus server, or a compatible one, with the rate: "http://127.0.0.1:9090".
        query: PromQL query to that server with one number as its result.
        file: File with the rate as one number, which another program updates.
        factor: Factor from the number of `url` or `file` to the rate per kilowatt-hour: 0.001 for a
            price per megawatt-hour, 1 for kilograms per megawatt-hour as grams.
        refresh: Interval of queries or of file reads.
        max_age: Age above which the answer, or the file, is ignored.
        timeout: Timeout of a query to the server.
    """

    constant_key: ClassVar[str]
    """The key of a constant rate."""

    schedule: str = ""
    url: str = ""
    query: str = ""
    file: str = ""
    factor: Annotated[float, about(least=1e-9, most=1e9)] = 1.0
    refresh: Annotated[Duration, about(least="1s", most="1d")] = Duration.parse("1m")
    max_age: Annotated[Duration, about(least="1s", most="30d")] = Duration.parse("15m")
    timeout: Annotated[Duration, about(least="100ms", most="1m")] = Duration.parse("10s")

    @property
    def unit(self) -> str:
        """The unit of the numerator."""
        raise NotImplementedError

    @property
    def constant(self) -> float | None:
        """The constant rate; None if the table configures none."""
        rate: float | None = getattr(self, self.constant_key)
        return rate

    @property
    def rate_keys(self) -> list[str]:
        """The keys that set a rate; a valid table has at most one."""
        keys = [key for key in ("schedule", "url", "file") if getattr(self, key)]
        return keys if self.constant is None else [self.constant_key, *keys]

    def contradictions(self) -> Iterator[tuple[str, str]]:
        first, *others = self.rate_keys or [""]
        for key in others:
            yield key, f"{first} also sets the rate of a kilowatt-hour. Remove one of them."
        for key, other in (("url", "query"), ("query", "url")):
            if getattr(self, key) and not getattr(self, other):
                yield key, f"{other} is empty. Set {other}."
        if (self.url or self.file) and self.refresh > self.max_age:
            yield (
                "refresh",
                f"the interval {self.refresh} is longer than the validity of an answer,"
                f" {self.max_age}. Set max_age to more than the interval.",
            )
        if self.url and (cause := _url_fault(self.url)):
            yield "url", cause
        yield from relative_paths(self, "schedule", "file")


class CostSettings(RateSettings, frozen=True):
    """Cost of energy. At most one of `price`, `schedule`, `url` and `file` may be set.

    The agent treats a price below zero as unknown, because totals must not fall.

    Keys:
        currency: Currency of all amounts, such as "EUR": 1 to 12 letters.
        price: Constant price of a kilowatt-hour.
    """

    constant_key = "price"

    currency: str = "EUR"
    price: Annotated[float | None, about(least=0, most=MAX_RATE)] = None

    @property
    def unit(self) -> str:
        return self.currency

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super().contradictions()
        if not _CURRENCY.fullmatch(self.currency):
            yield (
                "currency",
                f'{quoted(self.currency)} is not a currency; write 1 to 12 letters, such as "EUR".',
            )


class CarbonSettings(RateSettings, frozen=True):
    """Carbon emissions of energy, in g/kWh of carbon dioxide equivalent.

    At most one of `intensity`, `schedule`, `url` and `file` may be set.

    Keys:
        intensity: Constant carbon intensity in grams per kilowatt-hour.
    """

    constant_key = "intensity"

    intensity: Annotated[float | None, about(least=0, most=MAX_RATE)] = None

    @property
    def unit(self) -> str:
        return "g"


def relative_paths(table: Table, *keys: str) -> Iterator[tuple[str, str]]:
    """The ``keys`` whose path is relative, each with cause and remedy."""
    for key in keys:
        path = getattr(table, key)
        if path and not path.startswith("/"):
            yield key, f"{quoted(path)} is a relative path. Write an absolute path."


def _url_fault(url: str) -> str:
    """Return the fault of the server address ``url``; "" if it is valid."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"{quoted(url)} is not an address: {error}"
    if "@" in parts.netloc:  # the message omits the address, which may hold a password
        return "it contains a user name; wattspan sends no user names and passwords"
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or port == 0:
        return f'{quoted(url)} is not an address such as "http://127.0.0.1:9090"'
    if parts.query or parts.fragment:
        return f"{quoted(url)} has a query or a fragment; write the query into `query`"
    return ""
