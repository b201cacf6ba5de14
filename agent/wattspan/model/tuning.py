"""Knobs, caps and decisions of the tuner."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.model.measurements import Instant, Microjoules, ModelEnum, Nanoseconds


class Knob(ModelEnum):
    """A setting of a device. Power is in milliwatts, clocks are in megahertz."""

    GPU_POWER = "gpu_power"  # the board's power management limit
    GPU_CLOCK = "gpu_clock"  # the highest locked SM clock; cannot be read back
    CPU_POWER = "cpu_power"  # the package's long-term power limit

    @property
    def unit(self) -> str:
        return "MHz" if self is Knob.GPU_CLOCK else "mW"


class CapKey(NamedTuple):
    """One knob of one device; ``device`` is the id of its domain."""

    knob: Knob
    device: str


class DevicePresence(NamedTuple):
    """Evidence that a device kept its settings: it did not, if this shows a reset since.

    ``load`` identifies the load of the driver and of the device, for every process of the host; ""
    if it is unknown. ``session`` counts the returns of the device that one process has noticed.
    ``odometer`` is a number that only a reset lowers, as an energy counter; None if there is none.
    """

    load: str = ""
    session: int = 0
    odometer: int | None = None

    def was_reset(self, before: DevicePresence, *, same_process: bool) -> bool:
        """True if the device or its driver was absent or reset after ``before``.

        Without ``same_process``, another process has noticed ``before``.
        """
        if self.load and before.load and self.load != before.load:
            return True
        if self.odometer is not None and self.odometer < (before.odometer or 0):
            return True
        return same_process and self.session != before.session


@dataclass(frozen=True, slots=True)
class KnobState:
    """The state of one knob, in its unit; None if unknown.

    ``requested`` is the last value that any program has set, ``enforced`` the effective one: the
    lowest of all limits, also of limits from outside this operating system. ``aliases`` are further
    names of the device for operators: a GPU's UUID or index, a zone's directory. ``presence`` is no
    part of the setting: states that differ in it alone are equal.
    """

    key: CapKey
    name: str
    minimum: int | None = None
    default: int | None = None
    maximum: int | None = None
    requested: int | None = None
    enforced: int | None = None
    aliases: tuple[str, ...] = ()
    presence: DevicePresence = field(default=DevicePresence(), compare=False)

    def is_named(self, names: Collection[str]) -> bool:
        """True if any of ``names`` is this device's: its id or an alias, or "*"."""
        return not {"*", self.key.device, *self.aliases}.isdisjoint(names)


@dataclass(frozen=True, slots=True)
class CapRow:
    """One knob and its holder.

    ``original`` is the limit before the first write of the capper, which is restored at the end.
    ``wanted`` is the holder's limit; the lower of it and ``ceiling`` applies, which a fixed cap or
    the share of a budget imposes with any holder and without. ``foreign``: another program has
    written since, and the capper does not write. ``lost`` is a foreign one with an unknown
    original, because the journal was damaged.
    """

    state: KnobState
    original: int | None = None
    wanted: int | None = None
    ceiling: int | None = None
    holder: str = ""  # the job, "operator" or "budget"; "" for none
    why: str = ""  # one sentence
    since: Instant | None = None
    expires: int | None = None  # monotonic end of the lease; None: no end
    foreign: bool = False
    lost: bool = False
    usable: bool = True  # False: it cannot be written, with the reason in ``trouble``
    trouble: str = ""

    def reaches(self, value: int) -> bool:
        """True if the holder's limit of ``value`` is in force; the capper limits one step's size.

        A register rounds down, never up.
        """
        if self.wanted is None or self.wanted > value:
            return False
        highest = value if self.ceiling is None else min(value, self.ceiling)
        return self.state.requested is None or self.state.requested <= highest


class Move(ModelEnum):
    """The action of a decision."""

    PROBE = "probe"  # hold a setting for a while, to measure it
    HOLD = "hold"  # hold a certified setting
    RELEASE = "release"  # restore the original limit now
    DECLINE = "decline"  # leave the original limit


