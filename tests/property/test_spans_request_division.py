"""The division of an engine's energy never creates or loses a microjoule."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from wattspan.inference.division import RequestDivision
from wattspan.inference.requests import InferenceRequest
from wattspan.inference.token_power import MAX_MODELS, TokenPowerModel
from wattspan.model import MILLISECOND, SECOND
from wattspan.spans.interval_pool import CounterStep
from wattspan.spans.values import InferenceDetails

BOARDS = ("a", "b")
TIMES = st.integers(0, 20 * SECOND)
LATENCIES = st.one_of(st.none(), st.integers(-SECOND, 30 * SECOND))


@st.composite
def _requests(draw: st.DrawFn) -> tuple[InferenceRequest, str, int]:
    """A request, its engine, and the time of its receipt."""
    start = draw(TIMES)
    end = start + draw(st.integers(0, 10 * SECOND))
    latencies = [draw(LATENCIES) for _ in range(4)]
    details = InferenceDetails(draw(st.sampled_from("mno")), draw(st.integers(0, 99)), *latencies)
    tokens = draw(st.integers(0, 5000)), draw(st.integers(0, 2000))
    ident = draw(st.binary(min_size=8, max_size=8))
    request = InferenceRequest.of(ident, start, end, tokens, details)
    return request, draw(st.sampled_from(["x", "y"])), end + draw(st.integers(0, 30 * SECOND))


@given(
    received=st.lists(_requests(), max_size=30),
    energies=st.lists(st.integers(0, 10**8), min_size=1, max_size=60),
    length=st.integers(1, 400 * MILLISECOND),
    pace=st.integers(SECOND // 3, 9 * SECOND),
)
def test_requests_and_idle_energy_are_the_energy_of_the_steps(
    received: list[tuple[InferenceRequest, str, int]],
    energies: list[int],
    length: int,
    pace: int,
) -> None:
    steps = {
        board: [
            CounterStep(i * length, (i + 1) * length, energy + number, False)
            for i, energy in enumerate(energies)
        ]
        for number, board in enumerate(BOARDS)
    }
    boards = {"x": frozenset({"a"}), "y": frozenset(BOARDS)}
    division = RequestDivision(lambda _: TokenPowerModel())
    for engine, own in boards.items():
        division.assign(engine, own)
    found, idle, since = [], 0, None
    for now in range(0, 80 * SECOND, pace):
        for request, engine, at in received:
            if now - pace < at <= now:
                since = request.start if since is None else min(since, request.start)
                division.add([request], at, engine=engine)
        settled = division.settle(now - 2 * SECOND)
        found += settled.requests
        idle += settled.idle
        division.add_steps({b: [s for s in each if s.end <= now] for b, each in steps.items()})
    last = division.settle(200 * SECOND)
    found += last.requests
    idle += last.idle

    assert division.waiting == 0
    assert len(found) == len([at for _, _, at in received if at <= now])
    divided = sum(each.energy for each in found) + idle
    assert divided == division.received
    assert all(each.input + each.output == each.energy for each in found)
    assert all(min(each.energy, each.input, each.output) >= 0 for each in found)


@given(
    models=st.integers(1, 200),
    energies=st.lists(st.integers(0, 10**8), min_size=1, max_size=40),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=15, deadline=None)
def test_energy_of_any_number_of_models_is_that_of_the_steps(
    models: int, energies: list[int], seed: int
) -> None:
    chance, power = random.Random(seed), TokenPowerModel()
    division = RequestDivision(lambda _: power)
    division.assign("e", frozenset({"a"}))
    end = len(energies) * 100 * MILLISECOND
    details = [InferenceDetails(f"m{number}", 0) for number in range(models)]
    requests = [
        InferenceRequest.of(
            number.to_bytes(8, "big"),
            chance.randint(0, end // 2),
            end,
            (chance.randint(0, 5000), chance.randint(0, 2000)),
            each,
        )
        for number, each in enumerate(details)
    ]
    division.add(requests, end, engine="e")
    steps = [
        CounterStep(i * 100 * MILLISECOND, (i + 1) * 100 * MILLISECOND, energy, False)
        for i, energy in enumerate(energies)
    ]
    division.add_steps({"a": steps})

    settled = division.settle(end + 60 * SECOND)

    assert len(settled.requests) == models
    assert sum(each.energy for each in settled.requests) + settled.idle == division.received
    assert all(min(each.energy, each.input, each.output) >= 0 for each in settled.requests)
    assert len(power) <= MAX_MODELS + 1
