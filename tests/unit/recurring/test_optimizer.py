"""The batch-size optimizer of a script: its decisions, and its failures that end no training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from wattspan.recurring import BatchSizeOptimizer
from wattspan.recurring.jobs import RecurringJobTerms, TrainingRun, TrialOutcome
from wattspan.recurring.optimizer import FileRuns, StartedRun, is_alive, this_process
from wattspan.recurring.run_book import RunningProcess
from wattspan.sdk import AgentUnavailableError, MeasurementError


class Meter:
    """Each read is an epoch of 100 J and 1 s."""

    def __init__(self) -> None:
        self.reads = 0
        self.fails: set[str] = set()

    def _check(self, call: str) -> None:
        if call in self.fails:
            raise AgentUnavailableError(f"no agent for {call}")

    def gpus(self) -> str:
        self._check("gpus")
        return "1 x H100"

    def power(self) -> float:
        self._check("power")
        return 300.0

    def begin(self) -> None:
        self._check("begin")
        self.reads = 0

    def read(self) -> tuple[float, float]:
        self._check("read")
        self.reads += 1
        return 100.0 * self.reads, 1.0 * self.reads


class Runs:
    """Begins every run with a size of 16, and keeps the ended ones."""

    def __init__(self, stop_cost: float | None = None) -> None:
        self.stop_cost = stop_cost
        self.begun: list[tuple[RecurringJobTerms, str]] = []
        self.ended: list[tuple[int, TrainingRun]] = []
        self.fails: set[str] = set()

    def begin(self, terms: RecurringJobTerms, gpus: str) -> StartedRun:
        if "begin" in self.fails:
            raise MeasurementError("the store is full")
        self.begun.append((terms, gpus))
        return StartedRun(len(self.begun), 16, self.stop_cost)

    def end(self, key: int, ended: TrainingRun) -> None:
        if "end" in self.fails:
            raise MeasurementError("the disk is full")
        self.ended.append((key, ended))


def optimizer(meter: Meter, runs: Runs, **terms: object) -> BatchSizeOptimizer:
    return BatchSizeOptimizer(
        **{  # type: ignore[arg-type]
            "job": "nightly",
            "batch_sizes": [64, 16, 32, 16],
            "default_batch_size": 32,
            "target_metric": 0.8,
            "higher_is_better_metric": True,
            "max_epochs": 4,
            "meter": meter,
            "runs": runs,
            **terms,
        }
    )


@pytest.fixture
def meter() -> Meter:
    return Meter()


def trained(one: BatchSizeOptimizer, *metrics: float) -> int:
    """Train until the optimizer ends it; returns the number of epochs."""
    one.get_batch_size()
    one.on_train_begin()
    for epoch, metric in enumerate(metrics, 1):
        one.on_evaluate(metric)
        if one.training_finished:
            return epoch
    return len(metrics)


def test_run_ends_with_its_target(meter: Meter) -> None:
    runs = Runs()
    one = optimizer(meter, runs)
    assert one.get_batch_size() == one.get_batch_size() == 16
    assert trained(one, 0.3, 0.7, 0.81, 0.9) == 3
    ((terms, gpus),) = runs.begun
    assert (terms.policy.batch_sizes, gpus) == ((16, 32, 64), "1 x H100")
    assert runs.ended == [(1, TrainingRun(16, TrialOutcome.CONVERGED, 300.0, 3.0, 300.0, 3))]


def test_metric_may_fall_towards_its_target(meter: Meter) -> None:
    runs = Runs()
    assert trained(optimizer(meter, runs, higher_is_better_metric=False), 3.0, 0.9, 0.7) == 3


def test_run_without_its_target_ends_after_the_last_epoch(meter: Meter) -> None:
    runs = Runs()
    assert trained(optimizer(meter, runs), 0.1, math.nan, 0.2, 0.3, 0.4) == 4
    assert runs.ended[0][1].outcome is TrialOutcome.MISSED


def test_expensive_run_is_stopped(meter: Meter) -> None:
    runs = Runs(stop_cost=450.0)  # an epoch costs half of 100 J and half of 300 J
    assert trained(optimizer(meter, runs), 0.1, 0.2, 0.3) == 3
    assert runs.ended[0][1].outcome is TrialOutcome.STOPPED


def test_target_at_a_high_cost_counts_as_reached(meter: Meter) -> None:
    runs = Runs(stop_cost=150.0)
    assert trained(optimizer(meter, runs), 0.9) == 1
    assert runs.ended[0][1].outcome is TrialOutcome.CONVERGED


@pytest.mark.parametrize("call", ["power", "gpus"])
def test_run_without_an_agent_uses_the_default_size(meter: Meter, call: str) -> None:
    runs = Runs()
    meter.fails = {call}
    one = optimizer(meter, runs)
    with pytest.warns(RuntimeWarning, match="uses the default batch size. no agent"):
        assert one.get_batch_size() == 32
    assert trained(one, 0.1, 0.9) == 2  # without a further warning
    assert runs.begun == []


def test_run_without_a_store_uses_the_default_size(meter: Meter) -> None:
    runs = Runs()
    runs.fails = {"begin"}
    one = optimizer(meter, runs)
    with pytest.warns(RuntimeWarning, match="the store is full"):
        assert one.get_batch_size() == 32
    assert trained(one, 0.1, 0.2, 0.3, 0.4) == 4


def test_run_that_is_not_measured_goes_on_and_does_not_count(meter: Meter) -> None:
    runs = Runs()
    one = optimizer(meter, runs)
    one.on_train_begin()
    one.on_evaluate(0.1)
    meter.fails = {"read"}
    with pytest.warns(RuntimeWarning, match="does not count"):
        one.on_evaluate(0.2)
    assert not one.training_finished
    one.on_evaluate(0.9)
    assert one.training_finished
    assert runs.ended == []


def test_run_that_cannot_be_recorded_ends_as_usual(meter: Meter) -> None:
    runs = Runs()
    runs.fails = {"end"}
    one = optimizer(meter, runs)
    with pytest.warns(RuntimeWarning, match="not recorded. the disk is full"):
        assert trained(one, 0.9) == 1


def test_failed_begin_of_the_measurement_is_a_warning(meter: Meter) -> None:
    meter.fails = {"begin"}
    with pytest.warns(RuntimeWarning, match="no agent for begin"):
        optimizer(meter, Runs()).on_train_begin()


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"batch_sizes": []}, "at least one size"),
        ({"default_batch_size": 7}, "default_batch_size 7"),
        ({"eta_knob": -0.1}, "eta_knob -0.1"),
        ({"max_power": 0}, "max_power 0"),
        ({"max_power": math.nan}, "max_power nan"),
    ],
)
def test_terms_that_make_no_sense_are_refused(meter: Meter, terms: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        optimizer(meter, Runs(), **terms)


# ------------------------------------------------------------------------------------- files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.sqlite"


def test_file_keeps_the_runs_of_a_job(meter: Meter, path: Path) -> None:
    sizes = []
    for _ in range(3):
        one = optimizer(meter, None, store=path, num_pruning_rounds=1)  # type: ignore[arg-type]
        sizes.append(one.get_batch_size())
        trained(one, 0.9)
    assert sizes == [32, 16, 64]


def test_concurrent_run_does_not_repeat_a_trial(meter: Meter, path: Path) -> None:
    first = optimizer(meter, None, store=path)  # type: ignore[arg-type]
    second = optimizer(meter, None, store=path)  # type: ignore[arg-type]
    trained(first, 0.9)
    again = optimizer(meter, None, store=path)  # type: ignore[arg-type]
    assert [again.get_batch_size(), second.get_batch_size()] == [16, 32]


def test_changed_terms_use_the_default_size_and_say_so(meter: Meter, path: Path) -> None:
    trained(optimizer(meter, None, store=path), 0.9)  # type: ignore[arg-type]
    one = optimizer(meter, None, store=path, eta_knob=0.7)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match=r"eta 0\.5, not 0\.7"):
        assert one.get_batch_size() == 32


def test_unusable_file_is_a_warning(meter: Meter, tmp_path: Path) -> None:
    one = optimizer(meter, None, store=tmp_path / "no" / "runs.sqlite")  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match=r"runs\.sqlite"):
        assert one.get_batch_size() == 32


def test_forgotten_run_is_named(path: Path) -> None:
    FileRuns(path)
    with pytest.raises(MeasurementError, match="has no run 7"):
        FileRuns(path).end(7, TrainingRun(16, TrialOutcome.MISSED))


def test_run_of_another_host_is_not_lost() -> None:
    own = this_process()
    assert is_alive(own)
    assert not is_alive(RunningProcess(own.host, own.pid, 1))
    assert not is_alive(RunningProcess(own.host, 2**22, 1))
    assert is_alive(RunningProcess("elsewhere", 1, 1))
