"""Caps and what the tuner decides about them, as everybody is shown them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from wattspan.model.measurements import Instant, Microjoules, ModelEnum, Nanoseconds

_EMPTY: Mapping[str, int] = MappingProxyType({})


class Knob(ModelEnum):
    """What can be turned on a device. Power is in milliwatts, clocks are in megahertz."""

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


@dataclass(frozen=True, slots=True)
class KnobState:
    """One knob as it was just read, in its unit; None where the device does not tell.

    ``requested`` is what was last asked of the device by anybody, ``enforced`` what it obeys:
    the least of all limits, also of those set outside this operating system. ``aliases`` are
    what an operator may call the device beside its id: a GPU's UUID or index, a zone's directory.
    """

    key: CapKey
    name: str
    minimum: int | None = None
    default: int | None = None
    maximum: int | None = None
    requested: int | None = None
    enforced: int | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CapRow:
    """One knob, and who holds it.

    ``original`` is what stood there before us and comes back when nobody holds it any more.
    ``wanted`` is what the holder asked for; what stands is the least of it and of ``ceiling``.
    ``foreign``: somebody else wrote it since; then nobody here touches it. ``lost`` is a foreign
    one whose original is unknown, because the journal was damaged.
    """

    state: KnobState
    original: int | None = None
    wanted: int | None = None
    ceiling: int | None = None
    holder: str = ""  # the job, "operator" or "budget"; "" for nobody
    why: str = ""  # one sentence
    since: Instant | None = None
    expires: int | None = None  # monotonic: when the lease lapses; None if it does not
    foreign: bool = False
    lost: bool = False
    usable: bool = True  # False: it cannot be written here, and ``trouble`` says why
    trouble: str = ""


class Move(ModelEnum):
    """What a decision does."""

    PROBE = "probe"  # hold a setting for a while to learn from it
    HOLD = "hold"  # keep a setting that is known to keep the budget
    RELEASE = "release"  # give the original back, now
    DECLINE = "decline"  # leave the original, and say why


class DecisionReason(ModelEnum):
    """Why a decision is as it is: a label of metrics."""

    # probing
    BASELINE = "baseline"  # the original setting's noise and draw are learned
    SCREENING = "screening"  # going down from just above the draw
    CERTIFYING = "certifying"  # one setting against the original until it is sure
    SENTINEL = "sentinel"  # a held setting is compared with the original now and then
    RECERTIFYING = "recertifying"  # a remembered setting is proved anew
    # holding
    CERTIFIED = "certified"
    # releasing
    OVER_BUDGET = "over_budget"  # slower than the budget allows, or that is likely
    BUDGET_SPENT = "budget_spent"  # the whole run's allowance is used up
    CHANGED = "changed"  # the job is not what it was
    PAUSED = "paused"  # the job's work stopped coming
    ENDED = "ended"  # the job is gone
    TAIL = "tail"  # too many requests were slower than the latency that must hold
    # declining
    ADVICE = "advice"  # only advice was asked for
    NOT_CHOSEN = "not_chosen"  # found by itself; applied only if the configuration says so
    NOT_ALLOWED = "not_allowed"  # its devices or groups are not in the configuration
    NO_SIGNAL = "no_signal"  # no unit of work was seen
    BAD_WORK = "bad_work"  # the work attribute is missing, zero or negative
    LYING_SIGNAL = "lying_signal"  # units are as long as ever, and fewer
    TOO_SHORT = "too_short"  # the job ends before it could pay
    TOO_NOISY = "too_noisy"  # certainty would cost more than the saving
    NOT_MONOTONE = "not_monotone"  # a lower setting was faster: the model does not hold
    INERT = "inert"  # no allowed setting changes anything
    NO_SAVING = "no_saving"  # no setting within the budget saves energy
    NO_ROOM = "no_room"  # the budget, floor or range leaves nothing to try
    WAITING = "waiting"  # another job of this host explores
    BACKING_OFF = "backing_off"  # released too often of late
    # both releasing and declining
    FOREIGN_WRITER = "foreign_writer"  # somebody else sets the device's limits
    THROTTLED = "throttled"  # the device slows down for reasons of its own
    SHARED = "shared"  # another tenant of the device has no signal or does not agree
    MIG = "mig"  # the device is split into instances
    PROFILE = "profile"  # a power profile of the vendor's is in force
    NO_PERMISSION = "no_permission"  # limits may not be written here
    NO_CAPPER = "no_capper"  # whoever may write limits does not answer
    LOST_DEVICE = "lost_device"
    NO_DEVICE = "no_device"  # the job uses no device that can be turned
    HELD = "held"  # somebody else holds the device's cap


class TuningState(ModelEnum):
    """Where a job stands."""

    WAITING = "waiting"
    EXPLORING = "exploring"
    HOLDING = "holding"
    RELEASED = "released"
    DECLINED = "declined"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, why, and in one sentence for the operator.

    ``caps`` are the settings by device, in the knob's unit; a device that is not named has its
    original setting. ``shown`` holds the figures of the sentence by name, for whoever wants
    to read them without reading.
    """

    move: Move
    reason: DecisionReason
    sentence: str
    caps: Mapping[str, int] = field(default_factory=lambda: _EMPTY)
    shown: Mapping[str, float] = field(default_factory=dict)

    @property
    def same_as(self) -> tuple[Move, DecisionReason, tuple[tuple[str, int], ...]]:
        """What two decisions must share to be the same one, told again with newer figures."""
        return self.move, self.reason, tuple(sorted(self.caps.items()))


