"""What is read of a job's devices at each turn: their caps, their energy, how caps bind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wattspan.model import MILLISECOND, SECOND, CapKey, GpuStatus, Knob
from wattspan.ports import Past
from wattspan.runtime.sight import Sight, binding
from wattspan.tuning import EnergyPoint, Range

_LONGEST = 600 * SECOND
"""What was not asked for so long is not in the history any more."""

STALL = 2 * SECOND
"""Between two looks so far apart a lease may have lapsed at any time."""


@dataclass(slots=True)
class Gauges:
    """Of the devices of one tuner. ``in_force`` has stood unchanged since ``changed``.

    A cap that is found to have gone after a stall counts as gone since the last look before it: a
    process that was stopped must not take what was done without its cap for work under it.
    """

    knob: Knob
    ranges: Sequence[Range]
    changed: int
    settled: int
    in_force: Mapping[str, int] = field(default_factory=dict)
    _looked: int | None = None
    _energy: int = 0
    _gpus: dict[str, GpuStatus] = field(default_factory=dict)

    def look_at_caps(self, sight: Sight) -> None:
        """Take note of what is in force, and since when it has been."""
        looked, self._looked = self._looked, sight.now.mono
        in_force: dict[str, int] = {}
        for one in self.ranges:
            row = sight.rows.get(CapKey(self.knob, one.device))
            if row is None:
                continue
            value = row.state.requested if self.knob is not Knob.GPU_CLOCK else row.wanted
            if value is not None and value < one.original:
                in_force[one.device] = value
        if in_force != self.in_force:
            gone = looked is not None and sight.now.mono - looked > STALL and not in_force
            self.changed = looked if looked is not None and gone else sight.now.mono
            self.in_force = in_force

    def spent(self, sight: Sight, past: Past) -> tuple[EnergyPoint, ...]:
        """One more point of what the devices have spent, if more has settled."""
        start, end = self.settled, sight.settled
        if end - start < 50 * MILLISECOND:
            return ()
        start = max(start, end - _LONGEST)
        for one in self.ranges:
            self._energy += sum(past.device(one.device, start, end).energy.values())
        self.settled = end
        return (EnergyPoint(end, self._energy),)

    def binding(self, sight: Sight) -> float | None:
        """The part of the time since the last look in which a cap held clocks down."""
        found = []
        for one in self.ranges:
            status = sight.gpu(one.device)
            part = binding(self._gpus.get(one.device), status)
            if status is not None and (part is not None or one.device not in self._gpus):
                self._gpus[one.device] = status
            if part is not None:
                found.append(part)
        return sum(found) / len(found) if found else None
