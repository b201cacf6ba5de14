"""The learned energy of tokens, against coefficients that are known."""

from __future__ import annotations

import random
from math import inf

import pytest

from wattspan.inference.token_power import (
    ENOUGH_PERIODS,
    ENOUGH_TIME,
    MAX_COMBINATIONS,
    MAX_ERROR,
    MAX_MODELS,
    MOST_PERIOD,
    NO_WORK,
    POOL,
    PREFILLS_OF_A_PERIOD,
    TokenEnergy,
    TokenPowerModel,
    TokenWork,
)
from wattspan.model import MILLISECOND, SECOND

TRUTH = TokenEnergy(15_000.0, 0.5, 14_000.0, 4.0, 550_000.0, 110e6)
STEP = 100 * MILLISECOND


def _work(chance: random.Random, active: float = 0.1) -> TokenWork:
    """The work of 0.1 s: some prefill, and iterations in the rest of the time."""
    prefill = chance.choice([0.0, 0.0, chance.uniform(100, 2000)])
    iterations = max(0.0, active - 30e-6 * prefill) / 0.008
    batch = chance.randint(1, 32)
    context = iterations * batch * chance.uniform(200, 2000)
    attention = prefill * chance.uniform(100, 2000)
    return TokenWork(prefill, attention, iterations * batch, context, iterations, active)


def _learn(
    model: TokenPowerModel,
    steps: int,
    *,
    name: str = "m",
    truth: TokenEnergy = TRUTH,
    noise: float = 0.01,
    seed: int = 0,
) -> None:
    chance = random.Random(seed)
    for _ in range(steps):
        work = _work(chance)
        model.learn({name: work}, truth.of(work) * chance.gauss(1.0, noise), STEP)


def test_parts_of_the_energy_are_learned() -> None:
    model = TokenPowerModel()
    _learn(model, 3000)

    found, chance = model.coefficients("m"), random.Random(99)
    works = [_work(chance) for _ in range(200)]
    total = NO_WORK
    for work in works:
        total = total.plus(work)
    prompt = total._replace(decode=0.0, context=0.0, iterations=0.0, active=0.0)

    assert found.of(total) == pytest.approx(TRUTH.of(total), rel=0.01)
    assert found.of(prompt) == pytest.approx(TRUTH.of(prompt), rel=0.1)
    assert model.error("m") < MAX_ERROR
    assert model.identified(["m"])


def test_coefficients_are_not_negative() -> None:
    model = TokenPowerModel()
    chance = random.Random(1)
    for _ in range(600):
        work = _work(chance)
        # Energy that falls with the context would need a negative coefficient.
        model.learn({"m": work}, max(0.0, 30e6 - 10 * work.context), STEP)

    found = model.coefficients("m")

    assert min(found) >= 0


def test_constant_mixture_is_not_identified() -> None:
    model = TokenPowerModel()
    work = TokenWork(500.0, 250_000.0, 100.0, 100_000.0, 10.0, 0.1)
    chance = random.Random(2)
    for _ in range(6000):
        model.learn({"m": work}, TRUTH.of(work) * chance.gauss(1.0, 0.01), STEP)

    assert model.error("m") > MAX_ERROR
    assert not model.identified(["m"])


