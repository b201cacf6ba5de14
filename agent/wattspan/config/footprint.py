"""Configuration tables of energy cost and carbon: [cost] and [carbon].

The agent sends no network request for a rate unless ``url`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from wattspan.attribution.cost import MAX_RATE
from wattspan.model.settings import Duration, Table, about, quoted

_CURRENCY = re.compile(r"[A-Za-z]{1,12}")


class RateSettings(Table, frozen=True):
    """Source of a rate per kilowatt-hour: at most one of a constant, `schedule`, `url`, `file`."""

    schedule: Annotated[
        str,
        about(
            "Absolute path of a tariff file with rates by time of day. The agent reads a changed "
            "file again within half a minute."
        ),
    ] = ""
    url: Annotated[
        str,
        about('Prometheus server, or a compatible one, with the rate: "http://127.0.0.1:9090".'),
    ] = ""
    query: Annotated[str, about("PromQL query to that server with one number as its result.")] = ""
    file: Annotated[
        str, about("File with the rate as one number, which another program updates.")
    ] = ""
    factor: Annotated[
        float,
        about(
            "Factor from the number of `url` or `file` to the rate per kilowatt-hour: 0.001 for a "
            "price per megawatt-hour, 1 for kilograms per megawatt-hour as grams.",
            least=1e-9,
            most=1e9,
        ),
    ] = 1.0
    refresh: Annotated[
        Duration, about("Interval of queries or of file reads.", least="1s", most="1d")
    ] = Duration.parse("1m")
    max_age: Annotated[
        Duration,
        about(
            "Validity of the last answer, and largest age of the file. After that the rate is "
            "unknown.",
            least="1s",
            most="30d",
        ),
    ] = Duration.parse("15m")
    timeout: Annotated[
        Duration, about("Timeout of a query to the server.", least="100ms", most="1m")
    ] = Duration.parse("10s")


class CostSettings(RateSettings, frozen=True):
    """Cost of energy. At most one of `price`, `schedule`, `url` and `file` may be set.

    The agent treats a price below zero as unknown, because totals must not fall.
    """

    currency: Annotated[str, about('Currency of all amounts, such as "EUR": 1 to 12 letters.')] = (
        "EUR"
    )
    price: Annotated[
        float | None, about("Constant price of a kilowatt-hour.", least=0, most=MAX_RATE)
    ] = None


class CarbonSettings(RateSettings, frozen=True):
    """Carbon emissions of energy, in g/kWh of carbon dioxide equivalent.

    At most one of `intensity`, `schedule`, `url` and `file` may be set.
    """

    intensity: Annotated[
        float | None,
        about("Constant carbon intensity in grams per kilowatt-hour.", least=0, most=MAX_RATE),
    ] = None


def rate_keys(table: CostSettings | CarbonSettings) -> list[str]:
    """Return the keys that set a rate; a valid table has at most one."""
    constant = (
        ("price", table.price)
        if isinstance(table, CostSettings)
        else ("intensity", table.intensity)
    )
    sources = (
        constant,
        *((key, getattr(table, key) or None) for key in ("schedule", "url", "file")),
    )
    return [key for key, value in sources if value is not None]


def footprint_faults(where: str, table: CostSettings | CarbonSettings) -> Iterator[tuple[str, str]]:
    """Yield the faults of one table: a dotted key and a sentence each."""
    rates = rate_keys(table)
    for key in rates[1:]:
        yield (
            f"{where}.{key}",
            f"Bad value for {f'{where}.{key}'!r}: {where}.{rates[0]} also sets the rate of a "
            "kilowatt-hour. Remove one of them.",
        )
    if isinstance(table, CostSettings) and not _CURRENCY.fullmatch(table.currency):
        yield (
            "cost.currency",
            f"Bad value for 'cost.currency': {quoted(table.currency)} is not a currency; write 1 "
            'to 12 letters, such as "EUR".',
        )
    if table.url and not table.query:
        yield (
            f"{where}.url",
            f"Bad value for {f'{where}.url'!r}: {where}.query is empty. Set {where}.query.",
        )
    if table.query and not table.url:
        yield (
            f"{where}.query",
            f"Bad value for {f'{where}.query'!r}: {where}.url is empty. Set {where}.url.",
        )
    if (table.url or table.file) and table.refresh > table.max_age:
        yield (
            f"{where}.refresh",
            f"Bad value for {f'{where}.refresh'!r}: the interval {table.refresh} is longer "
            f"than the validity of an answer, {table.max_age}. Set {where}.max_age to more than "
            "the interval.",
        )
    if table.url and (why := _url_fault(table.url)):
        yield f"{where}.url", f"Bad value for {f'{where}.url'!r}: {why}."
    for key in ("schedule", "file"):
        path = getattr(table, key)
        if path and not path.startswith("/"):
            yield (
                f"{where}.{key}",
                f"Bad value for {f'{where}.{key}'!r}: {quoted(path)} is a relative path. Write "
                "an absolute path.",
            )


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
