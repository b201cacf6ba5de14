"""An energy curve with the meter of one counter, as the device history has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wattspan.attribution.energy_curve import MAX_KNOTS, EnergyCurve
from wattspan.attribution.metering import CounterMeter
from wattspan.model import Domain, Instant, Interval, Reading


class MeteredCurve(EnergyCurve):
    """A curve that receives readings; ``absence`` is the time without one that is a gap.

    It is thinned at once, and keeps the knots around ``edges``, which are sorted.
    """

    def __init__(
        self,
        domain: Domain,
        absence: int,
        cell: int = 0,
        limit: int = MAX_KNOTS,
        edges: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        super().__init__(domain, cell, limit)
        self._edges = edges
        self._meter = CounterMeter(domain, absence)

    def add(self, start: int, end: int, energy: int, stale: int | None = None) -> None:
        super().add(start, end, energy, stale)
        while self.crowded:  # as in the service, which thins one step of a crowded curve a tick
            self.thin(self._edges())

    def read(self, reading: Reading) -> None:
        """Add a reading. One that is not newer than the last is ignored."""
        period = self._meter.advance(reading)
        if isinstance(period, Interval):
            self.add(period.start.mono, period.end.mono, period.energy, period.stale)
        else:
            self.begin(reading.at.mono)
            self.skip(reading.at.mono)

    @property
    def begun(self) -> int:
        """The time of the first reading."""
        return self._fine.kept.times[0]

    def absent(self, now: Instant) -> None:
        """Add a gap up to ``now`` if readings have been absent for long."""
        if self._meter.absent(now) is not None:
            self.skip(now.mono)
