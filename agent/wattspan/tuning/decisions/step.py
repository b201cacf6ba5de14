"""One step of the tuner: add the observation to the state, then decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wattspan.model import SECOND, Decision, DecisionReason, Move
from wattspan.tuning.decisions.blocks import (
    Block,
    LevelTime,
    SampleBuffer,
    add_energy,
    add_units,
    empty_buffer,
    set_level,
)
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.estimates import Pair, Pairing, add_block, with_block, with_pair
from wattspan.tuning.decisions.phases import decide
from wattspan.tuning.decisions.rank_balancing import observe_steps
from wattspan.tuning.decisions.ranks import Lockstep, SynchronousStep
from wattspan.tuning.decisions.safety import check_safety
from wattspan.tuning.decisions.search import (
    ProbePlan,
    SearchProgress,
    TunerPhase,
    TunerState,
    reach,
)
from wattspan.tuning.decisions.sequential_test import LevelShift, MissAlarm
from wattspan.tuning.decisions.serving import (
    ServingComparison,
    add_requests,
    latency_limit,
    units_to_learn,
)
from wattspan.tuning.decisions.tenants import follow
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    EnergyPoint,
    KnobRange,
    LevelLadder,
    Observation,
    TunerPolicy,
    WorkloadKind,
    WorkUnit,
)

_SAMPLE_FACTOR = 4
"""Requests for a reliable percentile, relative to those that just determine it."""

_MAX_DRAWS = 240

TURN_TIME = SECOND // 4
"""Shortest time between the request of a setting and its read-back."""

_MUCH_LONGER = 1.5


def begin(
    policy: TunerPolicy,
    ranges: Sequence[KnobRange],
    *,
    now: int,
    remembered: CertifiedLevels | None = None,
    account: SlowdownAccount | None = None,
    searches: int = 0,
    tenants: Sequence[TunerState] = (),
) -> TunerState:
    """The state of a new tuner of one knob of one job's devices.

    ``account`` is the closed account of the run's earlier tuners: the budget is the run's, and
    so is the permitted error. ``searches`` of these tuners in a row had no result. ``tenants`` are
    new states of other jobs on the same devices, without tenants of their own.
    """
    ladder = LevelLadder.over(ranges)
    resume_level = ladder.level(remembered.level) if remembered is not None else ladder.top
    return TunerState(
        policy=policy,
        search=SearchProgress(
            ladder,
            ProbePlan(ladder.top, 1),
            previous_level=ladder.top,
            requested_at=now,
            resume_level=None if resume_level == ladder.top else resume_level,
            retries=searches,
        ),
        samples=empty_buffer(ladder.top, now),
        decision=Decision(
            Move.DECLINE, DecisionReason.NO_SIGNAL, "No unit of work was received yet."
        ),
        begun=now,
        last_unit_end=now,
        account=account or SlowdownAccount(),
        tenants=tuple(tenants),
        random_state=(policy.seed * 2654435761 + 40503) % 2**32 or 1,
    )


def step(state: TunerState, observation: Observation) -> tuple[TunerState, Decision]:
    """The next state and its decision."""
    state = observe(state, observation)
    guarded = check_safety(state, observation)
    state = guarded if guarded is not None else decide(state, observation)
    return state, state.decision


def observe(state: TunerState, observation: Observation) -> TunerState:
    """The state with the observation added to every tenant's, before the decision."""
    if not state.tenants:
        return _observe_units(state, observation)
    shared = zip(state.tenants, observation.tenants, strict=True)
    others = tuple(
        _observe_units(follow(one, state), replace(observation, units=units))
        for one, units in shared
    )
    return _observe_units(state, observation)._replace(tenants=others)


