"""The division of counter steps among requests: shares, waits and exceptional requests."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from wattspan.inference.division import (
    BOARD_TIMEOUT,
    FIRST_HOLD,
    FIRST_REQUESTS,
    MAX_REQUESTS,
    DivisionMethod,
    RequestDivision,
    RequestEnergy,
)
from wattspan.inference.requests import MAX_ACTIVE, InferenceRequest
from wattspan.inference.token_power import TokenPowerModel, TokenWork
from wattspan.model import MILLISECOND, SECOND
from wattspan.spans.interval_pool import CounterStep

S = SECOND
STEP = 100 * MILLISECOND
GPU = frozenset({"gpu"})


def _request(
    number: int, start: float, first: float, end: float, *, prefill: int = 0, decode: int = 0
) -> InferenceRequest:
    ident, times = number.to_bytes(8, "big"), [round(at * S) for at in (start, first, end)]
    return InferenceRequest._make([ident, "m", *times, prefill, decode, prefill, True, "", 0, ""])


def _steps(start: float, end: float, watts: float, step: int = STEP) -> list[CounterStep]:
    edges = range(round(start * S), round(end * S), step)
    energy = round(watts * 1e6 * step / S)
    return [CounterStep(at, at + step, energy, False) for at in edges]


def _division(
    requests: Sequence[InferenceRequest],
    until: int,
    steps: Sequence[CounterStep] = (),
    model: TokenPowerModel | None = None,
) -> RequestDivision:
    """A division for one engine on one board."""
    division = RequestDivision(lambda _: TokenPowerModel() if model is None else model)
    division.assign("e", GPU)
    division.add(requests, until, engine="e")
    if steps:
        division.add_steps({"gpu": list(steps)})
    return division


def _divided(
    requests: Iterable[InferenceRequest], steps: dict[str, list[CounterStep]]
) -> tuple[dict[int, RequestEnergy], int]:
    division = RequestDivision(lambda _: TokenPowerModel())
    division.assign("e", frozenset(steps))
    division.add(list(requests), 100 * S, engine="e")
    division.add_steps(steps)
    settled = division.settle(100 * S)
    assert division.waiting == 0
    return {int.from_bytes(each.request.id, "big"): each for each in settled.requests}, settled.idle


def test_unidentified_model_divides_by_tokens() -> None:
    requests = [
        _request(1, 0, 1, 1, prefill=300),
        _request(2, 0, 0, 1, decode=100),
    ]

    found, idle = _divided(requests, {"gpu": _steps(0, 1, 100)})

    assert found[1].energy == pytest.approx(75e6, rel=1e-5)
    assert found[2].energy == pytest.approx(25e6, rel=1e-5)
    assert sum(each.energy for each in found.values()) + idle == 100_000_000
    assert (found[1].input, found[1].output) == (found[1].energy, 0)
    assert (found[2].input, found[2].output) == (0, found[2].energy)
    assert {each.method for each in found.values()} == {DivisionMethod.TOKENS}
    assert found[1].uncertainty is None


def test_requests_without_tokens_share_the_time() -> None:
    requests = [_request(1, 0, 0, 1), _request(2, 0.5, 0.5, 1)]

    found, idle = _divided(requests, {"gpu": _steps(0, 1, 100)})

    assert found[1].energy == pytest.approx(75e6, rel=1e-5)
    assert found[2].energy == pytest.approx(25e6, rel=1e-5)
    assert idle == 0


def test_time_without_requests_is_idle_energy() -> None:
    found, idle = _divided([_request(1, 0, 0, 1, decode=9)], {"gpu": _steps(0, 5, 100)})

    assert (found[1].energy, idle) == (100_000_000, 400_000_000)


def test_idle_power_is_subtracted_from_a_step_with_requests() -> None:
    steps = _steps(0, 2, 20) + _steps(2, 2.1, 50)
    first = _request(1, 0, 0, 0.1, decode=9)

    found, idle = _divided([first, _request(2, 2.05, 2.05, 2.1, decode=9)], {"gpu": steps})

    assert found[2].energy == 4_000_000
    assert idle == 19 * 2_000_000 + 1_000_000


def test_request_has_no_energy_of_other_engines_boards() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    division.assign(1, frozenset({"a"}))
    division.add([_request(1, 0, 0, 1, decode=9)], S, engine=1)
    division.assign(2, frozenset({"b"}))
    division.add([_request(2, 0, 0, 1, decode=9)], S, engine=2)
    division.add_steps({"a": _steps(0, 1, 100), "b": _steps(0, 1, 60)})

    one, other = division.settle(S).requests

    assert (one.energy, other.energy) == (100_000_000, 60_000_000)


def test_engines_on_one_board_share_its_energy() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    for engine in ("x", "y", "z"):
        division.assign(engine, GPU)
    division.add([_request(1, 0, 0, 1), _request(2, 0.5, 0.5, 2)], 2 * S, engine="x")
    division.add([_request(3, 0, 0, 1.5)], 2 * S, engine="y")
    division.add([_request(4, 1.5, 1.5, 2)], 2 * S, engine="z")
    division.add_steps({"gpu": _steps(0, 2, 100)})

    settled = division.settle(2 * S)

    found = {int.from_bytes(each.request.id, "big"): each.energy for each in settled.requests}
    assert sum(found.values()) + settled.idle == 200_000_000
    assert found[3] == pytest.approx(75e6, rel=1e-4)
    assert found[4] == pytest.approx(25e6, rel=1e-4)


def test_first_requests_wait_for_long_ones() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    division.assign("e", GPU)
    assert division.hold("gpu") == FIRST_HOLD
    division.add([_request(1, 0, 0, 1)], 2 * S, engine="e")

    assert division.hold("gpu") == FIRST_HOLD

    many = [_request(i, i, i, i + 9) for i in range(FIRST_REQUESTS)]
    for each in many:
        division.assign("e", GPU)
        division.add([each], each.end + S, engine="e")

    assert 10 * S <= division.hold("gpu") < 12 * S


@pytest.mark.exhaustive
def test_late_requests_delay_no_engine_on_another_board() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    for engine, delay in (("prompt", 0), ("late", 100 * S)):
        division.assign(engine, frozenset({engine}))
        for i in range(FIRST_REQUESTS):
            one = _request(i, i, i, i + 1)
            division.add([one], one.end + delay, engine=engine)
    division.assign("without a board", frozenset())

    assert division.hold("prompt") < 2 * S
    assert division.hold("late") > 100 * S
    assert division.hold("unknown") == 0

    last = FIRST_REQUESTS * S
    division.add_steps({name: _steps(0, FIRST_REQUESTS, 100) for name in ("prompt", "late")})
    settled = division.settle(last + 2 * S, held=True).requests
    assert FIRST_REQUESTS + 380 <= len(settled) <= FIRST_REQUESTS + 400


def test_request_waits_for_its_last_step() -> None:
    division = _division([_request(1, 0, 0, 0.95, decode=9)], S, _steps(0, 1, 100))

    assert division.settle(round(0.95 * S)).requests == []
    (settled,) = division.settle(S).requests
    assert settled.energy == 100_000_000


@pytest.mark.parametrize(
    ("begin", "end", "divided", "energy", "measured"),
    [
        (0, 1, 1, 0, True),  # the request beside it has its energy
        (0, 2, 1, 100_000_000, True),
        (3, 10, 10, 0, False),  # its energy was idle energy
        (3, 12, 10, 200_000_000, False),
    ],
)
def test_late_request_is_measured_if_others_have_its_energy(
    begin: int, end: int, divided: int, energy: int, *, measured: bool
) -> None:
    division = _division([_request(1, 0, 0, 1, decode=9)], S, _steps(0, 12, 100))
    division.settle(divided * S)
    division.add([_request(2, begin, begin, end, decode=9)], 12 * S, engine="e")

    (late,) = division.settle(12 * S).requests

    assert (late.energy, late.measured) == (energy, measured)


def test_board_is_read_again_for_an_earlier_request_until_a_step_was_divided() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    assert division.restart(["gpu"], 5 * S) == []
    division.assign("e", GPU)
    division.add([_request(2, 1, 1, 2, decode=9)], 2 * S, engine="e")
    division.add_steps({"gpu": _steps(1, 2, 100)})
    assert division.restart(["gpu", "other"], 0) == ["gpu"]
    assert division.received == 0
    division.add([_request(1, 0, 0, 1, decode=9)], 2 * S, engine="e")
    division.add_steps({"gpu": _steps(0, 2, 100)})

    found = division.settle(2 * S).requests

    assert [each.energy for each in found] == [100_000_000, 100_000_000]
    assert division.restart(["gpu"], 0) == []


def test_repeated_steps_are_ignored() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    division.add_steps({"gpu": _steps(0, 1, 100)})  # before any request: not the engine's
    division.assign("e", GPU)
    division.add([_request(1, 0.5, 0.5, 1, decode=9)], S, engine="e")
    for _ in range(2):
        division.add_steps({"gpu": _steps(0, 1, 100)})

    (settled,) = division.settle(S).requests

    assert settled.energy == 50_000_000


@pytest.mark.parametrize(
    ("steps", "measured"),
    [
        ({"a": [(0, 1), (1.5, 2)]}, False),  # a gap
        ({"a": [(0, 2)], "b": [(0, 1), (1.5, 2)]}, False),
        ({"a": [(0, 1), (1.1, 2)]}, True),
        ({"a": [(0.5, 2)]}, False),  # the agent began later
        ({"a": [(0, 2)], "b": [(0, 2)]}, True),
        ({"a": [(0, 2)], "b": [(1, 2)]}, True),  # the engine began to use it
        ({"a": [(0.5, 2)], "b": [(1, 2)]}, False),
    ],
)
def test_request_that_misses_much_of_its_time_is_not_measured(
    steps: dict[str, list[tuple[float, float]]], *, measured: bool
) -> None:
    boards = {name: [s for one in own for s in _steps(*one, 100)] for name, own in steps.items()}
    found, idle = _divided([_request(1, 0, 0, 2, decode=9)], boards)

    assert found[1].measured == measured
    assert found[1].energy + idle == sum(step.energy for own in boards.values() for step in own)


def test_request_misses_nothing_of_a_board_while_its_engine_does_not_use_it() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    division.assign("other", frozenset({"b"}))
    division.add([_request(1, 0, 0, 1, decode=9)], S, engine="other")
    division.add_steps({"b": _steps(0, 4, 100)})
    division.settle(4 * S)
    division.assign("e", frozenset({"a", "b"}))
    division.add([_request(2, 0, 0, 10, decode=9)], 10 * S, engine="e")
    division.add_steps({"a": _steps(0, 10, 100), "b": _steps(4, 10, 100)})

    (joined,) = division.settle(10 * S).requests
    assert (joined.energy, joined.measured) == (1_600_000_000, True)
    division.add([_request(i, at, at, 20, decode=9) for i, at in enumerate((9, 10))], S, engine="e")
    division.add_steps({"a": _steps(10, 20, 100)})
    assert division.settle(20 * S).requests == []

    cut, lost = division.settle(20 * S + BOARD_TIMEOUT + STEP).requests

    assert (cut.energy + lost.energy, cut.measured, lost.measured) == (1_000_000_000, False, True)


def test_request_without_any_board_is_settled_without_energy() -> None:
    division = _division([_request(1, 0, 0, 2, decode=9)], 2 * S)

    (settled,) = division.settle(2 * S + BOARD_TIMEOUT).requests

    assert (settled.energy, settled.measured) == (0, False)


def test_oldest_of_too_many_requests_are_settled_at_once() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    many = [_request(i, 0, 0, 50, decode=9) for i in range(MAX_REQUESTS + 3)]
    division.assign("e", GPU)
    division.add(many, 50 * S, engine="e")

    assert len(division.settle(S).requests) == 3
    assert division.waiting == MAX_REQUESTS


def test_requests_beyond_the_limit_have_no_energy_of_a_step() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    many = [_request(i, 0, 0, 0.1, decode=9) for i in range(MAX_ACTIVE + 2)]
    division.assign("e", GPU)
    division.add(many, S, engine="e")
    division.add_steps({"gpu": _steps(0, 0.1, 100)})

    found = division.settle(S + BOARD_TIMEOUT).requests

    assert [each.energy for each in found[-2:]] == [0, 0]
    assert sum(each.energy for each in found) == 10_000_000


def test_engines_have_fair_parts_of_the_active_requests() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    counts = {"many": 2 * MAX_ACTIVE, "half": MAX_ACTIVE, "few": 3}
    for number, (engine, count) in enumerate(counts.items()):
        requests = [_request(i, 0, 0, 0.1, decode=9) for i in range(count)]
        division.assign(engine, GPU)
        division.add([each._replace(model=str(number)) for each in requests], S, engine=engine)
    division.add_steps({"gpu": _steps(0, 0.1, 100)})

    found = division.settle(S + BOARD_TIMEOUT).requests

    covered = Counter(each.request.model for each in found if each.energy)
    assert covered["2"] == 3
    assert covered.total() == MAX_ACTIVE
    assert abs(covered["0"] - covered["1"]) <= 1
    assert sum(each.energy for each in found) == 10_000_000


def test_engines_have_fair_parts_of_the_waiting_requests() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    for engine, count in (("few", 3), ("many", MAX_REQUESTS)):
        requests = [_request(i, 0, 0, 50, decode=9) for i in range(count)]
        division.assign(engine, GPU)
        division.add([each._replace(model=engine) for each in requests], 50 * S, engine=engine)

    settled = division.settle(S).requests

    assert [each.request.model for each in settled] == ["many"] * 3
    assert [int.from_bytes(each.request.id, "big") for each in settled] == [0, 1, 2]
    assert division.waiting == MAX_REQUESTS


def test_no_requests_change_nothing() -> None:
    division = _division([], S)
    division.forget("e")

    assert division.settle(10 * S) == ([], 0, {})


def test_requests_of_a_forgotten_engine_are_settled() -> None:
    division = _division([_request(1, 0, 0, 1, decode=9)], S)
    division.forget("e")
    division.add_steps({"gpu": _steps(0, 1, 100)})

    (settled,) = division.settle(S).requests

    assert settled.energy == 100_000_000


def test_withdrawn_request_leaves_its_energy_to_idle_time() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    division.assign("e", GPU)
    outer, inner = _request(1, 0, 0, 2, decode=9), _request(2, 0, 0, 2, decode=9)
    division.add([outer, inner], S, engine="e")
    division.add_steps({"gpu": _steps(0, 2, 100)})
    assert not division.settle(S).requests
    division.withdraw([outer])

    settled = division.settle(2 * S)

    (found,) = settled.requests
    assert found.request is inner
    assert (found.energy, settled.idle) == (150_000_000, 50_000_000)


def test_requests_of_a_merged_engine_have_the_energy_of_the_other() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    division.add([_request(1, 0, 0, 1, decode=9)], S, engine="part")
    division.add([_request(2, 0, 0, 1, decode=9)], S, engine="e")
    division.merge("part", "e")
    division.merge("unknown", "e")
    division.assign("e", GPU)
    division.add_steps({"gpu": _steps(0, 1, 100)})

    found = division.settle(S).requests

    assert [each.energy for each in found] == [50_000_000, 50_000_000]


def test_step_without_energy_is_divided_and_measures_nothing() -> None:
    found, idle = _divided([_request(1, 0, 0, 1, decode=9)], {"gpu": _steps(0, 1, 0)})

    assert (found[1].energy, idle) == (0, 0)
    assert not found[1].measured


def _learned() -> TokenPowerModel:
    """A model that has learned a load of 60 s."""
    return copy.deepcopy(_learned_once())


@functools.cache
def _learned_once() -> TokenPowerModel:
    model = TokenPowerModel()
    _load(60, model=model)
    return model


def _load(seconds: int, *, model: TokenPowerModel) -> tuple[list[RequestEnergy], list[float]]:
    """Prefill of 400 J and decode of 100 W: one request after the other, some side by side."""
    chance, requests, truth, at = random.Random(1), [], [], 0.0
    while at < seconds:
        count = chance.randint(1, 3)
        for _ in range(count):
            prompt = chance.randint(1, 10) * 1000
            length = chance.uniform(1, 4)
            requests.append(
                _request(
                    len(requests),
                    at,
                    at + prompt / 20_000,
                    at + prompt / 20_000 + length,
                    prefill=prompt,
                    decode=round(100 * length),
                )
            )
            truth.append(prompt * 0.02 + 0.5 * round(100 * length))
        at += chance.uniform(0.5, 3)
    edges = range(0, round((at + 10) * S), STEP)
    steps = []
    for start in edges:
        energy = sum(
            part * 0.02 + 0.5 * decode
            for part, _, decode, _ in (each.work(start, start + STEP, float) for each in requests)
        )
        steps.append(CounterStep(start, start + STEP, round(1e6 * energy), False))
    division = _division(requests, edges[-1], steps, model=model)
    settled = division.settle(edges[-1] + STEP)
    assert sum(each.energy for each in settled.requests) + settled.idle == sum(
        each.energy for each in steps
    )
    return sorted(settled.requests, key=lambda each: each.request.id), truth


@pytest.mark.slow
def test_identified_model_divides_by_the_energy_of_work() -> None:
    found, truth = _load(150, model=TokenPowerModel())

    learned = [
        (each, true)
        for each, true in zip(found, truth, strict=True)
        if each.method is DivisionMethod.MODEL
    ]
    assert len(learned) > len(found) / 2
    errors = sorted(abs(each.energy / 1e6 / true - 1) for each, true in learned)
    assert errors[round(0.95 * len(errors))] < 0.05
    assert all(each.uncertainty is not None for each, _ in learned)
    within = [abs(each.energy / 1e6 - true) <= each.uncertainty / 1e6 for each, true in learned]
    assert sum(within) >= 0.9 * len(within)
    prompts = [each.input / 1e6 / (each.request.prefill * 0.02) for each, _ in learned]
    assert sum(prompts) / len(prompts) == pytest.approx(1, abs=0.1)


def test_uncertainty_is_unknown_once_the_model_is_forgotten() -> None:
    model = _learned()
    division = RequestDivision(lambda _: model)
    request = _request(1, 0, 1, 2, prefill=1000, decode=50)
    division.assign("e", frozenset({"a", "b"}))
    division.add([request], 2 * S, engine="e")
    division.add_steps({"a": _steps(0, 3, 100), "b": _steps(0, 0.1, 100)})
    assert division.settle(3 * S).requests == []
    for number in range(8):
        for _ in range(7):
            model.learn({str(number): TokenWork(0, 0, 9, 0, 9, 10)}, 1e9, 10 * S)

    (settled,) = division.settle(3 * S + BOARD_TIMEOUT).requests

    assert settled.method is DivisionMethod.MODEL
    assert settled.uncertainty is None


def test_active_request_without_tokens_has_a_part_of_the_common_energy() -> None:
    model = _learned()
    division = RequestDivision(lambda _: model)
    idle, busy = _request(1, 0, 0, 1), _request(2, 0, 0, 1, decode=100)
    division.assign("e", GPU)
    division.add([idle, busy], S, engine="e")
    division.add_steps({"gpu": _steps(0, 1, 100)})
    assert division.estimator("unknown") is None
    assert division.estimator("e").estimate(busy).energy > 0

    one, other = division.settle(S).requests

    assert one.method is DivisionMethod.MODEL
    assert one.energy + other.energy == 100_000_000
    assert one.energy < other.energy


def test_unidentified_model_leaves_identified_ones_their_learned_energy() -> None:
    model = _learned()
    alone, beside = RequestDivision(lambda _: model), RequestDivision(lambda _: model)
    known, other = _request(1, 0, 0, 1, decode=100), _request(2, 0, 0, 1, decode=900)
    other = other._replace(model="new")
    found = []
    for division, requests in ((alone, [known]), (beside, [known, other])):
        division.assign("e", GPU)
        division.add(requests, S, engine="e")
        division.add_steps({"gpu": _steps(0, 1, 50 if division is alone else 150)})
        found.append(division.settle(S).requests)

    ((one,), (learned, rest)) = found
    assert learned.method is DivisionMethod.MODEL
    assert rest.method is DivisionMethod.TOKENS
    assert learned.energy == pytest.approx(one.energy, rel=0.1)
    assert learned.energy + rest.energy == 150_000_000
    assert abs(learned.energy - 50e6) <= learned.uncertainty
    assert rest.uncertainty is None


@pytest.mark.parametrize("watts", [1, 0])
def test_unidentified_model_without_a_rest_has_no_energy(watts: int) -> None:
    requests = [_request(1, 0, 0, 1, decode=100), _request(2, 0, 0, 1)._replace(model="new")]
    division = _division(requests, S, _steps(0, 1, watts), model=_learned())

    learned, rest = division.settle(S).requests

    assert (learned.energy, rest.energy) == (watts * 1_000_000, 0)


def test_uncertainty_of_a_request_alone_is_that_of_its_edges() -> None:
    model = _learned()
    division = _division(
        [_request(1, 0.05, 0.05, 0.95, decode=90)], S, _steps(0, 1, 100), model=model
    )

    (settled,) = division.settle(S).requests

    # 2 ms at 200 W (a step's energy in half of its time) at either edge, and 2.5 deviations.
    assert settled.uncertainty == pytest.approx(2.5 * 2**0.5 * 0.002 * 200e6, rel=0.1)
