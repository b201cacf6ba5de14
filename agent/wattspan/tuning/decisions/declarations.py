"""Terms of tuning for a job that its application declares: the operator's limits come first.

``ignore`` uses no declaration. ``tighten`` gives an application a smaller budget, fewer knobs and
its own objective. ``allow`` gives it a larger budget as well, and lets the tuner apply limits to a
job that the operator has not named. No permission adds a knob or turns ``advise`` into ``apply``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from wattspan.model import DeclarationOutcome, Knob, RequestedTerms, TuningTerms

DeclarationPermission = Literal["ignore", "tighten", "allow"]

LARGEST_BUDGET = 1.0
"""Largest slowdown budget of a configuration, and so of an application."""

_OBJECTIVES = {"energy": "least energy", "cost": "least cost", "time": "least time"}


@dataclass(frozen=True, slots=True)
class OperatorTerms:
    """The operator's word on one job.

    ``terms`` apply without a declaration, ``host_mode`` is that of ``[autotune]``. ``named``: the
    configuration names the job. ``refusal`` is a sentence why the job must not be tuned, or "";
    ``condition`` a clause on what is not known yet, or "".
    """

    permission: DeclarationPermission
    host_mode: str
    named: bool
    terms: TuningTerms
    refusal: str = ""
    condition: str = ""


class TermsDecision(NamedTuple):
    """The terms that a job gets, and the answer to the process that asked."""

    given: TuningTerms
    outcome: DeclarationOutcome
    reason: str  # one sentence
    provisional: bool = False


def decide_terms(
    asked: RequestedTerms, operator: OperatorTerms, joined: Sequence[RequestedTerms] = ()
) -> TermsDecision:
    """The terms that a job gets, and the answer to the process that asked.

    ``joined`` are the requests of all processes of the job, oldest first, ``asked`` among them.
    The smallest budget, the common knobs and the highest lowest limit apply, and the first
    objective and first limit.
    """
    if operator.permission == "ignore":
        reason = (
            'Declarations have no effect: the operator has set [autotune] declared to "ignore".'
        )
        return TermsDecision(operator.terms, DeclarationOutcome.IGNORED, reason)
    if operator.terms.mode == "off":
        reason = (
            "Declarations have no effect while tuning is off: the operator sets [autotune] mode to "
            '"advise" or "apply".'
        )
        return TermsDecision(operator.terms, DeclarationOutcome.IGNORED, reason)
    off = replace(operator.terms, mode="off")
    if operator.refusal:
        return TermsDecision(off, DeclarationOutcome.DECLINED, operator.refusal)
    requests = joined or (asked,)
    budget, limits = _budget(asked, operator, requests)
    knobs, restricted = _knobs(asked, operator, requests)
    if not knobs:
        return TermsDecision(off, DeclarationOutcome.DECLINED, _no_knob(operator, requests))
    objective, eta, overruled = _objective(asked, operator, requests)
    limits = [*limits, *restricted, *overruled]
    floors = [one.floor_watts for one in requests if one.floor_watts is not None]
    given = TuningTerms(
        _mode(operator),
        budget,
        objective,
        eta,
        knobs,
        next((one.first_watts for one in requests if one.first_watts is not None), None),
        max(floors, default=None),
    )
    if not budget:
        given = replace(given, mode="off")
    result = _result(given, operator)
    provisional = bool(operator.condition and budget)
    if provisional:
        result = f"{result}; {operator.condition}"
    if not limits:
        return TermsDecision(given, DeclarationOutcome.ACCEPTED, f"{result}.", provisional)
    reason = f"{'; '.join(limits)}; {result[0].lower()}{result[1:]}."
    reason = reason[0].upper() + reason[1:]
    return TermsDecision(given, DeclarationOutcome.LIMITED, reason, provisional)


def _mode(operator: OperatorTerms) -> str:
    if operator.permission == "allow" and not operator.named:
        return operator.host_mode
    return operator.terms.mode


def _budget(
    asked: RequestedTerms, operator: OperatorTerms, requests: Sequence[RequestedTerms]
) -> tuple[float, list[str]]:
    """The budget, and the clauses with the limits of the asked one."""
    own, most = operator.terms.max_slowdown, LARGEST_BUDGET
    cause = "no budget is larger"
    if operator.permission == "tighten":
        most, cause = own, 'the operator permits no more ([autotune] declared is "tighten")'
    wanted = [one.max_slowdown for one in requests if one.max_slowdown is not None]
    given = min([*wanted, most]) if wanted else own
    if asked.max_slowdown is None or asked.max_slowdown <= given:
        return given, []
    if given < most:
        cause = "another process of the job declared less"
    limit = f"the budget of {_percent(asked.max_slowdown)} is limited to {_percent(given)}"
    return given, [f"{limit}: {cause}"]


def _knobs(
    asked: RequestedTerms, operator: OperatorTerms, requests: Sequence[RequestedTerms]
) -> tuple[tuple[Knob, ...], list[str]]:
    """The common knobs in the operator's order, and the clauses about knobs that are missing."""
    wanted = [one.knobs for one in requests if one.knobs is not None]
    permitted = operator.terms.knobs
    given = tuple(knob for knob in permitted if all(knob in knobs for knobs in wanted))
    limits = []
    missing = [knob for knob in asked.knobs or () if knob not in permitted]
    if missing:
        limits.append(f"{', '.join(missing)} is not in [autotune] knobs ({', '.join(permitted)})")
    if any(knob in permitted and knob not in given for knob in asked.knobs or ()):
        limits.append("another process of the job declared fewer knobs")
    return given, limits


def _no_knob(operator: OperatorTerms, requests: Sequence[RequestedTerms]) -> str:
    wanted = sorted({knob for one in requests for knob in one.knobs or ()})
    return (
        "The job is not tuned: its processes share no knob of [autotune] knobs "
        f"({', '.join(operator.terms.knobs)}); declared: {', '.join(wanted) or 'none'}."
    )


def _objective(
    asked: RequestedTerms, operator: OperatorTerms, requests: Sequence[RequestedTerms]
) -> tuple[str, float, list[str]]:
    """The objective, its weight of energy, and clauses if another process declared them first."""
    objectives = (one.objective for one in requests if one.objective is not None)
    objective = next(objectives, operator.terms.objective)
    weights = (one.eta for one in requests if one.eta is not None)
    eta = next(weights, operator.terms.eta)
    limits = []
    if asked.objective is not None and asked.objective != objective:
        limits.append(f'another process of the job declared the objective "{objective}" first')
    if asked.eta is not None and asked.eta != eta:
        limits.append(f"another process of the job declared eta = {eta:g} first")
    return objective, eta, limits


def _result(given: TuningTerms, operator: OperatorTerms) -> str:
    if not given.max_slowdown:
        return "The job keeps its original limits: a budget of 0 % permits no trial"
    terms = (
        f"The job is tuned for {_OBJECTIVES[given.objective]} within a slowdown budget of "
        f"{_percent(given.max_slowdown)} by {', '.join(given.knobs)}"
    )
    if given.first_watts is not None:
        terms += f", with {given.first_watts:g} W first"
    if given.floor_watts is not None:
        terms += f", at {given.floor_watts:g} W or more"
    if given.mode == "apply":
        return terms
    cause = 'its mode in the configuration is "advise"'
    if operator.host_mode == "apply" and not operator.named:
        cause = (
            "the operator has not named the job in [[autotune.job]], and [autotune] declared is "
            f'"{operator.permission}"'
        )
    return f"{terms}, as advice only: {cause}"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.4g} %"
