"""Joules per token of an engine: restarts, idle times, and counters at the end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from testbed.engine_pages import FINISH, SGLANG, VLLM, EmulatedPages, page
from testbed.serving_engines import BEGIN, ServingEngine, run_engines, single

from wattspan.inference.busy_time import BusyTime, PhaseTimes
from wattspan.inference.engine_energy import (
    LEARNED_TOGETHER,
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


def _add(
    account: EngineEnergy,
    number: int,
    before: EngineReading,
    after: EngineReading,
    energy: Microjoules,
    uncertainties: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Add the interval of five seconds with this number."""
    done = progress(before, after)
    assert done is not None
    times = number * 5 * SECOND, (number + 1) * 5 * SECOND
    account.add(EngineInterval(*times, energy, uncertainties, done))


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


def test_window_does_not_span_a_missing_interval() -> None:
    account = EngineEnergy()
    before = _read()
    for number in range(30):
        after = _read(**{name: count * (number + 1) for name, count in STEADY.items()})
        if number != 20:
            _add(account, number, before, after, Microjoules(JOULE))
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


def test_engine_on_other_boards_is_learned_anew() -> None:
    account = _played(_steady(14, **STEADY))
    assert account.figures().tokens.keys() == {"all"}
    account.restart()
    assert account.figures().tokens == {}


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
    parts = {part.model: part.tokens["output"] for part in done.models}
    assert parts == {"m": 2, "lora": 5}


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
        _add(account, number, before, after, Microjoules(100 * JOULE))
        before = after
    found = account.figures()
    assert found.tokens["all"].value == pytest.approx(100 * JOULE / 1250)
    assert found.tokens["all"].uncertainty == 0
    assert found.start == 9 * 5 * SECOND
    assert found.request is None


def test_request_in_the_batch_at_the_edges_is_part_of_the_uncertainty_of_a_request() -> None:
    running = [dict(one, running=4) for one in _steady(14, **STEADY)]
    found = _played(running).figures().request
    assert found is not None
    assert found.uncertainty == pytest.approx(found.value * 2 * 8**0.5 / 24)


@pytest.mark.parametrize("template", [VLLM, FINISH])
def test_page_without_running_requests_has_no_figure(template: str) -> None:
    bare = "".join(line + "\n" for line in template.splitlines() if "_running" not in line)
    account = _played(_steady(60, **STEADY, **ENDED), template=bare)
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
        _add(account, number, before, after, Microjoules(JOULE), (8e6, 8e6))
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
        _add(account, number, before, after, Microjoules(100 * JOULE))
        before = after
    found = account.figures().tokens["all"]
    assert found.uncertainty == pytest.approx(found.value * 50 * 32**0.5 / (12 * 1250))


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
        none = TokenEnergy(*(0.0,) * len(TokenEnergy._fields))
        monkeypatch.setattr(TokenPowerModel, "coefficients", lambda *_: none)
    assert account.figures().tokens.keys() == {"all"}


def test_figures_of_an_engine_that_is_read_each_second_change_each_five_seconds(
    engine: ServingEngine,
) -> None:
    figures = [found for _, found in _read_each(engine, 1)][-61:]
    assert sum(one is not other for one, other in pairwise(figures)) == 12


def test_readings_far_apart_give_no_split(engine: ServingEngine) -> None:
    figures = [found for _, found in _read_each(engine, 15)]
    assert "all" in figures[-1].tokens
    assert all("output" not in found.tokens for found in figures)


# ---------------------------------------------------------- prompts in passes of their own

PASS, PROMPT_TOKEN, DECODE_TOKEN = 1.4 * JOULE, 20_000.0, 25_000.0  # microjoules


def _passes(seed: int = 1) -> Iterator[tuple[Mapping[str, int], Microjoules]]:
    """The counts of readings each 5 s, and the energy before each."""
    chance, sums = (
        random.Random(seed),
        dict.fromkeys(("batched", "passes", "decoded", "prompts"), 0),
    )
    yield {**sums, "running": 8}, Microjoules(0)
    while True:
        prompts, prompt = chance.randint(10, 30), chance.randint(10_000, 50_000)
        passes = round((5 - 30e-6 * prompt) / 0.01)
        tokens = round(passes * chance.uniform(6, 10))
        for name, count in zip(sums, (prompt, passes, tokens, prompts), strict=True):
            sums[name] += count
        energy = PASS * passes + PROMPT_TOKEN * prompt + DECODE_TOKEN * tokens
        yield {**sums, "finished": sums["prompts"], "running": 8}, Microjoules(round(energy))


def test_prompts_in_passes_of_their_own_have_the_energy_of_these_passes() -> None:
    account, counts = EngineEnergy(), _passes()
    before = _read(SGLANG, **next(counts)[0])
    for number in range(120):
        one, energy = next(counts)
        _add(account, number, before, after := _read(SGLANG, **one), energy)
        before = after
    found = account.figures().tokens
    assert found["input"].value == pytest.approx(PROMPT_TOKEN, rel=0.01)
    assert abs(found["input"].value - PROMPT_TOKEN) <= found["input"].uncertainty
    assert found["output"].value == pytest.approx(PASS / 8 + DECODE_TOKEN, rel=0.05)


