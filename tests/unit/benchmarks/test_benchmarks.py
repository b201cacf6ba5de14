"""A benchmark that measures the wrong thing is worse than none."""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import psutil
import pytest
from benchmarks.__main__ import DOCS, page_of, placed, scripts
from benchmarks.harness import (
    Cost,
    Subject,
    cpu_seconds,
    family,
    medians,
    rss_megabytes,
    sleepers,
)
from benchmarks.idle_baseline import LAWS, SCENARIOS, resting, run, steady
from benchmarks.memory import slope
from benchmarks.overhead import table
from benchmarks.startup import FIRST_FIGURE

SLEEPY = Subject("sleepy", [sys.executable, "-c", "input()"], "nothing")


def test_cpu_seconds_are_the_kernels() -> None:
    times = os.times()
    assert cpu_seconds(os.getpid()) >= times.user + times.system - 0.02


def test_resident_memory_is_the_kernels() -> None:
    own = psutil.Process().memory_info().rss / 1e6
    assert rss_megabytes(os.getpid()) == pytest.approx(own, rel=0.2)


def test_sleeper_count_is_the_requested_one() -> None:
    before = set(family(os.getpid()))
    with sleepers(25):
        new = set(family(os.getpid())) - before
        assert len(new) == 1 + 25  # the one that forked them, and they
    assert not [pid for pid in new if psutil.pid_exists(pid)]


def test_benchmark_subject_ends_after_its_turn() -> None:
    forever = Subject(
        "forever", [sys.executable, "-c", "import threading as t; t.Event().wait()"], ""
    )
    with forever.running() as pid:
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_benchmark_subject_start_failure_is_reported(free_port: object) -> None:
    assert callable(free_port)
    url = f"http://127.0.0.1:{free_port()}/"
    broken = Subject("broken", [sys.executable, "-c", "raise SystemExit('no counters')"], "", url)
    with pytest.raises(RuntimeError, match="broken did not start: no counters"), broken.running():
        pass


def test_figure_of_several_rounds_is_their_median() -> None:
    costs = iter([Cost(1.0, 10.0), Cost(9.0, 30.0), Cost(2.0, 20.0)])
    assert medians([SLEEPY], 3, lambda _: next(costs)) == {"sleepy": Cost(2.0, 20.0)}


def test_ratios_are_to_the_first() -> None:
    other = Subject("other", [], "something")
    text = table(500, [SLEEPY, other], {"sleepy": Cost(0.5, 9), "other": Cost(5.0, 90)}, 3, 10.0)
    assert "| sleepy | nothing | 0.50 | 1.0 | 9 |" in text
    assert "| other | something | 5.00 | 10.0 | 90 |" in text


def test_trend_is_seen_in_growing_memory() -> None:
    assert slope([(0.0, 40.0), (60.0, 41.0), (120.0, 42.0)]) == pytest.approx(1 / 60)


@pytest.mark.parametrize(("value", "counts"), [("0", False), ("0.0", False), ("0.25", True)])
def test_first_figure_is_not_zero(value: str, counts: bool) -> None:
    line = f'wattspan_process_energy_joules_total{{pid="1"}} {value}\n'.encode()
    assert bool(FIRST_FIGURE["wattspan"].search(line)) is counts


def test_every_script_in_the_readme_exists() -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    text = (folder / "README.md").read_text(encoding="utf-8")
    named = {word.strip("`") for word in text.split() if word.strip("`").endswith(".py")}
    assert named
    assert all((folder / name).exists() for name in named)


def test_every_script_has_a_place_for_its_results_and_a_claim() -> None:
    readme = DOCS.parent / "benchmarks" / "README.md"
    for script in scripts():
        page = page_of(script).read_text(encoding="utf-8")
        assert f"Results {script}." in placed(page, script, f"Results {script}.")
        assert f"`{script}.py`" in readme.read_text(encoding="utf-8")


def test_results_replace_only_older_results() -> None:
    page = "a\n<!-- begin x -->\nold \\1\n<!-- end x -->\nb\n"
    once = placed(page, "x", "new \\1")
    assert once == "a\n<!-- begin x -->\n\nnew \\1\n\n<!-- end x -->\nb\n"
    assert placed(once, "x", "new \\1") == once
    with pytest.raises(ValueError, match="no place for y"):
        placed(page, "y", "")


@pytest.mark.parametrize("law", ["straight line", "Fan et al."])
@pytest.mark.parametrize("load", ["variation of 15 %", "requests"])
def test_process_energy_beside_a_busy_start_meets_its_goals(load: str, law: str) -> None:
    runs = [run(SCENARIOS[load], LAWS[law], seconds=70, seed=seed) for seed in range(3)]
    assert all(one.known_after is not None and one.known_after <= 30 for one in runs)
    assert statistics.median(abs(one.error(30, 40)) for one in runs) <= 0.05
    assert max(one.error(0, 5) for one in runs) <= 0.05


def test_load_without_variation_has_a_lower_bound_of_process_energy_only() -> None:
    one = run(steady, LAWS["Fan et al."], seconds=20, seed=1)
    assert one.known_after is None
    assert -1 < one.error(0, 20) < -0.5


@pytest.mark.parametrize("law", LAWS)
def test_process_energy_with_a_remembered_idle_power_is_exact_at_once(law: str) -> None:
    before = run(resting, LAWS[law], seconds=40, seed=1).checkpoint
    one = run(steady, LAWS[law], seconds=70, seed=2, checkpoint=before)
    assert abs(one.error(0, 5)) <= 0.02
    assert abs(one.error(60, 70)) <= 0.02
