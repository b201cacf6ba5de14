"""From utilisation samples to what each process spent of a GPU's time.

The rule. A sample says which percentage of its period a process kept the GPU busy. It speaks for
the time back to the same process's sample before it; where that is further away than one and a
half periods, periods without use (which NVML leaves out) lie between, and it speaks for one
period only. The period is learned from the samples: the lower quartile of the distances between
one process's samples. Stretches of time, so weighted, are cut at the edges of each usage record.

What the device as a whole was busy beyond the sum of its processes was spent by somebody who
cannot be named. The device's figure trails the processes' by up to a second, so that it is
short by as much when work begins as it is long when work ends: a shortage is remembered, for at
most one second's worth, and set off against a later excess.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND, Instant, Payer, Usage

LONGEST_PERIOD = SECOND
"""NVML's sample periods reach from a sixth of a second to a second, by product."""

FIRST_PERIOD = 500 * MILLISECOND
SHORTEST_LAG = 200 * MILLISECOND
OBSERVED_FOR = 2 * SECOND
"""So long one look at the device's utilisation holds; after that, nobody was looking."""


class Sample(NamedTuple):
    """``percent`` of the GPU's time went to ``pid`` (``payer``, if it is known) until ``mono``."""

    mono: int
    pid: int
    payer: Payer | None
    percent: int


class Stretch(NamedTuple):
    """``percent`` of the time from ``begin`` to ``end``, on the monotonic clock."""

    begin: int
    end: int
    payer: Payer | None
    percent: int

    def within(self, begin: int, end: int) -> int:
        """The nanoseconds spent inside the given bounds."""
        inside = min(end, self.end) - max(begin, self.begin)
        return max(0, inside) * self.percent // 100


class SamplePeriod:
    """How far the samples of one process lie apart, as long as it is busy."""

    def __init__(self) -> None:
        self._distances: deque[int] = deque(maxlen=64)
        self.nanoseconds: int = FIRST_PERIOD

    def saw(self, distance: int) -> None:
        self._distances.append(distance)
        quartile = sorted(self._distances)[len(self._distances) // 4]
        self.nanoseconds = min(quartile, LONGEST_PERIOD)


class UsageMeter:
    """The usage of one GPU as a row of records, each beginning where the one before it ended."""

    def __init__(self, resource: str, start: Instant) -> None:
        self._resource = resource
        self._end = start
        self._period = SamplePeriod()
        self._last_sample: dict[int, int] = {}
        self._stretches: list[Stretch] = []
        self._device: list[Stretch] = []
        self._observed_at = start.mono
        self._shortage = 0

    @property
    def lag(self) -> int:
        """How long after a moment all samples that speak of it have come."""
        return min(max(2 * self._period.nanoseconds, SHORTEST_LAG), LONGEST_PERIOD)

    @property
    def step(self) -> int:
        """How far the samples of one process lie apart."""
        return self._period.nanoseconds

    @property
    def end(self) -> Instant:
        """The end of the newest record, the start of the next."""
        return self._end

    def observe_device(self, mono: int, percent: int) -> None:
        """The device was ``percent`` busy since it was last looked at.

        Where that was too long ago nobody knows, and all of it may have been in use.
        """
        begin, self._observed_at = self._observed_at, mono
        if mono > begin:
            known = mono - begin <= OBSERVED_FOR
            self._device.append(Stretch(begin, mono, None, percent if known else 100))

    def take(self, samples: list[Sample]) -> None:
        for sample in sorted(samples):
            last = self._last_sample.get(sample.pid)
            if last is not None and sample.mono <= last:
                continue
            self._last_sample[sample.pid] = sample.mono
            self._stretches.append(
                Stretch(
                    sample.mono - self._spoken_for(sample.mono, last),
                    sample.mono,
                    sample.payer,
                    sample.percent,
                )
            )

    def _spoken_for(self, mono: int, last: int | None) -> int:
        if last is not None:
            distance = mono - last
            if distance <= LONGEST_PERIOD * 3 // 2:
                self._period.saw(distance)
            if distance * 2 <= self._period.nanoseconds * 3:
                return distance
        return self._period.nanoseconds

    def usage(self, end: Instant, present: frozenset[Payer], *, named: bool) -> Usage | None:
        """The record up to ``end``; None if it does not lie after the one before.

        ``named`` is whether processes can be told apart at all. Where they cannot, all that
        the device was busy is unclaimed.
        """
        start = self._end
        if end.mono <= start.mono:
            return None
        spent, unclaimed = self._charge(start.mono, end.mono)
        busy = sum(stretch.within(start.mono, end.mono) for stretch in self._device)
        claimed = sum(spent.values()) + unclaimed
        if named:
            excess = busy - claimed - self._shortage
            self._shortage = min(max(0, -excess), LONGEST_PERIOD)
            unclaimed += max(0, excess)
        else:
            unclaimed += max(0, busy - claimed)
        self._end = end
        self._forget(end.mono)
        return Usage(
            resource=self._resource,
            start=start,
            end=end,
            spent=spent,
            unclaimed=unclaimed,
            capacity=end.mono - start.mono,
            present=present,
        )

    def _charge(self, begin: int, end: int) -> tuple[dict[Payer, int], int]:
        spent: dict[Payer, int] = {}
        nameless = 0
        for stretch in self._stretches:
            part = stretch.within(begin, end)
            if not part:
                continue
            if stretch.payer is None:
                nameless += part
            else:
                spent[stretch.payer] = spent.get(stretch.payer, 0) + part
        return spent, nameless

    def _forget(self, before: int) -> None:
        self._stretches = [stretch for stretch in self._stretches if stretch.end > before]
        self._device = [stretch for stretch in self._device if stretch.end > before]
        horizon = before - 2 * LONGEST_PERIOD
        self._last_sample = {pid: mono for pid, mono in self._last_sample.items() if mono > horizon}
