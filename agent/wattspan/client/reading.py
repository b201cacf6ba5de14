"""Reading a window: asking the agent until its energy is known."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic, sleep  # noqa: TID251 - an application has no clock of ours

from wattspan.client.agent import ask
from wattspan.client.measurement import Measurement

_PAUSE = 0.05  # seconds between questions to an agent that answers at once
_LONGEST = 30.0  # seconds one question waits at the agent; it allows a minute


def read(
    parameters: Mapping[str, str], timeout: float, directories: tuple[str, ...] = ()
) -> Measurement:
    """The measurement as soon as it is complete, or as it stands after ``timeout`` seconds."""
    deadline = monotonic() + max(0.0, timeout)
    while True:
        asked = monotonic()
        wait = min(_LONGEST, max(0.0, deadline - asked))
        told = ask(
            "/v1/energy",
            {**parameters, "wait": f"{wait * 1e3:.0f}ms"},
            patience=wait,
            directories=directories,
        )
        if told["complete"] or monotonic() >= deadline:
            return Measurement.of(told)
        if monotonic() - asked < wait:  # the agent was too busy to wait
            sleep(min(_PAUSE, wait))
