"""What holds for every job of a host, and what of it is told to the tuner of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import CapKey, Knob, Payer
from wattspan.runtime.sight import Sight
from wattspan.tuning import Kind, Objective, Policy, Range

_STEP = {Knob.GPU_POWER: 1_000, Knob.CPU_POWER: 1_000, Knob.GPU_CLOCK: 15}
"""The smallest move of a knob that is told apart, in its unit."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for every job of this host."""

    settings: AutotuneSettings
    floor: int = 0  # milliwatts: no cap of any sort goes below
    seed: int = 0

    def budget(self, job: TunedJobSettings) -> float:
        """How much slower ``job`` may become."""
        return self.settings.max_slowdown if job.max_slowdown is None else job.max_slowdown

    def policy(
        self, job: TunedJobSettings, kind: Kind, knob: Knob, ranges: Sequence[Range], *, apply: bool
    ) -> Policy:
        """What the configuration asks of the tuner of ``job``."""
        settings = self.settings
        return Policy(
            knob=knob,
            kind=kind,
            max_slowdown=self.budget(job),
            confidence=settings.confidence,
            objective=Objective(settings.objective),
            eta=settings.eta,
            max_power=sum(one.original for one in ranges),
            latency=job.latency or None,
            percentile=job.percentile,
            apply=apply,
            slack=bool(job.compute),
            block_units=settings.block_units,
            block_time=settings.block,
            settle_units=settings.settle_units,
            settle_time=settings.settle,
            dwell=settings.dwell,
            seed=self.seed,
        )

    def ranges(
        self,
        sight: Sight,
        knob: Knob,
        devices: Collection[str],
        used: Mapping[str, Collection[Payer]],
        ranks: Mapping[Payer, int],
    ) -> tuple[Range, ...] | None:
        """How far each device may be turned; None if that of any is not known."""
        found = [self._range(sight, CapKey(knob, device), used, ranks) for device in devices]
        known = tuple(one for one in found if one is not None)
        return known if len(known) == len(found) else None

    def ceilings(
        self, sight: Sight, knob: Knob, devices: Collection[str]
    ) -> tuple[int | None, ...]:
        """What is imposed on each device's knob: when it changes, so does what is compared with."""
        return tuple(ceiling(sight, CapKey(knob, device)) for device in devices)

    def _range(
        self,
        sight: Sight,
        key: CapKey,
        used: Mapping[str, Collection[Payer]],
        ranks: Mapping[Payer, int],
    ) -> Range | None:
        state, row = sight.knob(key), sight.rows.get(key)
        if state is None:
            return None
        held = row is not None and bool(row.wanted)
        original = (row.original if row is not None else None) or state.requested
        original = original or state.maximum or state.default
        if original is None:
            return None
        imposed = ceiling(sight, key)
        if imposed is not None:
            # What is imposed on it stands with a tuner and without.
            original = min(original, imposed)
        if state.enforced and not held:
            # Limited from outside this operating system: that is what anybody is compared with.
            original = min(original, state.enforced)
        floor = max(
            state.minimum or 0,
            round(self.settings.floor * (state.default or original)),
            self.floor if key.knob is not Knob.GPU_CLOCK else 0,
        )
        resource = sight.domains[key.device].resource or ""
        rank = min((ranks[one] for one in used.get(resource, ()) if one in ranks), default=0)
        return Range(key.device, original, min(floor, original), _STEP[key.knob], rank)


def ceiling(sight: Sight, key: CapKey) -> int | None:
    """What the operator or the host's budget allows a knob at most, in its unit."""
    row = sight.rows.get(key)
    if row is None:
        return None
    fixed = row.wanted if row.expires is None else None  # what has no lease is no tuner's
    known = [value for value in (fixed, row.ceiling) if value is not None]
    return min(known, default=None)


def usable(sight: Sight, knob: Knob, devices: Collection[str]) -> bool:
    """Whether the capper can write all of them."""
    rows = [sight.rows.get(CapKey(knob, device)) for device in devices]
    return all(row is not None and row.usable for row in rows)
