"""Emulated engines under random traffic: the energy of the counters, to the microjoule."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from testbed.continuous_batching import ContinuousBatching, EmulatedRequest, ModelCosts
from testbed.serving_engines import ServingEngine, run

BEGIN = 1_000


def _engine(
    model: str, boards: tuple[str, ...], slots: int, size: float, seed: int
) -> ServingEngine:
    """An engine with some requests, a part of whose prompts is cached."""
    chance = random.Random(seed)
    at = BEGIN + chance.uniform(0, 1)
    requests = []
    for number in range(chance.randint(1, 15)):
        at += chance.choice([0.0, chance.expovariate(4.0), chance.expovariate(0.5)])
        prompt = chance.randint(1, 3000)
        cached = chance.choice([0, chance.randint(0, prompt)])
        requests.append(EmulatedRequest(number, at, prompt, chance.randint(1, 40), cached))
    costs = ModelCosts().scaled(size)
    batching = ContinuousBatching(costs, slots=slots, boards=len(boards), seed=seed)
    return ServingEngine(model, batching, boards, iter(requests))


@given(
    placement=st.sampled_from(
        [
            [("gpu-0",)],
            [("gpu-0", "gpu-1")],  # tensor parallelism
            [("gpu-0",), ("gpu-1",)],
            [("gpu-0",), ("gpu-0",)],
            [("gpu-0", "gpu-1"), ("gpu-1",)],
        ]
    ),
    slots=st.integers(1, 64),
    size=st.sampled_from([0.4, 1.0, 4.0]),
    seed=st.integers(0, 2**32),
)
@example(placement=[("gpu-0",)], slots=1, size=4.0, seed=529)  # the first is known late
@settings(max_examples=20)
def test_requests_idle_energy_and_remainder_are_the_energy_of_the_counters(
    placement: list[tuple[str, ...]], slots: int, size: float, seed: int
) -> None:
    engines = [
        _engine(f"m{i}", boards, slots, size, seed + i) for i, boards in enumerate(placement)
    ]

    result = run(engines, seed=seed)

    assert len(result.outcomes) == sum(len(one.done) for one in engines)
    assert all(each.found.energy >= 0 for each in result.outcomes)
    assert result.remainder == 0
    assert result.requests + result.engine_idle > 0
    assert result.board_idle > 0
