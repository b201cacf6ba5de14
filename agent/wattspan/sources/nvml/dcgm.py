"""Activity of MIG instances from the metrics of dcgm-exporter, for boards without GPM.

The exporter renews its figures every 30 s by default. A thread of its own reads them, because no
read of an energy counter may wait for a network.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from typing import NamedTuple

from wattspan.model import SECOND, Nanoseconds
from wattspan.ports import Clock
from wattspan.util.http_get import OK, FetchError, http_get
from wattspan.util.throttle import RetryBackoff

SM_ACTIVE, ENGINE_ACTIVE = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
FETCH_INTERVAL = 5 * SECOND
LONGEST_RETRY = 60 * SECOND
"""The interval grows to it while the exporter fails: an answer that fails costs time as well."""

MAX_AGE = 90 * SECOND
"""Figures that have not been fetched for three of the exporter's intervals are not used."""

EXPORTER_INTERVAL = Nanoseconds(30 * SECOND)
"""The default interval of the exporter: figures are means over it, and may be as old."""

_MAX_BYTES = 4 << 20
_MAX_LINE, _MAX_DIGITS, _MAX_SERIES = 4096, 32, 1024
_LONGEST_ID = 3
"""Digits of the id of a GPU instance; boards have at most 15 of them."""
_TIMEOUT = 2.0  # seconds
_FULL = 1_000_000
# Matched at one position after the other, never searched for: linear in the line's length.
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"\s*,?', re.ASCII)

Activity = Mapping[tuple[str, int], int]
"""Millionths of the instance, by the UUID of the board and the id of the GPU instance."""


class DcgmError(Exception):
    """The metrics cannot be read; the message is the cause."""


def parse_activity(text: str) -> dict[tuple[str, int], int]:
    """The activity of all instances in the text of the exporter.

    The activity of multiprocessors is preferred to that of the graphics engine, which is 1 while
    any kernel runs. Lines that are no such figure are ignored.
    """
    found: dict[str, dict[tuple[str, int], int]] = {SM_ACTIVE: {}, ENGINE_ACTIVE: {}}
    for name, series in found.items():
        opening = f"{name}{{"
        start = 0 if text.startswith(opening) else text.find(f"\n{opening}") + 1
        for _ in range(_MAX_SERIES):
            if not start and not text.startswith(opening):
                break
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
            if end - start <= _MAX_LINE:
                _add_series(text[start + len(opening) : end], series)
            following = text.find(f"\n{opening}", end)
            if following < 0:
                break
            start = following + 1
    return found[ENGINE_ACTIVE] | found[SM_ACTIVE]


def _add_series(line: str, series: dict[tuple[str, int], int]) -> None:
    """Add the figure of a line, from its first label on, unless it is malformed."""
    labels: dict[str, str] = {}
    position = 0
    while (match := _LABEL.match(line, position)) is not None:
        labels[match[1]] = match[2]
        position = match.end()
    values = line[position:].lstrip()
    if not values.startswith("}"):
        return
    value = _ratio(values[1:].split(None, 1)[0] if values[1:].strip() else "")
    instance, board = labels.get("GPU_I_ID", ""), labels.get("UUID", "")
    plausible = instance.isascii() and instance.isdecimal() and len(instance) <= _LONGEST_ID
    if value is not None and board and plausible:
        series[board, int(instance)] = round(value * _FULL)


def _ratio(text: str) -> float | None:
    if len(text) > _MAX_DIGITS:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value <= 1 else None


class _Fetched(NamedTuple):
    at: int
    activity: Activity


class DcgmExporter:
    """The newest activities from an exporter at ``url``; the thread starts with the first query."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.url = url
        self._clock = clock
        self._newest = _Fetched(-MAX_AGE, {})
        self._backoff = RetryBackoff(FETCH_INTERVAL, LONGEST_RETRY)
        self.trouble = "it was not asked yet"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def activity(self, board: str) -> dict[int, int] | None:
        """The activities of the instances of a board, by instance id; None if they are unknown."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="wattspan-dcgm", daemon=True)
            self._thread.start()
        at, activity = self._newest
        if self._clock.monotonic() - at > MAX_AGE:
            return None
        own = {instance: value for (uuid, instance), value in activity.items() if uuid == board}
        return own or None

    def fetch(self) -> int:
        """Read the metrics once; returns the time of the next read.

        A failure is kept as ``trouble``.
        """
        try:
            activity = parse_activity(_get(self.url))
            self._newest = _Fetched(self._clock.monotonic(), activity)
            self.trouble = "" if activity else f"it has no {SM_ACTIVE} of a MIG instance"
        except DcgmError as error:
            self.trouble = str(error)
        except Exception as error:  # noqa: BLE001 - its thread and the agent continue
            self.trouble = f"its answer cannot be read ({type(error).__name__})"
        now = self._clock.monotonic()
        if self.trouble:
            return self._backoff.failed(now)
        self._backoff.reset()
        return now + FETCH_INTERVAL

    def close(self) -> None:
        """End the thread; a request under way ends by its timeout."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_TIMEOUT)

    def _work(self) -> None:
        while not self._stop.is_set():
            due = self.fetch()
            self._stop.wait(max(0, due - self._clock.monotonic()) / 1e9)


def _get(url: str) -> str:
    try:
        status, body = http_get(url, timeout=_TIMEOUT, most=_MAX_BYTES)
    except FetchError as error:
        raise DcgmError(str(error)) from None
    if status != OK:
        raise DcgmError(f"the server answers {status}")
    if len(body) > _MAX_BYTES:
        raise DcgmError("the answer is longer than 4 MiB")
    return body.decode(errors="replace")
