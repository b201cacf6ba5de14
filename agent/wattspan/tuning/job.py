"""A tuning job: its terms, its work, its devices, its account, and its decisions by a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import (
    SECOND,
    CapKey,
    Consumer,
    Decision,
    DecisionReason,
    Instant,
    Knob,
    Microjoules,
    Move,
    TuningFigures,
    TuningRow,
    TuningState,
)
from wattspan.ports import ProcessDirectory
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.report import report
from wattspan.tuning.decisions.safety import ENFORCEMENT_TIMEOUT
from wattspan.tuning.decisions.search import TunerState, closed_account
from wattspan.tuning.decisions.tenants import follow
from wattspan.tuning.decisions.values import KnobRange, WorkloadKind
from wattspan.tuning.host_view import HostView
from wattspan.tuning.job_context import JobDevices, Strategy, TuningContext
from wattspan.tuning.job_work import JobWork
from wattspan.tuning.permissions import JobOwner, JobTerms
from wattspan.util.throttle import RetryBackoff

if TYPE_CHECKING:
    from wattspan.tuning.host_turns import HostTurns

PROCESS_GONE_AFTER = 5 * SECOND
"""Time after the end of its last process at which a job has ended: its last spans have arrived."""

_FORGET_REFUSALS = 3600 * SECOND
"""After this time without a refusal of the capper, delays begin at the shortest again."""

_MAX_REFUSALS = 3
"""Refusals of a knob for its device or its permission after which the next knob is used."""

_STATES = {
    Move.PROBE: TuningState.EXPLORING,
    Move.HOLD: TuningState.HOLDING,
    Move.RELEASE: TuningState.RELEASED,
    Move.DECLINE: TuningState.DECLINED,
}
_WAITING_REASONS = frozenset({DecisionReason.WAITING, DecisionReason.NO_SIGNAL})

ACCOUNT_INTERVAL = 10 * SECOND
"""Interval of storing a job's account, and the time of work that a crash can lose from it."""


@dataclass(slots=True)
class CumulativeSavings:
    """Totals of a job over all of its tuners; they never fall."""

    decisions: Counter[tuple[Move, DecisionReason]] = field(default_factory=Counter)
    saved: int = 0  # microjoules, lower bound
    exploration: int = 0
    units: int = 0
    _closed: tuple[int, int, int] = (0, 0, 0)  # of the tuners before the present one

    def update(self, report: TuningFigures) -> None:
        saved, exploration, units = self._closed
        self.saved = max(self.saved, saved + (report.saved_low or 0))
        self.exploration = max(self.exploration, exploration + report.exploration)
        self.units = max(self.units, units + report.units)

    def close(self) -> None:
        """Continue with the reports of a new tuner."""
        self._closed = self.saved, self.exploration, self.units