class DecisionReason(ModelEnum):
    """The reason of a decision: a label of metrics."""

    # probing
    BASELINE = "baseline"  # noise and power at the original setting are measured
    SCREENING = "screening"  # settings are tried downwards from just above the power
    CERTIFYING = "certifying"  # one setting is compared with the original
    SENTINEL = "sentinel"  # a held setting is compared with the original again
    RECERTIFYING = "recertifying"  # a remembered setting is certified again
    # holding
    CERTIFIED = "certified"
    STRAGGLER = "straggler"  # a slower data-parallel pipeline permits lower clocks
    # releasing
    OVER_BUDGET = "over_budget"  # slower than the budget, or probably so
    CHANGED = "changed"  # drift of the job
    PAUSED = "paused"  # no units of work arrive
    ENDED = "ended"  # the job is gone
    TAIL = "tail"  # too many requests exceed the latency limit
    # declining
    ADVICE = "advice"  # mode `advise`
    NOT_CHOSEN = "not_chosen"  # a detected job, which the configuration does not apply
    NOT_ALLOWED = "not_allowed"  # its devices or groups are not configured
    NO_SIGNAL = "no_signal"  # no units of work
    BAD_WORK = "bad_work"  # the work attribute is missing, zero or negative
    TOO_SHORT = "too_short"  # the job ends before tuning pays off
    TOO_NOISY = "too_noisy"  # certification would cost more than the saving
    NOT_MONOTONE = "not_monotone"  # a lower setting was faster
    NOT_BINDING = "not_binding"  # the job draws less than the lowest allowed cap
    INERT = "inert"  # no allowed setting has an effect
    NO_SAVING = "no_saving"  # no setting within the budget saves energy
    NO_ROOM = "no_room"  # no setting within budget, floor and range
    WAITING = "waiting"  # another job of the host, or another host of the job, explores
    # both releasing and declining
    FOREIGN_WRITER = "foreign_writer"  # another program sets the device's limits
    THROTTLED = "throttled"  # the device throttles itself
    SHARED = "shared"  # another process uses the device and is not tuned with it
    MIG = "mig"  # the device is split into instances
    NO_PERMISSION = "no_permission"  # no permission to write limits
    NO_CAPPER = "no_capper"  # the capper does not respond
    LOST_DEVICE = "lost_device"
    NO_DEVICE = "no_device"  # the job uses no device with a knob
    BAD_PIPELINE = "bad_pipeline"  # its spans are not those of one pipeline
    HELD = "held"  # another holder has the device's cap


