"""Whether a process was born when somebody says it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from wattspan.model import MILLISECOND, Instant
from wattspan.spanfeed.evidence import Living

TOLERANCE = 1500 * MILLISECOND
"""The kernel counts births in hundredths of a second, many libraries the boot in whole ones."""

_MOST_BOOTS = 8
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def unix_time(text: str) -> int | None:
    """Unix nanoseconds of an ISO 8601 date and time, UTC unless it says; None if it is none."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError):
        return None


class Births:
    """Compares times of birth by the wall with those since boot.

    A time by the wall is as good as the clock was when it was taken: where the clock was set
    since, what fits its former setting, as far as it was seen, is right as well.
    """

    def __init__(self) -> None:
        self._boots: list[int] = []  # Unix nanoseconds, by each setting of the clock

    def observe(self, now: Instant) -> None:
        boot = now.wall - now.mono - now.asleep
        if not self._boots or abs(boot - self._boots[-1]) > TOLERANCE // 3:
            self._boots.append(boot)
            del self._boots[:-_MOST_BOOTS]

    def fits(self, living: Living, created: int) -> bool:
        """Whether ``living`` can have been born at Unix time ``created``."""
        return any(abs(boot + living.born - created) <= TOLERANCE for boot in self._boots)

    def before(self, created: int, living: Living) -> bool:
        """Whether Unix time ``created`` was, by any setting, before ``living`` was born."""
        return any(created <= boot + living.born + TOLERANCE for boot in self._boots)
