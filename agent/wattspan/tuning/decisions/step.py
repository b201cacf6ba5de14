"""One step of the tuner: add the observation to the state, then decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wattspan.model import Decision
from wattspan.tuning.decisions.blocks import Block, LevelTime, add_units, set_level
from wattspan.tuning.decisions.budget import charge_energy, charge_time
from wattspan.tuning.decisions.drift import add_inconclusive_pair, add_pair, update_level_shift
from wattspan.tuning.decisions.estimates import Pair, add_block, with_block, with_pair
from wattspan.tuning.decisions.phases import decide
from wattspan.tuning.decisions.rank_balancing import observe_steps
from wattspan.tuning.decisions.ranks import Lockstep, SynchronousStep
from wattspan.tuning.decisions.safety import (
    add_request_units,
    check_safety,
    compare_latency,
    learn_latency_limit,
    update_load_shift,
)
from wattspan.tuning.decisions.search import free_blocks, pair_deviation
from wattspan.tuning.decisions.state import TunerPhase, TunerState, initial_state
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    KnobRange,
    LevelLadder,
    Observation,
    TunerPolicy,
    WorkloadKind,
    WorkUnit,
)

_MAX_DRAWS = 240


def begin(
    policy: TunerPolicy,
    ranges: Sequence[KnobRange],
    *,
    now: int,
    remembered: CertifiedLevels | None = None,
) -> TunerState:
    """The state of a new tuner of one knob of one job's devices."""
    return initial_state(policy, LevelLadder.over(ranges), now, remembered)


def step(state: TunerState, observation: Observation) -> tuple[TunerState, Decision]:
    """The next state and its decision."""
    state = observe(state, observation)
    guarded = check_safety(state, observation)
    state = guarded if guarded is not None else decide(state, observation)
    return state, state.decision


def observe(state: TunerState, observation: Observation) -> TunerState:
    """The state with the observation added, before the decision."""
    level = _enforced_level(state, observation)
    samples = state.samples
    last = samples.periods[-1]
    if last.level is not None and last.level != state.plan.level:
        samples = set_level(samples, None, state.requested_at)
        last = samples.periods[-1]
    if level != last.level or observation.since > last.since:
        samples = set_level(samples, level, max(observation.since, state.requested_at))
    blocks: list[Block] = []
    times: list[LevelTime] = []
    steps: Sequence[SynchronousStep] = ()
    if state.policy.kind is WorkloadKind.REQUESTS:
        state = learn_latency_limit(state, observation)
        samples, blocks, times = add_request_units(state, samples, observation)
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
    if observation.draw and level == state.top and len(state.estimates.draws) < _MAX_DRAWS:
        draws = (*state.estimates.draws, max(observation.draw.values()))
        state = state._replace(estimates=replace(state.estimates, draws=draws))
    account = state.account
    for time in times:
        charged = (
            time.level if time.level is not None else min(state.plan.level, state.previous_level)
        )
        held = state.phase is TunerPhase.HOLD and charged == state.candidate
        account = charge_time(account, time, charged, state.top, held=held)
    for block in blocks:
        account = charge_energy(account, block, state.top)
    if account is not state.account:
        state = state._replace(account=account)
    for block in blocks:
        state = _update_estimates(state, block)
    return state


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
    level = state.plan.level
    if not observation.in_force and level == state.top:
        return level
    return level if state.ladder.is_in_force(level, observation.in_force) else None


def _update_estimates(state: TunerState, block: Block) -> TunerState:
    estimates = with_block(state.estimates, block, state.top)
    screening = state.phase is TunerPhase.SCREEN
    level_shift, before = state.level_shift, state.pairing
    if state.phase is TunerPhase.HOLD and block.level == state.candidate:
        if block.arrived:
            level_shift = update_load_shift(level_shift, state, block)
        else:
            level_shift = update_level_shift(
                level_shift, block, estimates.deviation(1 / block.units)
            )
    # Where units differ little, drift dominates: only adjacent blocks are compared.
    near = screening or free_blocks(state) == 1
    reach = 1 if near else 3 if state.plan.blocks >= 8 else 2
    pairing, pair = add_block(state.pairing, block, state.top, reach=reach, screening=screening)
    state = state._replace(estimates=estimates, level_shift=level_shift, pairing=pairing)
    if block.arrived:
        state = compare_latency(state, block)
        ended = pairing.compared and (not before.compared or pairing.middle is not before.middle)
        if ended:
            state = state._replace(unmatched=0 if pair is not None else state.unmatched + 1)
    return _compare(state, pair) if pair is not None else state


def _compare(state: TunerState, pair: Pair) -> TunerState:
    cusum = state.cusum
    expected_side_ratio = state.estimates.deviation(2 * pair.weight)
    if abs(pair.side_ratio) > max(0.04, 4 * expected_side_ratio):
        # The job changed between the two sides, so that settings cannot be compared.
        return state._replace(cusum=add_inconclusive_pair(cusum))
    if pair.level == state.held:
        usual = state.estimates.at(pair.level).time
        ratio = pair.span if state.estimates.at(pair.level).misleading else pair.busy
        mean = usual.mean if usual.n >= 4 else 0.8 * state.budget
        cusum = add_pair(cusum, ratio, mean, state.budget, pair_deviation(state))
    return state._replace(estimates=with_pair(state.estimates, pair), cusum=cusum)
