"""What a kilowatt-hour costs and emits: a constant, a tariff file, or a figure somebody else keeps.

Nothing is asked of any network unless ``url`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from wattspan.attribution.cost import MAX_RATE
from wattspan.model.settings import Duration, Table, about, quoted

_CURRENCY = re.compile(r"[A-Za-z]{1,12}")

_Schedule = Annotated[
    str,
    about(
        "A tariff file, which says it by the time of day: an absolute path. It is read again "
        "within half a minute of being changed."
    ),
]
_Url = Annotated[
    str,
    about(
        "A Prometheus server, or what answers as one, that is asked for it: "
        '"http://127.0.0.1:9090".'
    ),
]
_Query = Annotated[str, about("What it is asked: PromQL that comes to one number.")]
_File = Annotated[
    str, about("A file that holds it as one number, which somebody else keeps writing.")
]
_Refresh = Annotated[
    Duration, about("How often the server is asked, or the file read.", least="1s", most="1d")
]
_MaxAge = Annotated[
    Duration,
    about(
        "How long the last answer counts while there is no newer one, and how old the file may "
        "be. After that the rate is unknown.",
        least="1s",
        most="30d",
    ),
]
_Timeout = Annotated[
    Duration, about("How long the server is waited for.", least="100ms", most="1m")
]


class CostSettings(Table, frozen=True):
    """What energy costs. One of `price`, `schedule`, `url` and `file` says it, or nobody does.

    A price below zero counts as not known: totals must not fall.
    """

    currency: Annotated[
        str, about('Of all amounts: "EUR", or what else you reckon in, in at most 12 letters.')
    ] = "EUR"
    price: Annotated[
        float | None, about("What a kilowatt-hour costs, always.", least=0, most=MAX_RATE)
    ] = None
    schedule: _Schedule = ""
    url: _Url = ""
    query: _Query = ""
    file: _File = ""
    factor: Annotated[
        float,
        about(
            "What the number from `url` or `file` is multiplied by to be a price per "
            "kilowatt-hour: 0.001 if it is one per megawatt-hour.",
            least=1e-9,
            most=1e9,
        ),
    ] = 1.0
    refresh: _Refresh = Duration.parse("1m")
    max_age: _MaxAge = Duration.parse("15m")
    timeout: _Timeout = Duration.parse("10s")


class CarbonSettings(Table, frozen=True):
    """What energy emits. One of `intensity`, `schedule`, `url` and `file` says it, in g/kWh.

    Grams are of carbon dioxide equivalent.
    """

    intensity: Annotated[
        float | None,
        about("The grams that a kilowatt-hour emits, always.", least=0, most=MAX_RATE),
    ] = None
    schedule: _Schedule = ""
    url: _Url = ""
    query: _Query = ""
    file: _File = ""
    factor: Annotated[
        float,
        about(
            "What the number from `url` or `file` is multiplied by to be grams per "
            "kilowatt-hour, which kilograms per megawatt-hour are already.",
            least=1e-9,
            most=1e9,
        ),
    ] = 1.0
    refresh: _Refresh = Duration.parse("1m")
    max_age: _MaxAge = Duration.parse("15m")
    timeout: _Timeout = Duration.parse("10s")


def rate_keys(table: CostSettings | CarbonSettings) -> list[str]:
    """The keys that say what a kilowatt-hour comes to; of a right table there is at most one."""
    constant = (
        ("price", table.price)
        if isinstance(table, CostSettings)
        else ("intensity", table.intensity)
    )
    means = (constant, *((key, getattr(table, key) or None) for key in ("schedule", "url", "file")))
    return [key for key, value in means if value is not None]


def footprint_faults(where: str, table: CostSettings | CarbonSettings) -> Iterator[tuple[str, str]]:
    """What cannot be in one of these tables: a dotted key and a sentence each."""
    said = rate_keys(table)
    for key in said[1:]:
        yield (
            f"{where}.{key}",
            f"Bad value for {f'{where}.{key}'!r}: {where}.{said[0]} says already what a "
            "kilowatt-hour comes to. Keep one of them.",
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
            f"Bad value for {f'{where}.url'!r}: nothing is asked of it. Set {where}.query.",
        )
    if table.query and not table.url:
        yield (
            f"{where}.query",
            f"Bad value for {f'{where}.query'!r}: nobody is asked. Set {where}.url.",
        )
    if (table.url or table.file) and table.refresh > table.max_age:
        yield (
            f"{where}.refresh",
            f"Bad value for {f'{where}.refresh'!r}: asked every {table.refresh}, and an answer "
            f"counts for {table.max_age}, so nothing would be known in between. Set "
            f"{where}.max_age to more than that.",
        )
    if table.url and (why := _url_fault(table.url)):
        yield f"{where}.url", f"Bad value for {f'{where}.url'!r}: {why}."
    for key in ("schedule", "file"):
        path = getattr(table, key)
        if path and not path.startswith("/"):
            yield (
                f"{where}.{key}",
                f"Bad value for {f'{where}.{key}'!r}: {quoted(path)} is not an absolute path, and "
                "the agent runs elsewhere than you. Write it from / on.",
            )


def _url_fault(url: str) -> str:
    """Why ``url`` is not the address of a server; "" if it is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"{quoted(url)} is not an address: {error}"
    if "@" in parts.netloc:  # and is not shown: it may be a password
        return "it names a user; names and passwords cannot be sent"
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or port == 0:
        return f'{quoted(url)} is not an address such as "http://127.0.0.1:9090"'
    if parts.query or parts.fragment:
        return f"{quoted(url)} goes on after its path; write what is asked into `query`"
    return ""
