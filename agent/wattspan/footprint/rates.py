"""Asking for one number: of a server that speaks Prometheus's HTTP API, or of a file.

Rates that have to be looked up now and then, in a thread of their own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from wattspan.attribution.cost import billionths
from wattspan.footprint.schedule import Schedule
from wattspan.footprint.tariff_file import read_schedule
from wattspan.model import SECOND, Failure, Instant, RateOrigin, SourceHealth, Trouble
from wattspan.model.settings import Duration, quoted
from wattspan.ports import Clock, ConfigError
from wattspan.util.files import read_regular

MAX_RESPONSE_BYTES = 64 * 1024
"""Bytes of an answer; one number takes less."""


class NumberError(Exception):
    """There is no number: the message is why. ``answered`` if somebody did, and said no number."""

    def __init__(self, why: str, *, answered: bool = True) -> None:
        super().__init__(why)
        self.answered = answered


class TimedNumber(NamedTuple):
    """A number, and for how many nanoseconds it has been known."""

    number: float
    age: int = 0


def query_number(url: str, query: str, timeout: float) -> TimedNumber:
    """The one number that ``query`` comes to now; AnswerError if there is none, or several.

    ``timeout`` seconds are for each step of the conversation, not for all of it.
    """
    return TimedNumber(parse_number(_fetch(url, query, timeout)))


def parse_number(body: bytes) -> float:
    """The number in an answer of ``/api/v1/query``: a scalar, or a vector of one."""
    try:
        answer: Any = json.loads(body)
        if answer["status"] != "success":
            raise NumberError(f"the server says {quoted(str(answer.get('error', 'no reason')))}")
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
        if kind == "vector":
            if len(result) != 1:
                raise NumberError(_how_many(len(result)))
            result = result[0]["value"]
        elif kind != "scalar":
            raise NumberError(f"the query yields a {quoted(str(kind))} and not one number")
        return float(str(result[1]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise NumberError("the answer is not that of a Prometheus server") from None


def _how_many(series: int) -> str:
    if not series:
        return "the query yields nothing"
    return f"the query yields {series} series; make it one, as with avg()"


def _fetch(url: str, query: str, timeout: float) -> bytes:
    # Imported here: most agents never ask anybody.
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import urlencode
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Stay(HTTPRedirectHandler):
        """Whoever was configured is asked, and nobody else."""

        def redirect_request(self, *_: object) -> None:
            return None

    address = f"{url.rstrip('/')}/api/v1/query?{urlencode({'query': query})}"
    try:
        with build_opener(Stay).open(Request(address), timeout=timeout) as answer:  # noqa: S310
            body: bytes = answer.read(MAX_RESPONSE_BYTES + 1)
    except HTTPError as error:
        with error:
            body = error.read(MAX_RESPONSE_BYTES + 1)
        if not body.startswith(b'{"status":"error"'):
            raise NumberError(f"the server answers {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise NumberError(str(why).lower(), answered=False) from None
    if len(body) > MAX_RESPONSE_BYTES:
        raise NumberError("the answer is far too long for one number")
    return body


def read_number(path: Path, now: int) -> TimedNumber:
    """The number in a file, as old as the file; ``now`` is Unix nanoseconds."""
    try:
        text, status = read_regular(path)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise NumberError(why, answered=False) from None
    try:
        return TimedNumber(float(text.decode("ascii")), max(0, now - status.st_mtime_ns))
    except ValueError:
        shown = quoted(text[:60].decode("ascii", "replace").strip())
        raise NumberError(f"{shown} is not a number") from None


_TARIFF_INTERVAL = 30 * SECOND
"""How often it is looked whether a tariff file has changed."""


class EnergyRate(Protocol):
    """What a kilowatt-hour comes to, in billionths. ``at`` never blocks, from any thread."""

    @property
    def origin(self) -> RateOrigin: ...

    def at(self, now: Instant) -> int | None:
        """The rate in force; None while it is not known."""
        ...


class ConstantRate:
    """The same, always."""

    origin = RateOrigin.CONSTANT

    def __init__(self, rate: int | None) -> None:
        self._rate = rate

    def at(self, now: Instant) -> int | None:
        return self._rate


class PolledRate:
    """``look`` is called at once and then at every turn of a thread, which may take its time."""

    def __init__(self, name: str, every: int) -> None:
        self.name = name
        self._every = every
        self._looks = self._failed = 0
        self._failure: Failure | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"wattspan-{name}", daemon=True)

    def health(self) -> SourceHealth:
        failure = self._failure
        return SourceHealth(
            self.name,
            failure is None,
            self._looks,
            self._failed,
            (failure,) if failure is not None else (),
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A look that hangs is left behind: it is a daemon's."""
        self._stop.set()
        self._thread.join(1.0)

    def poll(self) -> None:
        """Once. What fails is told by ``health``."""
        self._looks += 1
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - without a rate, energy is measured all the same
            self._failed += 1
            self._failure = self._failure_of(error)
        else:
            self._failure = None

    def _run(self) -> None:
        while not self._stop.is_set():
            self.poll()
            self._stop.wait(self._every / 1e9)

    def _look(self) -> None:
        raise NotImplementedError

    def _failure_of(self, error: Exception) -> Failure:
        raise NotImplementedError


