"""Moments as they are written in a question.

``mono:NS`` is the monotonic clock, which all processes of a host share: exact. All else goes by
the wall clock as it stands now, so that a clock that was set, or a host that slept, since then
shifts it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from wattspan.model import Instant
from wattspan.model.settings import Duration

FORMS = (
    'Write "mono:NANOSECONDS" (CLOCK_MONOTONIC), Unix nanoseconds, '
    '"2026-01-31T12:00:00Z", or "-10s" for so long ago.'
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LARGEST = 2**63 - 1


def moment(text: str, now: Instant) -> int:
    """The monotonic nanoseconds that ``text`` means at ``now``; ValueError says what is wrong."""
    if text.startswith("mono:"):
        return _whole(text[5:])
    if text.startswith("-"):
        return now.mono - Duration.parse(text[1:])
    if text.isdecimal():
        wall = _whole(text)
        if wall < 10**17:  # 1973 in nanoseconds, the year 5138 in seconds
            raise ValueError("that is too small for Unix nanoseconds")
    else:
        wall = _iso(text)
    return now.mono - (now.wall - wall)


def _whole(digits: str) -> int:
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 19):
        raise ValueError("that is no whole number of nanoseconds")
    if int(digits) > _LARGEST:
        raise ValueError("that is too much")
    return int(digits)


def _iso(text: str) -> int:
    try:
        # a "+" that was not escaped arrives as a blank
        told = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise ValueError("that is no time") from None
    if told.tzinfo is None:
        raise ValueError('that time has no offset, such as "Z"')
    return (told - _EPOCH) // timedelta(microseconds=1) * 1000
