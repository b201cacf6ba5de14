"""Requests: the latency that must hold, and whether it does."""

from __future__ import annotations

from types import MappingProxyType

from wattspan.tuning.blocks import Block, Tape, Time, measure
from wattspan.tuning.serving import Serving, latency_limit, units_to_learn
from wattspan.tuning.state import State
from wattspan.tuning.values import Kind, Observation
from wattspan.tuning.windows import as_served, serve

_SHOWN = 4  # times as many requests as just show a percentile, for one that is to be relied on


def hear(state: State, seen: Observation) -> State:
    """The state with the latency that must hold, once enough requests have shown it.

    While a setting is held every request is counted that takes longer.
    """
    if not seen.units:
        return state
    if state.limit is None:
        reached = max(unit.end for unit in seen.units)
        state = state._replace(tape=state.tape._replace(reached=reached), heard=reached)
        latencies = state.latencies + tuple(seen.units)
        if len(latencies) < _SHOWN * units_to_learn(state.policy):
            return state._replace(latencies=latencies)
        limit = latency_limit(state.policy, latencies)

        return state._replace(latencies=(), limit=limit)
    if state.alarm is None or state.tape.level != state.plan.level or state.held is None:
        return state
    if state.plan.level == state.top:
        return state
    late = sum(unit.end - unit.start > state.limit for unit in seen.units)
    return state._replace(alarm=state.alarm.add(len(seen.units), late))


def attend(state: State, tape: Tape, seen: Observation) -> tuple[Tape, list[Block], list[Time]]:
    """As blocks.take, of requests."""
    waiting = list(tape.waiting)
    times: list[Time] = []
    if state.limit is not None:
        tape = tape._replace(served_to=tape.served_to or seen.now)
        apart = state.spending.elapsed / max(state.spending.units, 1)
        tape, told, times = serve(tape, state.policy, seen.units, seen.now, state.limit, apart)
        waiting += told
    tape, blocks = measure(tape, waiting, seen.energy, seen.now)
    return tape, blocks, times


def compare_served(state: State, block: Block) -> State:
    """The state with one more block of requests, for the tail of the level in question."""
    level = state.held if state.held is not None else state.probe
    if not level or block.level not in (level, state.top):
        return state
    serving = state.serving.get(level, Serving()).add(as_served(block), block.level != state.top)
    alarm = state.alarm
    if alarm is None or state.held is None:
        alarm = serving.alarm(state.policy)
    return state._replace(serving=MappingProxyType({**state.serving, level: serving}), alarm=alarm)


def holds(state: State, level: int) -> bool:
    """Whether the latency surely holds at a level; of jobs without requests it always does."""
    if state.policy.kind is Kind.STEPS:
        return True
    return state.serving.get(level, Serving()).verdict(state.policy).passes


def misses(state: State) -> bool:
    """Whether too many requests were late at the level that is held."""
    if state.policy.kind is Kind.STEPS or state.held is None:
        return False
    if state.alarm is not None and state.alarm.rings:
        return True
    return state.serving.get(state.held, Serving()).verdict(state.policy).fails
