"""The hooks that a training loop calls on its callbacks, as in ``zeus.callback``."""

from __future__ import annotations

import logging

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Callback:
    """The base class of callbacks; each hook does nothing."""

    def on_train_begin(self) -> None:
        """Before the first step of training."""

    def on_train_end(self) -> None:
        """After the last step of training."""

    def on_epoch_begin(self) -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self) -> None:
        """After the last step of an epoch."""

    def on_step_begin(self) -> None:
        """Before a step."""

    def on_step_end(self) -> None:
        """After a step."""

    def on_evaluate(self, metric: float) -> None:
        """After an evaluation, with its result."""

    def on_instruction_begin(self, name: str) -> None:
        """Before an instruction of a pipeline, such as ``forward``."""

    def on_instruction_end(self, name: str) -> None:
        """After an instruction of a pipeline."""


class CallbackSet(Callback):
    """Calls each hook on several callbacks, in their order; once on one that is given twice."""

    def __init__(self, callbacks: list[Callback]) -> None:
        once = list({id(each): each for each in callbacks}.values())
        if len(once) < len(callbacks):
            logging.getLogger("wattspan").warning(
                "A callback is attached twice to a CallbackSet; its hooks are called once. "
                "Remove one of them."
            )
            callbacks = once
        self.callbacks = callbacks

    def _call_all(self, hook: Callable[[Callback], object]) -> None:
        for callback in self.callbacks:
            hook(callback)

    def on_train_begin(self) -> None:
        self._call_all(lambda one: one.on_train_begin())

    def on_train_end(self) -> None:
        self._call_all(lambda one: one.on_train_end())

    def on_epoch_begin(self) -> None:
        self._call_all(lambda one: one.on_epoch_begin())

    def on_epoch_end(self) -> None:
        self._call_all(lambda one: one.on_epoch_end())

    def on_step_begin(self) -> None:
        self._call_all(lambda one: one.on_step_begin())

    def on_step_end(self) -> None:
        self._call_all(lambda one: one.on_step_end())

    def on_evaluate(self, metric: float) -> None:
        self._call_all(lambda one: one.on_evaluate(metric))

    def on_instruction_begin(self, name: str) -> None:
        self._call_all(lambda one: one.on_instruction_begin(name))

    def on_instruction_end(self, name: str) -> None:
        self._call_all(lambda one: one.on_instruction_end(name))
