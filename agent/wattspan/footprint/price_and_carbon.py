"""Rates per kilowatt-hour: constant, from a tariff file, or polled from a server or a file.

A server is queried through the HTTP API of Prometheus. Polling happens in a thread of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from wattspan.config.tables import RateSettings
from wattspan.footprint.cost import Schedule, billionths
from wattspan.model import SECOND, Failure, Instant, RateOrigin, SourceHealth, Trouble
from wattspan.model.settings import Duration, quoted
from wattspan.ports import Clock, ConfigError
from wattspan.util.files import read_regular
from wattspan.util.http_get import OK, FetchError, http_get

MAX_RESPONSE_BYTES = 64 * 1024
"""Largest response, in bytes."""


class NumberError(Exception):
    """The query yields no number; the message is the cause.

    ``answered`` is False if there was no response at all.
    """

    def __init__(self, cause: str, *, answered: bool = True) -> None:
        super().__init__(cause)
        self.answered = answered


class TimedNumber(NamedTuple):
    """A number and its age in nanoseconds."""

    number: float
    age: int = 0


def query_number(url: str, query: str, timeout: float) -> TimedNumber:
    """Return the current value of the PromQL ``query``. NumberError without exactly one number.

    ``timeout`` (seconds) limits the whole answer.
    """
    return TimedNumber(parse_number(_fetch(url, query, timeout)))


def parse_number(body: bytes) -> float:
    """Return the number in a response of ``/api/v1/query``: a scalar or a vector of one."""
    try:
        answer: Any = json.loads(body)
        if answer["status"] != "success":
            raise NumberError(f"the server reports {quoted(str(answer.get('error', 'no reason')))}")
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
        if kind == "vector":
            if len(result) != 1:
                raise NumberError(
                    f"the query yields {len(result)} series; make it one, as with avg()"
                    if result
                    else "the query yields nothing"
                )
            result = result[0]["value"]
        elif kind != "scalar":
            raise NumberError(f"the query yields a {quoted(str(kind))} instead of a number")
        return float(str(result[1]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise NumberError("the response is not that of a Prometheus server") from None


def _fetch(url: str, query: str, timeout: float) -> bytes:
    from urllib.parse import urlencode  # most agents query no server

    address = f"{url.rstrip('/')}/api/v1/query?{urlencode({'query': query})}"
    try:
        status, body = http_get(address, timeout=timeout, most=MAX_RESPONSE_BYTES)
    except FetchError as error:
        raise NumberError(str(error), answered=False) from None
    if status != OK and not body.startswith(b'{"status":"error"'):
        raise NumberError(f"the server answers {status}")
    if len(body) > MAX_RESPONSE_BYTES:
        raise NumberError("the response is too long for one number")
    return body


def read_number(path: Path, now: int) -> TimedNumber:
    """Return the number in a file with the age of the file; ``now`` is Unix nanoseconds."""
    try:
        text, status = read_regular(path)
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise NumberError(cause, answered=False) from None
    try:
        return TimedNumber(float(text.decode("ascii")), max(0, now - status.st_mtime_ns))
    except ValueError:
        shown = quoted(text[:60].decode("ascii", "replace").strip())
        raise NumberError(f"{shown} is not a number") from None


_TARIFF_INTERVAL = 30 * SECOND
"""Interval of checks whether a tariff file has changed."""


class ConstantRate:
    """A constant rate per kilowatt-hour in billionths."""

    origin = RateOrigin.CONSTANT

    def __init__(self, rate: int | None) -> None:
        self._rate = rate

    def at(self, now: Instant) -> int | None:
        return self._rate


class PolledRate:
    """A rate per kilowatt-hour that a thread polls (``run``)."""

    origin: RateOrigin

    def __init__(self, name: str, interval: int) -> None:
        self.name = name
        self._interval = interval
        self._polls = self._failed = 0
        self._failure: Failure | None = None

    def at(self, now: Instant) -> int | None:
        """Return the rate in force in billionths, without blocking; None while it is unknown."""
        raise NotImplementedError

    def health(self) -> SourceHealth:
        failure = self._failure
        return SourceHealth(
            self.name,
            failure is None,
            self._polls,
            self._failed,
            (failure,) if failure is not None else (),
        )

    def run(self, stop: threading.Event) -> None:
        """Poll at once and then at every interval, until ``stop``."""
        while not stop.is_set():
            self.poll()
            stop.wait(self._interval / 1e9)

    def poll(self) -> None:
        """Poll once; ``health`` reports a failure."""
        self._polls += 1
        try:
            self._poll()
        except Exception as error:  # noqa: BLE001 - energy is measured without a rate as well
            self._failed += 1
            self._failure = self._failure_of(error)
        else:
            self._failure = None

    def _poll(self) -> None:
        raise NotImplementedError

    def _failure_of(self, error: Exception) -> Failure:
        raise NotImplementedError


class TariffRate(PolledRate):
    """The rate of a tariff file, which is read again after a change.

    If the file becomes unreadable, the schedule that was read last stays in force.
    """

    origin = RateOrigin.SCHEDULE

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, _TARIFF_INTERVAL)
        self._path = path
        self._version: tuple[int, int, int] | None = None
        self._schedule: Schedule | None = None
        self.poll()

    def at(self, now: Instant) -> int | None:
        schedule = self._schedule
        return None if schedule is None else schedule.rate(now.wall // 10**9)

    def _poll(self) -> None:
        try:
            found = self._path.stat()
            version = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            version = None  # read_schedule reports the cause
        if version is None or version != self._version or self._failure is not None:
            from wattspan.footprint.tariff_file import read_schedule  # imports zoneinfo

            self._schedule = read_schedule(self._path)
            self._version = version

    def _failure_of(self, error: Exception) -> Failure:
        remedy = "The previous schedule stays in force." if self._schedule else "No rate is known."
        first, *more = str(error).splitlines() or [type(error).__name__]
        first = first.removeprefix(f"Cannot read the tariff {self._path}: ")
        others = f" ({len(more)} more: see `wattspan doctor`)" if more else ""
        malformed = isinstance(error, ConfigError)
        return Failure(
            self.name,
            f"the tariff {self._path}",
            Trouble.MALFORMED if malformed else Trouble.RETRY,
            f"{first.rstrip('.')}{others}",
            remedy,
        )


class ExternalRate(PolledRate):
    """A number of a server or a file, multiplied by ``factor``.

    The last number is valid for ``max_age``. A number that is no rate, such as a price below zero,
    replaces the last one: the rate is then unknown.
    """

    origin = RateOrigin.METRIC

    def __init__(
        self,
        name: str,
        description: str,
        query: Callable[[], TimedNumber],
        clock: Clock,
        *,
        factor: float,
        interval: int,
        max_age: int,
    ) -> None:
        super().__init__(name, interval)
        self._description, self._query, self._clock = description, query, clock
        self._factor, self._max_age = factor, max_age
        self._answer: tuple[int, int | None] | None = None

    def at(self, now: Instant) -> int | None:
        answer = self._answer
        if answer is None or now.since_boot - answer[0] > self._max_age:
            return None
        return answer[1]

    def _poll(self) -> None:
        queried_at = self._clock.now().since_boot
        number, age = self._query()
        number *= self._factor
        rate = billionths(number)
        self._answer = queried_at - age, rate
        if age > self._max_age:
            old = Duration(age // SECOND * SECOND)
            raise NumberError(f"it was last written {old} ago", answered=False)
        if rate is None:
            raise NumberError(f"{number:g} is no rate per kilowatt-hour")

    def _failure_of(self, error: Exception) -> Failure:
        cause, answered = f"{type(error).__name__}: {error}", False
        if isinstance(error, NumberError):
            cause, answered = str(error), error.answered
        return Failure(
            self.name,
            self._description,
            Trouble.MALFORMED if answered else Trouble.RETRY,
            cause,
            "Energy without a known rate is reported separately and is in no total.",
        )


def open_rate(
    name: str, table: RateSettings, clock: Clock
) -> ConstantRate | TariffRate | ExternalRate | None:
    """The rate that a table configures, without a lookup yet; None if it configures none."""
    if table.constant is not None:
        return ConstantRate(billionths(table.constant))
    if table.schedule:
        return TariffRate(name, Path(table.schedule))
    if not table.url and not table.file:
        return None
    path, timeout = Path(table.file), table.timeout / 1e9
    return ExternalRate(
        name,
        f"the rate per kilowatt-hour from {table.url or path}",
        (lambda: query_number(table.url, table.query, timeout))
        if table.url
        else (lambda: read_number(path, clock.now().wall)),
        clock,
        factor=table.factor,
        interval=table.refresh,
        max_age=table.max_age,
    )