def test_few_periods_are_not_identified() -> None:
    model = TokenPowerModel()
    _learn(model, ENOUGH_TIME // STEP - 1)

    assert model.error("m") == inf

    _learn(model, 1)

    assert model.error("m") < inf


def test_few_long_periods_are_not_identified() -> None:
    model = TokenPowerModel()
    model.set_prefill_time(SECOND)
    _learn(model, ENOUGH_PERIODS * MOST_PERIOD // STEP - 1)

    assert model.error("m") == inf

    _learn(model, 1)

    assert model.error("m") < inf


def test_period_of_an_equation_is_long_compared_to_prefill() -> None:
    model = TokenPowerModel()
    model.set_prefill_time(SECOND / 5)
    steps = PREFILLS_OF_A_PERIOD * 2
    _learn(model, steps - 1)

    assert model.names == ()

    _learn(model, 1)

    assert model.names == ("m",)


def test_unknown_model_has_no_coefficients() -> None:
    model = TokenPowerModel()

    assert set(model.coefficients("other")) == {0.0}
    assert model.error("other") == inf
    assert model.variance({"other": NO_WORK}) == inf
    assert not model.identified(["other"])


def test_energy_without_active_requests_is_idle_power() -> None:
    model = TokenPowerModel()
    assert model.idle_power == 0.0
    for _ in range(20):
        model.learn({}, 2.5e6, STEP)

    assert model.idle_power == pytest.approx(25e6)
    assert len(model) == 0


def test_idle_energy_of_a_step_is_not_that_of_its_requests() -> None:
    model, alone = TokenPowerModel(), TokenPowerModel()
    for _ in range(20):
        model.learn({}, 2.5e6, STEP)
    chance = random.Random(3)
    for _ in range(1000):
        work = _work(chance, active=0.04)
        model.learn({"m": work}, TRUTH.of(work) + 25e6 * 0.06, STEP)
        alone.learn({"m": work}, TRUTH.of(work), STEP)

    assert model.coefficients("m") == pytest.approx(alone.coefficients("m"))


@pytest.mark.slow
def test_models_on_one_board_are_kept_apart() -> None:
    model, chance = TokenPowerModel(), random.Random(4)
    totals = {"large": NO_WORK, "small": NO_WORK}
    small = TokenEnergy._make([0.4 * each for each in TRUTH])._replace(active=TRUTH.active)
    for _ in range(6000):
        works = {"large": _work(chance, 0.05), "small": _work(chance, 0.05)}
        if chance.random() < 0.3:
            del works[chance.choice(["large", "small"])]
        energy = sum({"large": TRUTH, "small": small}[m].of(w) for m, w in works.items())
        model.learn(works, energy * chance.gauss(1.0, 0.01), STEP)
        totals |= {name: totals[name].plus(work) for name, work in works.items()}

    for name, truth in (("large", TRUTH), ("small", small)):
        found = model.coefficients(name)
        assert found.of(totals[name]) == pytest.approx(truth.of(totals[name]), rel=0.03)
    assert model.identified(["large", "small"])


def test_model_keeps_its_coefficients_while_another_one_is_alone() -> None:
    model, chance = TokenPowerModel(), random.Random(9)
    small = TokenEnergy._make([0.4 * each for each in TRUTH])._replace(active=TRUTH.active)
    total = NO_WORK
    for i in range(2000):
        works = {"large": _work(chance, 0.05), "small": _work(chance, 0.05)}
        if i // 10 % 4 == 0:
            del works["large"]
        energy = sum({"large": TRUTH, "small": small}[m].of(w) for m, w in works.items())
        model.learn(works, energy * chance.gauss(1.0, 0.01), STEP)
        total = total.plus(works["small"])
    before = model.coefficients("small").of(total)
    _learn(model, 3_000, name="large", seed=10)

    assert before == pytest.approx(small.of(total), rel=0.05)
    assert model.coefficients("small").of(total) == pytest.approx(before, rel=0.05)


def test_least_recently_used_combination_is_forgotten() -> None:
    model, chance = TokenPowerModel(), random.Random(11)
    _learn(model, 10, name="0")
    for number in range(1, MAX_COMBINATIONS + 1):
        names = [str(bit) for bit in range(1, 6) if number >> (bit - 1) & 1]
        works = {name: _work(chance, 0.1 / len(names)) for name in names}
        for _ in range(10):
            model.learn(works, 30e6, STEP)

    assert len(model) == 6
    assert not any(model.coefficients("0")[:-1])


def test_model_with_more_active_time_takes_a_place() -> None:
    model = TokenPowerModel()
    for i in range(MAX_MODELS):
        _learn(model, 10, name=str(i))
    _learn(model, 10, name="new")

    assert model.place("new") is POOL

    _learn(model, 20, name="new")

    assert model.place("new") == "new"
    assert model.place("0") is POOL
    assert len(model.names) == MAX_MODELS
    assert not any(model.coefficients("0")[:-1])


def test_all_models_beyond_the_limit_share_the_pool() -> None:
    model, chance = TokenPowerModel(), random.Random(12)
    for _ in range(40):
        works = {str(i): _work(chance, 0.1 / 200) for i in range(200)}
        model.learn(works, 30e6, STEP)

    assert len(model) == MAX_MODELS + 1
    assert len(model.names) == MAX_MODELS
    assert sum(model.place(str(i)) is POOL for i in range(200)) == 200 - MAX_MODELS


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("beside", [True, False])
def test_work_of_a_displaced_model_is_that_of_the_pool(beside: bool) -> None:
    """The pool knows the energy of work that it had as a model, alone or beside the pool."""
    model, chance = TokenPowerModel(), random.Random(13)
    for i in range(1, MAX_MODELS):
        _learn(model, 400, name=str(i), seed=i)
    total = NO_WORK
    for _ in range(300):
        works = {"0": _work(chance, 0.05), "other": _work(chance, 0.05)}
        if not beside:
            del works["other"]
        energy = sum(TRUTH.of(work) for work in works.values())
        model.learn(works, energy * chance.gauss(1.0, 0.01), STEP)
        total = total.plus(works["0"])
    _learn(model, 1000, name="new", seed=20)

    assert model.place("0") is POOL
    assert model.place("new") == "new"
    assert model.coefficients(POOL).of(total) == pytest.approx(TRUTH.of(total), rel=0.05)
    assert model.identified([POOL])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_models_within_the_limit_keep_their_coefficients_beside_pooled_ones() -> None:
    alone, beside, chance = TokenPowerModel(), TokenPowerModel(), random.Random(14)
    truths = {
        str(i): TokenEnergy._make([(1 + i / 4) * each for each in TRUTH])._replace(
            active=TRUTH.active
        )
        for i in range(MAX_MODELS)
    }
    totals = dict.fromkeys(truths, NO_WORK)
    for i in range(6000):
        own = {name: _work(chance, 0.1 / MAX_MODELS) for name in truths}
        pooled = {f"p{i % 50}": _work(chance, 0.1 / MAX_MODELS)} if i > 100 else {}
        energy = sum(truths[name].of(work) for name, work in own.items())
        more = sum(TRUTH.of(work) for work in pooled.values())
        noise = chance.gauss(1.0, 0.01)
        alone.learn(own, energy * noise, STEP)
        beside.learn({**own, **pooled}, (energy + more) * noise, STEP)
        totals = {name: total.plus(own[name]) for name, total in totals.items()}

    assert set(beside.names) == set(truths)
    assert beside.identified(truths) == alone.identified(truths)
    for name, truth in truths.items():
        for model in (alone, beside):
            found = model.coefficients(name).of(totals[name])
            assert found == pytest.approx(truth.of(totals[name]), rel=0.1)


@pytest.mark.exhaustive
def test_changed_coefficients_are_learned_anew() -> None:
    model = TokenPowerModel()
    _learn(model, 3000)
    changed = TokenEnergy(*(2 * each for each in TRUTH))
    _learn(model, 40_000, truth=changed, seed=5)
    work = _work(random.Random(6))

    found = model.coefficients("m")

    assert found.of(work) == pytest.approx(changed.of(work), rel=0.05)


def test_model_without_energy_is_not_identified() -> None:
    model, chance = TokenPowerModel(), random.Random(7)
    for _ in range(1000):
        model.learn({"m": _work(chance)}, 0.0, STEP)

    assert model.error("m") == inf


def test_variance_of_residuals_is_that_of_a_second() -> None:
    model = TokenPowerModel()
    chance = random.Random(8)
    for _ in range(6000):
        work = _work(chance)
        model.learn({"m": work}, TRUTH.of(work) + chance.gauss(0.0, 1e6), STEP)

    steps = SECOND / STEP
    assert model.residual_variance == pytest.approx(steps * 1e12, rel=0.2)