@pytest.mark.parametrize("rest", ["prompts", "nothing"])
def test_window_without_passes_or_energy_gives_no_split(rest: str) -> None:
    account, counts = EngineEnergy(), _passes()
    one = next(counts)[0]
    before = _read(SGLANG, **one)
    for number in range(60):
        if number < 40:
            one, energy = next(counts)
        elif rest == "prompts":
            one = {**one, "prompts": one["prompts"] + 20, "batched": one["batched"] + 9000}
        elif number % 2:
            one, energy = next(counts)[0], Microjoules(0)
        done = progress(before, after := _read(SGLANG, **one))
        assert done is not None
        if number == 39:
            assert "output" in account.figures().tokens
        times = number * 5 * SECOND, (number + 1) * 5 * SECOND
        account.add(EngineInterval(*times, energy, (0.0, 0.0), done))
        before = after
    assert account.figures().tokens.keys() <= {"all"}


def test_engines_on_the_same_boards_are_divided_by_their_work() -> None:
    """Iterations of one take 10 ms, of the other 20 ms with twice the power."""
    chance, accounts = random.Random(2), {"a": EngineEnergy(), "b": EngineEnergy()}
    cost = {"a": (0.01, 1.0 * JOULE), "b": (0.02, 4.0 * JOULE)}
    sums = {name: dict.fromkeys(("batched", "passes", "decoded", "prompts"), 0) for name in cost}
    before = {name: _read(SGLANG, running=4, **each) for name, each in sums.items()}
    energies, counted = ({name: list[float]() for name in cost} for _ in range(2))
    for number in range(200):
        part, common = chance.uniform(0.2, 0.8), 0.0
        done = {}
        for name, time in (("a", 5.0 * part), ("b", 5.0 * (1 - part))):
            prompts = chance.randint(3, 9)
            passes = round((time - 0.03 * prompts) / cost[name][0])
            tokens = chance.randint(2 * passes, 6 * passes)
            energy = cost[name][1] * passes + 20.0 * JOULE * prompts + 20_000 * tokens
            for key, count in zip(
                sums[name], (1000 * prompts, passes, tokens, prompts), strict=True
            ):
                sums[name][key] += count
            done[name] = progress(before[name], after := _read(SGLANG, running=4, **sums[name]))
            before[name], common = after, common + energy
            energies[name].append(energy / 1e6)
            counted[name].append(sum(done[name].tokens.values()))
        for name, other in (("a", "b"), ("b", "a")):
            times = number * 5 * SECOND, (number + 1) * 5 * SECOND
            whole = Microjoules(round(common))
            half = Microjoules(round(common / 2))
            if number < LEARNED_TOGETHER // (5 * SECOND):
                assert not accounts[name].figures().tokens
            accounts[name].add(
                EngineInterval(
                    *times, half, (0.0, 0.0), done[name], 0.0, ((other, done[other]),), whole
                )
            )
    for name, account in accounts.items():
        found = account.figures()
        one = found.tokens["all"]
        truth = 1e6 * sum(energies[name][-12:]) / sum(counted[name][-12:])
        assert one.value == pytest.approx(truth, rel=0.03)
        assert abs(one.value - truth) <= one.uncertainty
        assert found.idle is None


@pytest.mark.parametrize(("every", "least", "most"), [(1, 0.0, 0.02), (2, 0.2, 0.3)])
def test_longer_log_interval_is_seen_in_the_counts(every: int, least: float, most: float) -> None:
    """The counts move once in two readings, while each has the same number of passes."""
    counts = [
        {"batched": 1000 * n, "passes": 500 * n, "prompts": n, "running": 1,
         "decoded": 4000 * (n // every) * every}
        for n in range(14)
    ]  # fmt: skip
    found = _played(counts, template=SGLANG).figures().tokens
    part = found["all"].uncertainty / found["all"].value if found else most
    assert least <= part <= most


def test_engine_without_passes_in_a_window_has_no_late_tokens() -> None:
    counts = [{"batched": 1000 * n, "prompts": n} for n in range(14)]
    found = _played(counts, template=SGLANG).figures().tokens["all"]
    assert found.uncertainty == pytest.approx(found.value * 1000 / 12_012)  # a prompt


# ------------------------------------------------------------------- an engine that often waits


def test_busy_time_of_an_engine_that_often_waits_is_by_the_latencies_of_requests() -> None:
    """Iterations take 8 ms, prompts 28 ms, and a request in decode waits for those beside it."""
    busy = BusyTime()
    decode, prompts = 98 * 0.008, 2 * 0.028
    requests = PhaseTimes(decode / (1 - prompts / 5.0), prompts, 2.0)
    for _ in range(20):
        found = busy.of(5.0, (98.0, 2.0, 1000.0, 98.0), (0, 1), requests)
    assert found == pytest.approx(decode + prompts, rel=0.001)
    assert busy.of(5.0, (0.0, 0.0, 0.0, 0.0), (0, 0), PhaseTimes(0, 0, 0)) == 0


def test_page_without_latencies_gives_no_busy_time() -> None:
    busy = BusyTime()
    for _ in range(40):
        found = busy.of(5.0, (98.0, 2.0, 1000.0, 98.0), (0, 1), PhaseTimes(0, 0, 2))
    assert found is None


def test_engine_that_often_waits_has_a_split_with_the_truth_inside() -> None:
    (made,) = single(4, 0.05, 150)
    run_engines([made])
    pages, minutes = EmulatedPages(made), 0
    for at, found in _read_each(made, 5):
        if "output" in found.tokens and not at % 60:
            first, last = pages.truth(found.start / SECOND), pages.truth(at)
            truth = (last.output - first.output) / (last.generated - first.generated)
            one = found.tokens["output"]
            assert abs(one.value / 1e6 - truth) <= one.uncertainty / 1e6
            minutes += 1
    assert minutes >= 3