def _observe_units(state: TunerState, observation: Observation) -> TunerState:
    level = _enforced_level(state, observation)
    samples = state.samples
    last = samples.periods[-1]
    if last.level is not None and last.level != state.search.plan.level:
        samples = set_level(samples, None, state.search.requested_at)
        last = samples.periods[-1]
    if level != last.level or observation.since > last.since:
        samples = set_level(samples, level, max(observation.since, state.search.requested_at))
    blocks: list[Block] = []
    times: list[LevelTime] = []
    steps: Sequence[SynchronousStep] = ()
    if state.policy.kind is WorkloadKind.REQUESTS:
        state = _learn_latency_limit(state, observation)
        samples, blocks, times = _add_request_units(state, samples, observation)
    elif observation.units or observation.energy or samples.waiting:
        state, units, steps = _synchronized_units(state, observation.units)
        samples, blocks, times = add_units(
            samples, state.policy, units, observation.energy, observation.now
        )
    if samples is not state.samples:
        last_unit_end = (
            max(state.last_unit_end, samples.last_end) if observation.units else state.last_unit_end
        )
        state = observe_steps(state._replace(samples=samples, last_unit_end=last_unit_end), steps)
    if observation.energy and not state.latency.measured:
        state = _measure_latency(state, observation.energy)
    if observation.draw and level == state.top and len(state.estimates.draws) < _MAX_DRAWS:
        draws = (*state.estimates.draws, max(observation.draw.values()))
        state = state._replace(estimates=replace(state.estimates, draws=draws))
    account = state.account
    for time in times:
        charged = (
            time.level
            if time.level is not None
            else min(state.search.plan.level, state.search.previous_level)
        )
        held = state.search.phase is TunerPhase.HOLD and charged == state.search.candidate
        account = account.add_time(time, charged, state.top, held=held)
    for block in blocks:
        account = account.add_energy(block, state.top)
    if account is not state.account:
        state = state._replace(account=account)
    for block in blocks:
        state = _update_estimates(state, block)
    return state


def _measure_latency(state: TunerState, points: Sequence[EnergyPoint]) -> TunerState:
    """Use the measured latency of caps as the settling time, once it is known.

    Comparisons that were made with a much shorter one are dropped.
    """
    latency = state.latency.add(points)
    state = state._replace(latency=latency)
    settle = latency.settled_after - TURN_TIME
    if not latency.measured or settle <= state.policy.settle_time:
        return state
    if settle > _MUCH_LONGER * state.policy.settle_time:
        estimates = replace(state.estimates, levels={})
        state = state._replace(
            estimates=estimates,
            evidence=state.evidence._replace(pairing=Pairing(), judged_pairs=0),
        )
    return state._replace(policy=replace(state.policy, settle_time=settle))


def _synchronized_units(
    state: TunerState, units: Sequence[WorkUnit]
) -> tuple[TunerState, Sequence[WorkUnit], Sequence[SynchronousStep]]:
    """The units of several ranks as steps of the job; those of one rank unchanged."""
    if state.lockstep is None:
        if all(unit.rank == units[0].rank for unit in units):
            return state, units, ()
        state = state._replace(lockstep=Lockstep())
    lockstep, steps = (state.lockstep or Lockstep()).add(units)
    return state._replace(lockstep=lockstep), [one.unit for one in steps], steps


def _enforced_level(state: TunerState, observation: Observation) -> int | None:
    """The requested level, once it is in force; None until then.

    The previous level does not count after the request: the time of the change, between request
    and read-back, is unknown.
    """
    level = state.search.plan.level
    if not observation.in_force and level == state.top:
        return level
    return level if state.search.ladder.is_in_force(level, observation.in_force) else None


def _update_estimates(state: TunerState, block: Block) -> TunerState:
    estimates = with_block(state.estimates, block, state.top)
    screening = state.search.phase is TunerPhase.SCREEN
    evidence = state.evidence
    level_shift, before = evidence.level_shift, evidence.pairing
    if state.search.phase is TunerPhase.HOLD and block.level == state.search.candidate:
        if block.arrived:
            level_shift = _update_load_shift(level_shift, state, block)
        else:
            level_shift = level_shift.add(block, estimates.deviation(1 / block.units))
    pairing, pair = add_block(before, block, state.top, reach=reach(state), screening=screening)
    evidence = evidence._replace(level_shift=level_shift, pairing=pairing)
    state = state._replace(estimates=estimates, evidence=evidence)
    if block.arrived:
        state = _compare_latency(state, block)
        ended = pairing.compared and (not before.compared or pairing.middle is not before.middle)
        if ended:
            unmatched = 0 if pair is not None else state.evidence.unmatched + 1
            state = state._replace(evidence=state.evidence._replace(unmatched=unmatched))
    return _compare(state, pair) if pair is not None else state