class RecordedDecision(NamedTuple):
    """A decision that was made once, with when and about which job."""

    at: Instant
    job: str
    knob: Knob
    decision: Decision
    applied: bool  # False: advice, or it could not be carried out


@dataclass(frozen=True, slots=True)
class SettingResult:
    """One setting that was tried, and what comparing it with the original has shown so far.

    ``setting`` is every device's, in the knob's unit. ``slowdown`` is of the time per unit of
    work, with its upper ``bound`` at the declared confidence; ``saving`` is of the energy per
    unit of work.
    """

    setting: int
    slowdown: float | None = None
    bound: float | None = None
    saving: float | None = None
    pairs: int = 0
    certified: bool = False


@dataclass(frozen=True, slots=True)
class TuningRow:
    """One job's tuning of one knob.

    ``slowdown`` is the whole run's, exploration included, with its upper ``slowdown_bound`` at
    the declared confidence; ``held_slowdown`` is that of the setting now held. ``saved`` is an
    estimate with its interval, ``saved_surely`` the most that its lower end ever was: it never
    falls. ``exploration`` is the time lost to measuring settings, ``committed`` how long it
    took from the job's first unit to the first certified setting. ``lost`` is all the time that
    was lost so far, ``allowance`` what the budget allows to be lost by now. ``original`` are the
    settings before us, by device.
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
    slowdown: float | None = None
    slowdown_bound: float | None = None
    held_slowdown: float | None = None
    held_bound: float | None = None
    saving: float | None = None  # of the energy per unit of work, at the setting held
    saved: Microjoules | None = None
    saved_low: Microjoules | None = None
    saved_high: Microjoules | None = None
    saved_surely: Microjoules = Microjoules(0)
    exploration: Nanoseconds = Nanoseconds(0)
    pairs: int = 0
    units: int = 0
    committed: Nanoseconds | None = None
    decisions: Mapping[tuple[Move, DecisionReason], int] = field(default_factory=dict)
    tried: tuple[SettingResult, ...] = ()
    lost: Nanoseconds | None = None
    allowance: Nanoseconds | None = None
    original: Mapping[str, int] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True)
class TuningAccounts:
    """All that is known of tuning and of caps. ``capper`` is None where none is asked for.

    ``forwarded`` are log records about both that the user's collector has taken, None where there
    is none; ``forward_drops`` those that it did not get, by reason.
    """

    mode: str = "off"
    rows: tuple[TuningRow, ...] = ()
    caps: tuple[CapRow, ...] = ()
    capper: bool | None = None
    capper_trouble: str = ""
    writes: int = 0
    restores: int = 0
    ceiling: int | None = None  # milliwatts: the host's power budget, if there is one
    forwarded: int | None = None
    forward_drops: Mapping[str, int] = field(default_factory=lambda: _EMPTY)
