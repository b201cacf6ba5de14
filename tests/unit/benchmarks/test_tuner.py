"""The tuner's bench: its statistics, its true values and its scorer, against known results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.__main__ import placed
from benchmarks.tuner import compare, prior, results
from benchmarks.tuner.baselines import Selector, Window, oracle, select, static, sweep, sweep_units
from benchmarks.tuner.calibration import level, tasks
from benchmarks.tuner.cells import Cell, cells, quick
from benchmarks.tuner.command import PAGE, main, parts
from benchmarks.tuner.curves import Curve, Effect, curves
from benchmarks.tuner.job import Job
from benchmarks.tuner.plants import Phase, Plant, luck
from benchmarks.tuner.run_cache import Kept, bench_digest, core_digest
from benchmarks.tuner.runner import Bench, Score, Terms, Watch
from benchmarks.tuner.stats import clopper_pearson, mean, quantile
from benchmarks.tuner.trials import OURS, Trials, summary
from benchmarks.tuner.truth import Truth, run_at

from wattspan.model import Decision, DecisionReason, Move, TuningFigures
from wattspan.tuning.decisions.values import KnobRange, Observation, TunerPolicy

LINE = Curve("line", "none", "none", 180.0, (100.0, 200.0), (Effect(1.1, 0.8), Effect(1.0, 1.0)))
"""Every watt less costs a thousandth of the time and saves two of the energy."""

TERMS = Terms(batch=1.0)


@dataclass(frozen=True)
class Steady:
    """A core that holds one setting from some unit on, and then another."""

    plan: tuple[tuple[int, int], ...]  # from that many units on, milliwatts

    def begin(
        self, policy: TunerPolicy, ranges: tuple[KnobRange, ...], **_: object
    ) -> tuple[str, int]:
        return ranges[0].device, 0

    def step(
        self, state: tuple[str, int], observation: Observation
    ) -> tuple[tuple[str, int], Decision]:
        device, units = state
        units += len(observation.units)
        caps: Mapping[str, int] = {}
        for since, setting in self.plan:
            if units >= since:
                caps = {device: setting} if setting else {}
        move = Move.HOLD if caps else Move.RELEASE
        reason = DecisionReason.CERTIFIED if caps else DecisionReason.CHANGED
        return (device, units), Decision(move, reason, "", caps)

    def plan_ends(self, state: tuple[str, int]) -> None:
        return None

    def measures(self, state: tuple[str, int]) -> bool:
        return False

    def report(self, state: tuple[str, int]) -> TuningFigures:
        return TuningFigures()


def plant(**more: object) -> Plant:
    return Plant("a job", LINE, **{"units": 2_000, "cv": 0.0, "floor": 0.5, **more})  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [
        (5, 100, 0.0164319, 0.1128349),
        (0, 10, 0.0, 0.3084971),
        (10, 10, 0.6915029, 1.0),
        (1, 2, 0.0125791, 0.9874209),
    ],
)
def test_interval_of_a_rate_is_the_published_one(
    hits: int, trials: int, low: float, high: float
) -> None:
    assert clopper_pearson(hits, trials) == pytest.approx((low, high), abs=1e-6)


def test_zero_misses_of_three_hundred_bound_the_rate_below_one_percent() -> None:
    _, high = clopper_pearson(0, 300, one_sided=True)
    assert high == pytest.approx(1 - 0.05 ** (1 / 300))
    assert high < 0.01


def test_rate_of_an_empty_sample_is_rejected() -> None:
    with pytest.raises(ValueError, match="no rate"):
        clopper_pearson(3, 2)


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.9) == pytest.approx(9)
    assert math.isnan(quantile([], 0.5))
    assert math.isnan(mean([]))


# ------------------------------------------------------------------------------------- curves


def test_every_curve_begins_at_its_original_setting_and_has_an_origin() -> None:
    for curve in curves().values():
        assert curve.at(curve.original) == pytest.approx((1.0, 1.0))
        assert list(curve.watts) == sorted(curve.watts)
        assert 50 < curve.draw < 700
    assert {curve.name for curve in curves().values() if curve.second_hand} == {
        "h100-llama",
        "h100-vit",
        "pro-qwen14b",
        "pro-gemma4b",
    }


def test_between_measured_caps_a_line_is_drawn() -> None:
    assert LINE.at(150) == pytest.approx((1.05, 0.9))
    assert LINE.at(90) == LINE.at(100)
    assert LINE.at(300) == LINE.at(200)


def test_real_iterations_have_their_own_mean_and_noise() -> None:
    curve = curves()["a40-bert-huge-pp8"]
    assert curve.devices == 8
    for iterations in curve.iterations.values():
        assert statistics.fmean(one.time for one in iterations) == pytest.approx(1.0)
        assert 0 < statistics.pstdev(one.time for one in iterations) < 0.02


# -------------------------------------------------------------------------------------- plants


def test_same_seed_is_the_same_luck() -> None:
    job = plant(cv=0.05, drift=0.015, episodes_every=500, stragglers=0.02)
    assert luck(job, 3) == luck(job, 3)
    assert luck(job, 3).work != luck(job, 4).work


def test_noise_has_the_requested_mean_and_variation() -> None:
    drawn = luck(plant(cv=0.1, units=20_000), 1).work
    assert statistics.fmean(drawn) == pytest.approx(0.75, rel=0.005)
    assert statistics.pstdev(drawn) / 0.75 == pytest.approx(0.1, rel=0.05)


def test_drift_is_slow_and_of_the_requested_size() -> None:
    drawn = [math.log(one / 0.75) for one in luck(plant(drift=0.03, units=60_000), 1).work]
    assert statistics.pstdev(drawn) == pytest.approx(0.03, rel=0.3)
    steps = [b - a for a, b in pairwise(drawn)]
    assert statistics.pstdev(steps) < 0.004


def test_neighbour_load_has_the_requested_frequency() -> None:
    drawn = luck(plant(episodes_every=2_000, units=100_000), 1).work
    slow = sum(one > 0.8 for one in drawn)
    assert slow == pytest.approx(60 * 100_000 / 2_060, rel=0.4)
    assert {round(one / 0.75, 2) for one in drawn} == {1.0, 1.15}


# ----------------------------------------------------------------------------------- the truth


@pytest.mark.parametrize(
    "more",
    [
        {"cv": 0.05, "drift": 0.015, "episodes_every": 500},
        {"cv": 0.05, "stragglers": 0.02, "pauses_every": 300},
        {"cv": 0.05, "phases": (Phase(0.4, LINE.flat(), 1.5),)},
        {"cv": 0.05, "growth": 0.5, "varied_work": True},
    ],
)
def test_run_at_one_setting_matches_its_time_and_energy_sums(more: dict[str, object]) -> None:
    job = plant(**more)
    drawn = luck(job, 1)
    seen, told = run_at(job, drawn, 160), Truth(job, drawn).at(160)
    assert (seen.time, seen.energy) == pytest.approx((told.time, told.energy))
    stepped = Job(job, drawn)
    stepped.start_at(160)
    now = 0.0
    while not stepped.done:
        now += 1.7
        stepped.advance(now)
    assert (stepped.time, stepped.spent) == pytest.approx((told.time, told.energy))
    assert len(stepped.ends) == len(stepped.units) == job.units


def test_oracle_is_the_cheapest_setting_within_the_budget() -> None:
    truth = Truth(plant(), luck(plant(), 1))
    watts, total = truth.oracle(0.05)
    assert watts == 150
    assert total.time / truth.at(200).time == pytest.approx(1.05)
    assert total.energy / truth.at(200).energy == pytest.approx(0.9)


def test_oracle_stays_above_the_floor() -> None:
    job = plant(floor=0.9)
    assert Truth(job, luck(job, 1)).oracle(0.05)[0] == 180


def test_oracle_does_not_go_where_energy_rises_again() -> None:
    shape = replace(
        LINE,
        watts=(100.0, 150.0, 200.0),
        effects=(Effect(1.04, 1.2), Effect(1.02, 0.9), Effect(1.0, 1.0)),
    )
    job = replace(plant(), curve=shape)
    assert Truth(job, luck(job, 1)).oracle(0.05)[0] == 150


# ------------------------------------------------------------------------------------- the job


def test_cap_works_only_after_it_has_settled() -> None:
    job = Job(plant(settle=(1.0, 1.0)), luck(plant(), 1))
    job.advance(0.75)
    job.set_cap(100)
    job.advance(4.0)
    first, later = job.ends[1] - job.ends[0], job.ends[4] - job.ends[3]
    assert later == pytest.approx(0.75 * 1.1)
    assert 0.75 < first < later


def test_energy_counter_moves_in_steps_and_is_known_late() -> None:
    job = Job(plant(counter_step=0.5, energy_lag=3.0), luck(plant(), 1))
    told = []
    for tenths in range(1, 101):
        job.advance(tenths / 10)
        job.read()
        told += job.take(tenths / 10)
    assert told[-1].at == pytest.approx(7e9)
    energies = [one.energy for one in told]
    assert energies == sorted(energies)
    assert len(set(energies)) <= 15 < len(energies)


def test_false_spans_keep_their_length_while_work_slows_down() -> None:
    honest, lying = (Job(plant(lying=lies), luck(plant(), 1)) for lies in (False, True))
    for job in (honest, lying):
        job.start_at(100)
        job.advance(100)
    assert honest.ends == lying.ends
    assert {unit.end - unit.start for unit in lying.units} == {750_000_000}
    assert honest.units[5].end - honest.units[5].start == pytest.approx(825e6, rel=1e-6)


# ----------------------------------------------------------------------------------- the scorer


def test_setting_held_from_the_start_costs_its_curve_value() -> None:
    score = Bench(plant(cv=0.02), 1, TERMS).ours(Steady(((0, 160_000),)))
    assert score.slowdown == pytest.approx(0.04, abs=0.001)
    assert score.saving == pytest.approx(0.08, abs=0.001)
    assert score.oracle == pytest.approx(0.1)
    assert score.held_watts == 160
    assert score.commit_units is not None
    assert score.commit_units <= 3


def test_loss_before_the_held_setting_counts_as_exploration() -> None:
    bench = Bench(plant(), 1, TERMS)
    score = bench.ours(Steady(((0, 0), (500, 160_000))))
    assert score.commit_units == pytest.approx(500, abs=10)
    assert score.exploration == pytest.approx(0.0, abs=1e-6)
    assert score.slowdown == pytest.approx(0.04 * 1490 / 2000, abs=0.002)


def test_giving_up_a_setting_that_kept_the_budget_is_a_false_alarm() -> None:
    kept = Bench(plant(), 1, TERMS).ours(Steady(((0, 160_000), (900, 0))))
    broke = Bench(plant(), 1, TERMS).ours(Steady(((0, 120_000), (900, 0))))
    assert (kept.alarms, broke.alarms) == (1, 0)
    assert kept.releases == {"changed": 1}


def test_worst_ten_minutes_are_worse_than_the_whole_run() -> None:
    score = Bench(plant(), 1, TERMS).ours(Steady(((0, 100_000), (1_000, 0))))
    assert score.worst == pytest.approx(0.1, abs=0.002)
    assert score.slowdown == pytest.approx(0.05, abs=0.005)


def test_cell_counts_its_runs_over_budget() -> None:
    runs = [
        Score("p", "m", seed, 0.06 if seed < 3 else 0.01, 0.1, 0.1, 0.2, 150) for seed in range(10)
    ]
    facts = summary(runs, 0.05)
    assert (facts["over"], facts["runs"]) == (3, 10)
    assert facts["share"] == pytest.approx(0.5)
    assert facts["over_high"] == pytest.approx(0.6524529, abs=1e-6)


def test_savings_share_is_absent_without_possible_savings() -> None:
    assert summary([Score("p", "m", 0, 0.0, 0.0, 0.0, 0.0, 200)], 0.05)["share"] is None


def test_held_setting_is_seen_once_and_a_probe_is_not_an_alarm() -> None:
    job, watch = Job(plant(), luck(plant(), 1)), Watch()
    held = Decision(Move.HOLD, DecisionReason.CERTIFIED, "", {"gpu": 160_000})
    job.start_at(160)
    for decision in (held, held, Decision(Move.PROBE, DecisionReason.SENTINEL, ""), held):
        watch.see(decision, job)
    assert (watch.compared, watch.releases, watch.let_go) == (1, {}, [])
    watch.see(Decision(Move.RELEASE, DecisionReason.OVER_BUDGET, ""), job)
    assert watch.let_go == [pytest.approx(0.04)]


# ---------------------------------------------------------------------------------- baselines


def test_sweep_selects_the_lowest_limit_within_budget() -> None:
    windows = [Window(300, 10.0, 100.0), Window(275, 10.2, 80.0), Window(250, 10.4, 90.0)]
    assert select(Selector.SLOWDOWN, windows, 0.05) == 250
    assert select(Selector.SLOWDOWN, windows, 0.03) == 275
    assert select(Selector.ENERGY, windows, 0.05) == 275


def test_sweep_tries_every_limit_for_fifty_steps() -> None:
    bench = Bench(plant(), 1, TERMS)
    score = sweep(bench, Selector.SLOWDOWN)
    assert score.commit_units == sweep_units(bench) == 251
    assert score.held_watts == 150
    assert score.worst > 0.015


def test_oracle_and_a_static_cap_are_fixed_settings() -> None:
    bench = Bench(plant(), 1, TERMS)
    assert oracle(bench).saving == pytest.approx(0.1)
    assert oracle(bench).slowdown == pytest.approx(0.05)
    assert static(bench).slowdown == pytest.approx(0.04)


# ---------------------------------------------------------------------------------- the table


def test_cells_cover_every_curve_noise_and_disturbance_once() -> None:
    found = cells()
    assert len(found) >= 70
    assert {cell.plant.cv for cell in found} == {0.0, 0.01, 0.02, 0.05, 0.10}
    assert {cell.group for cell in found} == {"curves", "iterations", "short", "disturbed", "null"}
    assert len(quick()) == 6


def test_methods_of_one_seed_share_their_luck() -> None:
    cell = Cell(plant(cv=0.05), "curves")
    found = Trials().scores([cell], 2, ("static 80%", "oracle"))["a job"]
    assert [score.seed for score in found["oracle"]] == [0, 1]
    assert all(score.slowdown == pytest.approx(0.04, abs=1e-9) for score in found["static 80%"])


def test_small_benchmark_runs_the_tuner_and_stores_its_results(tmp_path: Path) -> None:
    job = replace(plant(cv=0.01), name="tiny", curve=curves()["a40-resnet50"], units=1_200)
    trials = Trials(tmp_path)
    found = trials.scores([Cell(job, "curves")], 2, (OURS, "static 80%"))["tiny"]
    assert [score.seed for score in found[OURS]] == [0, 1]
    assert all(score.probes for score in found[OURS])
    assert all(score.slowdown < 0.05 for score in found[OURS])
    again = Trials(tmp_path, deadline=0.0)
    assert again.scores([Cell(job, "curves")], 2, (OURS, "static 80%"))["tiny"] == found


def test_benchmark_out_of_time_keeps_completed_runs() -> None:
    cell = Cell(plant(), "curves")
    assert Trials(deadline=0.0).scores([cell], 2, ("oracle",))["a job"]["oracle"] == []


def test_runs_of_another_cpu_model_are_not_reused(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "a.jsonl")
    kept.put("key", {"figure": 1})
    with kept.path.open("a") as file:
        file.write('["cut')
    assert Kept(kept.path).facts == {"key": {"figure": 1}}
    assert core_digest() != bench_digest()


def test_held_job_beyond_its_budget_is_counted() -> None:
    assert level(0.05).at(250) == pytest.approx((1.05, 0.8))
    assert level(0.05).at(300) == pytest.approx((1.0, 1.0))
    made = list(tasks(4))
    assert sum(what == "certify" and flags[0] == 0.05 for what, flags in made) == 4 * 3 * 2
    assert sum(what == "certify" and flags[0] == 0.03 for what, flags in made) == 3


def test_page_has_the_tables_that_were_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in parts(results.load()).items():
        assert placed(page, name, text) == page, name


def test_command_names_its_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list", "--cells", "lying"])
    assert capsys.readouterr().out.splitlines() == [
        f"lying spans, CV {noise} %" for noise in (1, 5, 10)
    ]


# --------------------------------------------------------------------------- quick comparison


def test_comparison_shows_the_figures_of_both_cores() -> None:
    (job,) = compare.chosen_cells(["v100-bert, 1 min of 30 ms"])
    found = compare.measure([job], 1, Terms())[job.plant.name]
    assert found["runs"] == 1
    assert found["minutes"] == pytest.approx(1.0, abs=0.1)
    line = compare.row(job.plant.name, [found, found])
    assert line.count("over 0") == 2


def test_prior_of_published_curves_is_fitted_without_the_job_itself(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    rows = ["source,gpu,workload,config,power_limit_w,time_s,avg_power_w"]
    for job in range(4):
        for cap in (300, 250, 200):
            x = (300 - cap) / 300
            time = math.exp(0.1 * (1 + 0.1 * job) * x + (0.5 + 0.05 * job**2) * x * x)
            power = 300 * math.exp(-(1 + 0.05 * job) * x - 0.03 * job**2 * x * x)
            rows.append(f"s,g,w{job},c,{cap},{time},{power}")
    path.write_text("\n".join(rows))
    chosen = prior.jobs(path)
    assert len(chosen) == 4
    fitted = prior.fit(chosen)
    assert fitted.slowdown.linear == pytest.approx(0.115, abs=0.001)
    assert fitted.relief.linear == pytest.approx(1.075, abs=0.001)
    alone, measured = prior.errors(chosen)
    assert max(map(abs, measured)) < max(map(abs, alone)) < 0.1
