"""The emulated server of a language model: its prefix cache and the times of its model."""

from __future__ import annotations

import pytest

from wattspan.emulation.continuous_batching import ContinuousBatching, EmulatedRequest, ModelCosts
from wattspan.emulation.inference_server import PrefixCache

EVEN = ModelCosts(noise=0.0, drift=0.0)


def test_prompt_hits_the_cache_up_to_its_first_other_block() -> None:
    cache, words = PrefixCache(), [str(i) for i in range(100)]

    assert cache.add(words) == 0
    assert cache.add(words) == 96  # whole blocks of 16 tokens
    assert cache.add([*words[:40], "other", *words[41:]]) == 32
    assert cache.add(["other", *words[1:]]) == 0
    assert cache.add([]) == 0


def test_cache_forgets_its_oldest_prompts() -> None:
    cache, words = PrefixCache(), [str(i) for i in range(16)]
    cache.add(words)
    for number in range(10_000):
        cache.add([f"other {number}"] * 16)

    assert cache.add(words) == 0


def test_stretched_model_takes_longer_for_the_same_work() -> None:
    requests = []
    for costs in (EVEN, EVEN.stretched(4.0)):
        engine, request = ContinuousBatching(costs), EmulatedRequest(1, 0.0, 500, 20)
        engine.add(request)
        while engine.busy:
            engine.iterate()
        requests.append(request)

    fast, slow = requests
    assert slow.ended == pytest.approx(4 * fast.ended)
    active = EVEN.active_power * (slow.ended - fast.ended)
    assert slow.energy - fast.energy == pytest.approx(active)
