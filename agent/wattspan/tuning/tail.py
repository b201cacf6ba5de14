"""Requests: the latency that must hold, and whether it does."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from wattspan.model import SECOND, Decision, Reason
from wattspan.tuning import sentences
from wattspan.tuning.blocks import Block, Tape, Time, measure
from wattspan.tuning.serving import Serving, latency_limit, units_to_learn
from wattspan.tuning.state import Stage, State
from wattspan.tuning.values import Kind, Observation
from wattspan.tuning.watch import Raw
from wattspan.tuning.windows import as_served, serve

_SHOWN = 4  # times as many requests as just show a percentile, for one that is to be relied on


_RARE = 600 * SECOND
"""Where it takes longer until there are requests enough for one block, nothing is compared."""

_UNMATCHED = 12
"""So many comparisons in a row of loads that differ: it will not be otherwise soon."""


def hopeless(state: State, now: int) -> Decision | None:
    """Why settings cannot be compared as requests come; None where they can, or are no requests."""
    if state.policy.kind is Kind.STEPS:
        return None
    if state.unmatched >= _UNMATCHED and state.stage in (Stage.SCREEN, Stage.PROVE):
        more = ", for the load is hardly ever the same twice"
        return sentences.decline(Reason.TOO_NOISY, more)
    lasted, came = state.spending.elapsed, state.spending.units
    if state.limit is None:
        lasted, came = now - state.begun, len(state.latencies)
    if lasted >= _RARE and came * _RARE < state.policy.block_units * lasted:
        return sentences.decline(Reason.TOO_NOISY, ", for too few requests come")
    return None


def watch_load(raw: Raw, state: State, block: Block) -> Raw:
    """As watch.look, of a setting that is held under requests: was it judged at such a load?

    Time and power per request change with the load, which is the clients' affair; only what
    happens at a higher load than was compared nobody knows.
    """
    judged = state.serving.get(block.level)
    known = judged is not None and judged.covers(as_served(block))
    if raw.level != block.level:
        raw = Raw(block.level)
    return replace(raw, shifted=0 if known else raw.shifted + 1, blocks=raw.blocks + 1)


def hear(state: State, seen: Observation) -> State:
    """The state with the latency that must hold, once enough requests have shown it.

    While a setting is held every request is counted that takes longer.
    """
    if not seen.units:
        return state
    if state.limit is None:
        state = state._replace(heard=max(unit.end for unit in seen.units))
        latencies = state.latencies + tuple(seen.units)
        if len(latencies) < _SHOWN * units_to_learn(state.policy):
            return state._replace(latencies=latencies)
        return state._replace(latencies=(), limit=latency_limit(state.policy, latencies))
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
