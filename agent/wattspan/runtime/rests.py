"""How long to leave alone what was refused: the longer the more often."""

from __future__ import annotations

from dataclasses import dataclass

from wattspan.model import SECOND

FIRST, LONGEST = 10 * SECOND, 600 * SECOND
FORGIVEN = 3600 * SECOND
"""What was refused so long ago has nothing to do with it any more."""


@dataclass(slots=True)
class Rests:
    """``until`` is when to ask again, monotonic."""

    until: int = 0
    _length: int = 0

    def begin(self, now: int) -> None:
        """It was refused."""
        again = self._length and now - self.until < FORGIVEN
        self._length = min(2 * self._length, LONGEST) if again else FIRST
        self.until = now + self._length
