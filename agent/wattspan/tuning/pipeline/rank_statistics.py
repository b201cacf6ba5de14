"""Waiting and saved energy of each rank of a running pipeline, as measured.

The energy of a rank in an iteration is its mean power in the periods of its counter that are known
for this iteration, times the whole iteration. Iterations without such a period count with the mean
of those at the same clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from wattspan.model import Microjoules
from wattspan.tuning.pipeline.iterations import PipelineIteration

_RECENT = 20
"""Iterations of which the time and the waiting are shown."""

_MOST_SETTINGS = 512
"""Settings of which the energy is kept; a session uses some dozens."""


class _SettingEnergy(NamedTuple):
    """Iterations at the same clocks, and the joules of each rank in ``metered`` ones of them."""

    iterations: int = 0
    metered: int = 0
    joules: tuple[float, ...] = ()

    def add(self, joules: tuple[float, ...] | None) -> _SettingEnergy:
        one = self._replace(iterations=self.iterations + 1)
        if joules is None:
            return one
        known = self.joules or (0.0,) * len(joules)
        summed = tuple(a + b for a, b in zip(known, joules, strict=True))
        return one._replace(metered=self.metered + 1, joules=summed)

    def mean(self, rank: int) -> float:
        return self.joules[rank] / self.metered


class _RecentIteration(NamedTuple):
    """Seconds of an iteration, without and with the waiting for other pipelines, and of work."""

    seconds: float
    whole: float
    busy: tuple[float, ...]


_SettingKey = tuple[tuple[int, ...], bool]  # clocks, and True beside a slower pipeline


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """The latest iterations, and the energy at each setting; of ``ranks`` ranks."""

    ranks: int = 0
    recent: tuple[_RecentIteration, ...] = ()
    settings: Mapping[_SettingKey, _SettingEnergy] = field(default_factory=dict)

    def add(self, iteration: PipelineIteration, ranks: int, *, straggler: bool) -> RankStatistics:
        """Add an iteration; ``straggler`` if all of its ranks waited for another pipeline.

        With another number of ranks than before, only this iteration is kept.
        """
        before = self if ranks == self.ranks else RankStatistics(ranks)
        busy = [0.0] * ranks
        for span in iteration.spans:
            busy[span.rank] += span.end - span.start
        latest = _RecentIteration(iteration.seconds, iteration.whole, tuple(busy))
        recent = (*before.recent[1 - _RECENT :], latest)
        settings, clocks = before.settings, iteration.clocks
        if clocks is not None:
            watts = iteration.rank_watts(ranks)
            joules = None if watts is None else tuple(one * iteration.whole for one in watts)
            key = clocks, straggler
            known = settings.get(key)
            if known is not None or len(settings) < _MOST_SETTINGS:
                settings = {**settings, key: (known or _SettingEnergy()).add(joules)}
        return replace(before, recent=recent, settings=settings)

    @property
    def seconds(self) -> float | None:
        """The mean time of the latest iterations, without the waiting for other pipelines."""
        return fmean(one.seconds for one in self.recent) if self.recent else None

    @property
    def waiting(self) -> tuple[float, ...]:
        """The part of the latest iterations for which each rank has waited."""
        whole = sum(one.whole for one in self.recent)
        return tuple(
            min(max(1 - sum(one.busy[rank] for one in self.recent) / whole, 0.0), 1.0)
            for rank in range(self.ranks)
        )

    def saved(self, original: int) -> tuple[Microjoules, ...] | None:
        """Energy that each rank has used less than at the ``original`` clock, in all iterations.

        Iterations beside a slower pipeline are compared with each other. None before both energies
        are known.
        """
        totals, known = [0.0] * self.ranks, False
        for (_, straggler), one in self.settings.items():
            usual = self.settings.get(((original,) * self.ranks, straggler))
            if usual is None or one is usual or not (one.metered and usual.metered):
                continue
            known = True
            for rank in range(self.ranks):
                totals[rank] += one.iterations * (usual.mean(rank) - one.mean(rank))
        return tuple(Microjoules(round(one * 1e6)) for one in totals) if known else None
