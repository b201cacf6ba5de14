"""Joules per token of an engine: exact totals, restarts, idle times, and counters at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from testbed.engine_pages import FINISH, VLLM, EmulatedPages, page
from testbed.serving_engines import BEGIN, ServingEngine, run_engines, single

from wattspan.inference.engine_energy import (
    BusyTime,
    EngineEnergy,
    EngineFigures,
    EngineInterval,
    edge_doubt,
)
from wattspan.inference.engine_metrics import EngineReading, Figure, progress, read_page
from wattspan.inference.token_power import TokenEnergy, TokenPowerModel
from wattspan.model import SECOND, Microjoules

JOULE = 1_000_000


def _read(template: str = VLLM, model: str = "m", **counts: int) -> EngineReading:
    return read_page(page(template, model, **counts))


def _played(
    counts: list[Mapping[str, int]],
    *,
    seconds: int = 5,
    joules: float = 100.0,
    template: str = VLLM,
) -> EngineEnergy:
    """An account of readings with these counts, and the same energy between any two."""
    account, before = EngineEnergy(), None
    for number, one in enumerate(counts):
        after = _read(template, **one)
        if before is not None:
            done = progress(before, after)
            if done is None:
                account.skip()
            else:
                times = (number - 1) * seconds * SECOND, number * seconds * SECOND
                energy = Microjoules(round(joules * JOULE))
                account.add(EngineInterval(*times, energy, (0.0, 0.0), done))
        before = after
    return account


def _steady(readings: int, **each: int) -> list[Mapping[str, int]]:
    return [{name: count * number for name, count in each.items()} for number in range(readings)]


STEADY = {"prompt": 1000, "computed": 900, "cached": 100, "generated": 250, "finished": 2,
          "prompts": 2, "iterations": 50}  # fmt: skip


def test_energy_of_all_tokens_is_the_quotient_over_a_minute() -> None:
    account = _played(_steady(14, **STEADY))
    found = account.figures()
    assert found.tokens["all"].value == pytest.approx(100 * JOULE / 1250)
    assert found.request is not None
    assert found.request.value == pytest.approx(50 * JOULE)
    assert account.energy == 13 * 100 * JOULE
    assert account.tokens == {"input": 13_000, "output": 3250}
    assert account.requests == 26


def test_no_figure_is_known_before_a_minute() -> None:
    assert _played(_steady(12, **STEADY)).figures().tokens == {}
    assert _played(_steady(13, **STEADY)).figures().tokens.keys() == {"all"}


def test_intervals_of_a_minute_have_figures_and_are_no_base_of_a_split() -> None:
    found = _played(_steady(60, **STEADY), seconds=60).figures()
    assert found.tokens.keys() == {"all"}


@pytest.mark.parametrize("fallen", ["prompt", "generated", "iterations"])
def test_window_does_not_span_a_restart(fallen: str) -> None:
    counts = [dict(one) for one in _steady(20, **STEADY)]
    for one in counts[15:]:
        one[fallen] -= 15 * STEADY[fallen] - 1
    assert _played(counts[:15]).figures().tokens
    assert not _played(counts).figures().tokens
    # The tokens of the interval with the restart are unknown, and its energy is none of theirs.
    account = _played(counts)
    assert account.energy == 18 * 100 * JOULE


def test_window_does_not_span_a_missing_interval() -> None:
    account = EngineEnergy()
    before = _read()
    for number in range(30):
        after = _read(**{name: count * (number + 1) for name, count in STEADY.items()})
        if number != 20:
            done = progress(before, after)
            assert done is not None
            times = number * 5 * SECOND, (number + 1) * 5 * SECOND
            account.add(EngineInterval(*times, Microjoules(JOULE), (0.0, 0.0), done))
        before = after
    assert not account.figures().tokens


def test_engine_that_rests_for_a_day_has_no_energy_of_tokens_and_all_of_its_energy_is_idle() -> (
    None
):
    at_rest = [{name: 7 * count for name, count in STEADY.items()}] * 17_280
    account = _played([*_steady(8, **STEADY), *at_rest])
    found = account.figures()
    assert not found.tokens
    assert found.request is None
    assert found.idle == 1.0


def test_figures_return_after_a_day_of_rest() -> None:
    at_rest = [{name: 7 * count for name, count in STEADY.items()}] * 17_280
    later = [{name: (8 + n) * count for name, count in STEADY.items()} for n in range(13)]
    found = _played([*_steady(8, **STEADY), *at_rest, *later]).figures()
    assert found.tokens["all"].value == pytest.approx(100 * JOULE / 1250)


def test_engine_on_other_boards_keeps_its_totals_and_is_learned_anew() -> None:
    account = _played(_steady(14, **STEADY))
    energy, tokens = account.energy, dict(account.tokens)
    assert account.figures().tokens.keys() == {"all"}
    account.restart()
    assert account.figures().tokens == {}
    assert (account.energy, account.tokens) == (energy, tokens)


def test_another_page_of_the_same_engine_is_no_progress() -> None:
    old = page(VLLM, "m", prompt=5, generated=5)
    older = b"\n".join(line for line in old.splitlines() if b"by_source" not in line)
    assert progress(read_page(older), read_page(old)) is None


def test_series_that_appears_counts_from_zero() -> None:
    before = read_page(page(VLLM, "m", generated=10))
    after = read_page(page(VLLM, "m", generated=12) + page(VLLM, "lora", generated=5))
    done = progress(before, after)
    assert done is not None
    assert done.figures[Figure.OUTPUT] == 7
    assert done.model == ""


def test_series_that_a_broken_page_lacked_does_not_count_from_zero() -> None:
    both = read_page(page(VLLM, "m", generated=12) + page(VLLM, "lora", generated=5))
    assert progress(read_page(page(VLLM, "m", generated=10)), both, whole=False) is None
    assert progress(both, both, whole=False) is not None


def test_series_that_disappears_is_no_progress() -> None:
    both = page(VLLM, "m", generated=10) + page(VLLM, "lora", generated=5)
    assert progress(read_page(both), read_page(page(VLLM, "m", generated=11))) is None


# ---------------------------------------------------------------- counters that move at the end


ENDED = {"ended_prompt": 1000, "ended_cached": 100, "ended_generated": 250}
AT_END = {**ENDED, "finished": 4}


def test_counters_of_finished_requests_wait_for_twenty_durations() -> None:
    running = [dict(one, running=16) for one in _steady(120, **AT_END)]
    few = _played(running[:70], template=FINISH).figures()
    assert not few.tokens
    enough = _played(running[:90], template=FINISH).figures()
    assert enough.tokens["all"].value == pytest.approx(100 * JOULE / 1250)
    # Tokens that are begun at the edges are part of the uncertainty.
    requests = (90 - 9) * 4
    assert enough.tokens["all"].uncertainty > enough.tokens["all"].value * 16**0.5 / requests


def test_counters_of_finished_requests_are_exact_between_times_without_requests() -> None:
    found = _played(_steady(14, **AT_END), template=FINISH).figures()
    assert found.tokens["all"].value == pytest.approx(100 * JOULE / 1250)
    assert found.tokens["all"].uncertainty == 0


def test_engine_that_counts_no_requests_has_figures_between_times_without_any() -> None:
    page = b"llamacpp:prompt_tokens_total %d\nllamacpp:tokens_predicted_total %d\n"
    page += b"llamacpp:requests_processing %d\n"
    account, before = EngineEnergy(), read_page(page % (0, 0, 0))
    for number in range(30):
        after = read_page(page % (1000 * (number + 1), 250 * (number + 1), number > 20))
        done = progress(before, after)
        assert done is not None
        times = number * 5 * SECOND, (number + 1) * 5 * SECOND
        account.add(EngineInterval(*times, Microjoules(100 * JOULE), (0.0, 0.0), done))
        before = after
    found = account.figures()
    assert found.tokens["all"].value == pytest.approx(100 * JOULE / 1250)
    assert found.tokens["all"].uncertainty == 0
    assert found.start == 9 * 5 * SECOND
    assert found.request is None
    assert account.requests is None


def test_request_in_the_batch_at_the_edges_is_part_of_the_uncertainty_of_a_request() -> None:
    running = [dict(one, running=4) for one in _steady(14, **STEADY)]
    found = _played(running).figures().request
    assert found is not None
    assert found.uncertainty == pytest.approx(found.value * 2 * 8**0.5 / 24)


@pytest.mark.parametrize("template", [VLLM, FINISH])
def test_page_without_running_requests_has_totals_and_no_figure(template: str) -> None:
    bare = "".join(line + "\n" for line in template.splitlines() if "_running" not in line)
    account = _played(_steady(60, **STEADY, **ENDED), template=bare)
    assert account.energy
    assert account.tokens
    assert not account.figures().tokens
    assert account.figures().request is None


def test_leap_of_a_counter_is_no_progress() -> None:
    before, after = _read(generated=5), _read(generated=10**13)
    assert progress(before, after) is None


def test_counters_of_finished_requests_give_no_split() -> None:
    found = _played(_steady(200, **AT_END), template=FINISH).figures()
    assert found.tokens.keys() == {"all"}


# ------------------------------------------------------------------------------ the edges


def test_figure_with_a_large_uncertainty_is_not_published() -> None:
    account = EngineEnergy()
    before = _read()
    for number in range(13):
        after = _read(**{name: count * (number + 1) for name, count in STEADY.items()})
        done = progress(before, after)
        assert done is not None
        times = number * 5 * SECOND, (number + 1) * 5 * SECOND
        account.add(EngineInterval(*times, Microjoules(JOULE), (8e6, 8e6), done))
        before = after
    assert not account.figures().tokens


def test_edge_has_half_a_step_and_the_duration_of_the_reading() -> None:
    assert edge_doubt(Microjoules(1000), SECOND, 0) == 500
    assert edge_doubt(Microjoules(1000), SECOND, SECOND // 10) == 550
    assert edge_doubt(Microjoules(1000), 0, SECOND) == 0


def test_counters_of_a_log_interval_are_late_by_its_iterations() -> None:
    name = b"sglang:realtime_tokens_total"
    page = b"".join(
        name + b'{mode="%s"} %%d\n' % mode
        for mode in (b"prefill_compute", b"prefill_cache", b"decode")
    )
    page += b"sglang:num_running_reqs 4\n"
    account, before = EngineEnergy(), read_page(page % (0, 0, 0))
    for number in range(12):
        after = read_page(page % tuple(each * (number + 1) for each in (900, 100, 250)))
        done = progress(before, after)
        assert done is not None
        times = number * 5 * SECOND, (number + 1) * 5 * SECOND
        account.add(EngineInterval(*times, Microjoules(100 * JOULE), (0.0, 0.0), done))
        before = after
    found = account.figures().tokens["all"]
    assert found.uncertainty == pytest.approx(found.value * 40 * 32**0.5 / (12 * 1250))


def test_tokens_without_energy_have_no_figure() -> None:
    found = _played(_steady(14, **STEADY), joules=0).figures()
    assert not found.tokens
    assert found.request is None


def test_doubt_of_the_division_is_stated_in_full() -> None:
    (before, after), account = (_read(**each) for each in _steady(2, **STEADY)), EngineEnergy()
    done = progress(before, after)
    assert done is not None
    for number in range(12):
        times = number * 5 * SECOND, (number + 1) * 5 * SECOND
        account.add(EngineInterval(*times, Microjoules(100 * JOULE), (0, 0), done, 20 * JOULE))
    found = account.figures()
    for each in (found.tokens["all"], found.request):
        assert each is not None
        assert each.uncertainty >= 0.2 * each.value


@pytest.mark.parametrize("known", [0, 1])
def test_prompt_that_is_not_counted_yet_is_part_of_the_uncertainty(known: int) -> None:
    """A window in which the engine computes one prompt only, and generates beside it."""
    first = [dict(one, running=2) for one in _steady(2, **STEADY)] * known
    begin = first[-1] if first else {}
    rest = [
        {**begin, "generated": begin.get("generated", 0) + 250 * n, "running": 2} for n in range(14)
    ]
    found = _played([*first, *rest]).figures().tokens
    assert found.keys() == ({"all"} if known else set())
    if known:
        each = found["all"]
        assert each.uncertainty == pytest.approx(each.value * 500 / (12 * 250), rel=0.1)


# ------------------------------------------------------------------------------ busy time


def test_busy_time_of_loaded_intervals_is_all_of_it() -> None:
    busy = BusyTime()
    for number in range(30):
        work = (500.0 + 10 * (number % 5), 4000.0 - 300 * (number % 5), 3000.0)
        found = busy.of(5.0, work, (3, 4))
    assert found == 5.0


def test_busy_time_of_half_the_work_is_half_of_the_time() -> None:
    busy = BusyTime()
    for number in range(40):
        busy.of(5.0, (500.0 + 10 * (number % 5), 4000.0 - 300 * (number % 7), 3000.0), (3, 4))
    assert busy.of(5.0, (260.0, 1550.0, 1500.0), (0, 1)) == pytest.approx(2.5, rel=0.1)
    assert busy.of(5.0, (0.0, 0.0, 0.0), (0, 0)) == 0


def test_busy_time_is_unknown_while_the_engine_mostly_rests() -> None:
    busy = BusyTime()
    for number in range(100):
        found = busy.of(5.0, (500.0, 4000.0, 3000.0), (3, 4) if number % 2 else (0, 3))
    assert found is None


# ------------------------------------------------------------------------------ known truth


@pytest.fixture(scope="module")
def engine() -> ServingEngine:
    (made,) = single(16, 0.9, 2400)
    run_engines([made])
    return made


def _read_each(engine: ServingEngine, seconds: int) -> Iterator[tuple[int, EngineFigures]]:
    """The times of readings and the figures then."""
    pages, account = EmulatedPages(engine), EngineEnergy()
    before = read_page(pages.at(BEGIN))
    for at in range(BEGIN + seconds, int(engine.iterations[-1].end), seconds):
        after = read_page(pages.at(at))
        done = progress(before, after)
        assert done is not None
        energy = Microjoules(round(1e6 * (engine.curve.at(at) - engine.curve.at(at - seconds))))
        times = (at - seconds) * SECOND, at * SECOND
        account.add(EngineInterval(*times, energy, (0.0, 0.0), done))
        before = after
        yield at, account.figures()


def test_split_of_an_emulated_engine_contains_the_truth(engine: ServingEngine) -> None:
    pages, minutes = EmulatedPages(engine), 0
    for at, found in _read_each(engine, 5):
        if "output" not in found.tokens or at % 60:
            continue
        first, last = pages.truth(found.start / SECOND), pages.truth(at)
        output = (last.output - first.output) / (last.generated - first.generated)
        one = found.tokens["output"]
        assert abs(one.value / 1e6 - output) <= one.uncertainty / 1e6
        assert one.value / 1e6 == pytest.approx(output, rel=0.1)
        minutes += 1
    assert minutes >= 4


@pytest.mark.parametrize("lacking", ["output", "rates"])
def test_split_needs_output_and_rates(
    engine: ServingEngine, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, account = EmulatedPages(engine), EngineEnergy()
    readings = [read_page(pages.at(BEGIN + 5 * number)) for number in range(95)]
    for number, (before, after) in enumerate(pairwise(readings)):
        done = progress(before, after)
        assert done is not None
        if number == 80:
            assert "output" in account.figures().tokens
        if number >= 80 and lacking == "output":
            done = replace(done, figures={**done.figures, Figure.OUTPUT: 0.0})
        at = BEGIN + 5 * number
        energy = Microjoules(round(1e6 * (engine.curve.at(at + 5) - engine.curve.at(at))))
        times = number * 5 * SECOND, (number + 1) * 5 * SECOND
        account.add(EngineInterval(*times, energy, (0.0, 0.0), done))
    if lacking == "rates":
        assert "output" in account.figures().tokens
        none = TokenEnergy(*(0.0,) * len(TokenEnergy._fields))
        monkeypatch.setattr(TokenPowerModel, "coefficients", lambda *_: none)
    assert account.figures().tokens.keys() == {"all"}


def test_readings_far_apart_give_no_split(engine: ServingEngine) -> None:
    figures = [found for _, found in _read_each(engine, 15)]
    assert "all" in figures[-1].tokens
    assert all("output" not in found.tokens for found in figures)