class TuningState(ModelEnum):
    """The state of a job."""

    WAITING = "waiting"
    EXPLORING = "exploring"
    HOLDING = "holding"
    RELEASED = "released"
    DECLINED = "declined"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of one step of the tuner, with a sentence for the operator.

    ``caps`` are the settings by device, in the knob's unit; other devices keep the original.
    ``shown`` holds the figures of the sentence by name.
    """

    move: Move
    reason: DecisionReason
    sentence: str
    caps: Mapping[str, int] = field(default_factory=dict)
    shown: Mapping[str, float] = field(default_factory=dict)

    @property
    def same_as(self) -> tuple[Move, DecisionReason, tuple[tuple[str, int], ...]]:
        """The identity of a decision without its figures."""
        return self.move, self.reason, tuple(sorted(self.caps.items()))


class RecordedDecision(NamedTuple):
    """A decision with its time and job."""

    at: Instant
    job: str
    knob: Knob
    decision: Decision
    applied: bool  # False: advice, or it failed


@dataclass(frozen=True, slots=True)
class SettingResult:
    """The comparison of one setting, in the knob's unit, with the original.

    ``slowdown`` is the relative increase of the time per unit of work, with its upper ``bound`` at
    the configured confidence; ``saving`` is the relative decrease of the energy per unit.
    """

    setting: int
    slowdown: float | None = None
    bound: float | None = None
    saving: float | None = None
    pairs: int = 0
    certified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFigures:
    """Figures of one job and one knob.

    ``slowdown`` is that of the whole run, exploration included, with its upper ``slowdown_bound``
    of 99 %; ``held_slowdown`` is that of the held setting, with its upper ``held_bound`` at the
    configured confidence. ``saving`` is that of the energy per unit of work at the held setting,
    ``saved`` an estimate with an interval of two standard errors on each side.
    ``exploration`` is the time at uncertified settings, ``committed`` the time from the first unit
    to the first certified setting. ``lost`` is the lost time, ``allowance`` the time that the
    budget permits to have lost. ``unit_time`` and ``unit_energy`` are the estimated means of a unit
    of work at the original setting.
    """

    slowdown: float | None = None
    slowdown_bound: float | None = None
    held_slowdown: float | None = None
    held_bound: float | None = None
    saving: float | None = None
    saved: Microjoules | None = None
    saved_low: Microjoules | None = None
    saved_high: Microjoules | None = None
    exploration: Nanoseconds = Nanoseconds(0)
    pairs: int = 0
    units: int = 0
    committed: Nanoseconds | None = None
    tried: tuple[SettingResult, ...] = ()
    lost: Nanoseconds | None = None
    allowance: Nanoseconds | None = None
    unit_time: Nanoseconds | None = None
    unit_energy: Microjoules | None = None


class DeclarationOutcome(ModelEnum):
    """The answer to an application that has declared a tuning job."""

    ACCEPTED = "accepted"  # it gets every term that it asked for
    LIMITED = "limited"  # the operator's configuration, or another process, restricts a term
    DECLINED = "declined"  # the job must not be tuned
    IGNORED = "ignored"  # the agent uses no declarations


@dataclass(frozen=True, slots=True)
class RequestedTerms:
    """Terms of tuning that an application asks for; None leaves a term to the operator.

    ``objective`` is ``energy``, ``cost`` or ``time``, ``eta`` the weight of energy in ``cost``.
    ``first_watts`` is the power limit of a GPU to certify first, ``floor_watts`` the lowest one.
    """

    max_slowdown: float | None = None
    objective: str | None = None
    eta: float | None = None
    knobs: tuple[Knob, ...] | None = None
    first_watts: float | None = None
    floor_watts: float | None = None


@dataclass(frozen=True, slots=True)
class TuningTerms:
    """Terms under which a job is tuned; ``mode`` is ``off``, ``advise`` or ``apply``.

    ``first_watts`` and ``floor_watts`` are None unless the application has asked for them.
    """

    mode: str
    max_slowdown: float
    objective: str
    eta: float
    knobs: tuple[Knob, ...]
    first_watts: float | None = None
    floor_watts: float | None = None


@dataclass(frozen=True, slots=True)
class DeclaredTerms:
    """The terms that an application asked for, those that it was given, and one sentence why.

    ``name`` is the application's name of the job, ``uid`` its user, ``owner`` the principal and the
    Slurm job. ``provisional``: the answer may change once the job uses a GPU.
    """

    name: str
    uid: int
    asked: RequestedTerms
    given: TuningTerms
    decision: DeclarationOutcome
    reason: str
    provisional: bool = False
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ObjectiveFigures:
    """A latency limit, and the requests since the start of the job that are known to exceed it.

    ``name`` is its key in the configuration, such as ``ttft_p99``. At most ``allowed`` (a ratio) of
    the requests may exceed the limit. ``requests`` are those with a known latency.
    """

    name: str
    limit_seconds: float
    allowed: float
    requests: int = 0
    misses: int = 0

    @property
    def miss_ratio(self) -> float | None:
        return self.misses / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class LoadBinFigures:
    """A load bin that was met, at the setting that is chosen for it.

    The bin ends at ``bin_bound`` requests in flight. ``setting`` is in milliwatts or megahertz.
    ``kept`` is True if the latency limits are certainly kept, False if they are certainly not, and
    None if ``requests`` are too few to know. Energies are per output token, None where unknown.
    """

    bin: int
    bin_bound: float
    setting: int
    requests: int = 0
    kept: bool | None = None
    joules_per_token: float | None = None
    original_joules_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Load tracking of a server.

    ``load`` is the averaged number of requests in flight, larger where these are heavier than
    usual, and projected during a rise.

    The load bin ends at ``bin_bound`` requests in flight. ``headroom`` is the largest load at which
    the present setting is certified, relative to the present load; None at the original setting,
    which is permitted at every load, and without a load. ``bins`` are in ascending order.
    """

    load: float
    bin: int
    bin_bound: float
    headroom: float | None = None
    objectives: tuple[ObjectiveFigures, ...] = ()
    bins: tuple[LoadBinFigures, ...] = ()

    @property
    def used(self) -> float | None:
        """The present load relative to the largest one at which the present setting is certified.

        None as for ``headroom``, and if the setting is certified at no load yet.
        """
        return 1 / self.headroom if self.headroom else None


