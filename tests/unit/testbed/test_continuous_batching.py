"""The emulated engine: its schedule, and the sum of the true energies of its requests."""

from __future__ import annotations

import pytest
from testbed.continuous_batching import (
    ContinuousBatching,
    EmulatedRequest,
    ModelCosts,
)

EVEN = ModelCosts(noise=0.0, drift=0.0)


def _served(engine: ContinuousBatching, *requests: EmulatedRequest) -> float:
    """Serve all requests; returns the energy of one board in joules."""
    for request in requests:
        engine.add(request)
    energy = 0.0
    while engine.busy:
        energy += engine.iterate().energy
    return energy


@pytest.mark.parametrize("boards", [1, 2])
def test_energies_of_requests_add_up_to_the_energy_of_the_boards(boards: int) -> None:
    engine = ContinuousBatching(slots=3, boards=boards, seed=1)
    requests = [EmulatedRequest(i, 0.0, 300 * i + 1, 5 + i, cached=20 * i) for i in range(7)]

    energy = _served(engine, *requests)

    assert sum(each.energy for each in requests) == pytest.approx(boards * energy)
    assert all(each.generated == each.output for each in requests)


def test_request_has_its_first_token_after_its_prompt() -> None:
    request = EmulatedRequest(1, 0.0, 5000, 3)
    engine = ContinuousBatching(budget=2048)
    engine.add(request)

    ends = [engine.iterate().end for _ in range(5)]

    assert not engine.busy
    assert (request.scheduled, request.first_token, request.ended) == (0.0, ends[2], ends[4])


def test_cached_tokens_are_not_computed() -> None:
    whole, cached = EmulatedRequest(1, 0.0, 4000, 2), EmulatedRequest(2, 0.0, 4000, 2, cached=3000)

    times = []
    for request in (whole, cached):
        engine = ContinuousBatching(EVEN, budget=8192)
        _served(engine, request)
        times.append(request.first_token)

    assert cached.energy < 0.5 * whole.energy
    assert times[1] < 0.5 * times[0]


def test_requests_beyond_the_slots_wait() -> None:
    one, other = EmulatedRequest(1, 0.0, 10, 5), EmulatedRequest(2, 0.0, 10, 5)
    _served(ContinuousBatching(slots=1), one, other)

    assert other.scheduled == one.ended


def test_requests_beyond_the_budget_wait() -> None:
    one, other = EmulatedRequest(1, 0.0, 2048, 5), EmulatedRequest(2, 0.0, 10, 5)
    _served(ContinuousBatching(budget=2048), one, other)

    assert other.scheduled == one.first_token


def test_batch_costs_less_than_one_request_after_the_other() -> None:
    requests = [EmulatedRequest(i, 0.0, 100, 50) for i in range(16)]
    alone = _served(ContinuousBatching(EVEN, slots=1), *requests)
    together = _served(
        ContinuousBatching(EVEN), *(EmulatedRequest(i, 0.0, 100, 50) for i in range(16))
    )

    assert together < 0.3 * alone


def test_slower_iterations_need_no_more_active_energy() -> None:
    fast, slow = ContinuousBatching(EVEN), ContinuousBatching(EVEN)
    for engine in (fast, slow):
        engine.add(EmulatedRequest(1, 0.0, 100, 1))

    one, other = fast.iterate(), slow.iterate(slowdown=2.0)

    assert other.end == pytest.approx(2 * one.end)
    assert other.energy == pytest.approx(one.energy)


def test_larger_model_takes_more_time_and_energy() -> None:
    small, large = EmulatedRequest(1, 0.0, 500, 20), EmulatedRequest(2, 0.0, 500, 20)
    _served(ContinuousBatching(EVEN), small)
    _served(ContinuousBatching(EVEN.scaled(4.0)), large)

    assert large.ended > 2 * small.ended
    assert large.energy > 3 * small.energy


def test_engine_that_is_not_mixed_computes_prompts_apart() -> None:
    engine = ContinuousBatching(slots=2, mixed=False)
    engine.add(EmulatedRequest(1, 0.0, 100, 5))
    first = engine.iterate()
    engine.add(EmulatedRequest(2, 0.0, 100, 5))
    prompt, decode = engine.iterate(), engine.iterate()

    assert (first.generated, prompt.generated, decode.generated) == (1, 1, 2)
    assert prompt.input == pytest.approx(prompt.energy)
    assert (decode.input, decode.computed) == (0.0, 0)