class TuningJob:
    """Belongs to the tuner's thread.

    ``owner`` is that of all of its processes, ``ranks`` are their numbers. ``strategy`` makes the
    strategy, which decides for the job's ``devices``; ``turns`` are those among other hosts with
    ranks of the same job, None if there are none.
    """

    def __init__(
        self,
        name: str,
        service: str,
        span: str,
        terms: JobTerms,
        context: TuningContext,
        strategy: Callable[[TuningJob], Strategy],
        *,
        kind: WorkloadKind,
        now: Instant,
        owner: JobOwner,
        turns: HostTurns | None = None,
        savings: CumulativeSavings | None = None,
    ) -> None:
        self.name, self.service, self.span, self.owner = name, service, span, owner
        self.kind, self.context, self.terms, self.turns = kind, context, terms, turns
        self._leader: TuningJob | None = None  # whose search sets the devices that this job shares
        self.tenants: tuple[TuningJob, ...] = ()  # whose evidence counts in this job's search
        self.work = JobWork(span, self.settings, now.mono)
        self.devices = JobDevices(owner, context, now.mono)
        self.strategy = strategy(self)
        self._use_terms()
        self.decided_knob = self.knob
        self._refusals = RetryBackoff(10 * SECOND, 600 * SECOND)
        self.account: SlowdownAccount | None = None  # of the run's earlier tuners
        self._account_stored_at = now.mono
        self.savings = savings or CumulativeSavings()
        self.savings.close()
        self.report = TuningFigures()
        self._since = now
        self.ended = False
        self.decision = Decision(
            Move.DECLINE,
            DecisionReason.NO_SIGNAL,
            f"The tuner waits for units of work of {self.name}.",
        )

    # ------------------------------------------------------------------------------- terms

    @property
    def settings(self) -> TunedJobSettings:
        """The settings of the configuration, or else the default."""
        return self.terms.job

    def use(self, terms: JobTerms) -> None:
        """Continue under ``terms``; with a new tuner if they differ in more than their reason."""
        before, self.terms = self.terms, terms
        if _effect(terms) != _effect(before):
            self.stop()
            self.work.use(self.settings)
            self._use_terms()

    def _use_terms(self) -> None:
        self.devices.use_settings(self.terms.host, self.terms.floor)
        self.devices.use_knob(clock=self.strategy.clock_only)

    # ------------------------------------------------------------------------------- units

    @property
    def ranks(self) -> dict[Consumer, int]:
        """The numbers of the living processes that send the job's spans."""
        return self.work.ranks

    def update_living(self, directory: ProcessDirectory, now: int) -> None:
        """Remove ended processes, and end after the last one."""
        self.work.update_living(directory, now)
        if not self.ended and now - self.work.latest > PROCESS_GONE_AFTER:
            self.ended = True
            self.strategy.store(None)

    # ----------------------------------------------------------------------------- tenants

    @property
    def everyone(self) -> tuple[TuningJob, ...]:
        """The job and its tenants."""
        return (self, *self.tenants)

    @property
    def shares_devices(self) -> bool:
        """True if its kind permits to tune it together with other jobs of this host."""
        return not self.strategy.clock_only and self.turns is None

    def may_share(self, refusal: str, now: int) -> bool:
        """True if it can be tuned together with other jobs; ``refusal`` as in ``decide``."""
        declared = self.terms.declared
        forbidden = refusal or (declared is not None and declared.given.mode == "off")
        present = bool(self.ranks) and not self.ended
        return present and not forbidden and self._refusals.is_due(now)

    def share(self, leader: TuningJob | None, tenants: Sequence[TuningJob]) -> None:
        """Be tuned by the search of ``leader``, or tune the devices of ``tenants`` as well.

        None and no tenants: be tuned alone.
        """
        if leader is self._leader and tuple(tenants) == self.tenants:
            return
        self.stop()
        if leader is not None:
            self.devices.clear()
        self._leader, self.tenants = leader, tuple(tenants)

    @property
    def _shared_state(self) -> TunerState | None:
        """The state of this tenant in the search of its leader; None while there is none."""
        leader = self._leader
        if leader is None or leader.strategy.state is None or self not in leader.tenants:
            return None
        search = leader.strategy.state
        return follow(search.tenants[leader.tenants.index(self)], search)

    def _follow(self, leader: TuningJob, now: Instant) -> None:
        """Report the leader's decision as this job's, with this job's figures."""
        state = self._shared_state
        if state is not None:
            # The energy of the devices is saved once, by the leader.
            self.report = replace(report(state), saved=None, saved_low=None, saved_high=None)
            self.savings.update(self.report)
            self._store_account(now.mono)
        sentence = f"Tuned with {leader.name}, which shares its devices: {leader.decision.sentence}"
        self._set_decision(replace(leader.decision, sentence=sentence, caps={}), now)

    # ------------------------------------------------------------------------------- state

    @property
    def knob(self) -> Knob:
        return self.devices.knob if self._leader is None else self._leader.knob

    @property
    def ranges(self) -> tuple[KnobRange, ...]:
        """The permitted settings of the devices."""
        return self.devices.ranges if self._leader is None else self._leader.ranges

    @property
    def applied(self) -> bool:
        """True if decisions are applied; else they are advice."""
        return self.strategy.applied if self._leader is None else self._leader.applied

    @property
    def claim(self) -> int:
        """Its claim to explore beside the other jobs of this host: the highest one does, 0 none.

        In its turn among other hosts it comes first, because they wait; it leaves the turn to
        other jobs of this host if it must wait itself.
        """
        if self.ended or not self.strategy.exploring:
            return 0
        return 1 if self.turns is None else 2 * self.turns.has_turn

    @property
    def caps(self) -> dict[CapKey, int]:
        """The caps to hold now."""
        if not self.applied:
            return {}
        return {CapKey(self.knob, one): value for one, value in self.decision.caps.items()}

    def row(self) -> TuningRow:
        """The job's state for exporters, the API and the page."""
        waits = self.decision.move is Move.DECLINE and self.decision.reason in _WAITING_REASONS
        state = TuningState.WAITING if waits else _STATES[self.decision.move]
        figures = {one.name: getattr(self.report, one.name) for one in fields(TuningFigures)}
        row = TuningRow(
            job=self.name,
            service=self.service,
            span=self.span,
            knob=self.knob,
            state=TuningState.ENDED if self.ended else state,
            decision=self.decision,
            since=self._since,
            budget=self.terms.budget,
            confidence=self.terms.host.confidence,
            devices=tuple(one.device for one in self.ranges),
            applied=self.applied,
            saved_surely=Microjoules(self.savings.saved),
            decisions=dict(self.savings.decisions),
            original={one.device: one.original for one in self.ranges},
            passed_knobs=dict(self.devices.passed),
            declared=self.terms.declared,
            **figures | {"exploration": self.savings.exploration, "units": self.savings.units},
        )
        return self.strategy.describe(row)

    # ---------------------------------------------------------------------------- decisions

    def decide(self, host: HostView, *, may_explore: bool, refusal: str = "") -> None:
        """Take the next step of the tuner.

        ``refusal`` is a sentence why the job must not be tuned.
        """
        turns, now = self.turns, host.now.mono
        if turns is None:
            self._decide(host, refusal, may_explore=may_explore)
        elif not turns.take_part(wanted=self.terms.may_apply and not self.ended):
            self._decide(host, refusal, may_explore=False)
        else:
            allowed = turns.enter(now, claims=self.claim > 0, may_explore=may_explore)
            self._decide(host, refusal, may_explore=allowed)
            turns.publish(now, self.strategy.state, self.report, explores=self.strategy.exploring)

    def _decide(self, host: HostView, refusal: str, *, may_explore: bool) -> None:
        declined: Decision | None = None
        if not self.ended:
            self.devices.update_members(host, self.ranks)
            if self._leader is not None:  # the leader reads the units of this job
                self._follow(self._leader, host.now)
                return
            self._check_partition_modes(host)
            declined = self._blocked(refusal, host) or self._prepare(host)
        if declined is not None or not self.strategy.running:
            self.discard_work()
            self._set_decision(declined or self.decision, host.now)
            return
        decision, self.report = self.strategy.step(host, may_explore=may_explore)
        self.savings.update(self.report)
        self._store_account(host.now.mono)
        if decision.reason is DecisionReason.ADVICE:
            decision = self._explain_advice(decision, host)
        self._set_decision(decision, host.now)

    def discard_work(self) -> None:
        """Discard the units that no tuner reads."""
        for one in self.everyone:
            one.work.discard()

    def fail(
        self, reason: DecisionReason, sentence: str, now: Instant, *, back_off: bool = False
    ) -> None:
        """Restart, because a decision could not be applied; ``back_off`` delays the start."""
        if back_off:
            if now.mono - self._refusals.retry_at >= _FORGET_REFUSALS:
                self._refusals.reset()
            self._refusals.failed(now.mono)
        self._set_decision(self.decline(reason, sentence), now)
        refused = reason in (DecisionReason.LOST_DEVICE, DecisionReason.NO_PERMISSION)
        often = self._refusals.failures >= _MAX_REFUSALS and not self.strategy.clock_only
        if refused and often and self.devices.skip_knob(reason):
            self._refusals.reset()

    def _check_partition_modes(self, host: HostView) -> None:
        """Begin again if a device has another partition mode: none of the evidence applies to it.

        The delay covers units of work that began before the change.
        """
        changed = self.devices.changed_mode(host)
        if changed:
            self.stop(forget=True)
            sentence = f"{self.name} is measured again: {changed}."
            self.fail(DecisionReason.CHANGED, sentence, host.now, back_off=True)

    def _set_decision(self, decision: Decision, now: Instant) -> None:
        if decision.same_as != self.decision.same_as:
            self._since = now
            self.savings.decisions[decision.move, decision.reason] += 1
            self.decided_knob = self.knob
            self.devices.continue_round()
            if (
                decision.move is Move.DECLINE
                and self.strategy.state is not None
                and self.devices.try_next_knob(decision.reason, now.mono)
            ):
                self.stop()
        self.decision = decision

    def decline(self, reason: DecisionReason, sentence: str) -> Decision:
        """The decision against tuning the job now; its tuner is dropped."""
        self.stop()
        return Decision(Move.DECLINE, reason, sentence)

    def stop(self, *, forget: bool = False) -> None:
        """Drop the tuner. The next one continues the account: the budget is the run's."""
        for one in self.everyone:
            one.keep_account()
        self.strategy.stop(forget=forget)
        if self.turns is not None:
            self.turns.leave()

    # ------------------------------------------------------------------------------ account

    def keep_account(self, account: SlowdownAccount | None = None) -> None:
        """Keep ``account``, or that of the present tuner if there is one, for the next one."""
        self.account = account or self._closed_account() or self.account

    def _closed_account(self) -> SlowdownAccount | None:
        """The account of the run with the present estimates; None if no tuner keeps one."""
        if self._leader is None:
            return self.strategy.account
        state = self._shared_state
        return None if state is None else closed_account(state)

    def recalled_account(self) -> SlowdownAccount | None:
        """The account of the run's earlier tuners, also of those before a restart of the agent."""
        if self.account is None:
            self.account = self.context.accounts.recall(self.name, self.ranks)
        return self.account

    def _store_account(self, now: int) -> None:
        """Store the account at intervals, so that it survives the agent."""
        if not self.ranks or now - self._account_stored_at < ACCOUNT_INTERVAL:
            return
        account = self._closed_account()
        if account is not None:
            self._account_stored_at = now
            self.context.accounts.store(self.name, self.ranks, account)

    # ------------------------------------------------------------------- choice of devices

    def _blocked(self, refusal: str, host: HostView) -> Decision | None:
        """The decision, if it does not depend on the job's devices."""
        declared, now = self.terms.declared, host.now.mono
        if declared is not None and declared.given.mode == "off":
            refusal = refusal or declared.reason
        if refusal:
            return self.decline(DecisionReason.NOT_ALLOWED, refusal)
        if not self._refusals.is_due(now):
            return self.decision
        if self.devices.round_has_ended(now):
            self.stop()
            self.devices.use_knob(clock=self.strategy.clock_only)
        if self.turns is not None and self.terms.may_apply:
            trouble = self.turns.trouble_of(self.strategy.state)
            if trouble:
                sentence = f"Keep the original setting: {trouble}"
                return self.decline(DecisionReason.WAITING, sentence)
        return None

    def _prepare(self, host: HostView) -> Decision | None:
        """Create a tuner for the job's devices, if they have changed; or the reason against it."""
        devices, strategy = self.devices, self.strategy
        if not strategy.running and not self.ranks:
            return self.decision
        used = host.users.used_by(devices.members, host.now.mono)
        permitted = all(one.terms.may_apply for one in self.everyone)
        choice = devices.choose(host, used, apply=permitted)
        refused = devices.refusal(host, choice, self.name)
        if refused is not None:
            return self.decline(*refused)
        if strategy.running and devices.are(choice, applied=self.applied):
            return None
        if not devices.use(host, choice, used):
            return self.decline(
                DecisionReason.NO_DEVICE,
                f"{self.name} uses no device with a readable range of the knob "
                f"{devices.knobs[choice.position]}; `wattspan doctor` lists the knobs of this "
                "host.",
            )
        self.stop()
        return strategy.begin(host, devices.ranges, apply=choice.apply)

    def vetoes(self, host: HostView) -> set[DecisionReason]:
        """External reasons not to tune the job's devices now."""
        members = {one for job in self.everyone for one in job.devices.members}
        declared = self.terms.declared is not None
        vetoes = self.devices.vetoes(host, members, whole_boards=declared)
        if self.terms.may_apply and self.applied and host.trouble is not None:
            vetoes.add(host.trouble)
        return vetoes

    def external_reason(
        self, host: HostView, requested_at: int, *, in_force: bool
    ) -> DecisionReason | None:
        """An external reason for the original setting; the wanted one was requested at a time."""
        if self.ended:
            return DecisionReason.ENDED
        if vetoes := self.vetoes(host):
            return min(vetoes)
        since = max(requested_at, self.devices.sampler.changed)
        late = not in_force and host.now.mono - since > ENFORCEMENT_TIMEOUT
        return DecisionReason.FOREIGN_WRITER if late else None

    def _explain_advice(self, advice: Decision, host: HostView) -> Decision:
        """The advice with its cause, where the configuration asks for more than advice."""
        if self.terms.configured_mode != "apply":
            return advice
        trouble = self.devices.unusable(host)
        if not self.terms.may_apply:
            found = "detected" if self.terms.declared is None else "declared"
            reason, cause = DecisionReason.NOT_CHOSEN, f"the job was {found} and is not configured"
        elif host.trouble is not None:
            denied = host.trouble is DecisionReason.NO_PERMISSION
            cause = "the capper refuses this agent" if denied else "no capper answers"
            reason = host.trouble
        elif trouble:
            reason, cause = DecisionReason.NO_PERMISSION, trouble.removesuffix(".")
        else:
            reason, cause = DecisionReason.LOST_DEVICE, "the capper lacks one of its devices"
        sentence = f"{advice.sentence} The advice is not applied: {cause}."
        return replace(advice, reason=reason, sentence=sentence)


def _effect(terms: JobTerms) -> tuple[AutotuneSettings, TunedJobSettings, str, int]:
    """The terms without the reasons that are given for them."""
    return terms.host, terms.job, terms.mode, terms.floor
