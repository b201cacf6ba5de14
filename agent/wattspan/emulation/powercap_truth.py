"""What the zones of an emulated host had counted at any recent moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from operator import itemgetter

KEPT = 60_000  # steps; a minute at a thousand a second

_AT = itemgetter(0)


class CounterLog:
    """The recent steps of a powercap engine: time, and what each zone had spent."""

    def __init__(self, kept: int = KEPT) -> None:
        self._steps: deque[tuple[int, Mapping[str, int]]] = deque(maxlen=kept)

    def note(self, time: int, energies: Mapping[str, int]) -> None:
        self._steps.append((time, energies))

    def at(self, time: int) -> dict[str, int]:
        """Microjoules by zone at ``time``, a straight line between two steps.

        After the last step it is that step's; LookupError before the first that is kept.
        """
        steps = self._steps
        if not steps or time < steps[0][0]:
            raise LookupError(f"the truth about {time} is not remembered")
        place = min(bisect_left(steps, time, key=_AT), len(steps) - 1)
        (late, after), (early, before) = steps[place], steps[max(0, place - 1)]
        part, whole = min(time, late) - early, max(1, late - early)
        return {zone: before[zone] + (after[zone] - before[zone]) * part // whole for zone in after}
