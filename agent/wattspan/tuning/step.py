"""From one observation to the next: what came is taken down, then it is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wattspan.model import Decision
from wattspan.tuning.blocks import Block, Time, stand, take
from wattspan.tuning.course import judge
from wattspan.tuning.known import with_block, with_pair
from wattspan.tuning.ladder import Ladder
from wattspan.tuning.outside import guard
from wattspan.tuning.pairs import Pair, follow
from wattspan.tuning.ranks import Lockstep, Step
from wattspan.tuning.search import free_blocks, pair_deviation
from wattspan.tuning.slack import watch
from wattspan.tuning.spending import meter, spend
from wattspan.tuning.state import Stage, State, start
from wattspan.tuning.tail import attend, compare_served, hear, watch_load
from wattspan.tuning.values import Kind, Observation, Policy, Range, Remembered, Unit
from wattspan.tuning.watch import add, doubt, look

_DRAWS = 240


def begin(
    policy: Policy, ranges: Sequence[Range], *, now: int, remembered: Remembered | None = None
) -> State:
    """A tuner of one knob of one job's devices, that has seen nothing yet."""
    return start(policy, Ladder.over(ranges), now, remembered)


def step(state: State, seen: Observation) -> tuple[State, Decision]:
    """What is to be done now."""
    state = listen(state, seen)
    guarded = guard(state, seen)
    state = guarded if guarded is not None else judge(state, seen)
    return state, state.decision


def listen(state: State, seen: Observation) -> State:
    """The state with what was seen, nothing decided yet."""
    level = _in_force(state, seen)
    tape = state.tape
    last = tape.stretches[-1]
    if last.level is not None and last.level != state.plan.level:
        tape = stand(tape, None, state.asked_at)
        last = tape.stretches[-1]
    if level != last.level or seen.since > last.since:
        tape = stand(tape, level, max(seen.since, state.asked_at))
    blocks: list[Block] = []
    times: list[Time] = []
    steps: Sequence[Step] = ()
    if state.policy.kind is Kind.REQUESTS:
        state = hear(state, seen)
        tape, blocks, times = attend(state, tape, seen)
    elif seen.units or seen.energy or tape.waiting:
        state, units, steps = _in_step(state, seen.units)
        tape, blocks, times = take(tape, state.policy, units, seen.energy, seen.now)
    if tape is not state.tape:
        heard = max(state.heard, tape.reached) if seen.units else state.heard
        state = watch(state._replace(tape=tape, heard=heard), steps)
    if seen.draw and level == state.top and len(state.known.draws) < _DRAWS:
        draws = (*state.known.draws, max(seen.draw.values()))
        state = state._replace(known=replace(state.known, draws=draws))
    spending = state.spending
    for time in times:
        charged = time.level if time.level is not None else min(state.plan.level, state.before)
        held = state.stage is Stage.HOLD and charged == state.candidate
        spending = spend(spending, time, charged, state.top, held=held)
    for block in blocks:
        spending = meter(spending, block, state.top)
    if spending is not state.spending:
        state = state._replace(spending=spending)
    for block in blocks:
        state = _learn(state, block)
    return state


def _in_step(state: State, units: Sequence[Unit]) -> tuple[State, Sequence[Unit], Sequence[Step]]:
    """Units of several ranks as steps of the job; those of one rank as they are."""
    if state.lockstep is None:
        if all(unit.rank == units[0].rank for unit in units):
            return state, units, ()
        state = state._replace(lockstep=Lockstep())
    lockstep, steps = (state.lockstep or Lockstep()).add(units)
    return state._replace(lockstep=lockstep), [one.unit for one in steps], steps


def _in_force(state: State, seen: Observation) -> int | None:
    """The level that was asked for, once it is in force; None until then.

    What was in force before counts no more from the moment on at which it was to change: when
    it truly changed, between the asking and the reading back, nobody knows.
    """
    level = state.plan.level
    if not seen.in_force and level == state.top:
        return level
    return level if state.ladder.stands_at(level, seen.in_force) else None


def _learn(state: State, block: Block) -> State:
    known = with_block(state.known, block, state.top)
    screening = state.stage is Stage.SCREEN
    raw, before = state.raw, state.pairing
    if state.stage is Stage.HOLD and block.level == state.candidate:
        if block.arrived:
            raw = watch_load(raw, state, block)
        else:
            raw = look(raw, block, known.deviation(1 / block.units))
    # Where units differ little it is drift that counts: what lies next is compared, no more.
    near = screening or free_blocks(state) == 1
    reach = 1 if near else 3 if state.plan.blocks >= 8 else 2
    pairing, pair = follow(state.pairing, block, state.top, reach=reach, screening=screening)
    state = state._replace(known=known, raw=raw, pairing=pairing)
    if block.arrived:
        state = compare_served(state, block)
        ended = pairing.told and (not before.told or pairing.middle is not before.middle)
        if ended:
            state = state._replace(unmatched=0 if pair is not None else state.unmatched + 1)
    return _compare(state, pair) if pair is not None else state


def _compare(state: State, pair: Pair) -> State:
    cusum = state.cusum
    usual_apart = state.known.deviation(2 * pair.weight)
    if abs(pair.apart) > max(0.04, 4 * usual_apart):
        # Something began or ended between the two sides: it is no comparison of settings.
        return state._replace(cusum=doubt(cusum))
    if pair.level == state.held:
        usual = state.known.at(pair.level).time
        ratio = pair.span if state.known.at(pair.level).lying else pair.busy
        mean = usual.mean if usual.n >= 4 else 0.8 * state.budget
        cusum = add(cusum, ratio, mean, state.budget, pair_deviation(state))
    return state._replace(known=with_pair(state.known, pair), cusum=cusum)
