"""Configuration of tuning jobs: their policy, their devices' ranges, permitted and missing jobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import (
    SECOND,
    CapKey,
    Consumer,
    Decision,
    DecisionReason,
    Instant,
    Knob,
    Move,
    Payer,
    TuningRow,
    TuningState,
)
from wattspan.ports import ProcessDirectory
from wattspan.tuning.decisions.values import KnobRange, Objective, TunerPolicy, WorkloadKind
from wattspan.tuning.host_view import HostView
from wattspan.tuning.work_units import ReceivedSpans, matching_job

_KNOB_STEP = {Knob.GPU_POWER: 1_000, Knob.CPU_POWER: 1_000, Knob.GPU_CLOCK: 15}
"""The resolution of a knob, in its unit."""


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """The configuration of all jobs of this host."""

    settings: AutotuneSettings
    floor: int = 0  # milliwatts: no cap of any kind is lower
    seed: int = 0

    def budget(self, job: TunedJobSettings) -> float:
        return self.settings.max_slowdown if job.max_slowdown is None else job.max_slowdown

    def tuner_policy(
        self,
        job: TunedJobSettings,
        kind: WorkloadKind,
        knob: Knob,
        ranges: Sequence[KnobRange],
        *,
        apply: bool,
    ) -> TunerPolicy:
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
        host: HostView,
        knob: Knob,
        devices: Collection[str],
        used: Mapping[str, Collection[Payer]],
        ranks: Mapping[Payer, int],
    ) -> tuple[KnobRange, ...] | None:
        """The ranges of the devices; None if one of them is unknown.

        ``used`` are the users of each resource, ``ranks`` the ranks of the job's processes.
        """
        ranges = [self._range(host, CapKey(knob, device), used, ranks) for device in devices]
        known = tuple(one for one in ranges if one is not None)
        return known if len(known) == len(ranges) else None

    def ceilings(
        self, host: HostView, knob: Knob, devices: Collection[str]
    ) -> tuple[int | None, ...]:
        """The imposed limit of each device; comparisons are invalid when one changes."""
        return tuple(imposed_limit(host, CapKey(knob, device)) for device in devices)

    def _range(
        self,
        host: HostView,
        key: CapKey,
        used: Mapping[str, Collection[Payer]],
        ranks: Mapping[Payer, int],
    ) -> KnobRange | None:
        state, row = host.knob(key), host.rows.get(key)
        if state is None:
            return None
        held = row is not None and bool(row.wanted)
        original = (row.original if row is not None else None) or state.requested
        original = original or state.maximum or state.default
        if original is None:
            return None
        imposed = imposed_limit(host, key)
        if imposed is not None:  # it is in force with and without a tuner
            original = min(original, imposed)
        if state.enforced and not held:  # limited from outside this operating system
            original = min(original, state.enforced)
        floor = max(
            state.minimum or 0,
            round(self.settings.floor * (state.default or original)),
            self.floor if key.knob is not Knob.GPU_CLOCK else 0,
        )
        resource = host.domains[key.device].resource or ""
        rank = min((ranks[one] for one in used.get(resource, ()) if one in ranks), default=0)
        return KnobRange(key.device, original, min(floor, original), _KNOB_STEP[key.knob], rank)


def imposed_limit(host: HostView, key: CapKey) -> int | None:
    """The limit that the operator or the host's power budget imposes, in the knob's unit."""
    row = host.rows.get(key)
    if row is None:
        return None
    fixed = row.wanted if row.expires is None else None  # tuned limits have a lease
    return min((value for value in (fixed, row.ceiling) if value is not None), default=None)


def knobs_usable(host: HostView, knob: Knob, devices: Collection[str]) -> bool:
    """True if the capper can write all of them."""
    rows = [host.rows.get(CapKey(knob, device)) for device in devices]
    return all(row is not None and row.usable for row in rows)


# ----------------------------------------------------------------------------- permitted jobs

_MAX_CACHED = 1024


@dataclass(slots=True)
class TuningPermissions:
    """Jobs whose processes are in permitted groups, each named ``name`` or ``kind:name``."""

    directory: ProcessDirectory
    groups: Collection[str]
    _cache: dict[Consumer, bool] = field(default_factory=dict)

    def refusal(self, job: str, ranks: Collection[Consumer]) -> str:
        """A sentence why the job must not be tuned; "" if it may be."""
        if not self.groups:
            return ""
        outside = next((one for one in ranks if not self._is_permitted(one)), None)
        if outside is None:
            return ""
        return (
            f"{job} is not tuned: process {outside.pid} is in none of [autotune] groups "
            f"({', '.join(self.groups)})."
        )

    def _is_permitted(self, consumer: Consumer) -> bool:
        permitted = self._cache.get(consumer)
        if permitted is None:
            info = self.directory.describe(consumer)
            if info is None:
                return False
            permitted = any(
                name in self.groups or f"{kind}:{name}" in self.groups for kind, name in info.groups
            )
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[consumer] = permitted
        return permitted


# ------------------------------------------------------------------------------- missing jobs

MISSING_AFTER = 300 * SECOND
"""Time after which a configured job without units of work is logged."""

_MAX_SERVICES, _MAX_LISTED_NAMES = 64, 6
_HINT = "`wattspan top --by span` lists the received spans."


@dataclass(slots=True)
class MissingJobs:
    """Configured jobs without units of work, and the spans that were received instead."""

    settings: AutotuneSettings
    started: Instant
    log: Callable[[str], None]
    _received: OrderedDict[str, dict[str, None]] = field(default_factory=OrderedDict)
    _logged: set[str] = field(default_factory=set)

    def add(self, received: ReceivedSpans) -> None:
        names = self._received.setdefault(received.service, {})
        self._received.move_to_end(received.service)
        if len(self._received) > _MAX_SERVICES:
            self._received.popitem(last=False)
        for span in received.spans:
            if len(names) >= _MAX_LISTED_NAMES:
                break
            names.setdefault(span.name)

    def rows(self, known: Collection[tuple[str, str]], now: Instant) -> Iterator[TuningRow]:
        """A row for each configured job that is none of the ``known`` services and spans."""
        for job in self.settings.job:
            if any(matching_job([job], service, span) for service, span in known):
                continue
            name, sentence = f"{job.service or '*'}/{job.span or '*'}", self._missing(job)
            if now.mono - self.started.mono > MISSING_AFTER and name not in self._logged:
                self._logged.add(name)
                self.log(f"{name} is not tuned. {sentence}")
            yield TuningRow(
                job=name,
                service=job.service,
                span=job.span,
                knob=self.settings.knobs[0],
                state=TuningState.WAITING,
                decision=Decision(Move.DECLINE, DecisionReason.NO_SIGNAL, sentence),
                since=self.started,
                budget=JobPolicy(self.settings).budget(job),
                confidence=self.settings.confidence,
            )

    def _missing(self, job: TunedJobSettings) -> str:
        """A sentence: the missing spans, the received ones, and a remedy."""
        if job.service and job.service not in self._received:
            others = _quoted(self._received)
            instead = f"; spans come from {others}" if others else ", nor from another service"
            return (
                f'No span of the service "{job.service}" was received yet{instead}. Check its '
                "service.name and its OTLP endpoint (OTEL_EXPORTER_OTLP_ENDPOINT). "
                f"{_HINT}"
            )
        names = {
            name: None
            for service, received in self._received.items()
            if job.service in ("", service)
            for name in received
        }
        service = f'the service "{job.service}"' if job.service else "any service"
        if job.span and job.span not in names:
            others = _quoted(names)
            instead = f"; received: {others}" if others else ""
            return f'No span "{job.span}" of {service} was received yet{instead}. {_HINT}'
        if job.span:
            return f'Too few spans "{job.span}" of {service} were received to determine its kind.'
        return (
            f"No span of {service} looks like a repeated unit of work: name the unit's span as "
            f"`span`. {_HINT}"
        )


def _quoted(names: Collection[str]) -> str:
    return ", ".join(f'"{name}"' for name in list(names)[:_MAX_LISTED_NAMES])
