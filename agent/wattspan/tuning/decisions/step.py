"""From one observation to the next: what came is taken down, then it is decided."""

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

_DRAWS = 240


def begin(
    policy: TunerPolicy,
    ranges: Sequence[KnobRange],
    *,
    now: int,
    remembered: CertifiedLevels | None = None,
) -> TunerState:
    """A tuner of one knob of one job's devices, that has seen nothing yet."""
    return initial_state(policy, LevelLadder.over(ranges), now, remembered)


def step(state: TunerState, seen: Observation) -> tuple[TunerState, Decision]:
    """What is to be done now."""
    state = observe(state, seen)
    guarded = check_safety(state, seen)
    state = guarded if guarded is not None else decide(state, seen)
    return state, state.decision


def observe(state: TunerState, seen: Observation) -> TunerState:
    """The state with what was seen, nothing decided yet."""
    level = _enforced_level(state, seen)
    tape = state.tape
    last = tape.stretches[-1]
    if last.level is not None and last.level != state.plan.level:
        tape = set_level(tape, None, state.asked_at)
        last = tape.stretches[-1]
    if level != last.level or seen.since > last.since:
        tape = set_level(tape, level, max(seen.since, state.asked_at))
    blocks: list[Block] = []
    times: list[LevelTime] = []
    steps: Sequence[SynchronousStep] = ()
    if state.policy.kind is WorkloadKind.REQUESTS:
        state = learn_latency_limit(state, seen)
        tape, blocks, times = add_request_units(state, tape, seen)
    elif seen.units or seen.energy or tape.waiting:
        state, units, steps = _synchronized_units(state, seen.units)
        tape, blocks, times = add_units(tape, state.policy, units, seen.energy, seen.now)
    if tape is not state.tape:
        heard = max(state.heard, tape.reached) if seen.units else state.heard
        state = observe_steps(state._replace(tape=tape, heard=heard), steps)
    if seen.draw and level == state.top and len(state.known.draws) < _DRAWS:
        draws = (*state.known.draws, max(seen.draw.values()))
        state = state._replace(known=replace(state.known, draws=draws))
    spending = state.spending
    for time in times:
        charged = time.level if time.level is not None else min(state.plan.level, state.before)
        held = state.stage is TunerPhase.HOLD and charged == state.candidate
        spending = charge_time(spending, time, charged, state.top, held=held)
    for block in blocks:
        spending = charge_energy(spending, block, state.top)
    if spending is not state.spending:
        state = state._replace(spending=spending)
    for block in blocks:
        state = _update_estimates(state, block)
    return state


def _synchronized_units(
    state: TunerState, units: Sequence[WorkUnit]
) -> tuple[TunerState, Sequence[WorkUnit], Sequence[SynchronousStep]]:
    """Units of several ranks as steps of the job; those of one rank as they are."""
    if state.lockstep is None:
        if all(unit.rank == units[0].rank for unit in units):
            return state, units, ()
        state = state._replace(lockstep=Lockstep())
    lockstep, steps = (state.lockstep or Lockstep()).add(units)
    return state._replace(lockstep=lockstep), [one.unit for one in steps], steps


def _enforced_level(state: TunerState, seen: Observation) -> int | None:
    """The level that was asked for, once it is in force; None until then.

    What was in force before counts no more from the moment on at which it was to change: when
    it truly changed, between the asking and the reading back, nobody knows.
    """
    level = state.plan.level
    if not seen.in_force and level == state.top:
        return level
    return level if state.ladder.stands_at(level, seen.in_force) else None


def _update_estimates(state: TunerState, block: Block) -> TunerState:
    known = with_block(state.known, block, state.top)
    screening = state.stage is TunerPhase.SCREEN
    raw, before = state.raw, state.pairing
    if state.stage is TunerPhase.HOLD and block.level == state.candidate:
        if block.arrived:
            raw = update_load_shift(raw, state, block)
        else:
            raw = update_level_shift(raw, block, known.deviation(1 / block.units))
    # Where units differ little it is drift that counts: what lies next is compared, no more.
    near = screening or free_blocks(state) == 1
    reach = 1 if near else 3 if state.plan.blocks >= 8 else 2
    pairing, pair = add_block(state.pairing, block, state.top, reach=reach, screening=screening)
    state = state._replace(known=known, raw=raw, pairing=pairing)
    if block.arrived:
        state = compare_latency(state, block)
        ended = pairing.told and (not before.told or pairing.middle is not before.middle)
        if ended:
            state = state._replace(unmatched=0 if pair is not None else state.unmatched + 1)
    return _compare(state, pair) if pair is not None else state


def _compare(state: TunerState, pair: Pair) -> TunerState:
    cusum = state.cusum
    usual_apart = state.known.deviation(2 * pair.weight)
    if abs(pair.apart) > max(0.04, 4 * usual_apart):
        # Something began or ended between the two sides: it is no comparison of settings.
        return state._replace(cusum=add_inconclusive_pair(cusum))
    if pair.level == state.held:
        usual = state.known.at(pair.level).time
        ratio = pair.span if state.known.at(pair.level).lying else pair.busy
        mean = usual.mean if usual.n >= 4 else 0.8 * state.budget
        cusum = add_pair(cusum, ratio, mean, state.budget, pair_deviation(state))
    return state._replace(known=with_pair(state.known, pair), cusum=cusum)
