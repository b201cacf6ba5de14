"""Tracking of a server's load: the lowest setting that keeps a latency objective at each load.

A step adds the observation and decides. The setting is that of the present load bin and of those
up to the projected load, as far as they were met before (:mod:`load`, :mod:`load_cells`). It is
raised at once; it is lowered by one setting in a dwell time, after two quiet periods. A surge that
ends with the load in certified bins is undone without a dwell time: the setting before is in force
again after two quiet periods. A setting below the certified ones is tried only where latencies
leave room for it, and is left at the first sign of misses. Misses, growth of the queue or silence
restore the original and double the dwell.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from wattspan.model import SECOND, DecisionReason, Nanoseconds
from wattspan.tuning.decisions.blocks import energy_at
from wattspan.tuning.decisions.load import LoadSample, LoadTracker, bin_bound, load_bin
from wattspan.tuning.decisions.load_cells import (
    LatencyObjective,
    LoadCell,
    LoadCells,
    MissTally,
    RequestTimes,
    gates,
)
from wattspan.tuning.decisions.sequential_test import MissAlarm
from wattspan.tuning.decisions.values import EnergyPoint

LOWERING_TIME = 60 * SECOND
"""Smallest time between two steps down."""

QUIET_PERIODS = 2

_MAX_DOUBLINGS = 6
_STRETCH = 1.5
"""Exponent of the growth of latencies with the ratio of two settings, queues included."""

_CALM = 5  # dwells without an alarm after which the dwell is halved
_PATIENCE = 20_000  # requests between false alarms at a certified setting
_TRIAL_PATIENCE = 100  # the same at one that is tried
_MAX_MARKS = 512
_MAX_METERS = 64
_LATE = 6 * SECOND  # exporters send the spans of ended requests in batches
_ENERGY_TIMEOUT = 30 * SECOND


@dataclass(frozen=True, slots=True)
class TrackingPolicy:
    """The objective and the parameters of load tracking; times in nanoseconds.

    ``settings`` are those of the knob, from the original downwards. ``every_bin`` requires that a
    setting is certified in every higher bin that was ever met, instead of those up to the projected
    load.
    """

    objectives: tuple[LatencyObjective, ...]
    settings: tuple[int, ...]
    period: int = 5 * SECOND
    confidence: float = 0.95
    by_length: bool = False
    dwell: int = LOWERING_TIME
    every_bin: bool = False


class LoadObservation(NamedTuple):
    """Input of one step. Requests occur once; their energy may arrive seconds later.

    ``energy`` are the points of energy that have become known, in order. ``in_force`` is true once
    the requested setting is. ``generated`` are points of cumulative tokens, of which one without
    tokens begins anew; None if the tokens are those of the requests.
    """

    now: int
    sample: LoadSample | None = None
    requests: Sequence[RequestTimes] = ()
    energy: Sequence[EnergyPoint] = ()
    in_force: bool = True
    generated: Sequence[EnergyPoint] | None = None


class _Mark(NamedTuple):
    """The load bin and the setting since ``at``; ``settled``: the setting was in force."""

    at: int
    number: int
    setting: int
    settled: bool


class _Meter(NamedTuple):
    """A period whose energy and tokens are not all known yet."""

    start: int
    end: int
    number: int
    setting: int
    settled: bool
    tokens: float = 0.0


class TrackingTotals(NamedTuple):
    """Totals since the start: energy in microjoules, misses by objective.

    ``saved`` compares each period with the energy per token of the original in the same load bin,
    where that is known; ``metered`` is the energy of these periods.
    """

    requests: int = 0
    misses: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()
    saved: float = 0.0
    metered: float = 0.0


class TrackingState(NamedTuple):
    """The state between two steps."""

    policy: TrackingPolicy
    load: LoadTracker
    cells: LoadCells
    setting: int = 0
    before_surge: int = 0  # the certified setting that a surge has raised
    reason: DecisionReason = DecisionReason.BASELINE
    begun: int = 0
    changed_at: int = 0
    may_lower_at: int = 0
    doublings: int = 0
    alarmed_at: int = 0
    quiet_since: int = 0
    trial: bool = False
    failed: Mapping[tuple[int, int], int] = {}
    alarm: MissAlarm | None = None
    marks: tuple[_Mark, ...] = ()
    tallies: Mapping[tuple[int, int], MissTally] = {}
    tallied_at: int = 0
    meters: tuple[_Meter, ...] = ()
    tokens: float = 0.0  # of the present period
    points: tuple[EnergyPoint, ...] = ()
    generated: tuple[EnergyPoint, ...] | None = None
    totals: TrackingTotals = TrackingTotals()
    committed: Nanoseconds | None = None

    @property
    def bin(self) -> int:
        """The bin of the present load."""
        return self.load.bin

    @property
    def dwell(self) -> int:
        """The present time between two steps down."""
        return self.policy.dwell << self.doublings


class TrackingEvidence(NamedTuple):
    """The part of a state with which a later tracking of the same server processes continues.

    Cells are by bin and setting, certified settings by bin; ``failed`` has the time until which a
    setting is not tried again in a bin.
    """

    cells: Mapping[tuple[int, int], LoadCell]
    certified: Mapping[int, int]
    failed: Mapping[tuple[int, int], int]
    doublings: int


def collected_evidence(state: TrackingState) -> TrackingEvidence:
    """The evidence of a state."""
    return TrackingEvidence(state.cells.cells, state.cells.certified, state.failed, state.doublings)


def begin_tracking(
    policy: TrackingPolicy, now: int, evidence: TrackingEvidence | None = None
) -> TrackingState:
    """The state of a server at the original setting, with the ``evidence`` of an earlier tracking.

    ValueError: no objective, no setting, or settings that do not fall.
    """
    if not policy.objectives:
        raise ValueError("load tracking needs a latency objective")
    if not policy.settings or any(low >= high for high, low in pairwise(policy.settings)):
        raise ValueError("load tracking needs settings from the original downwards")
    steps = pairwise(policy.settings)
    near = max((high / low for high, low in steps), default=1.0) ** _STRETCH
    each = gates(policy.objectives, by_length=policy.by_length, near=near)
    zeros = (0,) * len(policy.objectives)
    known = evidence or TrackingEvidence({}, {}, {}, 0)
    cells = LoadCells(each, 1 - policy.confidence, known.cells, known.certified)
    doublings = min(known.doublings, _MAX_DOUBLINGS)
    return TrackingState(
        policy,
        LoadTracker(policy.period),
        cells,
        begun=now,
        changed_at=now,
        may_lower_at=now + (policy.dwell << doublings),
        doublings=doublings,
        alarmed_at=now if doublings else 0,
        quiet_since=now,
        failed=known.failed,
        tallied_at=now,
        totals=TrackingTotals(misses=zeros, counted=zeros),
        committed=Nanoseconds(0) if any(cells.certified.values()) else None,
    )


def resume_tracking(state: TrackingState, now: int) -> TrackingState:
    """Continue an ended tracking of the same server, with its evidence, at the original setting.

    Requests and energy from before the first new observation are ignored.
    """
    return begin_tracking(state.policy, now, collected_evidence(state))._replace(
        load=state.load,
        alarmed_at=state.alarmed_at,
        begun=state.begun,
        totals=state.totals,
        committed=state.committed,
    )


def track(state: TrackingState, observation: LoadObservation) -> TrackingState:
    """The next state; ``setting`` is its decision."""
    state = _observe(state, observation)
    now = observation.now
    alarm = _alarm(state, now)
    if alarm is not None:
        return _restore(state, now, alarm)
    return _choose(state, now)


def release(
    state: TrackingState, observation: LoadObservation, reason: DecisionReason
) -> TrackingState:
    """Restore the original for an external reason. Evidence stays; the dwell begins anew."""
    state = _observe(state, observation)
    now = observation.now
    state = _set(state, now, 0, reason)
    return state._replace(may_lower_at=now + state.dwell, quiet_since=now)


def headroom(state: TrackingState) -> float | None:
    """The largest load at which the present setting is certified, relative to the present load.

    None for the original setting, which is permitted at every load, and without a load.
    """
    load = state.load.load
    if not state.setting or load <= 0:
        return None
    bins = [one for one, lowest in state.cells.certified.items() if lowest >= state.setting]
    return bin_bound(max(bins)) / load if bins else 0.0


# ------------------------------------------------------------------------------- observation


def _observe(state: TrackingState, observation: LoadObservation) -> TrackingState:
    now = observation.now
    if (observation.generated is None) is not (state.generated is None):
        # Of periods before, the tokens were counted otherwise.
        state = state._replace(generated=None if state.generated is not None else (), meters=())
    before = state.bin
    if observation.sample is not None:
        state = state._replace(load=state.load.add(observation.sample))
    if state.bin > before or (state.before_surge and state.load.surging):
        state = state._replace(quiet_since=now)
    state = _mark(state, now, settled=observation.in_force)
    for _, ended in groupby(observation.requests, key=attrgetter("end")):
        state = _add_requests(state, tuple(ended))
    if now - state.tallied_at >= state.policy.period:
        state = _add_tallies(state, now)
    return _add_energy(state, observation)


def _mark(state: TrackingState, now: int, *, settled: bool) -> TrackingState:
    mark = _Mark(now, state.load.usual_bin, state.setting, settled)
    last = state.marks[-1] if state.marks else None
    if last is not None and mark[1:] == last[1:] and now - last.at < state.policy.period:
        return state
    meters = state.meters
    if last is not None:
        meters = (*meters, _Meter(last.at, now, *last[1:], state.tokens))[-_MAX_METERS:]
    return state._replace(marks=(*state.marks, mark)[-_MAX_MARKS:], meters=meters, tokens=0.0)


def _add_requests(state: TrackingState, ended: Sequence[RequestTimes]) -> TrackingState:
    """Count requests that ended at one time, as all those of a page did: they have no order."""
    requests = misses = 0
    for request in ended:
        state, heard, missed = _add_request(state, request)
        requests += heard
        misses += heard * missed
    if state.alarm is None or not requests:
        return state
    return state._replace(alarm=state.alarm.add_mixed(requests, misses))


def _add_request(state: TrackingState, request: RequestTimes) -> tuple[TrackingState, int, bool]:
    """Count requests for the load bin at their arrival, and the lowest setting of their time.

    Under several settings they count only if they missed a limit. A certified setting therefore
    holds for the requests that arrive while the load is in this bin. Returns the number for the
    alarm, too, and whether they missed.
    """
    marks, each, number = state.marks, state.cells.gates, request.number
    place = bisect_right(marks, request.start, key=attrgetter("at"))
    latest = request.end - (request.end - request.start) // 2
    late = [
        None if (latency := request.latency(one)) is None else latency > one.limit
        for one in state.policy.objectives
    ]
    missed = any(late)
    if not place:  # they began before the first known load
        return state, number * (missed and request.end >= state.changed_at), missed
    during = marks[place - 1 : max(place, bisect_left(marks, request.end, key=attrgetter("at")))]
    setting = max(one.setting for one in during)
    mixed = any(one.setting != setting or not one.settled for one in during)
    key = during[0].number, setting
    tally = state.tallies.get(key, MissTally.empty(len(each)))
    tally = tally.add(each, request, only_misses=mixed)
    known = state.totals
    totals = state.totals._replace(
        requests=known.requests + number * (not request.again),
        misses=tuple(
            total + number * (one is True) for total, one in zip(known.misses, late, strict=True)
        ),
        counted=tuple(
            total + number * (one is not None)
            for total, one in zip(known.counted, late, strict=True)
        ),
    )
    # A request counts once, with each of its misses, also if the present setting is that of most
    # of its time: else long requests would alarm late after a change.
    present = setting == state.setting or state.changed_at <= latest
    heard = number * (present and (missed or not request.again))
    meters, tokens = state.meters, state.tokens
    generated = number * (request.output_tokens or 0)
    for place in reversed(range(len(meters))):
        if meters[place].start <= request.end < meters[place].end:
            one = meters[place]._replace(tokens=meters[place].tokens + generated)
            meters = (*meters[:place], one, *meters[place + 1 :])
            break
    else:
        tokens += generated  # of the present period, or of one whose energy was counted
    state = state._replace(
        tallies={**state.tallies, key: tally},
        totals=totals,
        meters=meters,
        tokens=tokens,
    )
    return state, heard, missed


def _add_tallies(state: TrackingState, now: int) -> TrackingState:
    """Add the requests of one period to their cells: a group for the clustering of misses."""
    cells = state.cells
    for (number, setting), tally in state.tallies.items():
        cells = cells.add_tally(number, setting, tally)
    return state._replace(cells=cells, tallies={}, tallied_at=now)


def _add_energy(state: TrackingState, observation: LoadObservation) -> TrackingState:
    points, generated = (*state.points, *observation.energy), state.generated
    if generated is not None and observation.generated:
        begins = not observation.generated[0].energy
        generated = (*(() if begins else generated), *observation.generated)
    cells, totals = state.cells, state.totals
    series: tuple[tuple[EnergyPoint, ...], ...]
    series = (points,) if generated is None else (points, generated)
    timeout = max(_ENERGY_TIMEOUT, 2 * state.policy.period)
    left: list[_Meter] = []
    for one in state.meters:
        known = all(each and each[-1].at >= one.end for each in series)
        if observation.now < one.end + _LATE or (not known and observation.now < one.end + timeout):
            left.append(one)
        elif known and one.settled and max(each[0].at for each in series) <= one.start:
            energy = energy_at(points, one.end) - energy_at(points, one.start)
            tokens = one.tokens
            if generated is not None:
                tokens += energy_at(generated, one.end) - energy_at(generated, one.start)
            cells = cells.add_energy(one.number, one.setting, energy, tokens)
            original = cells.cell(one.number, 0).energy_per_token
            if original is not None:
                saved = original * tokens - energy if one.setting else 0.0
                totals = totals._replace(
                    saved=totals.saved + saved, metered=totals.metered + energy
                )
    oldest = left[0].start if left else state.marks[-1].at  # the next period begins there
    return state._replace(
        cells=cells,
        totals=totals,
        meters=tuple(left),
        points=_since(points, oldest),
        generated=None if generated is None else _since(generated, oldest),
    )


def _since(points: tuple[EnergyPoint, ...], oldest: int) -> tuple[EnergyPoint, ...]:
    """The points from the last one that is not later than ``oldest``."""
    keep = [place for place, (at, _) in enumerate(points) if at <= oldest]
    return points[keep[-1] :] if keep else points


# ---------------------------------------------------------------------------------- decision


def _alarm(state: TrackingState, now: int) -> DecisionReason | None:
    """A reason to restore the original at once: misses, a growing queue, or silence."""
    if not state.setting:
        return None
    if state.alarm is not None and state.alarm.alarmed:
        return DecisionReason.TAIL
    if state.load.growing:
        return DecisionReason.CHANGED
    return DecisionReason.PAUSED if state.load.silent(min(now, state.load.until)) else None


def _restore(state: TrackingState, now: int, alarm: DecisionReason) -> TrackingState:
    """Restore the original; a setting that has failed must be certified anew."""
    failed, cells, missed = state.failed, state.cells, alarm is DecisionReason.TAIL
    if missed:
        place = state.load.usual_bin, state.setting
        cells, failed = cells.without(*place), {**failed, place: now + (state.dwell << 2)}
    if not missed or state.setting <= state.cells.lowest(state.bin):
        state = state._replace(doublings=min(state.doublings + 1, _MAX_DOUBLINGS))
    state = _set(state, now, 0, alarm)
    wait = now + state.dwell
    return state._replace(
        cells=cells, failed=failed, alarmed_at=now, may_lower_at=wait, quiet_since=now
    )


def _choose(state: TrackingState, now: int) -> TrackingState:
    present = state.setting
    if state.doublings and now - state.alarmed_at > _CALM * state.dwell:
        state = state._replace(doublings=state.doublings - 1, alarmed_at=now)
    number = state.bin
    target = state.cells.cheapest(number, state.cells.lowest(number))
    if present > target and not (present == target + 1 and _may_try(state, now, [number], target)):
        return _raise(state, now, target)
    if present > target:
        return state  # the trial goes on
    if present == target and state.trial:
        committed = state.committed
        if committed is None:
            committed = Nanoseconds(now - state.begun)
        state = state._replace(
            trial=False,
            reason=DecisionReason.CERTIFIED,
            committed=committed,
            alarm=_new_alarm(state, trial=False),
        )
    quiet = now - state.quiet_since >= QUIET_PERIODS * state.policy.period
    if not quiet or (now < state.may_lower_at and not state.before_surge):
        return state
    needed = _needed_bins(state)
    certified = min(state.cells.lowest(number) for number in needed)
    target = min(target, certified)
    again = min(state.before_surge, target)
    if again > present:
        state = _set(state, now, again, DecisionReason.CERTIFIED)
        return state._replace(may_lower_at=now + state.dwell)
    state = state._replace(before_surge=0)
    if now < state.may_lower_at:
        return state
    if present < target:
        return _lower(state, now, present + 1, trial=False)
    if present == target == certified and _may_try(state, now, needed, target):
        return _lower(state, now, present + 1, trial=True)
    return state


def _raise(state: TrackingState, now: int, setting: int) -> TrackingState:
    """Raise the setting for the load; in a surge, the certified one is kept for its end."""
    certified = state.setting - state.trial
    before = max(state.before_surge, certified) if state.load.surging else 0
    state = _set(state, now, setting, DecisionReason.CERTIFIED)
    return state._replace(before_surge=before)


def _needed_bins(state: TrackingState) -> list[int]:
    """The present bin, and those above it up to the projected load that were met before."""
    number, top = state.bin, load_bin(state.load.projected)
    above = (
        one for one in state.cells.met if number < one and (one <= top or state.policy.every_bin)
    )
    return [number, *above]


def _may_try(state: TrackingState, now: int, needed: Sequence[int], above: int) -> bool:
    """True if the setting below ``above`` may be tried in every bin that is needed."""
    following = above + 1
    if following >= len(state.policy.settings):
        return False
    for number in needed:
        if not state.cells.may_try(number, above):
            return False
        if state.cells.cheapest(number, following) < following:
            return False
    return not any(
        until > now and number <= max(needed) and setting <= following
        for (number, setting), until in state.failed.items()
    )


def _lower(state: TrackingState, now: int, setting: int, *, trial: bool) -> TrackingState:
    reason = DecisionReason.CERTIFYING if trial else DecisionReason.CERTIFIED
    state = _set(state, now, setting, reason)
    return state._replace(
        trial=trial, alarm=_new_alarm(state, trial=trial), may_lower_at=now + state.dwell
    )


def _set(state: TrackingState, now: int, setting: int, reason: DecisionReason) -> TrackingState:
    state = state._replace(
        setting=setting, reason=reason, changed_at=now, trial=False, before_surge=0
    )
    return state._replace(alarm=_new_alarm(state, trial=False) if setting else None)


def _new_alarm(state: TrackingState, *, trial: bool) -> MissAlarm:
    allowed = min(one.allowed for one in state.policy.objectives)
    return MissAlarm(allowed, _TRIAL_PATIENCE if trial else _PATIENCE)