@dataclass(frozen=True, slots=True)
class PipelineRankFigures:
    """One rank of a pipeline. Clocks are in megahertz, None where unknown.

    ``clock`` is in force now, ``planned`` that of the plan, None before there is one. ``waiting``
    is the part of the latest iterations for which the rank has waited. ``saved`` is an estimate
    from the measured energy at all clocks, since the tuner has known the pipeline.
    """

    device: str
    clock: int | None = None
    planned: int | None = None
    waiting: float | None = None
    saved: Microjoules | None = None


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """One pipeline of a job, and why its ranks have their clocks.

    ``name`` tells data-parallel pipelines of a job apart, "" for the only one. ``unit_time`` is the
    mean time of its latest iterations without the waiting for other pipelines, ``original_time``
    that at the original clocks. ``straggler_time`` is the iteration time of a slower pipeline that
    it waits for, None without one. ``saving`` is the measured part of the energy that its plan
    saves.
    """

    name: str
    move: Move
    reason: DecisionReason
    sentence: str
    unit_time: Nanoseconds | None = None
    original_time: Nanoseconds | None = None
    straggler_time: Nanoseconds | None = None
    saving: float | None = None
    ranks: tuple[PipelineRankFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class JobPartner:
    """Another host of a job, and one sentence: on its pipelines, or why they are not ``used``.

    ``host`` is "" for the sentence on the contact to all of them. ``age`` is the time since this
    host first saw the other one's latest record, ``straggler`` the pipeline of the other host for
    which a pipeline of this one has lower clocks, "" for none.
    """

    host: str
    used: bool
    sentence: str
    age: Nanoseconds | None = None
    straggler: str = ""


@dataclass(frozen=True, slots=True)
class TuningRow(TuningFigures):
    """The state of one job and one knob.

    ``exploration`` and ``units`` are totals over all tuners of the job; ``saved_surely``, the
    maximum of ``saved_low``, never falls. ``original`` are the original settings by device.
    ``passed_knobs`` are the knobs before this one, each with the reason why it is of no use.
    ``declared`` is None for a job that no application has declared. ``load`` is None for a job
    without load tracking; a job with it has no slowdown budget, and ``budget`` is 0. ``pipelines``
    are those of a job with ``pipeline`` on this host, ``partners`` its other hosts.
    """

    job: str
    service: str
    span: str
    knob: Knob
    state: TuningState
    decision: Decision
    since: Instant
    budget: float
    confidence: float
    devices: tuple[str, ...] = ()
    applied: bool = False
    saved_surely: Microjoules = Microjoules(0)
    decisions: Mapping[tuple[Move, DecisionReason], int] = field(default_factory=dict)
    original: Mapping[str, int] = field(default_factory=dict)
    passed_knobs: Mapping[Knob, DecisionReason] = field(default_factory=dict)
    declared: DeclaredTerms | None = None
    load: LoadFigures | None = None
    pipelines: tuple[PipelineFigures, ...] = ()
    partners: tuple[JobPartner, ...] = ()


@dataclass(frozen=True, slots=True)
class CapperFigures:
    """The capper. ``answers`` is None if none is needed, ``shared`` a socket of another agent's."""

    answers: bool | None
    trouble: str
    shared: str = ""
    writes: int = 0
    restores: int = 0
    resets: int = 0


@dataclass(frozen=True, slots=True)
class TuningAccounts:
    """The state of tuning and of all caps.

    ``forwarded`` counts the log records that the user's collector has received, None without a
    collector; ``forward_drops`` counts lost ones by reason.
    """

    mode: str = "off"
    rows: tuple[TuningRow, ...] = ()
    caps: tuple[CapRow, ...] = ()
    capper: CapperFigures = CapperFigures(None, "")
    ceiling: int | None = None  # milliwatts: the host's power budget, if there is one
    forwarded: int | None = None
    forward_drops: Mapping[str, int] = field(default_factory=dict)
