"""A synchronous job whose ranks run on several hosts, each of which tunes its own ones in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from wattspan.fleet.job_records import JobRecord, RankSetting
from wattspan.model import Decision, DecisionReason, TuningFigures, TuningRow
from wattspan.tuning.decisions.report import report, setting_text
from wattspan.tuning.decisions.step import step
from wattspan.tuning.decisions.values import CertifiedLevels, KnobRange, TunerPolicy
from wattspan.tuning.host_turns import HeldSetting, HostTurn, can_keep, host_part, judged, kept
from wattspan.tuning.host_view import HostView
from wattspan.tuning.job import TuningJob

_ALONE: Final = "its ranks run on several hosts, and [fleet] names no service for their records."


class SpreadJob(TuningJob):
    """A job with ``hosts``. Settings of earlier runs are not used: other hosts had theirs."""

    _turn = HostTurn()
    _before: Mapping[str, HeldSetting] | None = None  # the hosts before this one
    _place = 0  # the time since which it has its place in the sequence
    _session = ""

    @property
    def budget(self) -> float:
        """This host's part of the slowdown budget."""
        return host_part(super().budget, self._settings.hosts)

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
            self._turn = HostTurn(trouble=_ALONE)
            if records is not None:
                records.withdraw(self.name)
            super().decide(host, may_explore=False, refusal=refusal)
            return
        self._session = self._session or str(now)
        self._turn = judged(records.view(self.name), self._settings.hosts, self._before, now)
        allowed = may_explore and self._asks and self._turn.may_explore
        super().decide(host, may_explore=allowed, refusal=refusal)
        record = JobRecord(session=self._session, sent=now, ranks=self._ranks())
        records.publish(self.name, record, explores=may_explore and self._asks)

    @property
    def _asks(self) -> bool:
        """True if it needs the turn; the last host in the sequence, to improve its setting."""
        return self.exploring or (self._before is not None and self._turn.last)

    def _blocked(self, refusal: str, host: HostView) -> Decision | None:
        blocked = super()._blocked(refusal, host)
        if blocked is not None or not self.terms.may_apply:
            return blocked
        trouble = self._turn.trouble
        if self._before is not None and self.exploring and self._turn.later:
            trouble = trouble or "the turn of this host to compare settings has ended."
        if not trouble:
            return None
        return self._decline(DecisionReason.WAITING, f"Keep the original setting: {trouble}")

    def _advance(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        assert self._state is not None  # noqa: S101 - it is running
        if may_explore and self._before is None:
            self._before, self._place = self._turn.holders, host.now.mono
        observation = self._observe(host, may_explore=may_explore)
        if self._turn.later and can_keep(self._state):
            state = kept(self._state, observation)
            if state is None:
                sentence = "The setting is certified again: it was not compared for long."
                return self._decline(DecisionReason.CHANGED, sentence), self._report
            self._state = state
        else:
            self._state, _ = step(self._state, observation)
        if not self.exploring and self._state.held is None:
            self._leave()
        decision, waits = self._state.decision, self._turn.waits
        if decision.reason is DecisionReason.WAITING and waits:
            decision = replace(decision, sentence=f"Keep the original setting: {waits}.")
        return decision, report(self._state)

    def _ranks(self) -> RankSetting:
        """The part of this host, for the other ones."""
        state, bound = self._state, max(self._report.slowdown_bound or 0.0, 0.0)
        holds = state is not None and self._place and not self.exploring
        text = setting_text(state, state.chosen) if state is not None and holds else ""
        return RankSetting(since=self._place, setting=text, lost=bound / (1 + bound))

    # ------------------------------------------------------------------ certified settings

    def _recall(self, host: HostView) -> CertifiedLevels | None:
        return None

    def store_certified(self) -> None:
        """Nothing: see the class."""
