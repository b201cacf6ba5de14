"""Reading a window: asking the agent until its energy is known."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic  # noqa: TID251 - an application has no clock of ours

from wattspan.client.agent import ask
from wattspan.client.measurement import Measurement

_LONGEST = 30.0  # seconds one question waits at the agent; it allows a minute


def read(parameters: Mapping[str, str], timeout: float) -> Measurement:
    """The measurement as soon as it is complete, or as it stands after ``timeout`` seconds."""
    deadline = monotonic() + max(0.0, timeout)
    while True:
        wait = min(_LONGEST, max(0.0, deadline - monotonic()))
        told = ask("/v1/energy", {**parameters, "wait": f"{wait * 1e3:.0f}ms"}, patience=wait)
        if told["complete"] or monotonic() >= deadline:
            return Measurement.of(told)
