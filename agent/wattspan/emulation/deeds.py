"""What emulated work has finished, and exactly when: the truth that spans and tests are made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from wattspan.emulation.gpu_work import Finished

KEPT = 20_000  # units of work by process: forty minutes of steps of 0.12 s
_SECOND = 1_000_000_000


class Deed(NamedTuple):
    """A finished unit of work, in nanoseconds of the monotonic clock.

    ``computed``: when its own part was done, where it then waited for other ranks. ``ideal`` is
    how long it would have taken with nothing to slow it, 0 where nobody can know.
    """

    began: int
    computed: int
    ended: int
    ideal: int
    work: int


class DeedLog:
    """The units that one process has finished: the latest in full, all of them in sums."""

    def __init__(self, kept: int = KEPT) -> None:
        self._deeds: deque[Deed] = deque(maxlen=kept)
        self.units = 0
        self.took = 0
        self.ideal = 0
        self.work = 0

    def note(self, at: int, finished: Iterable[Finished]) -> None:
        """Remember what was finished up to the time ``at``."""
        for one in finished:
            began, computed, ended = (
                at - round(ago * _SECOND) for ago in (one.began, one.computed, one.ended)
            )
            deed = Deed(began, computed, ended, round(one.ideal * _SECOND), one.work)
            self._deeds.append(deed)
            self.units += 1
            self.took += ended - began
            self.ideal += deed.ideal
            self.work += deed.work

    def since(self, number: int) -> tuple[Deed, ...]:
        """The units from number ``number`` on, as far as they are remembered."""
        wanted = min(max(0, self.units - number), len(self._deeds))
        return tuple(self._deeds)[len(self._deeds) - wanted :] if wanted else ()

    def told(self, number: int | None) -> dict[str, Any]:
        """As an answer of the engine: the sums, and what is new since ``number``."""
        return {
            "deeds": [] if number is None else [list(deed) for deed in self.since(number)],
            "units": self.units,
            "took": self.took,
            "ideal": self.ideal,
            "work": self.work,
        }
