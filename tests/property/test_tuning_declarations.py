"""Terms of declared jobs: the operator's limits come first, for any request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import DeclarationOutcome, Knob, RequestedTerms, TuningTerms
from wattspan.tuning.decisions.declarations import LARGEST_BUDGET, OperatorTerms, decide_terms

MODES = ("off", "advise", "apply")
OBJECTIVES = ("energy", "cost", "time")
ratios = st.floats(0.0, 1.0)
knobs = st.lists(st.sampled_from(Knob), unique=True).map(tuple)
requests = st.builds(
    RequestedTerms,
    st.none() | st.floats(0.0, 100.0),
    st.none() | st.sampled_from(OBJECTIVES),
    st.none() | ratios,
    st.none() | knobs,
)
operators = st.builds(
    OperatorTerms,
    st.sampled_from(("ignore", "tighten", "allow")),
    st.sampled_from(MODES),
    st.booleans(),
    st.builds(
        TuningTerms,
        st.sampled_from(MODES),
        st.floats(0.001, 1.0),
        st.sampled_from(OBJECTIVES),
        ratios,
        knobs.filter(bool),
    ),
    st.sampled_from(("", "", "It must not be tuned.")),
)


@given(requests, operators, st.lists(requests, max_size=3))
def test_operator_limits_every_request(
    asked: RequestedTerms, operator: OperatorTerms, others: list[RequestedTerms]
) -> None:
    own = operator.terms
    found = decide_terms(asked, operator, (*others, asked))
    given_terms = found.given
    allowed = operator.permission == "allow"
    assert given_terms.max_slowdown <= (LARGEST_BUDGET if allowed else own.max_slowdown)
    assert set(given_terms.knobs) <= set(own.knobs)
    rank = MODES.index(given_terms.mode)
    assert rank <= max(MODES.index(own.mode), MODES.index(operator.host_mode) if allowed else 0)
    if own.mode == "off" or operator.permission == "ignore":
        assert (given_terms, found.outcome) == (own, DeclarationOutcome.IGNORED)
    if operator.named or not allowed:
        assert rank <= MODES.index(own.mode)
    if operator.host_mode == "advise" and own.mode != "apply":
        assert given_terms.mode != "apply"
    assert found.reason.endswith(".")
    assert "\n" not in found.reason


@given(requests, operators, st.lists(requests, max_size=3))
def test_processes_of_a_job_are_given_the_same_terms(
    asked: RequestedTerms, operator: OperatorTerms, others: list[RequestedTerms]
) -> None:
    joined = (asked, *others)
    assert {decide_terms(one, operator, joined).given for one in joined} == {
        decide_terms(asked, operator, joined).given
    }


@given(requests, operators)
def test_accepted_application_gets_what_it_asked_for(
    asked: RequestedTerms, operator: OperatorTerms
) -> None:
    found = decide_terms(asked, operator)
    if found.outcome is not DeclarationOutcome.ACCEPTED:
        return
    assert asked.max_slowdown in (None, found.given.max_slowdown)
    assert asked.objective in (None, found.given.objective)
    assert asked.eta in (None, found.given.eta)
    assert asked.knobs is None or set(asked.knobs) == set(found.given.knobs)
