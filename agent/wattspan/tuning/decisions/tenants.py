"""Several jobs that share their devices: one search, judged by the evidence of every tenant.

The *leader* is the tenant whose tuner searches, that with the smallest budget. The states of the
other tenants follow its search and collect their own evidence at the same settings: blocks, pairs
and slowdown account. A setting is tried only if every tenant's account permits it, certified only
if every tenant's slowdown is certainly within its own budget, and released if any tenant's is not.
Each tenant's test has its own error probability, and all of them must pass, so no tenant is exposed
to more than its own. A search without other tenants is judged by itself alone.
"""

from __future__ import annotations

from collections.abc import Callable

from wattspan.tuning.decisions import safety, search
from wattspan.tuning.decisions.estimates import Pairing
from wattspan.tuning.decisions.search import TunerPhase, TunerState
from wattspan.tuning.decisions.sequential_test import Cusum, pairs_needed

_MIN_JUDGED_PAIRS = 6
_MAX_TAIL_PAIRS = 64
"""Pairs after which a latency that is not certain to hold is taken as not holding."""


def everyone(state: TunerState) -> tuple[TunerState, ...]:
    """The states of all tenants, the leader's first."""
    return (state, *state.tenants)


def follow(tenant: TunerState, leader: TunerState) -> TunerState:
    """The state of another tenant, in the leader's search."""
    return tenant._replace(search=leader.search)


def each(state: TunerState, change: Callable[[TunerState], TunerState]) -> TunerState:
    """Change the states of the other tenants."""
    return state._replace(tenants=tuple(map(change, state.tenants))) if state.tenants else state


def fresh_comparison(state: TunerState) -> TunerState:
    """Begin the comparison of another level, for every tenant."""

    def begin(one: TunerState) -> TunerState:
        pairing = Pairing(present=one.evidence.pairing.present)
        return one.knowing(cusum=Cusum(), miss_alarm=None, pairing=pairing)

    return begin(each(state, begin))


def empty_comparison(state: TunerState) -> TunerState:
    """Begin the comparison of a level from which another one was compared, for every tenant."""

    def empty(one: TunerState) -> TunerState:
        return one.knowing(cusum=Cusum(), pairing=Pairing())

    return empty(each(state, empty))


def pairs(state: TunerState, level: int) -> int:
    """The number of pairs of a level that every tenant has."""
    return min(one.estimates.at(level).time.n for one in everyone(state))


def affordable(state: TunerState, level: int, duration: float, share: float) -> bool:
    """True if the account of every tenant permits ``duration`` more nanoseconds at a level."""
    return all(search.affordable(one, level, duration, share) for one in everyone(state))


def block_time(state: TunerState) -> float:
    """The duration of a block of every tenant in nanoseconds."""
    return max(map(search.block_time, everyone(state)))


def screening_pairs(state: TunerState) -> int:
    return max(map(search.screening_pairs, everyone(state)))


def next_level(state: TunerState) -> int | None:
    """The next lower level to screen; None if screening has ended for any tenant."""
    return lower_level(state, search.next_level)


def candidate(
    state: TunerState, expected: Callable[[TunerState], float], above: int = 0
) -> int | None:
    """The level that every tenant will probably certify with its ``expected`` number of pairs.

    None if any tenant has none. It is higher than ``above``.
    """

    def certifiable(one: TunerState) -> int | None:
        return search.candidate(one, search.certifiable_slowdown(one, expected(one)), above)

    return lower_level(state, certifiable)


def lower_level(state: TunerState, lower: Callable[[TunerState], int | None]) -> int | None:
    """The highest of the lower levels of all tenants; None if any has none."""
    levels = [lower(one) for one in everyone(state)]
    known = [level for level in levels if level is not None]
    return max(known) if len(known) == len(levels) else None


def certain(state: TunerState, level: int) -> bool:
    """True if the slowdown of every tenant at a level is certainly within its own budget."""
    return all(_is_certain(one, level) for one in everyone(state))


def _is_certain(state: TunerState, level: int) -> bool:
    time = state.estimates.at(level).time
    return time.n >= state.policy.least_pairs and time.upper(state.error) <= state.budget


def latency_holds(state: TunerState, level: int) -> bool:
    return all(safety.latency_holds(one, level) for one in everyone(state))


def hopeless(state: TunerState, level: int) -> bool:
    """True if any tenant will hardly certify a level with a reasonable number of pairs."""
    return any(_is_hopeless(one, level) for one in everyone(state))


def _is_hopeless(state: TunerState, level: int) -> bool:
    time = state.estimates.at(level).time
    if time.n < _MIN_JUDGED_PAIRS:
        return False
    mean, error = search.expected_slowdown(state, level)
    # Few pairs can mislead: one standard error is granted.
    needed = pairs_needed(state.budget - mean + error, time.deviation, state.error)
    tail_unknown = _is_certain(state, level) and time.n >= _MAX_TAIL_PAIRS
    return needed > max(1.5 * time.n, 120) or tail_unknown


def over_budget(state: TunerState) -> TunerState | None:
    """A tenant that is slower than its budget, or probably so; None if there is none."""
    for one in everyone(state):
        time = one.estimates.at(one.chosen).time
        broken = time.lower(1 - one.policy.confidence) > one.budget
        if one.evidence.cusum.alarmed or (one.phase is TunerPhase.HOLD and broken):
            return one
    return None


def slowdown(state: TunerState, level: int) -> float:
    """The log ratio of time of the tenant that a level slows the most; 0 if it slows none."""
    return max(0.0, *(one.estimates.at(level).time.mean for one in everyone(state)))
