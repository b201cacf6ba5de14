"""A judge of leaks that sees none is worse than none, and so is one that sees them everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from testbed.soak.judge import LEAST, Bound, judge, trend
from testbed.soak.report import Soaked, as_json, conditions, sentence, table
from testbed.soak.samples import MEMORY, descriptors, gauges, total, with_shares

TURNS_AN_HOUR = 36_000
KB = 1e-3  # of a megabyte


def run(
    value: Callable[[float], float], hours: float = 1.6, looks: int = 300
) -> list[tuple[float, float]]:
    """The samples of ten minutes at the compressed pace."""
    return [(at, value(at)) for at in (hours * n / looks for n in range(looks))]


def noise(size: float, seed: int = 1) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: draw.gauss(0.0, size)


def test_leak_of_a_kilobyte_a_turn_is_found_in_ten_minutes() -> None:
    jitter = noise(0.5)
    verdict = judge(run(lambda at: 55 + at * TURNS_AN_HOUR * KB + jitter()), MEMORY)
    assert verdict.grows
    assert verdict.hourly == pytest.approx(36, rel=0.05)


def test_leak_of_a_third_of_that_is_found_as_well() -> None:
    jitter = noise(0.5)
    assert judge(run(lambda at: 55 + at * 12 + jitter()), MEMORY).grows


def test_small_leak_is_found_in_a_day_through_a_sawtooth_and_noise() -> None:
    jitter = noise(0.3)
    small = run(lambda at: 55 + 0.3 * at + 4 * (at % 1) + jitter(), hours=240)
    assert judge(small, MEMORY).grows


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_a_leak(seed: int) -> None:
    jitter = noise(1.0, seed)
    assert not judge(run(lambda at: 55 + jitter()), MEMORY).grows


@pytest.mark.parametrize("teeth", [1.5, 3, 10, 77])
def test_sawtooth_of_several_periods_is_not_a_leak(teeth: float) -> None:
    verdict = judge(run(lambda at: 55 + at / 1.6 * 2 * teeth % 1 * 0.9), MEMORY)
    assert not verdict.grows


def test_initial_growth_then_plateau_is_not_a_leak() -> None:
    assert not judge(run(lambda at: 40 + min(at, 0.7) * 60), MEMORY).grows


def test_few_samples_during_a_load_peak_are_not_a_leak() -> None:
    late = run(lambda at: 55 + (30 if at > 1.5 else 0))
    assert not judge(late, MEMORY).grows


def test_descriptor_leak_of_one_an_hour_is_found() -> None:
    bound = Bound(hourly=1.0, noise=1.5)
    assert judge(run(lambda at: 40 + int(at * 5)), bound).grows
    assert not judge(run(lambda at: 40 + (at * 50 % 1 > 0.6)), bound).grows


def test_too_few_samples_give_no_verdict() -> None:
    few = [(float(n), float(n)) for n in range(LEAST - 1)]
    assert trend(few) is None
    assert not judge(few, MEMORY).grows


def test_thousands_of_looks_are_judged_as_some_hundreds_are() -> None:
    many = [(n / 1000, n / 1000 * 3.0) for n in range(20_000)]
    assert trend(many) == pytest.approx(3.0)


def test_looks_at_one_moment_have_no_trend() -> None:
    assert trend([(1.0, float(n)) for n in range(50)]) is None


SCRAPE = """\
# TYPE wattspan_agent_ticks_total counter
wattspan_agent_ticks_total 120
wattspan_spans_open 3
wattspan_spans_forward_queue_bytes 2000000
wattspan_spans_total{service_name="a b",span_name="x"} 2
wattspan_spans_total{service_name="c",span_name="y"} 5
"""


def test_scrape_is_read_by_whole_names() -> None:
    told = gauges(SCRAPE)
    assert (told["ticks"], told["series"], told["open_spans"]) == (120, 5, 3)
    assert told["forward_mb"] == 2.0
    assert total(SCRAPE, "wattspan_spans_total") == 7


def test_share_of_a_core_is_that_since_the_look_before() -> None:
    looks = [{"at": 0.0, "cpu_seconds": 5.0}, {"at": 2.0, "cpu_seconds": 5.5}]
    assert [look["cpu"] for look in with_shares(looks)] == [25.0]


def test_descriptors_and_the_sockets_among_them_are_counted(free_port: object) -> None:
    import os
    import socket

    before = descriptors(os.getpid())
    with socket.socket():
        after = descriptors(os.getpid())
    assert after["sockets"] == before["sockets"] + 1
    assert after["descriptors"] == before["descriptors"] + 1


def soaked(value: Callable[[float], float], **failed: int) -> Soaked:
    looks = [{"hours": at, "rss": level} for at, level in run(value)]
    totals = {"decisions": 1.0, "spans": 1.0}
    done = {"scrapes": 100}
    return Soaked("a machine", 600, "10ms", "30s", 57_600, 3, 1.6, looks, done, failed, totals)


def test_growing_resource_fails_by_name() -> None:
    leaking = soaked(lambda at: 50 + at * 36)
    assert not leaking.passed
    assert sentence(leaking) == "Growth: resident memory, MB."
    assert "**grows**" in table(leaking)
    assert as_json(leaking)["passed"] is False


def test_constant_resource_passes_with_conditions() -> None:
    flat = soaked(lambda _: 50)
    assert flat.passed
    assert sentence(flat) == "No growth."
    assert "57,600 cycles, equal to 1.60 hours at 100 ms a cycle" in conditions(flat)


def test_small_growth_is_not_reported_as_flat() -> None:
    rising = soaked(lambda at: 50 + 4 * at)
    assert rising.passed
    assert "inconclusive, rose by 2.1" in table(rising)
    assert sentence(rising).endswith("without a longer soak: resident memory, MB.")


def test_soak_with_failed_readers_is_inconclusive() -> None:
    silent = soaked(lambda _: 50, scrapes=50)
    assert not silent.passed
    assert sentence(silent) == "Inconclusive, because most of this load failed: scrapes."


def test_soak_with_few_agent_ticks_is_inconclusive() -> None:
    starved = replace(soaked(lambda _: 50), turns=1_500, missed=58_500)
    assert not starved.passed
    assert sentence(starved).endswith("the agent got only 2% of its cycles.")


def test_rarely_sampled_resource_is_not_reported_as_flat() -> None:
    whole = soaked(lambda _: 50)
    short = replace(whole, looks=whole.looks[:10])
    assert not short.passed
    assert "| not judged |" in table(short)
    assert sentence(short) == ("Inconclusive, because of too few samples of: resident memory, MB.")


def test_loaded_soak_ignores_caches_and_fails_on_a_descriptor_leak() -> None:
    filling = soaked(lambda at: 50 + at * 36)
    assert not filling.passed
    assert filling.broken == []
    looks = [{**look, "descriptors": 40 + look["hours"] * 30} for look in filling.looks]
    assert replace(filling, looks=looks).broken == ["descriptors rose by 16"]
    few = [{**look, "descriptors": 40 + look["hours"] * 3} for look in filling.looks]
    assert replace(filling, looks=few).broken == []


def test_loaded_soak_fails_on_gross_memory_or_an_idle_agent() -> None:
    assert soaked(lambda at: 50 + at * 100).broken == ["resident memory came to 209 MB"]
    idle = replace(soaked(lambda _: 50), totals={"decisions": 0, "spans": 0})
    assert idle.broken == ["the agent did not work"]
