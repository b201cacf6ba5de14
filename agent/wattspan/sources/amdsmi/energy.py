"""The energy accumulator of an AMD GPU as a counter that does not wrap.

AMD SMI returns an accumulator and the energy of one of its steps: 15.3 uJ, as a C float, on all
boards. The accumulator has 64 bits, or 32 with the driver's first format of metrics (gpu_metrics
1.0), which last 66 kJ: two minutes of a busy board.

Some software stacks return an accumulator or a step that does not fit the power of the board
(ROCm/amdsmi issue 38). ``energy_meter.CounterCheck`` compares both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wattspan.model import SECOND, Instant, Microjoules, energy_at

_PICOJOULES = 1_000_000  # in a microjoule
_WIDTHS = (1 << 32, 1 << 64)
_LARGEST_STEP = 1_000_000.0  # microjoules
_GRACE = SECOND // 10
"""The value may be this much older at one read than at another: allowance for plausible energy."""


def accumulated(answer: Mapping[str, Any]) -> Any:
    """The accumulator in the library's answer: its name has changed."""
    return answer.get("energy_accumulator", answer.get("power"))


class EnergyAccumulator:
    """Turns accumulator values into cumulative energy.

    ``epoch`` grows when the energy since the value before is unknown: the accumulator fell without
    a plausible wrap, it may have wrapped more than once, or its step changed.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._step = 0  # picojoules
        self._last: tuple[int, int] | None = None  # mono, value
        self._offset = 0  # steps of the wraps so far
        self._width: int | None = None  # known from a wrap

    def advance(
        self, at: Instant, value: int, microjoules: float, max_power: int
    ) -> Microjoules | None:
        """The energy up to ``at``, for a step of ``microjoules``; None if that is not a step.

        ``max_power``: the board's largest plausible power in milliwatts.
        """
        if not (math.isfinite(microjoules) and 0 < microjoules < _LARGEST_STEP) or value < 0:
            return None
        step = round(microjoules * _PICOJOULES)
        if step == 0:
            return None
        last, self._last = self._last, (at.mono, value)
        if last is None or step != self._step:
            self._restart(step)
        else:
            since, before = last
            self._follow(before, value, energy_at(max_power, at.mono - since + _GRACE))
        return Microjoules((self._offset + value) * self._step // _PICOJOULES)

    def _restart(self, step: int) -> None:
        if self._step:
            self.epoch += 1
        self._step, self._offset, self._width = step, 0, None

    def _follow(self, before: int, value: int, plausible: int) -> None:
        width = self._width
        if width is not None and self._energy(width) <= plausible:
            self.epoch += 1  # it may have wrapped more than once since the last value
        if value >= before:
            return
        for width in _WIDTHS:
            if before < width and self._energy(value + width - before) <= plausible:
                self._offset += width
                self._width = width
                return
        self.epoch += 1
        self._offset = 0

    def _energy(self, steps: int) -> int:
        return steps * self._step // _PICOJOULES
