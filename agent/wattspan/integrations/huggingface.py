"""A callback for ``transformers.Trainer`` and the trainers derived from it, such as TRL's.

::

    from wattspan.integrations.huggingface import WattspanCallback

    trainer = Trainer(..., callbacks=[WattspanCallback(max_slowdown=0.05)])

The trainer fetches data before it calls ``on_step_begin``, and calls ``on_evaluate`` and
``on_save`` after the evaluation and the checkpoint. A unit of work therefore lasts from one begin
of a step to the next, and ends in ``on_step_end`` if an evaluation or a checkpoint follows.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from wattspan.integrations import lazy_class
from wattspan.training.loop import TrainingCallback
from wattspan.training.session import TrainingSession
from wattspan.training.units import StepWork
from wattspan.util.text import pip_command

_log = logging.getLogger("wattspan")


class TrainerHooks(TrainingCallback):
    """The hooks of ``transformers.TrainerCallback``, without its base class.

    The work of a unit is the tokens seen if the trainer counts them
    (``include_num_input_tokens_seen``), else the samples of full batches.
    """

    _training: ClassVar[weakref.WeakSet[TrainerHooks]] = weakref.WeakSet()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._state: Any = None  # of the trainer; each training has one of its own
        self._attached = 0  # how often the trainer calls each hook of this object
        self._substeps = 0
        self._tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._state is state:
            self._attached += 1
            self._warn_of_second()
            return
        if any(other._state is state for other in self._training):  # noqa: SLF001
            self._warn_of_second()
            return
        self._state, self._attached = state, 1
        self._training.add(self)
        self._tokens = state.num_input_tokens_seen
        self._start(
            declares=state.is_local_process_zero,
            steps=state.global_step,
            epochs=int(state.epoch or 0),
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if session := self._session_of(state):
            session.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if session := self._session_of(state):
            self._substeps = 0
            session.begin_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._substeps += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not (session := self._session_of(state)):
            return
        session.complete_step(self._work(args, state))
        self._tokens = state.num_input_tokens_seen
        if (
            control.should_evaluate
            or control.should_save
            or control.should_epoch_stop
            or control.should_training_stop
        ):
            session.interrupt()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation that another callback has requested after our ``on_step_end``."""
        if session := self._session_of(state):
            session.interrupt_late()

    on_evaluate = on_save = on_prediction_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if session := self._session_of(state):
            session.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._session_of(state):
            self._stop()
            self._state = None
            self._training.discard(self)

    def _session_of(self, state: Any) -> TrainingSession | None:
        """The session of a training that this callback reports; None for any other."""
        return self._session if self._state is state else None

    def _work(self, args: Any, state: Any) -> StepWork:
        if tokens := state.num_input_tokens_seen - self._tokens:
            return StepWork(tokens, "tokens")
        batches = 1 + self._substeps // self._attached
        return StepWork(batches * (state.train_batch_size or args.train_batch_size), "samples")

    def _warn_of_second(self) -> None:
        _log.warning(
            "A WattspanCallback is attached twice to one trainer; the second does nothing. "
            "Remove one of them."
        )


if TYPE_CHECKING:
    from transformers import TrainerCallback

    class WattspanCallback(TrainerHooks, TrainerCallback): ...


def _callback_base() -> type:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError(
            f"The Hugging Face callback needs transformers, which cannot be imported ({error}); "
            f"run {pip_command('transformers')}."
        ) from error
    base: type = TrainerCallback
    return base


__getattr__ = lazy_class("WattspanCallback", TrainerHooks, _callback_base)
