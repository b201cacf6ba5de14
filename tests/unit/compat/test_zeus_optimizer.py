"""Zeus's optimizers and selectors: signatures, wishes and units of work."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.training_spans import FakeDeclaration, RecordedTraining

from wattspan.compat.zeus import optimizer
from wattspan.compat.zeus.optimizer import (
    CUSTOM_SELECTOR,
    CallbackSet,
    GlobalPowerLimitOptimizer,
    HFOptimizerHooks,
    tuning_request,
)
from wattspan.compat.zeus.profile import (
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    PowerLimitMeasurement,
    Time,
    ZeusCost,
)
from wattspan.training.session import TuningRequest

MONITOR: Any = SimpleNamespace(gpu_indices=[0, 1])


class Recorded(GlobalPowerLimitOptimizer):
    """An optimizer whose spans and declaration stay here."""

    def __init__(self, training: RecordedTraining, *args: Any, **options: Any) -> None:
        super().__init__(MONITOR, *args, **options)
        self._provider, self._declare = training.options.values()


@pytest.fixture
def training() -> RecordedTraining:
    return RecordedTraining()


def measured(*figures: tuple[int, float, float]) -> list[PowerLimitMeasurement]:
    return [PowerLimitMeasurement(*each) for each in figures]


# ----------------------------------------------------------------------------------- selectors


def test_selectors_choose_by_their_quantity() -> None:
    curve = measured((300, 100, 10), (250, 80, 10.4), (200, 85, 10.4), (150, 70, 14))
    assert Energy().select(curve) == 150
    assert Time().select(curve) == 300
    assert ZeusCost(1.0).select(curve) == 150
    assert ZeusCost(0.0).select(curve) == 300
    assert ZeusCost(0.5, world_size=4).select(curve) == 300


def test_slowdown_constraint_selects_least_energy_instead_of_lowest_limit() -> None:
    curve = measured((300, 100, 10), (250, 80, 10.4), (200, 85, 10.4), (150, 70, 14))
    assert MaxSlowdownConstraint(1.05).select(curve) == 250  # Zeus selects 200 W
    assert MaxSlowdownConstraint(1.0).select(curve) == 300


@pytest.mark.parametrize("figures", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (1, float("nan"), 1)])
def test_measurement_of_nothing_is_refused(figures: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="is not positive"):
        PowerLimitMeasurement(*figures)


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, float("nan"), float("inf")])
def test_slowdown_factor_below_one_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        MaxSlowdownConstraint(factor)


@pytest.mark.parametrize("eta", [-0.01, 1.01, float("nan")])
def test_weight_outside_of_zero_to_one_is_refused(eta: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        ZeusCost(eta)


def test_cost_of_no_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        ZeusCost(0.5, world_size=0)


class Lowest(OptimumSelector):
    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        return min(each.power_limit for each in measurements)


class OtherEnergy(Energy):
    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        return 100


@pytest.mark.parametrize(
    ("selector", "request_"),
    [
        (MaxSlowdownConstraint(1.05), TuningRequest(max_slowdown=0.05, objective="energy")),
        (MaxSlowdownConstraint(1), TuningRequest(max_slowdown=0.0, objective="energy")),
        (Energy(), TuningRequest(max_slowdown=1.0, objective="energy")),
        (Time(), TuningRequest(objective="time")),
        (ZeusCost(0.7), TuningRequest(objective="cost", eta=0.7)),
        (Lowest(), None),
        (OtherEnergy(), None),
    ],
)
def test_selector_is_a_wish(selector: OptimumSelector, request_: TuningRequest | None) -> None:
    assert tuning_request(selector) == request_


# ----------------------------------------------------------------------------------- optimizer


def test_documented_loop_reports_steps_and_epochs(training: RecordedTraining) -> None:
    plo = Recorded(training, MaxSlowdownConstraint(1.1))
    for _ in range(2):
        plo.on_epoch_begin()
        for _ in range(3):
            plo.on_step_begin()
            plo.on_step_end()
        plo.on_epoch_end()
        plo.on_evaluate(0.5)
    assert (training.steps, training.epochs, training.parts) == ([1, 2, 3, 4, 5, 6], [1, 2], 0)
    (declared,) = training.declared
    assert (declared["max_slowdown"], declared["objective"]) == (0.1, "energy")


@pytest.mark.parametrize("same", [True, False])
def test_optimizer_attached_twice_reports_each_step_once(
    same: bool, training: RecordedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    first = Recorded(training, MaxSlowdownConstraint(1.1))
    both = CallbackSet([first, first if same else Recorded(training, MaxSlowdownConstraint(1.1))])
    for _ in range(2):
        both.on_epoch_begin()
        for _ in range(2):
            both.on_step_begin()
            both.on_step_end()
        both.on_epoch_end()
    both.on_train_end()
    assert (training.steps, training.epochs[-2:]) == ([1, 2, 3, 4], [1, 2])
    (warning,) = caplog.messages
    assert "twice" in warning
    assert "Remove one" in warning
    assert training.answer.withdrawals == len(training.declared)


def test_loop_with_two_hooks_reports_steps(training: RecordedTraining) -> None:
    """Zeus itself needs only the begin of a step and the end of an epoch."""
    plo = Recorded(training)
    for _ in range(2):
        for _ in range(3):
            plo.on_step_begin()
        plo.on_epoch_end()
    assert (training.steps, training.parts) == ([1, 2, 3, 4, 5, 6], 0)


def test_evaluation_after_a_step_is_in_no_unit(training: RecordedTraining) -> None:
    plo = Recorded(training)
    plo.on_step_begin()
    plo.on_step_end()
    training.provider.get_tracer("application").start_span("evaluation").end()
    plo.on_evaluate(0.5)
    (step,), (evaluation,) = training.spans("train_step"), training.spans("evaluation")
    assert step.end_time <= evaluation.start_time


def test_end_of_training_withdraws_the_job(training: RecordedTraining) -> None:
    plo = Recorded(training)
    plo.on_train_begin()
    plo.on_step_begin()
    plo.on_train_end()
    assert (training.steps, training.answer.withdrawals) == ([1], 1)
    plo.on_train_end()
    assert training.answer.withdrawals == 1


def test_default_selector_is_the_cost_of_all_gpus(training: RecordedTraining) -> None:
    selector = Recorded(training).optimum_selector
    assert isinstance(selector, ZeusCost)
    assert (selector.eta_knob, selector.world_size) == (0.5, 2)


def test_refused_budget_is_kept() -> None:
    training = RecordedTraining(FakeDeclaration("limited", "The operator allows 5 %."))
    plo = Recorded(training, Energy())
    assert plo.declined is None
    plo.on_step_begin()
    assert plo.declined == "The operator allows 5 %."


def test_custom_selector_is_measured_and_not_tuned(
    training: RecordedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    plo = Recorded(training, Lowest())
    plo.on_step_begin()
    plo.on_epoch_end()
    assert (training.declared, training.steps) == ([], [1])
    assert plo.declined == CUSTOM_SELECTOR
    assert caplog.messages == [CUSTOM_SELECTOR]
    assert HFOptimizerHooks(MONITOR, Lowest()).declined == CUSTOM_SELECTOR


@pytest.mark.parametrize(
    ("option", "value"),
    [("wait_steps", -1), ("warmup_steps", -1), ("profile_steps", 0), ("pl_step", 0)],
)
@pytest.mark.parametrize("kind", [GlobalPowerLimitOptimizer, HFOptimizerHooks])
def test_option_that_zeus_refuses_is_refused(kind: Any, option: str, value: int) -> None:
    with pytest.raises(ValueError, match=option):
        kind(MONITOR, **{option: value})


def test_unused_options_are_logged(
    training: RecordedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        Recorded(training, warmup_steps=0)
    assert "does not use wait_steps, warmup_steps, profile_steps, pl_step" in caplog.messages[0]


def test_optimizers_have_the_same_options() -> None:
    """Those of Zeus are compared in tests/flow/test_compat_zeus_signatures.py."""
    assert inspect.signature(HFOptimizerHooks) == inspect.signature(GlobalPowerLimitOptimizer)


def test_huggingface_optimizer_asks_as_its_selector() -> None:
    hooks = HFOptimizerHooks(MONITOR, MaxSlowdownConstraint(1.02))
    assert hooks._request == TuningRequest(max_slowdown=0.02, objective="energy")
    assert hooks.declined is None


def test_huggingface_optimizer_without_transformers_names_the_package() -> None:
    with pytest.raises(ImportError, match="install transformers"):
        optimizer.HFGlobalPowerLimitOptimizer  # noqa: B018
