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
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from wattspan.fleet.job_records import JobRecord, JobView, RankSetting, SeenRecord
from wattspan.model import SECOND, JobPartner, TuningFigures
from wattspan.tuning.decisions.report import setting_text
from wattspan.tuning.decisions.safety import check_safety
from wattspan.tuning.decisions.search import TunerPhase, TunerState
from wattspan.tuning.decisions.step import observe, step
from wattspan.tuning.decisions.values import Observation, TunerPolicy

HeldSetting = tuple[str, int]
"""The run of a host's tuner, and the time of its clock since which it holds its setting."""

LONGEST_HOLD: Final = 2 * 3600 * SECOND
"""Time without a comparison after which a setting is certified again."""

_ALONE: Final = "its ranks run on several hosts, and [fleet] names no service for their records."

_LONGEST_TEXT: Final = 100
"""Characters of a setting in words; other hosts refuse a record with too many."""

_PAUSE: Final = 30 * SECOND
"""Time for other hosts after a turn in which another job of this host explored."""


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


def kept(state: TunerState, observation: Observation) -> TunerState | None:
    """The state that holds its setting without comparing it; None if that must be certified again.

    Beside the settings of hosts after this one, a comparison would show too small a slowdown, and
    it would disturb theirs.
    """
    state = observe(state, observation)
    held = observation.now - state.samples.periods[-1].since
    if state.evidence.level_shift.changed or held > LONGEST_HOLD:
        return None
    return check_safety(state, observation) or state


def can_keep(state: TunerState) -> bool:
    """True if the held setting is requested: no comparison with the original one is running."""
    return state.search.phase is TunerPhase.HOLD and state.search.plan.level == state.chosen


def is_in_force(state: TunerState) -> bool:
    """True if the held setting is requested and in force, so that another host may compare its."""
    return can_keep(state) and state.samples.level == state.chosen


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


class JobRecords(Protocol):
    """Records of jobs that run on several hosts. No call waits for another host."""

    def view(self, job: str) -> JobView: ...

    def publish(self, job: str, record: JobRecord, *, explores: bool) -> None: ...

    def withdraw(self, job: str) -> None: ...


class HostTurns:
    """The turns of this host among the ``hosts`` at most with ranks of one synchronous ``job``.

    Settings of earlier runs are not used: other hosts had theirs. The job explores with the
    permission of this host and in the turn of this host among the others. It asks for the turn
    first, because other jobs of this host can explore meanwhile. ``turn`` is the latest one.
    """

    def __init__(self, job: str, hosts: int, records: JobRecords | None) -> None:
        self._job, self._hosts, self._records = job, hosts, records
        self.turn = HostTurn()
        self._asked = False  # for the turn, in the latest record
        self._asks_from = 0
        self._due = False  # the comparison of its held setting
        self._before: Mapping[str, HeldSetting] | None = None  # the hosts before this one
        self._place = 0  # the time since which it has its place in the sequence
        self._undisturbed = 0  # the time since which no later host compares or holds a setting
        self._session = ""

    @property
    def has_turn(self) -> bool:
        """True if no other host compares settings until this one has left the turn."""
        return self._asked and self.turn.may_explore

    def part(self, budget: float) -> float:
        """This host's part of the slowdown budget."""
        return host_part(budget, self._hosts)

    def policy(self, policy: TunerPolicy) -> TunerPolicy:
        """The policy of this host's search: its part of the budget and of the permitted error."""
        error = (1 - policy.confidence) / self._hosts
        return replace(policy, max_slowdown=self.part(policy.max_slowdown), confidence=1 - error)

    def take_part(self, *, wanted: bool) -> bool:
        """True if this host takes turns; if it is not ``wanted``, its record is withdrawn."""
        if wanted and self._records is not None:
            return True
        self.turn, self._asked = HostTurn(trouble=_ALONE), False
        if self._records is not None:
            self._records.withdraw(self._job)
        return False

    def enter(self, now: int, *, claims: bool, may_explore: bool) -> bool:
        """Judge the present records; True if the job may explore in this step.

        ``claims`` is True if it claims to explore on this host, where it ``may_explore``.
        """
        assert self._records is not None  # noqa: S101 - it takes part
        self._session = self._session or str(now)
        if claims and not may_explore:  # another job of this host is in its turn
            self._asks_from = now + _PAUSE
        disturbed = self.turn.later
        self.turn = judged(self._records.view(self._job), self._hosts, self._before, now)
        if disturbed and not self.turn.later:
            self._undisturbed = now
        return may_explore and self.has_turn and (claims or self.turn.last)

    def trouble_of(self, state: TunerState | None) -> str:
        """A sentence why this host must have the original setting now; "" for none."""
        compares = self._before is not None and state is not None and not can_keep(state)
        if not self.turn.trouble and compares and self.turn.later:
            return "the turn of this host to compare settings has ended."
        return self.turn.trouble

    def advance(self, state: TunerState, observation: Observation) -> TunerState | None:
        """The next state; None if the held setting must be certified again."""
        if observation.may_explore and self._before is None:
            self._before, self._place = self.turn.holders, observation.now
        # Work beside the comparisons of another host is compared with no other work.
        observation = replace(observation, since=max(observation.since, self._undisturbed))
        self._due = False
        if self.has_turn or not can_keep(state):
            return step(state, observation)[0]
        if not self.turn.later:
            following, _ = step(state, observation)
            if can_keep(following) or following.search.phase is not TunerPhase.HOLD:
                return following
            self._due = True  # it needs the turn to compare its held setting
        return kept(state, observation)

    def leave(self) -> None:
        """Leave the sequence, at the original setting."""
        self._before, self._place = None, 0

    def publish(
        self, now: int, state: TunerState | None, figures: TuningFigures, *, explores: bool
    ) -> None:
        """Publish the part of this host, and ask for the turn if it is needed."""
        assert self._records is not None  # noqa: S101 - it takes part
        self._asked = self._asks(now, state, explores=explores)
        part = self.rank_setting(state, figures, explores=explores)
        record = JobRecord(session=self._session, sent=now, ranks=part)
        self._records.publish(self._job, record, explores=self._asked)

    def _asks(self, now: int, state: TunerState | None, *, explores: bool) -> bool:
        """True if it needs the turn: to search, and to compare the setting that it holds.

        The last host in the sequence keeps the turn, to compare and improve its setting.
        """
        if explores or self._before is None or state is None:
            return explores and now >= self._asks_from
        return self.turn.last or self._due or not is_in_force(state)

    def rank_setting(
        self, state: TunerState | None, figures: TuningFigures, *, explores: bool
    ) -> RankSetting:
        """The part of this host, for the other ones."""
        bound = max(figures.slowdown_bound or 0.0, 0.0)
        holds = state is not None and self._place and not explores
        text = setting_text(state, state.chosen) if state is not None and holds else ""
        return RankSetting(
            since=self._place, setting=text[:_LONGEST_TEXT], lost=bound / (1 + bound)
        )
