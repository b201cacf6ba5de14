"""Ranks of one synchronous job on several hosts: who may compare settings, and under which budget.

A step lasts as long as that of the slowest host, so a cap of one host may hide that of another. The
hosts therefore form a sequence. Each compares its settings in its turn, while the hosts before it
hold theirs and no other host compares any, so that its slowdown is the one beyond theirs. It holds
its setting as long as theirs are unchanged, and returns to the original one otherwise. The slowdown
of the job is then the product of those of its hosts, each of which has an equal part of the budget.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wattspan.fleet.job_records import JobView, RankSetting, SeenRecord
from wattspan.model import SECOND, JobPartner
from wattspan.tuning.decisions.safety import check_safety
from wattspan.tuning.decisions.search import TunerPhase, TunerState
from wattspan.tuning.decisions.step import observe, step
from wattspan.tuning.decisions.values import Observation

HeldSetting = tuple[str, int]
"""The run of a host's tuner, and the time of its clock since which it holds its setting."""

LONGEST_HOLD: Final = 2 * 3600 * SECOND
"""Time without a comparison after which a setting is certified again."""


def host_part(budget: float, hosts: int) -> float:
    """The slowdown budget of each of ``hosts``, if all of them together keep ``budget``.

    The parts of the time that the hosts may lose have the sum of the part that the job may lose.
    """
    return budget / (hosts + (hosts - 1) * budget)


@dataclass(frozen=True, slots=True)
class HostTurn:
    """The other hosts of a job at one step.

    ``may_explore`` is True if this host may compare settings. If it may not, ``waits`` is the cause
    as a clause, as far as it is another host. ``trouble`` is a sentence why it must have the
    original setting; "" if it may hold one. ``holders`` are the other hosts that hold settings.
    ``later`` is True if one of them, or one that compares settings now, is after this host in the
    sequence. ``last`` is True if this host is the last one in it, and all the others hold settings.
    """

    may_explore: bool = False
    waits: str = ""
    trouble: str = ""
    holders: Mapping[str, HeldSetting] = field(default_factory=dict)
    later: bool = False
    last: bool = False
    figures: tuple[JobPartner, ...] = ()


def judged(
    view: JobView, hosts: int, before: Mapping[str, HeldSetting] | None, now: int
) -> HostTurn:
    """The turn by the present records, of a job on at most ``hosts`` hosts.

    ``before`` are the hosts before this one in the sequence; None if it has no place in it.
    """
    unused = {seen.host: _unused(seen, now) for seen in view.records}
    holders = {
        seen.host: (seen.record.session, seen.record.ranks.since)
        for seen in view.records
        if not unused[seen.host] and seen.record and seen.record.ranks and seen.record.ranks.setting
    }
    unclear = next((f"{host} is unknown" for host, cause in unused.items() if cause), "")
    later = before is not None and not holders.keys() <= before.keys()
    trouble = _trouble(view, hosts, before, holders)
    waits = f"{view.explorer} compares settings for this job" if view.explorer else unclear
    return HostTurn(
        may_explore=view.may_explore and not (waits or trouble or later),
        waits=waits,
        trouble=trouble,
        holders=holders,
        later=later or bool(view.explorer),
        last=before is not None and len(before) == hosts - 1 and not trouble,
        figures=view.figures([unused[seen.host] for seen in view.records], _does, now),
    )


def advanced(
    state: TunerState, observation: Observation, *, later: bool, has_turn: bool
) -> tuple[TunerState | None, bool]:
    """The next state, and True if it needs the turn to compare its held setting.

    As ``kept``, while the setting is held and may not be compared. ``later`` is HostTurn's.
    """
    if has_turn or not can_keep(state):
        return step(state, observation)[0], False
    if not later:
        following, _ = step(state, observation)
        if can_keep(following) or following.phase is not TunerPhase.HOLD:
            return following, False
    return kept(state, observation), not later


def kept(state: TunerState, observation: Observation) -> TunerState | None:
    """The state that holds its setting without comparing it; None if that must be certified again.

    Beside the settings of hosts after this one, a comparison would show too small a slowdown, and
    it would disturb theirs.
    """
    state = observe(state, observation)
    held = observation.now - state.samples.periods[-1].since
    if state.level_shift.changed or held > LONGEST_HOLD:
        return None
    return check_safety(state, observation) or state


def can_keep(state: TunerState) -> bool:
    """True if the held setting is requested: no comparison with the original one is running."""
    return state.phase is TunerPhase.HOLD and state.plan.level == state.chosen


def is_in_force(state: TunerState) -> bool:
    """True if the held setting is requested and in force, so that another host may compare its."""
    return can_keep(state) and state.samples.level == state.chosen


def is_searching(state: TunerState) -> bool:
    """True if its evidence is of a setting that is not certified yet."""
    return state.phase in (TunerPhase.SCREEN, TunerPhase.PROVE)


def _unused(seen: SeenRecord, now: int) -> str:
    unused = seen.unused(now)
    if unused or (seen.record is not None and seen.record.ranks is not None):
        return unused
    return "Its record has no setting of its ranks: configure the same `hosts` on it."


def _does(seen: SeenRecord) -> str:
    ranks = RankSetting() if seen.record is None else seen.record.ranks or RankSetting()
    if not ranks.since:
        return "It has the original setting."
    does = f"holds {ranks.setting}" if ranks.setting else "compares settings"
    return f"It {does}, which has cost at most {ranks.lost:.1%} of its time."


def _trouble(
    view: JobView,
    hosts: int,
    before: Mapping[str, HeldSetting] | None,
    holders: Mapping[str, HeldSetting],
) -> str:
    if not view.contact:
        return f"the other hosts of this job are out of contact. {view.trouble}".strip()
    if len(view.records) >= hosts:
        return f"{len(view.records) + 1} hosts have such a job, more than `hosts` ({hosts})."
    for host, setting in (before or {}).items():
        if holders.get(host) != setting:
            return f"{host} has another setting than in the comparisons of this host."
    return ""
