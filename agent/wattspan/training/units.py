"""Units of work of a training run: the rules by which hooks begin and end them.

A unit is one optimizer step. It lasts from the begin of a step to the begin of the next, so that it
includes the fetch of data between them, and ends early at an evaluation, at a checkpoint and at the
end of an epoch. A step that is interrupted before the optimizer has moved continues in a new unit
of the same number; its earlier part is no unit of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

EPOCH: Final = "epoch"
STEP: Final = "train_step"
STEP_PART: Final = "train_step_part"
"""Part of an optimizer step that was interrupted before the optimizer moved."""

EpochOrStep = Literal["epoch", "train_step", "train_step_part"]
WorkKind = Literal["tokens", "samples", "steps"]


class StepWork(NamedTuple):
    """The amount of work in a unit, or in a batch of it; ``amount`` is positive."""

    amount: float
    kind: WorkKind


class StepEvent(NamedTuple):
    """The begin or the end of a span. ``name`` is final at the end only.

    ``number`` counts from 1: steps over the whole training, epochs likewise. ``work`` is None at a
    begin, and at the end of a unit with work of different kinds, which has no amount.
    """

    action: Literal["begin", "end"]
    name: EpochOrStep
    number: int
    work: StepWork | None = None


Events = tuple[StepEvent, ...]
_NOTHING: Events = ()
_INFINITE = float("inf")


class StepTracker:
    """The open epoch and the open unit of one training run.

    Each method takes one hook of a training loop and returns the spans that begin and end, in
    order. Every order of hooks is valid, and repeated hooks have no effect. At most one unit is
    open, and it does not cross the edge of an epoch. ``steps`` and ``epochs`` are the numbers of
    the newest complete step and of the newest epoch; both only increase.
    """

    __slots__ = ("_amount", "_complete", "_in_epoch", "_kind", "_mixed", "_open", "epochs", "steps")

    def __init__(self) -> None:
        self.epochs = 0
        self._in_epoch = False
        self.steps = 0
        self._open = False
        self._complete = False  # the optimizer has moved in the open unit
        self._kind: WorkKind | None = None  # of all units, from the first work
        self._amount = 0.0
        self._mixed = False

    @property
    def in_step(self) -> bool:
        """True between the begin of a step and the move of the optimizer."""
        return self._open and not self._complete

    def continue_after(self, steps: int, epochs: int = 0) -> None:
        """Continue the numbers of a checkpoint. Numbers that were used are never used again."""
        self.steps = max(self.steps, steps)
        self.epochs = max(self.epochs, epochs)

    def begin_epoch(self) -> Events:
        if self._in_epoch and not self._open:
            return _NOTHING
        ended = self.end_epoch()
        self.epochs += 1
        self._in_epoch = True
        return (*ended, StepEvent("begin", EPOCH, self.epochs))

    def end_epoch(self) -> Events:
        ended = self.interrupt()
        if not self._in_epoch:
            return ended
        self._in_epoch = False
        return (*ended, StepEvent("end", EPOCH, self.epochs))

    def begin_step(self) -> Events:
        """The begin of a step, or of a further batch of a step under gradient accumulation."""
        if self._open and not self._complete:
            return _NOTHING
        ended = self.interrupt()
        self._open = True
        self._complete = False
        self._amount = 0.0
        self._mixed = False
        return (*ended, StepEvent("begin", STEP, self.steps + 1))

    def add_work(self, work: StepWork | None) -> None:
        """Add the work of a batch to the step. Outside of a step it is ignored."""
        if work is None or not self._open or self._complete or not 0 < work.amount < _INFINITE:
            return
        if self._kind is None:
            self._kind = work.kind
        elif self._kind != work.kind:
            self._mixed = True
        self._amount += work.amount

    def complete_step(self, work: StepWork | None = None) -> bool:
        """The move of the optimizer; True in a step. The unit remains open until the next step."""
        if not self._open or self._complete:
            return False
        self.add_work(work)
        self._complete = True
        return True

    def interrupt(self) -> Events:
        """End the unit: before an evaluation or a checkpoint, and at the end of an epoch."""
        if not self._open:
            return _NOTHING
        self._open = False
        if self._complete:
            self.steps += 1
            return (StepEvent("end", STEP, self.steps, self._work()),)
        return (StepEvent("end", STEP_PART, self.steps + 1),)

    def stop(self) -> Events:
        """End everything: at the end of the training, or after an error."""
        return self.end_epoch()

    def _work(self) -> StepWork | None:
        if self._kind is None:
            self._kind = "steps"
        if self._kind == "steps":
            return StepWork(1, "steps")
        if self._mixed or not self._amount:
            return None
        return StepWork(self._amount, self._kind)


def batch_work(batch: Any) -> StepWork | None:
    """The tokens of a batch of texts, else its samples; None if the batch has neither.

    Reads shapes only, so that no device is waited for. Tokens include padding, which is computed
    too. Of a tuple or list, the first element counts, unless the elements are samples themselves.
    """
    if isinstance(batch, Mapping):
        tokens = _shape(batch.get("input_ids"))
        if len(tokens) > 1:
            return _positive(tokens[0] * tokens[1], "tokens")
        return batch_work(next(iter(batch.values()), None))
    if shape := _shape(batch):
        return _positive(shape[0], "samples")
    if not isinstance(batch, (tuple, list)) or not batch:
        return None
    if isinstance(batch[0], (str, bytes, int, float, Mapping)):
        return StepWork(len(batch), "samples")
    return batch_work(batch[0])


def _shape(value: Any) -> tuple[int, ...]:
    """The sizes of a tensor; () of another object, and of one whose sizes are no numbers."""
    try:
        return tuple(map(int, value.shape))
    except Exception:  # noqa: BLE001 - RuntimeError of nested tensors: the training must not fail
        return ()


def _positive(amount: int, kind: WorkKind) -> StepWork | None:
    return StepWork(amount, kind) if amount > 0 else None
