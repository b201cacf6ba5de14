"""A synchronous job whose ranks run on several hosts, each of which tunes its own ones in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from wattspan.fleet.job_records import JobRecord, RankSetting
from wattspan.model import SECOND, Decision, DecisionReason, TuningFigures, TuningRow
from wattspan.tuning.decisions.report import report, setting_text
from wattspan.tuning.decisions.search import TunerPhase
from wattspan.tuning.decisions.values import CertifiedLevels, KnobRange, TunerPolicy
from wattspan.tuning.host_turns import (
    HeldSetting,
    HostTurn,
    advanced,
    can_keep,
    host_part,
    is_in_force,
    is_searching,
    judged,
)
from wattspan.tuning.host_view import HostView
from wattspan.tuning.job import TuningJob

_ALONE: Final = "its ranks run on several hosts, and [fleet] names no service for their records."

_LONGEST_TEXT: Final = 100
"""Characters of a setting in words; other hosts refuse a record with too many."""

_PAUSE: Final = 30 * SECOND
"""Time for other hosts after a turn in which another job of this host explored."""


class SpreadJob(TuningJob):
    """A job with ``hosts``. Settings of earlier runs are not used: other hosts had theirs.

    It explores with the permission of this host and in the turn of this host among the others. It
    asks for the turn first, because other jobs of this host can explore meanwhile. In the turn it
    comes before these, because other hosts wait; it leaves the turn to them if it must wait itself.
    """

    _turn = HostTurn()
    _asked = False  # for the turn, in the latest record
    _asks_from = 0
    _due = False  # the comparison of its held setting
    _before: Mapping[str, HeldSetting] | None = None  # the hosts before this one
    _place = 0  # the time since which it has its place in the sequence
    _undisturbed = 0  # the time since which no later host compares or holds a setting
    _session = ""

    @property
    def budget(self) -> float:
        """This host's part of the slowdown budget."""
        return host_part(super().budget, self._settings.hosts)

    @property
    def claim(self) -> int:
        """None while it waits for another host; above those of other jobs in its turn."""
        return 2 * super().claim if self._has_turn else 0

    @property
    def _has_turn(self) -> bool:
        """True if no other host compares settings until this one has left the turn."""
        return self._asked and self._turn.may_explore

    def row(self) -> TuningRow:
        return replace(super().row(), partners=self._turn.figures)

    def _policy(self, ranges: Sequence[KnobRange], *, apply: bool) -> TunerPolicy:
        policy = super()._policy(ranges, apply=apply)
        error = (1 - policy.confidence) / self._settings.hosts
        return replace(policy, max_slowdown=self.budget, confidence=1 - error)

    def _drop_tuner(self) -> None:
        super()._drop_tuner()
        self._leave()

    def _leave(self) -> None:
        """Leave the sequence, at the original setting."""
        self._before, self._place = None, 0

    # ---------------------------------------------------------------------------- decisions

    def decide(self, host: HostView, *, may_explore: bool, refusal: str = "") -> None:
        now, records = host.now.mono, self._context.records
        if records is None or self.ended or not self.terms.may_apply:
            self._turn, self._asked = HostTurn(trouble=_ALONE), False
            if records is not None:
                records.withdraw(self.name)
            super().decide(host, may_explore=False, refusal=refusal)
            return
        self._session = self._session or str(now)
        claimed, disturbed = self.claim > 0, self._turn.later
        if claimed and not may_explore:  # another job of this host is in its turn
            self._asks_from = now + _PAUSE
        self._turn = judged(records.view(self.name), self._settings.hosts, self._before, now)
        if disturbed and not self._turn.later:
            self._undisturbed = now
        allowed = may_explore and self._has_turn and (claimed or self._turn.last)
        super().decide(host, may_explore=allowed, refusal=refusal)
        self._asked = self._asks(now)
        record = JobRecord(session=self._session, sent=now, ranks=self._ranks())
        records.publish(self.name, record, explores=self._asked)

    def _asks(self, now: int) -> bool:
        """True if it needs the turn: to search, and to compare the setting that it holds.

        The last host in the sequence keeps the turn, to compare and improve its setting.
        """
        if self.exploring or self._before is None or self._state is None:
            return self.exploring and now >= self._asks_from
        return self._turn.last or self._due or not is_in_force(self._state)

    def _blocked(self, refusal: str, host: HostView) -> Decision | None:
        blocked = super()._blocked(refusal, host)
        if blocked is not None or not self.terms.may_apply:
            return blocked
        trouble, state = self._turn.trouble, self._state
        compares = self._before is not None and state is not None and not can_keep(state)
        if compares and self._turn.later:
            trouble = trouble or "the turn of this host to compare settings has ended."
        if not trouble:
            return None
        return self._decline(DecisionReason.WAITING, f"Keep the original setting: {trouble}")

    def _advance(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        assert self._state is not None  # noqa: S101 - it is running
        if may_explore and self._before is None:
            self._before, self._place = self._turn.holders, host.now.mono
        observation = self._observe(host, may_explore=may_explore)
        # Work beside the comparisons of another host is compared with no other work.
        observation = replace(observation, since=max(observation.since, self._undisturbed))
        state, self._due = advanced(
            self._state, observation, later=self._turn.later, has_turn=self._has_turn
        )
        if state is None:
            sentence = "The setting is certified again: it was not compared for long."
            return self._decline(DecisionReason.CHANGED, sentence), self._report
        self._state = state
        if not self.exploring and is_searching(state):
            self._drop_tuner()  # other hosts may have other settings when it may continue
        elif not self.exploring and state.phase is not TunerPhase.HOLD:
            self._leave()
        decision, waits = state.decision, self._turn.waits
        if decision.reason is DecisionReason.WAITING and waits:
            decision = replace(decision, sentence=f"Keep the original setting: {waits}.")
        return decision, report(state)

    def _ranks(self) -> RankSetting:
        """The part of this host, for the other ones."""
        state, bound = self._state, max(self._report.slowdown_bound or 0.0, 0.0)
        holds = state is not None and self._place and not self.exploring
        text = setting_text(state, state.chosen) if state is not None and holds else ""
        return RankSetting(
            since=self._place, setting=text[:_LONGEST_TEXT], lost=bound / (1 + bound)
        )

    # ------------------------------------------------------------------ certified settings

    def _recall(self, host: HostView) -> CertifiedLevels | None:
        return None

    def store_certified(self) -> None:
        """Nothing: see the class."""
