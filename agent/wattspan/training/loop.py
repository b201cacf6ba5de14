"""The units of work of a training loop that is written by hand, and of a trainer's callback.

::

    with wattspan.training.Loop(max_slowdown=0.05) as loop:
        for epoch in range(epochs):
            for batch in loop(loader):
                train(batch)
            loop.evaluate(lambda: accuracy(model))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from opentelemetry.sdk.trace import TracerProvider

from wattspan.sdk.jobs import declare
from wattspan.training.session import (
    BeforeEnd,
    Declare,
    TrainingSession,
    TuningRequest,
    is_local_rank_zero,
    start_session,
)
from wattspan.training.units import StepWork, batch_work

T = TypeVar("T")


class Loop:
    """Reports the units of work of a training loop, and asks the agent to tune it.

    ``for batch in loop(loader)`` is an epoch, and each pass one unit of work: one optimizer step,
    or, with ``accumulate``, one batch of it. ``with loop.step(work=n)`` is a unit by itself.
    The arguments from ``max_slowdown`` to ``floor_watts`` are as in ``TuningRequest``; ValueError
    for invalid ones. ``service`` names the job; by default it is OpenTelemetry's ``service.name``,
    or the name of the script. In a job of several ranks every rank opens a loop, and the first of
    each host declares the job. Without an agent the training goes on, after one warning.
    """

    def __init__(
        self,
        *,
        service: str = "",
        max_slowdown: float | None = None,
        objective: str | None = None,
        eta: float | None = None,
        knobs: Sequence[str] | None = None,
        first_watts: float | None = None,
        floor_watts: float | None = None,
        accumulate: int = 1,
        first_step: int = 0,
        declares: bool | None = None,
        provider: TracerProvider | None = None,
        declare: Declare = declare,
    ) -> None:
        """``first_step``: the optimizer steps before a checkpoint that this run continues."""
        request = TuningRequest(
            max_slowdown, objective, eta, knobs, first_watts, floor_watts
        ).check()
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate!r} is no number of batches: give 1 or more")
        if declares is None:
            declares = is_local_rank_zero()
        self._accumulate = accumulate
        self._pending = 0  # batches since the optimizer last moved
        self._batches: Iterator[Any] | None = None  # of the newest epoch
        self._session = start_session(
            request, service=service, declares=declares, provider=provider, declare=declare
        )
        self._session.continue_after(first_step)

    @property
    def declined(self) -> str | None:
        """The agent's sentence if it gives less than was asked; else None."""
        return self._session.declined

    def __call__(
        self, loader: Iterable[T], work: Callable[[T], float | None] | None = None
    ) -> Iterator[T]:
        """The batches of ``loader``, in one epoch.

        A unit lasts from its first batch to the first batch of the next unit. Its work are the
        tokens of its batches, else their samples (``batch_work``), or the samples that ``work``
        returns for a batch. If the loop is left by ``break`` or an error, its last unit does not
        count, because it may be incomplete.
        """
        count = batch_work if work is None else lambda batch: _samples(work(batch))
        session, batches = self._session, iter(loader)
        session.begin_epoch()
        self._batches, self._pending = batches, 0
        try:
            for batch in batches:
                session.begin_step()
                session.add_work(count(batch))
                yield batch
                self._pending += 1
                if self._is_moving(self._pending):
                    session.complete_step()
            if self._pending % self._accumulate:
                session.complete_step()
        finally:
            if self._batches is batches:  # no later epoch has begun
                session.end_epoch()

    @contextmanager
    def step(self, work: float | None = None) -> Iterator[None]:
        """One unit of work, instead of a pass of the loop; ``work`` is its number of samples.

        A unit with an error does not count.
        """
        session = self._session
        session.interrupt()
        session.begin_step()
        try:
            yield
            session.complete_step(_samples(work))
        finally:
            session.interrupt()

    def evaluate(self, metric: Callable[[], float] | float) -> float:
        """The value of ``metric``, evaluated outside of the units of work.

        ``metric`` is a function. Inside of the loop, call ``evaluate`` after the optimizer has
        moved: it ends the unit. A number is the result of an evaluation that has already run:
        inside of the loop, the unit contains that evaluation and does not count.
        """
        if not callable(metric):
            self._session.interrupt()
            return metric
        if self._is_moving(self._pending + 1):
            self._session.complete_step()
        self._session.interrupt()
        return metric()

    def close(self) -> None:
        """End the open spans and withdraw the job. Idempotent."""
        self._session.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_moving(self, batches: int) -> bool:
        """True if the optimizer moves after so many batches of the epoch."""
        return batches % self._accumulate == 0


def _samples(amount: float | None) -> StepWork | None:
    return None if amount is None else StepWork(amount, "samples")


# --------------------------------------------------------------------------- callbacks of trainers


class TrainingCallback:
    """Reports the units of work of a trainer, and asks the agent to tune them.

    It is the part of a callback that no framework changes: its wishes and its session.

    The arguments from ``max_slowdown`` to ``floor_watts`` are as in ``TuningRequest``; ValueError
    for invalid ones. ``service`` names the job; by default it is OpenTelemetry's ``service.name``,
    or the name of the script. Without an agent the training goes on, after one warning.
    """

    def __init__(
        self,
        *,
        service: str = "",
        max_slowdown: float | None = None,
        objective: str | None = None,
        eta: float | None = None,
        knobs: Sequence[str] | None = None,
        first_watts: float | None = None,
        floor_watts: float | None = None,
        provider: TracerProvider | None = None,
        declare: Declare = declare,
    ) -> None:
        super().__init__()
        self._request = TuningRequest(
            max_slowdown, objective, eta, knobs, first_watts, floor_watts
        ).check()
        self._service = service
        self._provider = provider
        self._declare = declare
        self._declares = True
        self._before_end: BeforeEnd | None = None
        self._session: TrainingSession | None = None

    @property
    def declined(self) -> str | None:
        """The agent's sentence if it gives less than was asked; None before the training."""
        return None if self._session is None else self._session.declined

    def _start(self, *, declares: bool, steps: int, epochs: int) -> TrainingSession:
        """A new session for a training that has made so many ``steps`` and full ``epochs``.

        Numbers of an earlier training with this callback are not used again.
        """
        earlier = self._session
        if earlier is not None:
            earlier.stop()
            steps, epochs = max(steps, earlier.steps), max(epochs, earlier.epochs)
        self._session = session = start_session(
            self._request,
            service=self._service,
            declares=declares and self._declares,
            provider=self._provider,
            declare=self._declare,
            before_end=self._before_end,
        )
        session.continue_after(steps, epochs)
        return session

    def _stop(self) -> None:
        if self._session is not None:
            self._session.stop()
