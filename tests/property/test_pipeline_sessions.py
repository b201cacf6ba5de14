"""Sessions of noisy pipelines keep the slowdown budget, whatever iterations report."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.pipelines import RunningPipeline, RunningReplicas

from wattspan.tuning.pipeline.session import add_iteration, use_plan
from wattspan.tuning.pipeline.session_state import PipelinePolicy, begin_session

ITERATIONS = 250
FLOOR = 800
BASES = st.lists(st.sampled_from([0.04, 0.07, 0.1]), min_size=2, max_size=3)
FEW = settings(max_examples=settings().max_examples // 12)  # two in `make test`


@pytest.mark.slow
@FEW
@given(
    BASES,
    st.sampled_from([0.01, 0.05]),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 2**16),
)
def test_session_keeps_the_budget(
    bases: list[float], budget: float, noise: float, unknown: float, seed: int
) -> None:
    """Noise of whole iterations, and unknown clocks and energies in some of them."""
    chance = random.Random(seed)
    pipeline, usual = RunningPipeline(bases, 3), RunningPipeline(bases, 3)
    state = begin_session(PipelinePolicy(1600, FLOOR, max_slowdown=budget))
    lost = elapsed = 0.0
    for number in range(ITERATIONS):
        longer = 1 + noise * chance.gauss(0, 1)
        one = pipeline.iteration(
            state.decision.clocks,
            reported=chance.random() >= unknown,
            longer=longer,
            metered=chance.random() >= unknown,
        )
        lost += one.seconds - usual.iteration(longer=longer).seconds
        elapsed += one.seconds
        state = add_iteration(state, one)
        if state.task is not None:
            state = use_plan(state, state.task.solved())
        clocks = state.decision.clocks
        assert all(FLOOR <= mhz <= 1600 for mhz in clocks)
        assert len(clocks) in (0, len(bases))
        assert state.account.elapsed / 1e9 <= elapsed + 1e-3
        if number > ITERATIONS // 2:
            # A noisy estimate may be wrong by a fifth of the budget for a short time.
            assert lost <= 1.2 * budget * elapsed


@pytest.mark.slow
@FEW
@given(
    st.sampled_from([(0.1, 0.06), (0.06, 0.1)]),
    st.sampled_from([0.01, 0.05]),
    st.sampled_from([1.0, 1.1, 1.3]),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 2**16),
)
def test_data_parallel_pipelines_keep_the_budget_of_their_job(
    bases: tuple[float, ...], budget: float, slower: float, noise: float, seed: int
) -> None:
    """The second pipeline is slower for some time, and both share the budget."""
    chance = random.Random(seed)
    policy = PipelinePolicy(1600, FLOOR, max_slowdown=budget, pipelines=2)
    job = RunningReplicas(policy, bases)
    for number in range(ITERATIONS):
        straggles = ITERATIONS // 3 <= number < ITERATIONS * 2 // 3
        factors = [1.0, slower if straggles else 1.0]
        job.iterate([one * (1 + noise * chance.gauss(0, 1)) for one in factors])
        account, loss = job.group.running_account
        assert account.elapsed / 1e9 <= job.lost + job.usual + 1e-3
        assert loss.bound >= loss.lost
        if number > ITERATIONS // 2:
            assert job.lost <= 1.2 * budget * job.usual
