"""Terms of declared jobs: examples of what an application asks for and is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattspan.model import DeclarationOutcome, Knob, RequestedTerms, TuningTerms
from wattspan.tuning.decisions.declarations import OperatorTerms, decide_terms

BOTH = (Knob.GPU_POWER, Knob.GPU_CLOCK)
TERMS = TuningTerms("apply", 0.05, "energy", 0.5, BOTH)
NAMED = OperatorTerms("tighten", "apply", True, TERMS)
UNNAMED = OperatorTerms("tighten", "apply", False, replace(TERMS, mode="advise"))
ACCEPTED, LIMITED = DeclarationOutcome.ACCEPTED, DeclarationOutcome.LIMITED


def test_application_without_wishes_gets_the_terms_of_the_operator() -> None:
    found = decide_terms(RequestedTerms(), NAMED)
    assert (found.given, found.outcome) == (TERMS, ACCEPTED)
    assert found.reason == (
        "The job is tuned for least energy within a slowdown budget of 5 % by gpu_power, gpu_clock."
    )


def test_tighter_terms_are_given() -> None:
    asked = RequestedTerms(0.03, "cost", 0.8, (Knob.GPU_CLOCK,))
    found = decide_terms(asked, NAMED)
    assert found.outcome is ACCEPTED
    assert found.given == TuningTerms("apply", 0.03, "cost", 0.8, (Knob.GPU_CLOCK,))


def test_larger_budget_is_limited_to_the_operators() -> None:
    found = decide_terms(RequestedTerms(0.2), NAMED)
    assert (found.given.max_slowdown, found.outcome) == (0.05, LIMITED)
    assert found.reason.startswith(
        "The budget of 20 % is limited to 5 %: the operator permits no more ([autotune] declared "
        'is "tighten"); the job is tuned for'
    )


def test_larger_budget_is_given_if_the_operator_allows_it() -> None:
    found = decide_terms(RequestedTerms(0.2), replace(NAMED, permission="allow"))
    assert (found.given.max_slowdown, found.outcome) == (0.2, ACCEPTED)


def test_budget_above_one_is_limited_to_one() -> None:
    found = decide_terms(RequestedTerms(1.5), replace(NAMED, permission="allow"))
    assert (found.given.max_slowdown, found.outcome) == (1.0, LIMITED)
    assert "no budget is larger" in found.reason


def test_knob_without_permission_is_left_out() -> None:
    asked = RequestedTerms(knobs=(Knob.CPU_POWER, Knob.GPU_CLOCK))
    found = decide_terms(asked, NAMED)
    assert (found.given.knobs, found.outcome) == ((Knob.GPU_CLOCK,), LIMITED)
    assert "cpu_power is not in [autotune] knobs (gpu_power, gpu_clock)" in found.reason.lower()


@pytest.mark.parametrize("knobs", [(Knob.CPU_POWER,), ()])
def test_job_without_a_permitted_knob_is_declined(knobs: tuple[Knob, ...]) -> None:
    found = decide_terms(RequestedTerms(knobs=knobs), NAMED)
    assert (found.given.mode, found.outcome) == ("off", DeclarationOutcome.DECLINED)
    assert f"declared: {', '.join(knobs) or 'none'}." in found.reason


def test_budget_of_zero_keeps_the_original_limits() -> None:
    found = decide_terms(RequestedTerms(0.0), NAMED)
    assert (found.given.mode, found.outcome) == ("off", ACCEPTED)
    assert found.reason == ("The job keeps its original limits: a budget of 0 % permits no trial.")


def test_unnamed_job_is_only_advised() -> None:
    found = decide_terms(RequestedTerms(0.03), UNNAMED)
    assert (found.given.mode, found.outcome) == ("advise", ACCEPTED)
    assert "as advice only: the operator has not named the job in [[autotune.job]]" in found.reason


def test_unnamed_job_is_applied_if_the_operator_allows_it() -> None:
    found = decide_terms(RequestedTerms(0.03), replace(UNNAMED, permission="allow"))
    assert found.given.mode == "apply"


@pytest.mark.parametrize("permission", ["tighten", "allow"])
@pytest.mark.parametrize("named", [True, False])
def test_advice_is_never_applied(permission: str, named: bool) -> None:
    operator = OperatorTerms(permission, "advise", named, replace(TERMS, mode="advise"))
    found = decide_terms(RequestedTerms(0.03), operator)
    assert found.given.mode == "advise"
    assert found.reason.endswith('as advice only: its mode in the configuration is "advise".')


def test_named_job_in_advise_mode_is_only_advised_on_a_host_that_applies() -> None:
    operator = replace(NAMED, permission="allow", terms=replace(TERMS, mode="advise"))
    assert decide_terms(RequestedTerms(), operator).given.mode == "advise"


def test_declaration_has_no_effect_where_it_is_ignored() -> None:
    found = decide_terms(RequestedTerms(0.01), replace(NAMED, permission="ignore"))
    assert (found.given, found.outcome) == (TERMS, DeclarationOutcome.IGNORED)
    assert '[autotune] declared to "ignore"' in found.reason


def test_declaration_has_no_effect_while_tuning_is_off() -> None:
    off = replace(TERMS, mode="off")
    found = decide_terms(RequestedTerms(0.01), OperatorTerms("allow", "off", False, off))
    assert (found.given, found.outcome) == (off, DeclarationOutcome.IGNORED)
    assert 'the operator sets [autotune] mode to "advise" or "apply"' in found.reason


def test_refused_process_is_declined_with_the_cause() -> None:
    found = decide_terms(RequestedTerms(), replace(NAMED, refusal="Not in a permitted group."))
    assert (found.given.mode, found.reason) == ("off", "Not in a permitted group.")
    assert found.outcome is DeclarationOutcome.DECLINED


def test_ranks_share_the_smallest_budget_and_common_knobs() -> None:
    first = RequestedTerms(0.03, knobs=(Knob.GPU_POWER,))
    second = RequestedTerms(0.04, knobs=BOTH)
    joined = (first, second)
    assert decide_terms(first, NAMED, joined).outcome is ACCEPTED
    found = decide_terms(second, NAMED, joined)
    assert (found.given.max_slowdown, found.given.knobs) == (0.03, (Knob.GPU_POWER,))
    assert found.outcome is LIMITED
    assert "The budget of 4 % is limited to 3 %: another process of the job declared less" in (
        found.reason
    )
    assert "another process of the job declared fewer knobs" in found.reason


def test_first_objective_of_a_job_applies() -> None:
    first, second = RequestedTerms(objective="time", eta=0.2), RequestedTerms(None, "cost", 0.9)
    joined = (RequestedTerms(), first, second)
    assert decide_terms(first, NAMED, joined).outcome is ACCEPTED
    found = decide_terms(second, NAMED, joined)
    assert (found.given.objective, found.given.eta) == ("time", 0.2)
    assert 'declared the objective "time" first' in found.reason
    assert "another process of the job declared eta = 0.2 first" in found.reason


def test_limits_of_a_profile_are_in_the_terms_and_in_the_sentence() -> None:
    found = decide_terms(RequestedTerms(first_watts=560.0, floor_watts=512.5), NAMED)
    assert (found.given.first_watts, found.given.floor_watts) == (560.0, 512.5)
    assert found.outcome is ACCEPTED
    assert found.reason.endswith("by gpu_power, gpu_clock, with 560 W first, at 512.5 W or more.")


def test_first_limit_is_the_oldest_and_lowest_limit_the_highest_of_all_processes() -> None:
    requests = [
        RequestedTerms(),
        RequestedTerms(first_watts=500.0, floor_watts=300.0),
        RequestedTerms(first_watts=400.0, floor_watts=350.0),
    ]
    given = decide_terms(requests[0], NAMED, requests).given
    assert (given.first_watts, given.floor_watts) == (500.0, 350.0)


CONDITION = replace(NAMED, condition="a job that uses another GPU is not tuned")


@pytest.mark.parametrize("budget", [0.03, 0.2])
def test_condition_is_stated_with_the_answer(budget: float) -> None:
    found = decide_terms(RequestedTerms(budget), CONDITION)
    assert found.provisional
    assert found.reason.endswith("; a job that uses another GPU is not tuned.")


def test_job_that_is_not_tuned_depends_on_no_condition() -> None:
    found = decide_terms(RequestedTerms(0.0), CONDITION)
    assert not found.provisional
    assert "another GPU" not in found.reason