def _compare(state: TunerState, pair: Pair) -> TunerState:
    evidence, cusum = state.evidence, state.evidence.cusum
    expected_side_ratio = state.estimates.deviation(2 * pair.weight)
    if abs(pair.side_ratio) > max(0.04, 4 * expected_side_ratio):
        # The job changed between the two sides, so that settings cannot be compared.
        cusum = replace(cusum, inconclusive=True)
        return state._replace(evidence=evidence._replace(cusum=cusum))
    if pair.level == state.held:
        usual = state.estimates.at(pair.level).time
        ratio = pair.span if state.estimates.at(pair.level).misleading else pair.busy
        mean = usual.mean if usual.n >= 4 else 0.8 * state.budget
        cusum = cusum.add(ratio, mean, state.budget, state.estimates.spread(pair.weight))
    estimates, account = with_pair(state.estimates, pair), state.account
    if pair.power is not None:
        time = pair.span if estimates.at(pair.level).misleading else pair.busy
        account = account.add_comparison(pair.level, time, pair.power)
    evidence = evidence._replace(cusum=cusum)
    return state._replace(estimates=estimates, account=account, evidence=evidence)


# ---------------------------------------------------------------------------------- requests


def _update_load_shift(shift: LevelShift, state: TunerState, block: Block) -> LevelShift:
    """As LevelShift.add, for requests: whether the level was compared at such a load.

    Time and power per request change with the load, which is the clients' choice. Only the effect
    of higher loads than compared is unknown.
    """
    serving = state.evidence.serving.get(block.level)
    covered = serving is not None and serving.covers(block)
    if shift.level != block.level:
        shift = LevelShift(block.level)
    return replace(shift, shifted=0 if covered else shift.shifted + 1, blocks=shift.blocks + 1)


def _learn_latency_limit(state: TunerState, observation: Observation) -> TunerState:
    """Learn the latency that must hold; afterwards count misses while a level is held."""
    units = observation.units
    if not units:
        return state
    if state.latency_limit is None:
        state = state._replace(last_unit_end=max(unit.end for unit in units))
        latencies = state.latencies + tuple(units)
        if len(latencies) < _SAMPLE_FACTOR * units_to_learn(state.policy):
            return state._replace(latencies=latencies)
        return state._replace(latencies=(), latency_limit=latency_limit(state.policy, latencies))
    held = state.held is not None and state.samples.level == state.search.plan.level != state.top
    if state.evidence.miss_alarm is None or not held:
        return state
    late = sum(unit.end - unit.start > state.latency_limit for unit in units)
    alarm = state.evidence.miss_alarm.add(len(units), late)
    return state._replace(evidence=state.evidence._replace(miss_alarm=alarm))


def _add_request_units(
    state: TunerState, samples: SampleBuffer, observation: Observation
) -> tuple[SampleBuffer, list[Block], list[LevelTime]]:
    """As blocks.add_units, for requests."""
    waiting = list(samples.waiting)
    times: list[LevelTime] = []
    if state.latency_limit is not None:
        samples = samples._replace(served_to=samples.served_to or observation.now)
        interval = state.account.elapsed / max(state.account.units, 1)
        samples, finished, times = add_requests(
            samples, state.policy, observation.units, observation.now, state.latency_limit, interval
        )
        waiting += finished
    samples, blocks = add_energy(samples, waiting, observation.energy, observation.now)
    return samples, blocks, times


def _compare_latency(state: TunerState, block: Block) -> TunerState:
    """Add a block of requests to the latency comparison of the level in question."""
    level = state.held if state.held is not None else state.search.probe_level
    if not level or block.level not in (level, state.top):
        return state
    serving = state.evidence.serving.get(level, ServingComparison()).add(
        block, block.level != state.top
    )
    alarm = state.evidence.miss_alarm
    if alarm is None or state.held is None:
        alarm = MissAlarm(serving.allowed(state.policy))
    compared = {**state.evidence.serving, level: serving}
    return state._replace(evidence=state.evidence._replace(serving=compared, miss_alarm=alarm))
