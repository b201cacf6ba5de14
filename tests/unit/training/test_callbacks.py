"""Hooks of trainers in the order in which the frameworks call them, without the frameworks.

The frameworks themselves run in ``tests/flow/test_training_frameworks.py``.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.training_spans import FakeDeclaration, RecordedTraining

from wattspan.integrations.huggingface import TrainerHooks
from wattspan.integrations.lightning import LightningHooks


@pytest.fixture
def training() -> RecordedTraining:
    return RecordedTraining()


# ------------------------------------------------------------------------------- Hugging Face


class FakeTrainer:
    """The order of hooks of ``transformers.Trainer`` 5.23 (``_run_epoch``)."""

    def __init__(self, *callbacks: TrainerHooks, batches: int = 6, accumulate: int = 1) -> None:
        self.callbacks, self.batches, self.accumulate = callbacks, batches, accumulate
        self.args = SimpleNamespace(train_batch_size=8)
        self.control = SimpleNamespace(
            should_evaluate=False,
            should_save=False,
            should_epoch_stop=False,
            should_training_stop=False,
        )
        self.evaluate_after: frozenset[int] = frozenset()
        self.late_evaluation = False  # requested by a callback that comes later
        self.tokens_of_step = 0
        self.last_step: int | None = None
        self.state = self.new_state()

    def new_state(self, step: int = 0, epoch: float | None = None) -> SimpleNamespace:
        return SimpleNamespace(
            global_step=step,
            epoch=epoch,
            is_local_process_zero=True,
            num_input_tokens_seen=0,
            train_batch_size=8,
        )

    def call(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self.args, self.state, self.control, model=None)

    def train(self, epochs: int = 1, *, skipped: int = 0) -> None:
        self.call("on_train_begin")
        for _ in range(epochs):
            self.epoch(skipped)
            skipped = 0
        self.call("on_train_end")

    def epoch(self, skipped: int = 0) -> None:
        self.call("on_epoch_begin")
        for batch in range(skipped, self.batches):
            if batch % self.accumulate == 0:
                self.call("on_step_begin")
            if (batch + 1) % self.accumulate and batch + 1 != self.batches:
                self.call("on_substep_end")
                continue
            self.state.global_step += 1
            self.state.num_input_tokens_seen += self.tokens_of_step
            evaluates = self.state.global_step in self.evaluate_after
            self.control.should_evaluate = evaluates and not self.late_evaluation
            self.control.should_training_stop = self.state.global_step == self.last_step
            self.call("on_step_end")
            if evaluates:
                self.call("on_prediction_step")
                self.call("on_evaluate")
            if self.control.should_training_stop:
                break
        self.call("on_epoch_end")


def test_optimizer_step_is_one_unit_of_full_batches(training: RecordedTraining) -> None:
    FakeTrainer(TrainerHooks(**training.options), batches=10, accumulate=4).train(epochs=2)
    assert training.steps == [1, 2, 3, 4, 5, 6]
    assert training.work == [32, 32, 16] * 2
    assert (training.epochs, training.parts) == ([1, 2], 0)


def test_tokens_are_the_work_if_the_trainer_counts_them(training: RecordedTraining) -> None:
    trainer = FakeTrainer(TrainerHooks(**training.options), batches=3)
    trainer.state.num_input_tokens_seen = 10_000  # of the checkpoint
    trainer.tokens_of_step = 512
    trainer.train()
    assert training.work == [512] * 3
    assert set(training.values("train_step", "wattspan.work_unit")) == {"tokens"}


@pytest.mark.parametrize("late", [False, True])
def test_evaluation_is_in_no_unit(late: bool, training: RecordedTraining) -> None:
    tracer = training.provider.get_tracer("application")

    class Evaluating(TrainerHooks):
        def on_prediction_step(self, *hook: Any, **more: Any) -> None:
            tracer.start_span("evaluation").end()
            super().on_prediction_step(*hook, **more)

        on_evaluate = TrainerHooks.on_prediction_step

    trainer = FakeTrainer(Evaluating(**training.options))
    trainer.evaluate_after, trainer.late_evaluation = frozenset({2, 4, 6}), late
    trainer.train()
    assert (training.steps, training.parts) == ([1, 2, 3, 4, 5, 6], 0)
    assert len(training.spans("evaluation")) == 3
    for evaluation in training.spans("evaluation"):
        for unit in training.spans("train_step"):
            assert unit.end_time <= evaluation.start_time or evaluation.end_time <= unit.start_time


def test_checkpoint_is_in_no_unit(training: RecordedTraining) -> None:
    callback = TrainerHooks(**training.options)
    trainer = FakeTrainer(callback)
    trainer.call("on_train_begin")
    trainer.call("on_step_begin")
    trainer.control.should_save = True
    trainer.call("on_step_end")
    assert training.steps == [1]  # before the checkpoint is written
    trainer.call("on_save")
    trainer.call("on_train_end")
    assert (training.steps, training.parts) == ([1], 0)


def test_training_that_stops_early_counts_its_last_step(training: RecordedTraining) -> None:
    trainer = FakeTrainer(TrainerHooks(**training.options))
    trainer.last_step = 4
    trainer.train()
    assert (training.steps, training.parts) == ([1, 2, 3, 4], 0)


def test_resumed_training_continues_the_numbers(training: RecordedTraining) -> None:
    trainer = FakeTrainer(TrainerHooks(**training.options))
    trainer.state = trainer.new_state(step=9, epoch=1.5)
    trainer.train(skipped=3)
    assert (training.steps, training.epochs) == ([10, 11, 12], [2])


def test_second_training_repeats_no_number(training: RecordedTraining) -> None:
    callback = TrainerHooks(**training.options)
    trainer = FakeTrainer(callback, batches=4)
    trainer.train()
    trainer.state = trainer.new_state(step=2)  # resumed from an earlier checkpoint
    trainer.train(skipped=2)
    assert (training.steps, training.epochs) == ([1, 2, 3, 4, 5, 6], [1, 2])
    assert [len(training.declared), training.answer.withdrawals] == [2, 2]


@pytest.mark.parametrize("same", [True, False])
def test_second_callback_of_a_trainer_does_nothing(
    same: bool, training: RecordedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    callback = TrainerHooks(**training.options)
    other = callback if same else TrainerHooks(**training.options)
    trainer = FakeTrainer(callback, other, batches=8, accumulate=4)
    trainer.evaluate_after = frozenset({1})
    trainer.train(epochs=2)
    assert (training.steps, training.work) == ([1, 2, 3, 4], [32] * 4)
    assert (training.epochs, training.parts) == ([1, 2], 0)
    assert (len(training.declared), training.answer.withdrawals) == (1, 1)
    assert [each for each in caplog.messages if "attached twice" in each] == caplog.messages
    assert len(caplog.messages) == 1


def test_callback_after_a_failed_training_reports_the_next(training: RecordedTraining) -> None:
    failed = FakeTrainer(TrainerHooks(**training.options))
    failed.call("on_train_begin")
    failed.call("on_epoch_begin")
    failed.call("on_step_begin")  # and then an exception, of which no hook tells
    FakeTrainer(TrainerHooks(**training.options), batches=2).train()
    assert training.steps == [1, 2]
    del failed
    gc.collect()
    assert (training.parts, training.answer.withdrawals) == (1, 2)


def test_hooks_outside_of_a_training_report_nothing(training: RecordedTraining) -> None:
    trainer = FakeTrainer(TrainerHooks(**training.options))
    for hook in ("on_prediction_step", "on_evaluate", "on_save", "on_step_end", "on_train_end"):
        trainer.call(hook)
    assert (training.declared, training.steps, training.parts) == ([], [], 0)


def test_other_ranks_of_a_trainer_declare_nothing(training: RecordedTraining) -> None:
    trainer = FakeTrainer(TrainerHooks(**training.options), batches=2)
    trainer.state.is_local_process_zero = False
    trainer.train()
    assert (training.declared, training.steps) == ([], [1, 2])


def test_callback_keeps_the_refusal_of_a_larger_budget() -> None:
    training = RecordedTraining(FakeDeclaration("limited", "The operator allows 5 %, not 30 %."))
    callback = TrainerHooks(max_slowdown=0.3, **training.options)
    assert callback.declined is None
    FakeTrainer(callback, batches=1).train()
    assert callback.declined == "The operator allows 5 %, not 30 %."


@pytest.mark.parametrize("hooks", [TrainerHooks, LightningHooks])
def test_invalid_wish_is_refused_before_the_training(hooks: type[Any]) -> None:
    for wish in ({"max_slowdown": -0.01}, {"eta": -1.0}, {"objective": "joy"}):
        with pytest.raises(ValueError, match=next(iter(wish))):
            hooks(**wish)


@pytest.mark.parametrize(
    ("module", "package"), [("huggingface", "transformers"), ("lightning", "lightning")]
)
def test_missing_framework_error_names_the_package(module: str, package: str) -> None:
    with pytest.raises(ImportError, match=rf"`pip --python \S+ install {package}`"):
        __import__(f"wattspan.integrations.{module}", fromlist=["x"]).WattspanCallback  # noqa: B018


# ----------------------------------------------------------------------------------- Lightning


class FakeLightning:
    """The order of hooks of Lightning 2.6 (``training_epoch_loop``)."""

    def __init__(self, *callbacks: LightningHooks, accumulate: int = 1) -> None:
        self.callbacks, self.accumulate = list(callbacks), accumulate
        self.global_step, self.current_epoch, self.local_rank = 0, 0, 0
        self.validate_after: frozenset[int] = frozenset()  # batches
        self.save_after: frozenset[int] = frozenset()
        self.optimizers = 1
        self.samples = 4
        self.write_checkpoint: Callable[[], object] = lambda: None

    def call(self, hook: str, *more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, None, *more)

    def fit(self, epochs: int, batches: int) -> None:
        self.call("on_train_start")
        for _ in range(epochs):
            self.call("on_train_epoch_start")
            for index in range(batches):
                batch = SimpleNamespace(shape=(self.samples, 3))
                self.call("on_train_batch_start", batch, index)
                if (index + 1) % self.accumulate == 0 or index + 1 == batches:
                    self.global_step += self.optimizers
                self.call("on_train_batch_end", None, batch, index)
                if index + 1 in self.validate_after:
                    self.call("on_validation_start")
                if index + 1 in self.save_after:
                    self.call("on_save_checkpoint", {})
                    self.write_checkpoint()
            self.call("on_train_epoch_end")
            self.current_epoch += 1
        self.call("on_train_end")


def test_accumulated_batches_of_lightning_are_one_unit(training: RecordedTraining) -> None:
    FakeLightning(LightningHooks(**training.options), accumulate=4).fit(epochs=2, batches=10)
    assert training.steps == [1, 2, 3, 4, 5, 6]
    assert training.work == [16, 16, 8] * 2
    assert (training.epochs, training.parts) == ([1, 2], 0)


def test_validation_in_mid_step_splits_the_unit(training: RecordedTraining) -> None:
    trainer = FakeLightning(LightningHooks(**training.options), accumulate=4)
    trainer.validate_after = frozenset({2, 8})
    trainer.fit(epochs=1, batches=8)
    assert (training.steps, training.work, training.parts) == ([1, 2], [8, 16], 1)


def test_checkpoint_of_lightning_is_in_no_unit(training: RecordedTraining) -> None:
    tracer = training.provider.get_tracer("application")
    trainer = FakeLightning(LightningHooks(**training.options))
    trainer.write_checkpoint = lambda: tracer.start_span("checkpoint").end()
    trainer.save_after = frozenset({1, 2})
    trainer.fit(epochs=1, batches=3)
    assert (training.steps, training.parts) == ([1, 2, 3], 0)
    assert len(training.spans("checkpoint")) == 2
    for checkpoint in training.spans("checkpoint"):
        for unit in training.spans("train_step"):
            assert unit.end_time <= checkpoint.start_time or checkpoint.end_time <= unit.start_time


def test_batch_with_several_optimizers_is_one_unit(training: RecordedTraining) -> None:
    trainer = FakeLightning(LightningHooks(**training.options))
    trainer.optimizers = 2
    trainer.fit(epochs=1, batches=3)
    assert (training.steps, training.work) == ([1, 2, 3], [4, 4, 4])


@pytest.mark.parametrize("same", [True, False])
def test_second_callback_of_lightning_does_nothing(same: bool, training: RecordedTraining) -> None:
    callback = LightningHooks(**training.options)
    other = callback if same else LightningHooks(**training.options)
    FakeLightning(callback, other, accumulate=2).fit(epochs=2, batches=4)
    assert (training.steps, training.work) == ([1, 2, 3, 4], [8] * 4)
    assert (training.epochs, len(training.declared)) == ([1, 2], 1)


def test_resumed_lightning_continues_the_numbers(training: RecordedTraining) -> None:
    trainer = FakeLightning(LightningHooks(**training.options))
    trainer.global_step, trainer.current_epoch = 50, 5
    trainer.fit(epochs=1, batches=2)
    assert (training.steps, training.epochs) == ([51, 52], [6])


def test_exception_of_lightning_ends_the_session(training: RecordedTraining) -> None:
    trainer = FakeLightning(LightningHooks(**training.options))
    trainer.call("on_train_start")
    trainer.call("on_train_epoch_start")
    trainer.call("on_train_batch_start", [1], 0)
    trainer.call("on_exception", KeyboardInterrupt())
    assert (training.parts, training.epochs, training.answer.withdrawals) == (1, [1], 1)


def test_sanity_check_of_lightning_reports_nothing(training: RecordedTraining) -> None:
    trainer = FakeLightning(LightningHooks(**training.options))
    for hook in ("on_validation_start", "on_train_end"):
        trainer.call(hook)
    trainer.call("on_save_checkpoint", {})
    assert (training.declared, training.parts) == ([], 0)


@pytest.mark.parametrize("hooks", [TrainerHooks, LightningHooks])
def test_callback_can_be_pickled_before_the_training(hooks: type[Any]) -> None:
    assert isinstance(pickle.loads(pickle.dumps(hooks(max_slowdown=0.1))), hooks)


def test_integrations_import_no_framework() -> None:
    assert not {"transformers", "lightning", "pytorch_lightning", "torch"} & sys.modules.keys()
