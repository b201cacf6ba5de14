"""What holds for every job of a host, and what of it is told to the tuner of one.

Whose jobs may be tuned: those of the groups that the configuration names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import CapKey, Consumer, Knob, Payer
from wattspan.ports import ProcessDirectory
from wattspan.tuning import KnobRange, Objective, TunerPolicy, WorkloadKind
from wattspan.tuning.host_view import HostView

_KNOB_STEP = {Knob.GPU_POWER: 1_000, Knob.CPU_POWER: 1_000, Knob.GPU_CLOCK: 15}
"""The smallest move of a knob that is told apart, in its unit."""


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """What holds for every job of this host."""

    settings: AutotuneSettings
    floor: int = 0  # milliwatts: no cap of any sort goes below
    seed: int = 0

    def budget(self, job: TunedJobSettings) -> float:
        """How much slower ``job`` may become."""
        return self.settings.max_slowdown if job.max_slowdown is None else job.max_slowdown

    def policy(
        self,
        job: TunedJobSettings,
        kind: WorkloadKind,
        knob: Knob,
        ranges: Sequence[KnobRange],
        *,
        apply: bool,
    ) -> TunerPolicy:
        """What the configuration asks of the tuner of ``job``."""
        settings = self.settings
        return TunerPolicy(
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
        sight: HostView,
        knob: Knob,
        devices: Collection[str],
        used: Mapping[str, Collection[Payer]],
        ranks: Mapping[Payer, int],
    ) -> tuple[KnobRange, ...] | None:
        """How far each device may be turned; None if that of any is not known."""
        found = [self._range(sight, CapKey(knob, device), used, ranks) for device in devices]
        known = tuple(one for one in found if one is not None)
        return known if len(known) == len(found) else None

    def ceilings(
        self, sight: HostView, knob: Knob, devices: Collection[str]
    ) -> tuple[int | None, ...]:
        """What is imposed on each device's knob: when it changes, so does what is compared with."""
        return tuple(knob_ceiling(sight, CapKey(knob, device)) for device in devices)

    def _range(
        self,
        sight: HostView,
        key: CapKey,
        used: Mapping[str, Collection[Payer]],
        ranks: Mapping[Payer, int],
    ) -> KnobRange | None:
        state, row = sight.knob(key), sight.rows.get(key)
        if state is None:
            return None
        held = row is not None and bool(row.wanted)
        original = (row.original if row is not None else None) or state.requested
        original = original or state.maximum or state.default
        if original is None:
            return None
        imposed = knob_ceiling(sight, key)
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
        return KnobRange(key.device, original, min(floor, original), _KNOB_STEP[key.knob], rank)


def knob_ceiling(sight: HostView, key: CapKey) -> int | None:
    """What the operator or the host's budget allows a knob at most, in its unit."""
    row = sight.rows.get(key)
    if row is None:
        return None
    fixed = row.wanted if row.expires is None else None  # what has no lease is no tuner's
    known = [value for value in (fixed, row.ceiling) if value is not None]
    return min(known, default=None)


def knobs_usable(sight: HostView, knob: Knob, devices: Collection[str]) -> bool:
    """Whether the capper can write all of them."""
    rows = [sight.rows.get(CapKey(knob, device)) for device in devices]
    return all(row is not None and row.usable for row in rows)


_MAX_CACHED = 1024


@dataclass(slots=True)
class TuningPermissions:
    """Belongs to the tuner's thread. A group is meant by its name, or as ``kind:name``."""

    directory: ProcessDirectory
    names: Collection[str]
    _known: dict[Consumer, bool] = field(default_factory=dict)

    def refusal(self, job: str, ranks: Collection[Consumer]) -> str:
        """Why a job of these processes may not be tuned, in a sentence; "" if it may."""
        if not self.names:
            return ""
        outside = next((one for one in ranks if not self._allowed(one)), None)
        if outside is None:
            return ""
        return (
            f"{job} is left alone: process {outside.pid} is in none of the groups that [autotune] "
            f"groups names ({', '.join(self.names)})."
        )

    def _allowed(self, consumer: Consumer) -> bool:
        """Whether it is in one of the groups; what is not known is not allowed, and asked again."""
        known = self._known.get(consumer)
        if known is None:
            info = self.directory.describe(consumer)
            if info is None:
                return False
            known = any(
                name in self.names or f"{kind}:{name}" in self.names for kind, name in info.groups
            )
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[consumer] = known
        return known
