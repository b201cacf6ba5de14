"""A callback for Lightning, as ``lightning.pytorch`` and as ``pytorch_lightning``.

::

    from wattspan.integrations.lightning import WattspanCallback

    trainer = Trainer(..., callbacks=[WattspanCallback(max_slowdown=0.05)])

Lightning's hooks are called for each batch. A unit of work is one optimizer step: it lasts from the
begin of its first batch to the begin of the next unit's, and ends at a validation and a checkpoint.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from wattspan.integrations import lazy_class
from wattspan.training.loop import TrainingCallback
from wattspan.training.units import batch_work
from wattspan.util.text import pip_command

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class LightningHooks(TrainingCallback):
    """The hooks of Lightning's ``Callback``, without its base class.

    The work of a unit is the tokens of its batches, else their samples (``batch_work``). With
    several optimizers, a unit is a batch in which any of them moves.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._trainer: Any = None  # while it trains
        self._moves = 0  # of all optimizers, at the end of the last batch
        self._counted: tuple[int, int] | None = None  # epoch and number of the last batch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._trainer is trainer or not self._is_first(trainer):
            return
        self._trainer = trainer
        self._moves, self._counted = trainer.global_step, None
        self._start(
            declares=trainer.local_rank == 0,
            steps=trainer.global_step,
            epochs=trainer.current_epoch,
        )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None and self._is_first(trainer):
            self._session.begin_epoch()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._session is not None and self._is_first(trainer):
            self._session.begin_step()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = (trainer.current_epoch, batch_idx)
        if self._session is None or number == self._counted or not self._is_first(trainer):
            return
        self._counted = number
        self._session.add_work(batch_work(batch))
        if trainer.global_step != self._moves:
            self._moves = trainer.global_step
            self._session.complete_step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None:
            self._session.interrupt()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Lightning calls it before it writes the checkpoint."""
        if self._session is not None:
            self._session.interrupt()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None:
            self._session.end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._trainer = None
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _is_first(self, trainer: Any) -> bool:
        """True for the first of the callbacks of this kind that the trainer has."""
        return (
            next((one for one in trainer.callbacks if isinstance(one, LightningHooks)), self)
            is self
        )


if TYPE_CHECKING:
    from lightning.pytorch import Callback

    class WattspanCallback(LightningHooks, Callback): ...


def _callback_base() -> type:
    """``Callback`` of the Lightning package that the program has imported, or that is installed."""
    loaded = [name for name in _PACKAGES if name in sys.modules]
    try:
        installed = [name for name in _PACKAGES if find_spec(name.partition(".")[0])]
        module = importlib.import_module((loaded or installed or _PACKAGES)[0])
    except ImportError as error:
        raise ImportError(
            "The Lightning callback needs lightning or pytorch_lightning, which cannot be "
            f"imported ({error}); run {pip_command('lightning')}."
        ) from error
    base: type = module.Callback
    return base


__getattr__ = lazy_class("WattspanCallback", LightningHooks, _callback_base)
