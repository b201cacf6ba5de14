"""The part of a trainer callback that no framework changes: its wishes and its session."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import TracerProvider

from wattspan.sdk.jobs import declare
from wattspan.training.session import (
    BeforeEnd,
    Declare,
    TrainingSession,
    TuningRequest,
    start_session,
)


class TrainingCallback:
    """Reports the units of work of a trainer, and asks the agent to tune them.

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
