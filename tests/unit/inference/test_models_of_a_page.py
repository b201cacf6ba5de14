"""Several models on the page of one engine: the energy of each against its truth."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import NamedTuple

import pytest
from testbed.engine_pages import SGLANG, VLLM, EmulatedPages, as_part, joined, page, with_ranks
from testbed.serving_engines import (
    BEGIN,
    ServingEngine,
    at_rest,
    pair,
    quantile,
    run_engines,
    single,
)

from wattspan.inference.engine_energy import (
    LEARNED_TOGETHER,
    MOST_MODELS,
    EngineEnergy,
    EngineFigures,
    EngineInterval,
    by_model,
)
from wattspan.inference.engine_metrics import Figure, Progress, progress, read_page
from wattspan.model import SECOND, Microjoules

ENGINE_PAGES = Path(__file__).parents[2] / "field" / "engine_pages"
READ, MINUTE = 5, 60  # seconds


def _interval(before: bytes, after: bytes, joules: int = 100) -> EngineInterval:
    done = progress(read_page(before), read_page(after))
    assert done is not None
    return EngineInterval(0, READ * SECOND, Microjoules(joules), (1.0, 2.0), done, 3.0)


def _counted(model: str, **counts: float) -> bytes:
    return page(VLLM, model, **counts)


STEP = {"prompt": 60, "computed": 50, "cached": 10, "generated": 40, "iterations": 9, "prompts": 2}


def test_models_of_a_page_are_engines_beside_each_other() -> None:
    before = joined(_counted("a"), _counted("b", running=4))
    after = joined(_counted("a", running=3, **STEP), _counted("b", running=2, generated=7))
    interval = _interval(before, after)
    found = dict(by_model(interval))
    assert found.keys() == {"a", "b"}
    one, other = found["a"], found["b"]
    assert one.common == other.common == interval.energy
    assert one.energy + other.energy == interval.energy
    assert (one.edges, one.doubt) == (interval.edges, interval.doubt)
    assert one.progress.figures[Figure.ITERATIONS] == 9
    assert (one.progress.running, other.progress.running) == ((0, 3), (4, 2))
    assert [label for label, _ in one.beside] == ["model b"]
    assert one.beside[0][1] == other.progress


def test_models_beside_other_engines_are_not_divided() -> None:
    """They would have more energy together than their page."""
    both = joined(_counted("a"), _counted("b")), joined(_counted("a", **STEP), _counted("b"))
    beside = (("other", Progress(read_page(both[0]).page)),)
    interval = _interval(*both)._replace(beside=beside, common=Microjoules(500))
    assert not [*by_model(interval)]


def test_page_that_counts_no_iterations_is_not_divided() -> None:
    text = (ENGINE_PAGES / "dynamo-two-models.toml").read_text()
    before = tomllib.loads(text)["page"].encode()
    after = re.sub(rb"\d+$", lambda count: b"%d" % (int(count[0]) + 50), before, flags=re.MULTILINE)
    interval = _interval(before, after)
    assert len(interval.progress.models) == 2
    assert not [*by_model(interval)]


def test_model_without_a_count_of_the_others_is_not_divided() -> None:
    interval = _interval(*(joined(_counted("a", **each), _counted("b")) for each in ({}, STEP)))
    one, other = interval.progress.models
    counts = {figure: n for figure, n in other.figures.items() if figure is not Figure.PROMPTS}
    models = (one, replace(other, figures=counts))
    progress_ = replace(interval.progress, models=models)
    assert [*by_model(interval)]
    assert not [*by_model(interval._replace(progress=progress_))]


def test_idle_part_of_a_model_is_unknown_before_its_energy_is_learned() -> None:
    """Half of the energy of the page, for lack of a division, is not that of the other model."""
    accounts = {name: EngineEnergy() for name in "ab"}
    pages = [
        joined(_counted("a"), _counted("b", **{name: n * one for name, one in STEP.items()}))
        for n in range(14)
    ]
    for number, (before, after) in enumerate(pairwise(pages)):
        times = {"start": number * READ * SECOND, "end": (number + 1) * READ * SECOND}
        for model, part in by_model(_interval(before, after)._replace(**times)):
            accounts[model].add(part)
    waiting = accounts["a"].figures()
    assert waiting.start > 0
    assert waiting.idle is None


def test_single_model_and_many_are_not_divided() -> None:
    assert not [*by_model(_interval(_counted("a"), _counted("a", **STEP)))]
    names = [f"m{number}" for number in range(MOST_MODELS + 1)]
    pages = [joined(*(_counted(name, **each) for name in names)) for each in ({}, STEP)]
    assert not [*by_model(_interval(*pages))]


@pytest.mark.parametrize("series", ["generation_tokens_total", "iteration_tokens_total_count"])
def test_work_that_names_no_model_is_not_divided(series: str) -> None:
    pages = [joined(*(_counted(name, **each) for name in "ab")) for each in ({}, STEP)]
    unnamed = [body + b"vllm:%b %d\n" % (series.encode(), 50 * n) for n, body in enumerate(pages)]
    assert [*by_model(_interval(*pages))]
    assert not [*by_model(_interval(*unnamed))]


# ------------------------------------------------------------------------------ known truth


class _Moment(NamedTuple):
    """The figures of a model, and its truth in joules a token: of all, and of output."""

    figures: EngineFigures
    all: float
    output: float


def _moments(engines: Sequence[ServingEngine]) -> Iterator[dict[str, _Moment]]:
    """Each reading of the page of some models."""
    run_engines(engines)
    pages = {one.model: EmulatedPages(one) for one in engines}
    accounts = {one.model: EngineEnergy() for one in engines}
    boards = {board for one in engines for board in one.boards}
    rests = [at_rest([one.curve for one in engines if board in one.boards]) for board in boards]
    curves = [*(one.curve for one in engines), *rests]

    def joules(at: float) -> float:
        return sum(curve.at(at) for curve in curves)

    def body(at: float) -> bytes:
        return joined(*(one.at(at) for one in pages.values()))

    end = min(one.iterations[-1].end for one in engines)
    for since, at in pairwise(range(BEGIN, int(end), READ)):
        done = progress(read_page(body(since)), read_page(body(at)))
        assert done is not None
        energy = Microjoules(round(1e6 * (joules(at) - joules(since))))
        whole = EngineInterval(since * SECOND, at * SECOND, energy, (0.0, 0.0), done)
        parts = [*by_model(whole)]
        assert len(parts) == len(engines)
        for model, part in parts:
            accounts[model].add(part)
        found = {}
        for model, one in pages.items():
            figures = accounts[model].figures()
            start = figures.start / SECOND or at - MINUTE
            first, last = one.truth(start), one.truth(at)
            before, after = read_page(one.at(start)), read_page(one.at(at))
            tokens = progress(before, after).tokens
            rest = sum(each.at(at) - each.at(start) for each in rests) / len(engines)
            output = last.output - first.output
            whole_joules = last.input - first.input + output + rest
            found[model] = _Moment(
                figures,
                whole_joules / (sum(tokens.values()) or nan),
                output / (tokens.get("output") or nan),
            )
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("count", "speed", "rest"), [(2400, 0.4, 30), (3600, 0.7, 0)])
def test_models_of_one_page_are_kept_apart_with_a_p95_of_a_tenth(
    count: int, speed: float, rest: float
) -> None:
    """Two models of different size that take turns on one board, from the first reading on."""
    errors: dict[str, list[float]] = {"all": [], "output": []}
    inside: list[bool] = []
    moments = [*_moments(pair(count, speed, ("gpu-0", "gpu-0"), rest=rest))]
    late = len(moments) - LEARNED_TOGETHER // (READ * SECOND)
    for found in moments:
        for one in found.values():
            for way, truth in (("all", one.all), ("output", one.output)):
                if way in one.figures.tokens:
                    each = one.figures.tokens[way]
                    errors[way].append(each.value / 1e6 / truth - 1)
                    inside.append(abs(each.value / 1e6 - truth) <= each.uncertainty / 1e6)
    for way, each in errors.items():
        assert 100 <= len(each) <= 2 * late, way
        assert quantile(each, 0.95) <= 0.10, (way, quantile(each, 0.95))
    assert sum(inside) >= 0.95 * len(inside)


# ------------------------------------------------------------- parts, ranks and API servers


@pytest.fixture(scope="module")
def engine() -> ServingEngine:
    (made,) = single(4, 0.5, 60)
    run_engines([made])
    return made


def test_data_parallel_parts_of_a_model_are_summed(engine: ServingEngine) -> None:
    alone = read_page(EmulatedPages(engine).at(BEGIN + 30))
    both = read_page(joined(*(as_part(EmulatedPages(engine).at(BEGIN + 30), n) for n in (0, 1))))
    for figure in alone.samples:
        assert both.sum(figure) == 2 * alone.sum(figure)
    assert both.models == alone.models == {"8b"}


def test_ranks_of_a_model_are_not_summed(engine: ServingEngine) -> None:
    body = EmulatedPages(engine).at(BEGIN + 30, SGLANG)
    alone, ranks = read_page(body), read_page(with_ranks(body, 4))
    assert body.count(b"tp_rank") * 4 == with_ranks(body, 4).count(b"tp_rank")
    assert {figure: ranks.sum(figure) for figure in alone.samples} == {
        figure: alone.sum(figure) for figure in alone.samples
    }


def test_models_with_parts_have_the_truth_of_all_their_parts() -> None:
    pages = [
        joined(*(as_part(_counted(name, **each), part) for name in "ab" for part in (0, 1)))
        for each in ({}, STEP)
    ]
    parts = [*by_model(_interval(*pages))]
    assert len(parts) == 2
    for _, part in parts:
        assert part.progress.tokens == {"input": 120, "output": 80}