class TariffRate(PolledRate):
    """What a tariff file says, read again once it has changed.

    A file that cannot be read any more changes nothing: what was read last stays in force.
    """

    origin = RateOrigin.SCHEDULE

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, _TARIFF_INTERVAL)
        self._path = path
        self._mark: tuple[int, int, int] | None = None
        self._schedule: Schedule | None = None
        self.poll()

    def at(self, now: Instant) -> int | None:
        schedule = self._schedule
        return None if schedule is None else schedule.rate(now.wall // 10**9)

    def _look(self) -> None:
        try:
            found = self._path.stat()
            mark = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            mark = None  # let reading say why
        if mark is None or mark != self._mark or self._failure is not None:
            self._schedule = read_schedule(self._path)
            self._mark = mark

    def _failure_of(self, error: Exception) -> Failure:
        kept = "What it said before stays in force." if self._schedule else "No rate is known."
        first, *more = str(error).splitlines() or [type(error).__name__]
        first = first.removeprefix(f"Cannot read the tariff {self._path}: ")
        others = f" ({len(more)} more: see `wattspan doctor`)" if more else ""
        bad = isinstance(error, ConfigError)
        return Failure(
            self.name,
            f"the tariff {self._path}",
            Trouble.MALFORMED if bad else Trouble.RETRY,
            f"{first.rstrip('.')}{others}",
            kept,
        )


class ExternalRate(PolledRate):
    """A number that somebody else keeps, multiplied by ``factor``.

    The last answer counts for ``max_age`` while there is no newer one. An answer that can be no
    rate, such as a price below zero, is one all the same: the rate is not known then.
    """

    origin = RateOrigin.METRIC

    def __init__(
        self,
        name: str,
        what: str,
        ask: Callable[[], TimedNumber],
        clock: Clock,
        *,
        factor: float,
        every: int,
        max_age: int,
    ) -> None:
        super().__init__(name, every)
        self._what, self._ask, self._clock = what, ask, clock
        self._factor, self._max_age = factor, max_age
        self._answer: tuple[int, int | None] | None = None

    def at(self, now: Instant) -> int | None:
        answer = self._answer
        if answer is None or _elapsed(now) - answer[0] > self._max_age:
            return None
        return answer[1]

    def _look(self) -> None:
        asked = _elapsed(self._clock.now())
        number, age = self._ask()
        number *= self._factor
        rate = billionths(number)
        self._answer = asked - age, rate
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
            self._what,
            Trouble.MALFORMED if answered else Trouble.RETRY,
            cause,
            "Energy that is spent while no rate is known is told apart, and in no total.",
        )


def _elapsed(now: Instant) -> int:
    """Nanoseconds since boot: an answer grows old while the host sleeps as well."""
    return now.mono + now.asleep
